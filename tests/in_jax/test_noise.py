"""The noise of `quell.jax` is that of `quell.noise`, bit for bit, however the parameters are sharded."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from quell import QuellError
from quell.jax import batches, check, clipped_grad, kernels, privatize, slices
from quell.jax import normals as made
from quell.noise import NoiseStream, generators
from quell.noise.audit import audit
from quell.noise.layout import DRAW, LANES, WORDS, tile_size
from quell.noise.normal import REFINE_BELOW
from quell.planning import Plan
from tests.noise import cases

from .trees import SHAPES, arrays, seeded, tree

RECURRENCES = {"regenerate": "bisr normalised", "ring": "band", "exponentials": "two exponentials", "fenwick": "tree"}
EXPECTED = 3.7


def mesh(*sizes: int) -> Any:
    return jax.make_mesh(sizes, ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2) if sizes else None


def sums_of(step: int) -> Any:
    random = np.random.default_rng(step)
    return lambda shape: 3 * random.standard_normal(shape)


def reference(case: str, generator: str, steps: int) -> list[dict[str, Any]]:
    """What NumPy and Numba release, divided: sums in the order of JAX's trees."""
    names = sorted(SHAPES)
    stream = NoiseStream(cases.spec(case), [SHAPES[n][0] for n in names], key=seeded(7), generator=generator)
    found = []
    for step in range(steps):
        whole = arrays(sums_of(step))
        summed = [whole[name] for name in names]
        stream.add_(summed)
        found.append({n: total / np.float32(EXPECTED) for n, total in zip(names, summed, strict=True)})
    return found


def differing(case: str, generator: str, where: Any, steps: int) -> int:
    """In how many elements a jitted run differs from the reference, in any bit."""
    params = tree(where)
    private = privatize(cases.spec(case), params, expected_batch_size=EXPECTED, key=seeded(7), generator=generator)
    update, state = jax.jit(private.update, donate_argnums=1), private.init(params)
    count = 0
    for step, expected in enumerate(reference(case, generator, steps)):
        means, state = update(tree(where, sums_of(step)), state)
        for name, value in means.items():
            assert value.sharding.is_equivalent_to(params[name].sharding, value.ndim)
            count += int(np.sum(np.asarray(value).view(np.uint32) != expected[name].view(np.uint32)))
    check(state)
    return count


def all_of(quick: tuple[str, str]) -> list[Any]:
    """Every recurrence with every generator; one of them in the quick tests."""
    pairs = [(kind, generator) for kind in RECURRENCES for generator in WORDS]
    return [pytest.param(*pair, marks=[] if pair == quick else pytest.mark.slow) for pair in pairs]


SIZES = [(), (1, 1), (2, 1), (1, 4)]


@pytest.mark.parametrize(("recurrence", "generator"), all_of(("ring", "philox")))
def test_eight_devices_make_the_bits_of_numpy(recurrence: str, generator: str) -> None:
    assert cases.spec(RECURRENCES[recurrence]).recipe().kind == recurrence
    assert differing(RECURRENCES[recurrence], generator, mesh(4, 2), steps=6) == 0


@pytest.mark.parametrize(
    ("sizes", "recurrence", "generator"),
    [(sizes, kind, generator) for sizes in SIZES for kind in RECURRENCES for generator in WORDS],
)
@pytest.mark.slow
def test_fewer_devices_make_the_same_bits(sizes: tuple[int, ...], recurrence: str, generator: str) -> None:
    assert differing(RECURRENCES[recurrence], generator, mesh(*sizes), steps=3) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", RECURRENCES.values())
def test_64_bit_mode_changes_no_bit(case: str) -> None:
    with jax.enable_x64(True):
        assert differing(case, "philox", None, steps=3) == 0


@pytest.mark.slow
def test_a_wrong_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices.Slice, "base", lambda self, coordinate: jnp.zeros((), jnp.uint32))
    assert differing("independent", "philox", mesh(2, 1), steps=1) > 1000


RARE = {"chacha20": [4851, 29853], "philox": [13609, 121104]}  # tiles with a radius word below 2¹²: it takes a second

SLOW = [("philox", False), ("chacha20", True), ("philox", True)]


@pytest.mark.parametrize(
    ("generator", "kernel"),
    [("chacha20", False), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_normals_of_rare_radius_words_and_far_blocks(generator: str, kernel: bool) -> None:
    key, rare = seeded(5), RARE[generator]
    for tile in rare:
        blocks = np.arange(tile * LANES, (tile + 1) * LANES, dtype=np.uint64)
        assert generators.words(generator, key, 3, 1, blocks, DRAW)[0::2].min() < REFINE_BELOW
    size = tile_size(generator)
    tiles = np.array([*rare, *range(13), 2**32 // size - 1], np.uint32)
    keys = np.stack([generators.key_words(generator, key, number) for number in (0, 1)])

    @jax.jit
    def some(keys: Any, zero: Any, step: Any, tiles: Any) -> Any:
        source, tensors = made.Source(generator, keys, zero), jnp.ones(len(tiles), jnp.uint32)
        if kernel:
            return kernels.fresh(source, step, None, tensors, tiles, interpret=True)
        return made.normals(source, step, tensors, tiles)

    found = np.asarray(some(keys, np.uint32(0), np.int32(3), tiles)).reshape(len(tiles), size)
    for tile, normals in zip(tiles, found, strict=True):
        expected = generators.normals(generator, key, 3, 1, int(tile) * size, size)
        np.testing.assert_array_equal(normals, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # from JAX 0.12 on
@pytest.mark.parametrize("generator", ["chacha20", "philox"])
def test_the_kernel_compiles_for_gpus(generator: str) -> None:
    """To Triton's intermediate language: where JAX and the GPU are one machine, Triton does the rest."""
    like = jax.ShapeDtypeStruct((64,), jnp.uint32)

    def noise(keys: Any, zero: Any, step: Any, tiles: Any) -> Any:
        source = made.Source(generator, keys, zero)
        return kernels.fresh(source, step, jnp.ones(3), tiles, tiles), kernels.fresh(source, step, None, tiles, tiles)

    words = generators.key_words(generator, seeded(1), 0).size
    args = [jax.ShapeDtypeStruct(*each) for each in (((5, words), jnp.uint32), ((), jnp.uint32), ((), jnp.int32))]
    gpu = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)):
        lowered = jax.jit(noise).trace(*args, like).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("quell_noise") >= 2


@pytest.mark.parametrize(("recurrence", "generator"), all_of(("regenerate", "chacha8")))
def test_the_kernel_makes_the_bits_of_numpy(monkeypatch: pytest.MonkeyPatch, recurrence: str, generator: str) -> None:
    monkeypatch.setattr("quell.jax.host.platform_of", lambda leaves: kernels.INTERPRETED)
    assert differing(RECURRENCES[recurrence], generator, mesh(4, 2) if generator == "philox" else None, steps=3) == 0


@pytest.mark.slow
def test_many_pieces_make_the_bits_of_one() -> None:
    """A tensor of several loops' length, against the compiled CPU path."""
    shape = (500, 301)
    private = privatize(
        cases.spec("lambda_cgd"), jnp.zeros(shape), expected_batch_size=1.0, key=seeded(2), generator="chacha20"
    )
    state = private.init(jnp.zeros(shape))
    stream = NoiseStream(cases.spec("lambda_cgd"), [shape], key=seeded(2))
    for _ in range(3):
        summed = np.ones(shape, np.float32)
        stream.add_([summed])
        noisy, state = private.update(jnp.ones(shape), state)
        np.testing.assert_array_equal(np.asarray(noisy), summed)


@pytest.mark.slow
def test_a_run_in_pytorch_is_checked_in_jax() -> None:
    torch = pytest.importorskip("torch")
    from quell.torch import CorrelatedNoise

    spec, names = cases.spec("bsr"), ("a", "b")
    tensors = {name: torch.zeros(5, 300) for name in names}
    noise = CorrelatedNoise(spec, tensors, key=seeded(7))
    like = {name: jnp.zeros((5, 300)) for name in names}
    private = privatize(spec, like, expected_batch_size=1.0, key=seeded(7))
    state = private.init(like)
    for step in range(4):
        sums = {name: np.full((5, 300), step, np.float32) for name in names}
        theirs = [torch.from_numpy(sums[name].copy()) for name in names]
        noise.add_(theirs)
        ours, state = private.update(sums, state)
        for name, released in zip(names, theirs, strict=True):
            np.testing.assert_array_equal(np.asarray(ours[name]), released.numpy())
    check(state)


@pytest.fixture(scope="module")
def scanned() -> tuple[Any, Any]:
    """A whole run of forty steps in one scan, on zeros, and its transformation."""
    params = jnp.zeros(4000)
    private = privatize(cases.spec("blt", 2.0), params, expected_batch_size=1.0, key=seeded(4), generator="chacha8")

    def step(state: Any, _: Any) -> Any:
        noisy, state = private.update(params, state)
        return state, noisy

    return jax.jit(lambda state: lax.scan(step, state, None, length=cases.STEPS))(private.init(params)), private


def test_whitened_rows_of_a_scan_are_normal(scanned: Any) -> None:
    (state, added), _ = scanned
    check(state)
    rows = [np.asarray(added, np.float64)]
    assert audit(rows, cases.matrix("blt"), 2.0).passed
    assert not audit(rows, np.eye(cases.STEPS), 2.0).passed
    assert not audit(rows, cases.matrix("blt"), 2.1).passed


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lambda_cgd", "bisr normalised", "band", "two exponentials", "tree"])
def test_whitened_rows_of_every_recurrence_are_normal(case: str) -> None:
    private = privatize(cases.spec(case), jnp.zeros(4000), expected_batch_size=1.0, key=seeded(4), generator="chacha8")
    _, rows = lax.scan(
        lambda state, _: private.update(jnp.zeros(4000), state)[::-1],
        private.init(jnp.zeros(4000)),
        None,
        length=cases.STEPS,
    )
    added = [np.asarray(rows, np.float64)]
    assert audit(added, cases.matrix(case), 1.0).passed
    assert not audit(added, np.eye(cases.STEPS), 1.0).passed


def test_the_noise_of_a_whole_training_passes_the_audit(plan: Plan) -> None:
    """Clipping, the plan's batches, noise and an optimizer: what is left of the sums is the plan's noise."""
    random = np.random.default_rng(1)
    data, params = random.standard_normal((60, 4000)).astype(np.float32), {"w": jnp.zeros(4000)}
    private = privatize(plan, params, 0.5, key=seeded(5), generator="chacha8")
    optimizer = optax.chain(private, optax.scale(-1.0))
    sums = clipped_grad(lambda params, x: jnp.tanh(params["w"] @ x), private, micro_batch=5)

    @jax.jit
    def step(params: Any, state: Any, batch: Any, mask: Any) -> Any:
        summed = sums(params, batch, mask)
        updates, state = optimizer.update(summed, state, params)
        return optax.apply_updates(params, updates), state, -12 * updates["w"] - summed["w"]

    state, rows = optimizer.init(params), []
    for indices, mask in batches(private, 60):
        params, state, noise = step(params, state, (data[indices],), mask)
        rows.append(np.asarray(noise, np.float64))
    check(state)
    matrix, scale = plan.mechanism.strategy.matrix(), 0.5 * plan.mechanism.noise_multiplier
    assert audit([np.stack(rows)], matrix, scale).passed
    assert not audit([np.stack(rows)], matrix, 1.1 * scale).passed


def test_a_step_past_the_plan_is_nan_and_an_error(scanned: Any) -> None:
    (state, _), private = scanned
    noisy, after = private.update(jnp.zeros(4000), state)
    assert np.isnan(noisy).all()
    assert int(after.step) == cases.STEPS
    with pytest.raises(Exception, match="the plan ends after 40 steps"):
        check({"inside": after})
    again, after = private.update(jnp.zeros(4000), after)  # and so it stays
    assert np.isnan(again).all()
    with pytest.raises(Exception, match="the plan ends"):
        check(after)


@pytest.mark.slow
def test_the_users_own_shard_map_and_a_chain() -> None:
    where, case = mesh(4, 2), "bsr"
    params = tree(where)
    private = privatize(cases.spec(case), params, expected_batch_size=EXPECTED, key=seeded(7), generator="philox")
    optimizer = optax.chain(private, optax.scale(-1.0))
    state = optimizer.init(params)
    specs = {name: SHAPES[name][1] for name in params}
    kept = jax.tree_util.tree_map(lambda leaf: leaf.sharding.spec if leaf.ndim > 1 else P(), state)
    step = jax.jit(
        jax.shard_map(
            lambda sums, state: optimizer.update(sums, state),
            mesh=where,
            in_specs=(specs, kept),
            out_specs=(specs, kept),
            check_vma=False,
        )
    )
    for number, expected in enumerate(reference(case, "philox", 3)):
        updates, state = step(tree(where, sums_of(number)), state)
        for name, value in updates.items():
            np.testing.assert_array_equal(np.asarray(value), -expected[name])
    check(state)


def test_steps_scanned_inside_shard_map_have_nothing_empty() -> None:
    """XLA of JAX 0.11.2 crashes on arrays without elements there, so a state without buffers has none."""
    params = jax.device_put(np.zeros(96, np.float32), jax.NamedSharding(mesh(4, 2), P("x")))
    private = privatize(cases.spec("lambda_cgd"), params, expected_batch_size=1.0, key=seeded(7), generator="philox")
    state = private.init(params)
    assert not state.buffers

    def steps(sums: Any, state: Any) -> Any:
        return lax.scan(lambda state, _: private.update(sums, state)[::-1], state, None, length=3)

    inside = jax.shard_map(
        steps, mesh=mesh(4, 2), in_specs=(P("x"), P()), out_specs=(P(), P(None, "x")), check_vma=False
    )
    after, found = jax.jit(inside)(params, state)
    check(after)
    stream = NoiseStream(cases.spec("lambda_cgd"), [(96,)], key=seeded(7), generator="philox")
    for row in np.asarray(found):
        summed = np.zeros(96, np.float32)
        stream.add_([summed])
        np.testing.assert_array_equal(row, summed)


def test_states_with_empty_buffers_go_on() -> None:
    """As earlier versions made them."""
    zeros = jnp.zeros(5)
    private = privatize(cases.spec("independent"), zeros, expected_batch_size=1.0, key=seeded(7))
    old = private.init(zeros)._replace(buffers=(jnp.zeros((0, 5)),))
    noisy, after = private.update(zeros, old)
    check(after)
    assert np.isfinite(noisy).all()
    assert [each.shape for each in after.buffers] == [(0, 5)]


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_programs_that_forbid_rank_promotion(recurrence: str) -> None:
    for generator, where in (("chacha8", None), ("philox", mesh(4, 2))):
        params = tree(where)
        spec = cases.spec(RECURRENCES[recurrence])
        private = privatize(spec, params, expected_batch_size=1.0, key=seeded(7), generator=generator)
        with jax.numpy_rank_promotion("raise"):
            jax.eval_shape(private.update, params, private.init(params))


def test_shard_maps_that_update_cannot_be_in() -> None:
    where = mesh(2, 2)
    specs = {"w": P("x"), "b": P()}
    zeros = {"w": np.zeros((4, 2), np.float32), "b": np.zeros(3, np.float32)}
    params = jax.device_put(zeros, {name: jax.NamedSharding(where, spec) for name, spec in specs.items()})
    options: Any = {"expected_batch_size": 1.0, "key": seeded(7), "generator": "philox"}
    sharded = privatize(cases.spec("independent"), params, **options)
    whole = privatize(cases.spec("independent"), zeros, **options)
    for private, parts, how, message in (
        (sharded, specs, {"check_vma": True}, "needs check_vma=False"),
        (sharded, specs, {"check_vma": False, "axis_names": {"x"}}, "all axes of the mesh manual, and y is not"),
        (whole, P(), {"check_vma": False, "axis_names": {"y"}}, "all axes of the mesh manual, and x is not"),
    ):
        update = jax.shard_map(private.update, mesh=where, in_specs=(parts, P()), out_specs=(parts, P()), **how)
        with pytest.raises(QuellError, match=message):
            jax.eval_shape(jax.jit(update), params, private.init(params))
    checked = jax.shard_map(whole.update, mesh=where, in_specs=P(), out_specs=P())  # check_vma is True by default
    noisy, after = jax.jit(checked)(zeros, whole.init(zeros))
    check(after)
    assert np.isfinite(noisy["b"]).all()


@pytest.mark.slow
def test_sums_that_were_not_added_up_get_no_noise() -> None:
    """Devices with sums of their own under the same noise: the difference of two releases would have none."""
    private = privatize(cases.spec("independent"), jnp.zeros(6), expected_batch_size=1.0, key=seeded(7))
    state = private.init(jnp.zeros(6))

    def step(sums: Any, state: Any) -> Any:
        return private.update(sums[0], state)

    apart = jax.shard_map(step, mesh=mesh(2, 1), in_specs=(P("x"), P()), out_specs=(P(), P()), check_vma=False)
    same, different = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32)
    different[1, 5] = 1e-30
    noisy, after = jax.jit(apart)(different, state)
    assert np.isnan(noisy).all()
    with pytest.raises(Exception, match="have different sums"):
        check(after)
    noisy, after = jax.jit(apart)(same, state)
    check(after)
    assert np.isfinite(noisy).all()


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_forgotten_psum_gets_no_noise(placed: bool, at_once: bool) -> None:
    """Without check_vma JAX takes it that sums are the same on all devices, and they are not."""
    where = jax.make_mesh((2,), ("data",))
    params = jax.device_put(np.zeros(3, np.float32), jax.NamedSharding(where, P())) if placed else np.zeros(3)
    private = privatize(cases.spec("independent"), params, expected_batch_size=1.0, generator="philox")

    def update(added: Any, x: Any, state: Any) -> Any:
        return private.update(added(x), state)

    def step(own: Any, x: Any, state: Any) -> Any:
        added = jax.shard_map(own, mesh=where, in_specs=P("data"), out_specs=P(), check_vma=False)
        if at_once:
            return jax.jit(partial(update, added))(x, state)
        return private.update(jax.jit(added)(x), state)

    x = jax.device_put(np.eye(2, 3, dtype=np.float32), jax.NamedSharding(where, P("data")))
    noisy, after = step(lambda x: x[0], x, private.init(params))
    assert np.isnan(noisy).all()
    with pytest.raises(QuellError, match="have different sums"):
        check(after)
    noisy, after = step(lambda x: lax.psum(x[0], "data"), x, private.init(params))
    check(after)
    assert np.isfinite(noisy).all()


@pytest.mark.parametrize("inside", [True, False])
def test_devices_at_different_steps_get_no_noise(inside: bool) -> None:
    """As after a restart from a checkpoint of its own in every process: the noise of step 0 came again on a device."""
    where = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(np.zeros(6, np.float32), jax.NamedSharding(where, P("x")))
    private = privatize(cases.spec("independent"), params, expected_batch_size=1.0, generator="philox")
    _, state = private.update(params, private.init(params))
    parts = [jax.device_put(np.int32(step), device) for step, device in zip((1, 0), where.devices, strict=True)]
    apart = jax.make_array_from_single_device_arrays((), jax.NamedSharding(where, P()), parts)
    update: Any = private.update
    if inside:
        specs = (P("x"), P())
        update = jax.jit(jax.shard_map(update, mesh=where, in_specs=specs, out_specs=specs, check_vma=False))
    noisy, after = update(params + 1, state._replace(step=apart))
    assert np.isnan(noisy).all()
    with pytest.raises(QuellError, match="states of different steps"):
        check(after)
    check(update(params + 1, state)[1])


def test_the_key_is_in_no_program() -> None:
    key = seeded(11)
    private = privatize(cases.spec("independent"), jnp.zeros(9), expected_batch_size=1.0, key=key)
    text = jax.jit(private.update).lower(jnp.zeros(9), private.init(jnp.zeros(9))).as_text()
    assert "custom_call" in text
    assert not {str(word) for word in key.words()} & set(re.findall(r"\d+", text))
