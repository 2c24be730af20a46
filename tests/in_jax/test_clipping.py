"""Clipped sums against loops in float64, and what must count for nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quell import QuellError, plan
from quell.jax import batches, check, clipped_grad, clipping, privatize
from quell.planning import Plan
from tests.noise import cases

from .trees import seeded

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.standard_normal((11, 5)).astype(np.float32), RANDOM.standard_normal(11).astype(np.float32)
PARAMS = {"w": RANDOM.standard_normal((5, 4)).astype(np.float32), "v": RANDOM.standard_normal(4).astype(np.float32)}


def loss(params: Any, x: Any, y: Any) -> Any:
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def by_hand(x: Any, y: Any, bound: float) -> dict[str, Any]:
    """The clipped sum, one example at a time, in float64."""
    w, v = (PARAMS[name].astype(np.float64) for name in ("w", "v"))
    total = {"w": np.zeros_like(w), "v": np.zeros_like(v)}
    for one, label in zip(x.astype(np.float64), y.astype(np.float64), strict=True):
        hidden = np.tanh(one @ w)
        slope = 2 * (hidden @ v - label)
        gradient = {"v": slope * hidden, "w": np.outer(one, slope * v * (1 - hidden**2))}
        norm = np.sqrt(sum(np.sum(value**2) for value in gradient.values()))
        for name, value in gradient.items():
            total[name] += value * min(1.0, bound / norm)
    return total


def close(found: Any, expected: Any, **tolerance: float) -> None:
    for name, value in expected.items():
        assert found[name].dtype == jnp.float32
        np.testing.assert_allclose(found[name], value, **{"rtol": 3e-4, "atol": 1e-5, **tolerance})


@pytest.mark.parametrize("micro_batch", [1, 4, 11, 64])
def test_sums_equal_a_loop(micro_batch: int) -> None:
    sums = jax.jit(clipped_grad(loss, 0.7, micro_batch=micro_batch))
    close(sums(PARAMS, (X, Y), None), by_hand(X, Y, 0.7))


def test_masked_and_broken_rows_count_for_nothing() -> None:
    sums = jax.jit(clipped_grad(jax.checkpoint(loss), 0.7, micro_batch=4))
    x, y = X.copy(), Y.copy()
    x[2], y[5], y[7] = np.nan, np.inf, 1e30  # the last has a norm that float32 does not hold
    broken = np.isin(np.arange(11), (2, 5, 7))
    close(sums(PARAMS, (x, y), None), by_hand(X[~broken], Y[~broken], 0.7))
    mask = np.arange(11) % 2 == 0
    close(sums(PARAMS, (np.where(mask[:, None], X, np.nan), Y), mask), by_hand(X[mask], Y[mask], 0.7))
    none = sums(PARAMS, (X, Y), np.zeros(11, bool))
    assert not any(np.any(value) for value in none.values())


def test_no_example_moves_the_sum_by_more_than_the_bound() -> None:
    for bound in (1e-30, 1e-3, 1e20):
        sums = jax.jit(clipped_grad(lambda w, x: w @ x, bound, micro_batch=1))
        for size in (1.0, 1e-6, 1e6):
            one = np.asarray(sums(jnp.zeros(50), (size * bound * np.ones((1, 50), np.float32),), None), np.float64)
            assert np.linalg.norm(one) <= bound * (1 + 1e-7)
            if size == 1e6:
                assert np.linalg.norm(one) > bound * 0.999


@pytest.mark.parametrize(("power", "micro_batch", "more"), [(11, 1, 2048), (13, 32, 256)])
def test_no_example_changes_how_all_later_ones_are_rounded(power: int, micro_batch: int, more: int) -> None:
    """With one example the total reaches a power of two, beyond which small ones are rounded up or away."""
    one = 1 - 2.0**-13
    halves = np.full(int((2**power - one) / 0.5), 0.5)
    large = np.append(halves, 2**power - one - halves.sum())
    large = np.pad(large, (0, -(len(large) + 1) % micro_batch))
    small = np.full(more * micro_batch, 0.51 * 2.0 ** (power - 23) / micro_batch)
    sums = jax.jit(clipped_grad(lambda w, x: w * x, 1.0, micro_batch=micro_batch))
    with_one, without = (
        float(sums(jnp.float32(0), (np.concatenate([large, [first], small]).astype(np.float32),), None))
        for first in (one, 0.0)
    )
    units = len(large) + 1 + len(small)
    assert abs(with_one - without) <= 1 + (units + clipping.GROUP**2) * 2.0**-23


@pytest.mark.parametrize("units", [8192, 8200])
def test_nor_within_a_large_micro_batch(units: int) -> None:
    """Where 8,192 were added in one go, an example moved the sum by 1.5 clip norms (found by a review)."""
    one = 1 - 2.0**-13
    halves = np.full(int((2**11 - one) / 0.5), 0.5)
    large = np.append(halves, 2**11 - one - halves.sum())
    rows = np.concatenate([large, [one], np.full(units - len(large) - 1, 0.51 * 2.0**-12)])
    sums = jax.jit(clipped_grad(lambda w, x: w @ x, 1.0, micro_batch=units))
    batch = (np.tile(rows.astype(np.float32)[:, None] / 8, 64),)
    mask = np.arange(units) != len(large)
    whole, without = (np.asarray(sums(jnp.zeros(64), batch, each), np.float64) for each in (None, mask))
    assert np.linalg.norm(whole - without) <= 1 + (units + clipping.GROUP**2) * 2.0**-23


def product(w: Any, x: Any, y: Any, total: Any) -> Any:
    """Its gradient is what rounding leaves of x·y − total, which differs with and without a fused multiply-add."""
    return jnp.mean((x * y - total - w) ** 2)


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_added_is_what_was_measured(mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA makes cheap gradients again for each use, rounded in another way: measured as 0, one moved a sum by 6.5."""

    def moved(width: int, units: int) -> float:
        random = np.random.default_rng(35)
        x, y = random.uniform(1e4, 2e4, (2, units, width)).astype(np.float32)
        sums = clipped_grad(product, 1.0)
        alone = jnp.arange(units) == 0
        whole = (jnp.zeros(width), (x, y, x * y), alone)
        by = jax.jit(jax.vmap(sums)) if mapped else jax.jit(sums)  # a branch would become a selection under vmap
        found = by(*jax.tree_util.tree_map(lambda leaf: leaf[None], whole) if mapped else whole)
        return float(np.linalg.norm(np.asarray(found, np.float64)))

    shapes = [(width, units) for width in (2, 3, 4) for units in (4, 8, 16, 32)]
    assert max(moved(*shape) for shape in shapes) <= 1 + 1e-6
    if not mapped and jax.default_backend() == "cpu":
        monkeypatch.setattr(clipping, "_in_memory", lambda leaves: leaves)
        assert max(moved(*shape) for shape in shapes) > 2


@pytest.mark.parametrize("constant", ["unused", "linear", "empty"])
@pytest.mark.parametrize("mapped", [False, True])
def test_also_where_gradients_are_constants(constant: str, mapped: bool) -> None:
    """XLA knows those while it compiles, so what depends on them alone holds nothing: one moved a sum by 8."""

    def with_more(params: Any, x: Any, y: Any, total: Any) -> Any:
        return product(params["w"], x, y, total) + (0.001 * params["b"] if constant == "linear" else 0)

    x, y = np.random.default_rng(35).uniform(1e4, 2e4, (2, 4, 3)).astype(np.float32)
    params = {"w": jnp.zeros(3), "b": jnp.zeros((0,) if constant == "empty" else ())}
    given = (params, (x, y, x * y), jnp.arange(4) == 0)
    sums = clipped_grad(with_more, 1.0)
    by = jax.jit(jax.vmap(sums)) if mapped else jax.jit(sums)
    found = by(*jax.tree_util.tree_map(lambda leaf: leaf[None], given) if mapped else given)
    assert np.linalg.norm([np.linalg.norm(np.asarray(leaf, np.float64)) for leaf in found.values()]) <= 1 + 1e-6


def test_norms_of_many_elements() -> None:
    """One addition after the other would lose most of what follows a large square."""
    rows = np.full((1, 2**22), 1e-4, np.float32)
    rows[0, 0] = 1.0
    exact = np.sum(rows.astype(np.float64) ** 2)
    found = float(jax.jit(clipping._sum_of_squares)(rows)[0])
    assert found == pytest.approx(exact, rel=2e-5)
    assert np.sqrt(found) * clipping.RAISED >= np.sqrt(exact)


def test_bfloat16_models_and_flax() -> None:
    pytest.importorskip("flax")
    from flax import nnx

    model = nnx.Linear(5, 1, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)

    def own(params: Any, x: Any, y: Any) -> Any:
        return (nnx.merge(graph, params)(x)[0].astype(jnp.float32) - y) ** 2

    found = jax.jit(clipped_grad(own, 0.1, micro_batch=4))(params, (X, Y), None)
    leaves = jax.tree_util.tree_leaves(found)
    assert [leaf.dtype for leaf in leaves] == [jnp.float32] * 2
    kernel, bias = (np.asarray(params[name][...], np.float64) for name in ("kernel", "bias"))
    slopes = 2 * (X.astype(np.float64) @ kernel[:, 0] + bias[0] - Y)
    whole = np.concatenate([slopes[:, None] * X, slopes[:, None]], axis=1)
    expected = (whole * np.minimum(1, 0.1 / np.linalg.norm(whole, axis=1))[:, None]).sum(axis=0)
    np.testing.assert_allclose(
        np.concatenate([np.ravel(found["kernel"][...]), found["bias"][...]]), expected, atol=0.02
    )


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_units_of_several_devices_are_clipped_apart(check_vma: bool) -> None:
    """With check_vma, JAX would add up the gradients of shared parameters over devices before they are clipped."""
    sums, mask = clipped_grad(loss, 0.7, micro_batch=3), np.arange(8) != 5
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def together(params: Any, batch: Any, mask: Any) -> Any:
        return jax.lax.psum(sums(params, batch, mask), "d")

    parts = (P(), P("d"), P("d"))
    shared = jax.jit(jax.shard_map(together, mesh=mesh, in_specs=parts, out_specs=P(), check_vma=check_vma))
    params = {**PARAMS, "none": np.zeros(0, np.float32)}
    close(shared(params, (X[:8], Y[:8]), mask), by_hand(X[:8][mask], Y[:8][mask], 0.7))


@pytest.mark.slow
def test_random_keys_are_part_of_a_batch_that_is_cut() -> None:
    def noisy(params: Any, x: Any, y: Any, key: Any) -> Any:
        return loss(params, x, y + jax.random.normal(key))

    keys = jax.random.split(jax.random.key(1), 11)
    shifted = np.asarray(Y + jax.vmap(jax.random.normal)(keys))
    close(jax.jit(clipped_grad(noisy, 0.7, micro_batch=4))(PARAMS, (X, Y, keys), None), by_hand(X, shifted, 0.7))


def test_a_loss_that_needs_other_devices_is_refused() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    both = jax.make_mesh((2, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def inside(w: Any, x: Any) -> Any:
        inner = jax.shard_map(
            lambda w: jax.lax.psum(w @ w, "d"), axis_names={"m"}, in_specs=P(), out_specs=P(), check_vma=False
        )
        return inner(w) * x.sum()

    for over, coupled in (
        (mesh, lambda w, x: jax.lax.psum(w @ x, "d")),
        (mesh, lambda w, x: jax.jit(lambda w: jax.lax.all_gather(w, "d").sum(axis=0) @ x)(w)),
        (both, inside),
    ):
        sums = clipped_grad(coupled, 1.0)
        wrong = jax.shard_map(
            lambda x, s=sums: s(jnp.ones(5), (x,), None),
            mesh=over,
            axis_names={"d"},
            in_specs=P("d"),
            out_specs=P("d"),
            check_vma=over is mesh,
        )
        with pytest.raises(QuellError, match="computed with those of other devices"):
            jax.eval_shape(jax.jit(wrong), X[:4])
    axis = object()
    sums = clipped_grad(lambda w, x: jax.lax.psum(w @ x, axis), 1.0)
    with pytest.raises(QuellError, match="computed with those of other devices"):
        jax.vmap(lambda x: sums(jnp.ones(5), (x,), None), axis_name=axis)(X[:4, None])


@pytest.mark.parametrize("spec", [P(), pytest.param(P(None, "d"), marks=pytest.mark.slow)])
def test_meshes_with_explicit_axes(spec: Any) -> None:
    """Which `jax.make_mesh` makes by default: batches, parameters and noise on them."""
    mesh = jax.make_mesh((2,), ("d",))
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    shardings = {"w": NamedSharding(mesh, spec), "v": NamedSharding(mesh, P())}
    params = jax.device_put(PARAMS, shardings)
    batch = jax.device_put((X[:8], Y[:8]), NamedSharding(mesh, P("d")))
    private = privatize(
        cases.spec("independent", 1e-6), params, expected_batch_size=1.0, key=seeded(1), generator="philox"
    )
    sums = clipped_grad(loss, 0.7, micro_batch=3)

    @jax.jit
    def step(state: Any, mask: Any) -> Any:
        return private.update(sums(params, batch, mask), state)

    mask = np.arange(8) != 5
    found, state = step(private.init(params), mask)
    check(state)
    close(found, by_hand(X[:8][mask], Y[:8][mask], 0.7))
    assert found["w"].sharding.is_equivalent_to(shardings["w"], 2)


def test_parameters_of_another_run_and_slices_are_refused(plan: Plan) -> None:
    """A unit clipped by the norm of each slice, on two devices, moves the sum by √2 clip norms."""
    private = privatize(plan, PARAMS, 0.7)
    sums = clipped_grad(loss, private)
    close(sums(PARAMS, (X, Y), np.ones(11, bool)), by_hand(X, Y, 0.7))
    with pytest.raises(QuellError, match="not the parameters that privatize was called with"):
        sums({**PARAMS, "u": PARAMS["v"]}, (X, Y), None)
    with pytest.raises(QuellError, match=r"has shape \(5, 2\)"):
        sums({**PARAMS, "w": PARAMS["w"][:, :2]}, (X, Y), None)
    mesh = jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"w": P(None, "m"), "v": P("m")}
    for check_vma in (True, False):
        sliced = jax.shard_map(
            lambda params: sums(params, (X, Y), None),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs,
            check_vma=check_vma,
        )
        with pytest.raises(QuellError, match="gather sharded parameters"):
            jax.eval_shape(sliced, PARAMS)


def test_a_bound_that_is_not_kept_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "_sum_of_squares", lambda rows: (rows * rows).sum(axis=1) / 2)
    with pytest.raises(AssertionError):
        close(jax.jit(clipped_grad(loss, 0.7))(PARAMS, (X, Y), None), by_hand(X, Y, 0.7))


def test_refusals() -> None:
    with pytest.raises(QuellError, match="must be positive"):
        clipped_grad(loss, 0.0)
    sums = clipped_grad(loss, 1.0)
    for batch in ((X, Y[:3]), [X, Y], (), (X, [1.0, 2.0])):
        with pytest.raises(QuellError, match="one row per unit"):
            sums(PARAMS, batch, None)
    with pytest.raises(QuellError, match="mask has shape"):
        sums(PARAMS, (X, Y), np.ones(3, bool))
    for mask in ([True] * 11, np.ones(11, np.float32)):
        with pytest.raises(QuellError, match="an array of True and False"):
            sums(PARAMS, (X, Y), mask)


def test_batches_of_random_size_need_their_mask():
    asked = {"examples": 200, "batch_size": 20, "epochs": 1, "epsilon": 8, "delta": 1e-3}
    planned = plan(**asked, sampling="poisson", memory=0)
    private = privatize(planned, jnp.zeros(3), max_grad_norm=1.0)
    sums = clipped_grad(lambda w, x: w @ x, private)
    indices, mask = batches(private, 200)[0]
    rows = jnp.ones((len(indices), 3))
    with pytest.raises(QuellError, match="come padded"):
        sums(jnp.zeros(3), (rows,), None)
    with pytest.raises(QuellError, match="True and False"):
        sums(jnp.zeros(3), (rows,), mask.astype(np.float32))
    assert float(jnp.linalg.norm(sums(jnp.zeros(3), (rows,), mask))) <= mask.sum() + 1e-3


def test_padding_for_devices_needs_its_mask(plan: Plan) -> None:
    """Twelve units padded to 16 for 8 devices: without the mask, example 0 counts up to five times."""
    private = privatize(plan, jnp.zeros(3), max_grad_norm=1.0)
    sums = clipped_grad(lambda w, x: w @ x, private)
    indices, _ = batches(private, 60)[0]
    sums(jnp.zeros(3), (jnp.ones((len(indices), 3)),), None)
    indices, mask = batches(private, 60, devices=8)[0]
    rows = jnp.ones((len(indices), 3))
    with pytest.raises(QuellError, match="among these 16: pass the mask"):
        sums(jnp.zeros(3), (rows,), None)
    assert float(jnp.linalg.norm(sums(jnp.zeros(3), (rows,), mask))) <= 12 + 1e-3
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    apart = jax.shard_map(lambda x: sums(jnp.zeros(3), (x,), None), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    with pytest.raises(QuellError, match="pass the mask"):
        jax.eval_shape(apart, rows)
