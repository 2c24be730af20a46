"""Random numbers of a loss: they are an example's own, whatever its place in the batch and whoever else is in it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import quell
from quell import QuellError
from quell.jax import PaddedBatches, batches, clipped_grad, privatize
from quell.planning import Plan
from quell.schemes import Batches, Cyclic

from ..user_streams import IDS, user_plan
from .trees import seeded

N, WIDTH = 200, 20
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(N, WIDTH)).astype(np.float32), RANDOM.integers(0, 5, size=N)
PARAMS = {"w": jnp.zeros((WIDTH, 5)), "b": jnp.zeros(5)}


def loss(params: Any, x: Any, y: Any, key: Any) -> Any:
    """Of docs/jax.md, with dropout of the inputs."""
    x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)
    return -jax.nn.log_softmax(x @ params["w"] + params["b"])[y]


def moved(one: Any, other: Any) -> float:
    pairs = zip(jax.tree_util.tree_leaves(one), jax.tree_util.tree_leaves(other), strict=True)
    return float(np.sqrt(sum(np.sum((np.asarray(a, np.float64) - np.asarray(b)) ** 2) for a, b in pairs)))


def without_first(indices: Any, mask: Any) -> tuple[Any, Any]:
    """The same batch where its first unit is not in the data: all others move up by a place."""
    return np.append(indices[1:], np.zeros_like(indices[:1]), axis=0), np.append(mask[1:], False)


@pytest.fixture(scope="module")
def random_batches() -> Plan:
    return quell.plan(
        examples=N, batch_size=100, epochs=2, epsilon=8, delta=1e-3, sampling="poisson", memory=0, momentum=0
    )


def test_one_example_less_moves_a_sum_by_one_clip_norm(random_batches: Plan) -> None:
    private = privatize(random_batches, PARAMS, max_grad_norm=1.0, key=seeded(3))
    drawn, sums = batches(private, N), jax.jit(clipped_grad(loss, private))

    def by(keys: Callable[[Any], Any]) -> float:
        both = [drawn[2], without_first(*drawn[2])]
        whole, rest = (sums(PARAMS, (X[rows], Y[rows], keys(rows)), mask) for rows, mask in both)
        return moved(whole, rest)

    assert 0.9 < by(lambda rows: drawn.keys(2, rows)) <= 1 + 1e-3
    of_places = jax.random.split(jax.random.key(0), drawn.size)
    assert by(lambda rows: of_places) > 5  # what docs/jax.md said before: with it, those behind get other numbers


def test_so_does_one_user_less() -> None:
    plan = user_plan("poisson")
    private = privatize(plan, PARAMS, max_grad_norm=1.0, users=IDS, rows_per_user=3, key=seeded(3))
    drawn, sums = batches(private, len(IDS)), jax.jit(clipped_grad(loss, private))
    step = max(range(len(drawn)), key=lambda number: int(drawn[number][1].sum()))
    indices, mask = drawn[step]
    assert mask.sum() > 2
    assert drawn.keys(step, indices).shape == indices.shape == (len(mask), 3)
    both = [(indices, mask), without_first(indices, mask)]
    whole, rest = (sums(PARAMS, (X[rows], Y[rows], drawn.keys(step, rows)), counts) for rows, counts in both)
    assert 0.1 < moved(whole, rest) <= 1 + 1e-3


def test_a_key_follows_from_run_step_and_index_only(random_batches: Plan) -> None:
    def words(keys: Any) -> Any:
        return np.asarray(jax.random.key_data(keys))

    private = privatize(random_batches, PARAMS, max_grad_norm=1.0, key=seeded(3))
    drawn, everyone = batches(private, N), np.arange(N)
    whole = np.stack([words(drawn.keys(step, everyone)) for step in range(len(drawn))])
    assert whole.shape == (4, N, 2)
    assert len(np.unique(whole.reshape(-1, 2), axis=0)) == 4 * N
    assert 0.48 < np.unpackbits(whole.view(np.uint8)).mean() < 0.52
    order = RANDOM.permutation(N)[:30].reshape(5, 6)
    for like in (np.int32, np.int64, np.uint8):
        np.testing.assert_array_equal(words(drawn.keys(1, order.astype(like))), whole[1][order])
    np.testing.assert_array_equal(words(drawn.keys(1, jnp.asarray(order))), whole[1][order])
    larger = batches(private, N, size=drawn.size + 7)
    np.testing.assert_array_equal(words(pickle.loads(pickle.dumps(larger)).keys(3, order)), whole[3][order])
    other = batches(privatize(random_batches, PARAMS, max_grad_norm=1.0, key=seeded(4)), N)
    assert not np.any(words(other.keys(0, everyone)) == whole[0])
    with generator("rbg"):
        assert drawn.keys(0, everyone).dtype == jax.random.key(0, impl="threefry2x32").dtype
    assert "secret" not in repr(drawn)


def test_steps_and_indices_beyond_32_bits_are_their_own() -> None:
    large = PaddedBatches(Batches(Cyclic(steps=2, separation=1), 2**34, bytes(range(32))), 2, secret=bytes(range(32)))
    places = np.arange(4)[:, None] * 2**32 + np.arange(2)
    made = np.concatenate([jax.random.key_data(large.keys(step, places)).reshape(-1, 2) for step in (0, 1)])
    assert len(np.unique(made, axis=0)) == 16


def test_a_resumed_run_draws_the_same(plan: Plan, tmp_path: Any) -> None:
    def started() -> Any:
        return privatize(plan, PARAMS, max_grad_norm=1.0, key=tmp_path / "run.key")

    def released(private: Any, state: Any) -> Any:
        drawn = batches(private, 60)
        indices, mask = next(drawn.starting(state))
        total = clipped_grad(loss, private)(PARAMS, (X[indices], Y[indices], drawn.keys(state, indices)), mask)
        return private.update(total, state)

    private = started()
    _, saved = released(private, private.init(PARAMS))
    first, _ = released(private, saved)
    private.close()
    private = started()
    again, state = released(private, jax.tree_util.tree_map(np.asarray, saved))
    quell.jax.check(state)  # which a step with other keys would not pass: the ledger knows its sums
    assert jax.tree_util.tree_all(jax.tree_util.tree_map(jnp.array_equal, first, again))
    drawn = batches(private, 60)
    indices, _ = drawn[1]
    assert bool((drawn.keys(saved, indices) == drawn.keys(1, indices)).all())
    assert not bool((drawn.keys(state, indices) == drawn.keys(1, indices)).any())
    private.close()


def test_keys_are_split_over_devices(plan: Plan) -> None:
    private = privatize(plan, PARAMS, max_grad_norm=1.0, key=seeded(3))
    drawn, sums = batches(private, 60, devices=2), clipped_grad(loss, private, micro_batch=4)
    indices, mask = drawn[0]
    batch = X[indices], Y[indices], drawn.keys(0, indices)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    apart = jax.shard_map(
        lambda params, batch, mask: jax.lax.psum(sums(params, batch, mask), "d"),
        mesh=mesh,
        in_specs=(P(), P("d"), P("d")),
        out_specs=P(),
    )
    assert moved(jax.jit(apart)(PARAMS, batch, mask), sums(PARAMS, batch, mask)) < 1e-5


def test_what_keys_refuses(plan: Plan) -> None:
    private = privatize(plan, PARAMS, max_grad_norm=1.0, key=seeded(3))
    drawn = batches(private, 60)
    indices, _ = drawn[0]
    for wrong in (indices.astype(np.float32), indices > 3, [-1], [60]):
        with pytest.raises(QuellError, match="integers from 0 to 59"):
            drawn.keys(0, wrong)
    for step in (-1, len(drawn)):
        with pytest.raises(QuellError, match="is not one of the 10 steps"):
            drawn.keys(step, indices)
    with pytest.raises(QuellError, match="state of another run"):
        drawn.keys(privatize(plan, PARAMS, max_grad_norm=1.0, key=seeded(4)).init(PARAMS), indices)
    with pytest.raises(QuellError, match="outside jit"):
        jax.jit(lambda rows: drawn.keys(0, rows))(indices)
    with pytest.raises(QuellError, match="make them with"):
        PaddedBatches(drawn.drawn, 20).keys(0, indices)


# Generators that vmap does not map


@contextmanager
def generator(name: str) -> Iterator[None]:
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", name)
    try:
        yield
    finally:
        jax.config.update("jax_default_prng_impl", before)


def noisy(w: Any, x: Any, key: Any) -> Any:
    return w @ jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


@jax.custom_vjp
def passed(w: Any, key: Any) -> Any:
    return w.sum() * jax.random.normal(key)


passed.defvjp(
    lambda w, key: (passed(w, key), key),
    lambda key, g: (g * jnp.ones(WIDTH) * jax.random.normal(key), None),
)


def scanned(w: Any, x: Any, key: Any) -> Any:
    return jax.lax.scan(lambda total, each: (total + noisy(w, x, each), None), 0.0, jax.random.split(key, 2))[0]


def chosen(w: Any, x: Any, key: Any) -> Any:
    return jax.lax.cond(x[0] > 0, lambda: noisy(w, x, key), lambda: w.sum())


LOSSES: dict[str, Callable[..., Any]] = {
    "plain": noisy,
    "jit": lambda w, x, key: jax.jit(noisy)(w, x, key),
    "checkpoint": jax.checkpoint(noisy),
    "scan": scanned,
    "cond": chosen,
    "while": lambda w, x, key: w @ x * jax.lax.fori_loop(0, 2, lambda i, t: t + jax.random.normal(key), 0.0),
    "custom_vjp": lambda w, x, key: passed(w, key) + w @ x,
    "vmap": lambda w, x, key: jax.vmap(noisy, (None, None, 0))(w, x, jax.random.split(key, 3)).sum(),
    "gamma": lambda w, x, key: w @ x * jax.random.gamma(key, 2.0),
    "fold_in": lambda w, x, key: w @ x * jax.random.key_data(jax.random.fold_in(key, 1))[0].astype(jnp.float32),
}
SOME = X[:8]


def sum_of(of: Callable[..., Any], keys: Any, **options: Any) -> Any:
    return clipped_grad(of, 1.0, micro_batch=4, **options)(jnp.ones(WIDTH), (SOME, keys), None)


@pytest.mark.parametrize("name", LOSSES)
def test_generators_that_couple_units_are_refused_wherever_a_loss_draws(name: str) -> None:
    for impl in ("rbg", "unsafe_rbg"):
        with pytest.raises(QuellError, match=f"by JAX's {impl} generator.*use threefry keys"):
            sum_of(LOSSES[name], jax.random.split(jax.random.key(0, impl=impl), 8))
        with generator(impl):
            raw = jax.random.split(jax.random.PRNGKey(0), 8)
            assert raw.shape == (8, 4)
            with pytest.raises(QuellError, match="rbg generator"):  # which of the two, jit may know from before
                sum_of(LOSSES[name], raw)
    for keys in (jax.random.key(0, impl="threefry2x32"), jax.random.PRNGKey(0, impl="threefry2x32")):
        own = jax.random.split(keys, 8)
        others = own.at[0].set(own[7])
        counts = np.arange(8) > 0  # only the key of a unit that does not count is another
        sums = clipped_grad(LOSSES[name], 1.0, micro_batch=4)
        found, again = (np.asarray(sums(jnp.ones(WIDTH), (SOME, each), counts)) for each in (own, others))
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, again)


def test_a_key_that_the_loss_makes_of_a_number_is_refused_too() -> None:
    with generator("rbg"), pytest.raises(QuellError, match="by JAX's rbg generator"):
        sum_of(lambda w, x, number: noisy(w, x, jax.random.key(number)), np.arange(8))


def test_xlas_own_generators_are_refused() -> None:
    def bits(w: Any, x: Any, key: Any) -> Any:
        return w @ x * jax.lax.rng_bit_generator(key, ())[1].astype(jnp.float32)

    with pytest.raises(QuellError, match="by JAX's rbg generator"):
        sum_of(bits, np.ones((8, 4), np.uint32))
    with pytest.raises(QuellError, match="by JAX's rng_uniform generator"):
        sum_of(lambda w, x, key: w @ x * jax.lax.rng_uniform(0.0, 1.0, ()), np.ones(8))


def test_rows_of_a_unit_are_looked_at_too() -> None:
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 8).reshape(4, 2)
    with pytest.raises(QuellError, match="by JAX's rbg generator"):
        clipped_grad(noisy, 1.0, rows_per_unit=2)(jnp.ones(WIDTH), (SOME.reshape(4, 2, WIDTH), keys), None)


def test_what_is_drawn_before_may_come_from_any_generator() -> None:
    sums = clipped_grad(lambda w, x, kept, key: w @ jnp.where(kept, x, 0), 1.0, micro_batch=4)

    @jax.jit
    def step(key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, SOME.shape)
        return kept, sums(jnp.ones(WIDTH), (SOME, kept, jax.random.split(key, 8)), None)  # the loss draws by no key

    for impl in ("rbg", "unsafe_rbg", "threefry2x32"):
        kept, found = step(jax.random.key(0, impl=impl))
        rows = np.where(kept, SOME, 0).astype(np.float64)
        norms = np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True))
        np.testing.assert_allclose(found, (rows / norms).sum(axis=0), atol=1e-3)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda value: (value, 1), "a tuple"),
        (lambda value: {"loss": value}, "a dict"),
        (lambda value: None, "a NoneType"),
        (lambda value: value[None], r"shape \(1,\) and dtype float32"),
        (lambda value: value + 1j, r"shape \(\) and dtype complex64"),
        (lambda value: 1, r"shape \(\) and dtype int32"),
    ],
)
def test_a_loss_returns_one_real_number(returned: Any, said: str) -> None:
    for rows in (None, 1):
        units = (SOME if rows is None else SOME[:, None],)
        sums = clipped_grad(lambda w, x: returned(w @ x), 1.0, rows_per_unit=rows)
        with pytest.raises(QuellError, match=f"the loss returned {said}: it must return"):
            sums(jnp.ones(WIDTH), units, None)
    assert not np.any(clipped_grad(lambda w, x: 1.0, 1.0)(jnp.ones(WIDTH), (SOME,), None))
