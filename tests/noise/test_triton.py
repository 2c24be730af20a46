"""The Triton kernels, run by Triton's interpreter on the CPU, against the NumPy reference and the CPU engine.

Where there is a GPU the same tests run on it (the interpreter is off then, see conftest.py).
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1 before it is imported", allow_module_level=True)

from quell import QuellError  # noqa: E402
from quell.noise import Key, Shard, generators, normal, triton_kernels, triton_random  # noqa: E402
from quell.noise.cpu import CpuEngine  # noqa: E402
from quell.noise.gpu import GpuEngine  # noqa: E402
from quell.noise.layout import LANES, WORDS, chacha_rounds  # noqa: E402
from quell.noise.spec import NO_GRID, Recipe  # noqa: E402

from .cases import STEPS, spec  # noqa: E402

Seeded = Callable[[int], Key]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GENERATORS = tuple(WORDS)
SHARDS = (Shard(0, 1000, 700), Shard(3, 0, 0), Shard(5, 2**40 + 5, 33), Shard(2, 0, 1))


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays per operation: smaller programs for the same operations."""
    if DEVICE.type == "cpu":
        philox = triton_kernels.KNOBS["philox"]._replace(span=512)  # two parts
        monkeypatch.setitem(triton_kernels.KNOBS, "philox", philox)


def _gradients(dtype: Any = torch.float32) -> list[Any]:
    return [torch.full((shard.length,), 0.5, dtype=dtype, device=DEVICE) for shard in SHARDS]


def _plain() -> Recipe:
    """Draws as they are, neither scaled nor rounded."""
    return replace(spec("independent").recipe(), scales=np.ones(1, np.float32), grids=np.full(1, NO_GRID))


@triton.jit
def _store_words(key, counters, out, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    block, high = tl.load(counters + lane), tl.load(counters + SIZE)
    step, tensor = tl.load(counters + SIZE + 1), tl.load(counters + SIZE + 2)
    if ROUNDS:
        words = triton_random.chacha(ROUNDS, triton_random.load_key(ROUNDS, key), block, high, step, tensor)
        for i in tl.static_range(16):
            tl.store(out + i * SIZE + lane, words[i])
    else:
        words = triton_random.philox(triton_random.load_key(ROUNDS, key), block, high, step, tensor)
        for i in tl.static_range(4):
            tl.store(out + i * SIZE + lane, words[i])


@pytest.mark.parametrize("generator", GENERATORS)
def test_words_equal_the_reference_bit_for_bit(generator: str) -> None:
    """Words are integers, so the compiled generator has no excuse: random counters and keys, the largest included."""
    random, lanes = np.random.default_rng(40), 32
    rounds = chacha_rounds(generator)
    reference = partial(generators.chacha_block, rounds) if rounds else generators.philox4x32
    for trial in range(8):
        key = random.integers(0, 2**32, 8 if rounds else 2, dtype=np.uint32)
        counters = random.integers(0, 2**32, lanes + 3, dtype=np.uint32)
        if trial == 0:
            key[:], counters[:] = 2**32 - 1, 2**32 - 1
        rest = [np.full(lanes, value) for value in counters[lanes:]]
        expected = reference(key, (counters[:lanes], *rest))
        made = torch.zeros(expected.shape, dtype=torch.uint32, device=DEVICE)
        arguments = (torch.from_numpy(values).to(DEVICE) for values in (key, counters))
        _store_words[(1,)](*arguments, made, ROUNDS=rounds, SIZE=lanes)
        np.testing.assert_array_equal(made.cpu().numpy(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_draws_equal_the_reference(generator: str, seeded: Seeded) -> None:
    key = seeded(41)
    engine = GpuEngine(_plain(), generator, key, SHARDS, DEVICE)
    engine.restore(7, None)
    made = [gradient.zero_() for gradient in _gradients()]
    engine.add(made)
    assert engine.step == 8
    for shard, row in zip(SHARDS, made, strict=True):
        expected = generators.normals(generator, key, 7, shard.tensor, shard.offset, shard.length)
        np.testing.assert_allclose(row.cpu().numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("case", "generator"),
    [
        ("lambda_cgd", "chacha20"),
        pytest.param("band", "chacha20", marks=pytest.mark.slow),
        pytest.param("bisr normalised", "philox", marks=pytest.mark.slow),
        pytest.param("bsr normalised", "philox", marks=pytest.mark.slow),
        ("band", "philox"),
        ("two exponentials", "philox"),
        ("tree", "philox"),
    ],
)
def test_recurrences_equal_the_cpu_engine(case: str, generator: str, seeded: Seeded) -> None:
    recipe = spec(case, 1.7).recipe()
    shards, key = (Shard(0, 500, 524),), seeded(42)  # begins inside a part, then whole ones
    cpu, gpu = CpuEngine(recipe, generator, key, shards, 1), GpuEngine(recipe, generator, key, shards, DEVICE)
    for _ in range(5):
        a, b = torch.full((524,), 0.5), torch.full((524,), 0.5, device=DEVICE)
        cpu.add([a])
        gpu.add([b])
        torch.testing.assert_close(a, b.cpu(), rtol=1e-6, atol=2e-6)
    for kept, expected in zip(gpu.export(), cpu.export(), strict=True):
        np.testing.assert_allclose(kept.numpy(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_is_loaded_ahead_changes_no_bit(ahead: int, seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than the ring keeps, and all of them."""
    recipe, shards, key = spec("band").recipe(), (Shard(0, 500, 524),), seeded(47)
    assert recipe.buffers == 3
    plain = GpuEngine(recipe, "philox", key, shards, DEVICE)
    monkeypatch.setitem(triton_kernels.RING_KNOBS, "philox", {3: triton_kernels.Knobs(512, 256, 64, ahead)})
    early = GpuEngine(recipe, "philox", key, shards, DEVICE)
    for _ in range(4):
        a, b = torch.full((524,), 0.5, device=DEVICE), torch.full((524,), 0.5, device=DEVICE)
        plain.add([a])
        early.add([b])
        assert torch.equal(a, b)


def test_rings_with_few_rows_have_knobs_of_their_own() -> None:
    ring = triton_kernels.knobs("chacha20", replace(spec("bisr").recipe(4), taps=np.ones((1, 3)), buffers=2))
    assert ring.ahead == 2  # no more than are kept
    others = [spec("bisr").recipe(), spec("bisr").recipe(2), spec("blt").recipe(), spec("tree").recipe()]
    for recipe in [*others, replace(spec("bsr").recipe(), taps=np.ones((1, 1001)), buffers=1000)]:
        assert triton_kernels.knobs("chacha20", recipe) == triton_kernels.KNOBS["chacha20"]


@pytest.mark.parametrize(
    ("generator", "keep", "start"),
    [("philox", 4, 6), ("philox", 2, 6), pytest.param("chacha8", 1, 1, marks=pytest.mark.slow)],
)
def test_buffered_equals_regenerated(generator: str, keep: int, start: int, seeded: Seeded) -> None:
    """All of the four old draws are kept, or a part of them while the older ones are made again."""
    shards, key = (Shard(0, 5, 60),), seeded(43)
    remade = GpuEngine(spec("bisr").recipe(), generator, key, shards, DEVICE)
    kept = GpuEngine(spec("bisr").recipe(keep), generator, key, shards, DEVICE)
    assert (kept.recipe.buffers, kept.recipe.remade) == (keep, 4 - keep)
    kept.restore(start, None)  # makes the kept draws anew
    remade.restore(start, None)
    for _ in range(3):
        a, b = torch.zeros(60, device=DEVICE), torch.zeros(60, device=DEVICE)
        remade.add([a])
        kept.add([b])
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_mix_in_one_step(dtype: Any, seeded: Seeded) -> None:
    recipe, key = spec("lambda_cgd").recipe(), seeded(44)
    cpu, gpu = CpuEngine(recipe, "philox", key, SHARDS, 1), GpuEngine(recipe, "philox", key, SHARDS, DEVICE)
    dtypes = [dtype, dtype, torch.float32, dtype]
    a = [torch.full((shard.length,), 0.5, dtype=kind) for shard, kind in zip(SHARDS, dtypes, strict=True)]
    b = [tensor.clone().to(DEVICE) for tensor in a]
    cpu.add(a)
    gpu.add(b)
    for one, other in zip(a, b, strict=True):
        assert one.dtype == other.dtype
        eps = torch.finfo(one.dtype).eps if one.dtype != torch.float64 else 1e-6  # the interpreter truncates bfloat16
        torch.testing.assert_close(one, other.cpu(), rtol=eps, atol=1e-6)


def test_launches_count_dtypes_and_not_tensors(seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = tuple(Shard(number, 0, 3) for number in range(50))
    engine = GpuEngine(spec("lambda_cgd").recipe(), "philox", seeded(45), shards, DEVICE)
    launched: list[int] = []
    monkeypatch.setattr(engine, "_start", lambda kernel, launch, *_, **__: launched.append(len(launch.members)))
    dtypes = [torch.float32, torch.bfloat16]
    engine.add([torch.zeros(3, dtype=dtypes[number % 2], device=DEVICE) for number in range(50)])
    assert launched == [25, 25]


def test_strided_empty_and_scalar_tensors(seeded: Seeded) -> None:
    shards, key = (Shard(0, 0, 40), Shard(1, 0, 0), Shard(2, 0, 1)), seeded(45)
    recipe = spec("lambda_cgd").recipe()
    cpu, gpu = CpuEngine(recipe, "philox", key, shards, 1), GpuEngine(recipe, "philox", key, shards, DEVICE)
    a = [torch.ones(5, 8).t(), torch.zeros(0, 3), torch.ones(())]
    b = [torch.ones(5, 8, device=DEVICE).t(), torch.zeros(0, 3, device=DEVICE), torch.ones((), device=DEVICE)]
    for _ in range(2):
        cpu.add(a)
        gpu.add(b)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-6, atol=1e-6)
    gpu.add([b[0].contiguous(), b[1], b[2]])  # tensors may come back in another form


@pytest.mark.parametrize(("skipped", "offset", "length"), [(1, 0, 300), (0, 1, 300), (3, 1, 300), (0, 0, 255)])
def test_unaligned_tensors_get_the_same_noise(skipped: int, offset: int, length: int, seeded: Seeded) -> None:
    """Vectors need aligned addresses; a view or a shard that starts elsewhere must not notice, nor its neighbours."""
    shards, key = (Shard(0, offset, length),), seeded(50)
    recipe = spec("bsr").recipe()
    cpu, gpu = CpuEngine(recipe, "philox", key, shards, 1), GpuEngine(recipe, "philox", key, shards, DEVICE)
    for _ in range(2):
        a, whole = torch.zeros(length), torch.zeros(skipped + length + 8, device=DEVICE)
        cpu.add([a])
        gpu.add([whole[skipped : skipped + length]])
        torch.testing.assert_close(a, whole[skipped : skipped + length].cpu(), rtol=1e-6, atol=2e-6)
        assert not whole[:skipped].any()
        assert not whole[skipped + length :].any()


def test_past_the_last_step_nothing_looks_like_noise(seeded: Seeded) -> None:
    """A captured graph cannot raise an error; it must not go on quietly either."""
    shards = (Shard(0, 0, 40),)
    engine = GpuEngine(spec("lambda_cgd").recipe(), "philox", seeded(46), shards, DEVICE)
    engine.restore(STEPS, None)
    gradient = torch.ones(40, device=DEVICE)
    engine.add([gradient])
    assert bool(gradient.isnan().all())


@pytest.mark.parametrize("generator", GENERATORS)
def test_rare_second_words_are_drawn(generator: str) -> None:
    """The element whose radius word is small, found by search, gets its second word."""
    key, count = Key(bytes(range(32))), WORDS[generator]
    words = generators.words(generator, key, 0, 0, np.arange(2**22 // count, dtype=np.uint64), 0)
    pair, block = np.argwhere(words[0::2] < normal.REFINE_BELOW)[0].tolist()
    offset = block // LANES * count * LANES + 2 * pair * LANES + block % LANES
    engine = GpuEngine(_plain(), generator, key, (Shard(0, offset, 1),), DEVICE)
    made = torch.zeros(1, device=DEVICE)
    engine.add([made])
    np.testing.assert_allclose(made.cpu().numpy(), generators.normals(generator, key, 0, 0, offset, 1), rtol=1e-6)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs need a GPU")
def test_graphs_replay_the_next_step(seeded: Seeded) -> None:
    recipe, shards, key = spec("bisr").recipe(), (Shard(0, 0, 5000),), seeded(47)
    cpu, gpu = CpuEngine(recipe, "chacha20", key, shards, 1), GpuEngine(recipe, "chacha20", key, shards, DEVICE)
    a, b = torch.zeros(5000), torch.zeros(5000, device=DEVICE)
    gpu.add([b])
    cpu.add([a])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.add([b])
    for _ in range(5):
        graph.replay()
        cpu.add([a])
    assert gpu.step == cpu.step == 6
    torch.testing.assert_close(a, b.cpu(), rtol=1e-6, atol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA streams need a GPU")
def test_steps_on_different_streams_follow_each_other(seeded: Seeded) -> None:
    """The first step waits behind a long kernel on its own stream; the second, on another, must not overtake it."""
    recipe, shards, key = spec("bsr").recipe(), (Shard(0, 0, 5000),), seeded(48)
    cpu, gpu = CpuEngine(recipe, "philox", key, shards, 1), GpuEngine(recipe, "philox", key, shards, DEVICE)
    made = [torch.zeros(5000, device=DEVICE) for _ in range(4)]
    gpu.prepare([made[0]])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for number, gradient in enumerate(made):
        with torch.cuda.stream(side if number % 2 == 0 else torch.cuda.current_stream()):
            if number % 2 == 0:
                torch.cuda._sleep(100_000_000)
            gpu.add([gradient])
    torch.cuda.synchronize()
    for gradient in made:
        expected = torch.zeros(5000)
        cpu.add([expected])
        torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-6, atol=1e-5)


def test_an_engine_never_carries_its_key_away(seeded: Seeded) -> None:
    engine = GpuEngine(spec("independent").recipe(), "philox", seeded(49), SHARDS, DEVICE)
    for twin in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(QuellError, match="never pickled or copied"):
            twin(engine)
