"""Every recurrence makes the rows of C⁻¹Z: against the dense matrix, against itself cut, stopped and buffered."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quell import QuellError
from quell.costs import draws_to_keep
from quell.noise import Key, NoiseSpec, NoiseStream, Shard, generators
from quell.noise.audit import collect
from quell.noise.cpu import CpuEngine
from quell.noise.layout import WORDS, whole
from quell.strategy.recurrence import Regenerate

from .cases import CASES, STEPS, spec, strategy

Seeded = Callable[[int], Key]
SIZES = [700, 1, 0, 1300]
GENERATORS = tuple(WORDS)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_dense_product(case: str, generator: str, seeded: Seeded) -> None:
    key = seeded(1)
    noise = spec(case, 2.5)
    made = collect(NoiseStream(noise, SIZES, key=key, generator=generator))
    noising = np.linalg.inv(strategy(case).matrix())
    scale, half_grid = 2.5 / (1 - noise.shortfall), float(noise.recipe().grids.max()) / 2
    for tensor, size in enumerate(SIZES):
        z = np.array([generators.normals(generator, key, step, tensor, 0, size) for step in range(STEPS)], np.float64)
        np.testing.assert_allclose(made[tensor], scale * noising @ z, rtol=2e-6, atol=1e-5 + half_grid)


@pytest.mark.parametrize("ways", [2, 3, 7])
@pytest.mark.parametrize("case", ["lambda_cgd", "bisr", "bsr", "blt", "tree"])
def test_any_split_gives_the_same_bits(case: str, ways: int, seeded: Seeded) -> None:
    """Each rank may choose for itself whether to keep old draws; that changes nothing either."""
    size = 5000
    [together] = collect(NoiseStream(spec(case), [size], key=seeded(2)))
    cuts = [0, *sorted(np.random.default_rng(ways).integers(1, size, ways - 1).tolist()), size]
    for start, stop in pairwise(cuts):
        shards, memory = [Shard(0, start, stop - start)], start % 2 * 4
        rank = NoiseStream(spec(case), shards=shards, key=seeded(2), threads=1, memory=memory)
        np.testing.assert_array_equal(collect(rank)[0], together[:, start:stop])


def test_threads_do_not_change_a_bit(seeded: Seeded) -> None:
    rows = []
    for threads in (1, 2, 5):
        gradient = np.ones(400_001, np.float32)
        stream = NoiseStream(spec("bsr"), [400_001], key=seeded(3), threads=threads)
        for _ in range(3):
            stream.add_(gradient)
        rows.append(gradient)
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_is_the_straight_run(case: str, seeded: Seeded) -> None:
    straight = collect(NoiseStream(spec(case), SIZES, key=seeded(4)))
    stop = int(np.random.default_rng(sum(map(ord, case))).integers(1, STEPS))
    first = NoiseStream(spec(case), SIZES, key=seeded(4))
    for _ in range(stop):
        first.add_([np.zeros(size, np.float32) for size in SIZES])
    saved = pickle.dumps(first.state_dict())
    first.add_([np.zeros(size, np.float32) for size in SIZES])  # what is saved does not move on
    second = NoiseStream(spec(case), SIZES, key=seeded(4))
    second.load_state_dict(pickle.loads(saved))
    assert second.step == stop
    for made, expected in zip(collect(second), straight, strict=True):
        np.testing.assert_array_equal(made, expected[stop:])


@pytest.mark.parametrize("case", ["lambda_cgd", "bisr", "bisr normalised", "independent"])
def test_buffered_equals_regenerated(case: str, seeded: Seeded) -> None:
    remade = NoiseStream(spec(case), SIZES, key=seeded(5))
    kept = NoiseStream(spec(case), SIZES, key=seeded(5), buffered=True)
    recurrence = strategy(case).recurrence
    assert isinstance(recurrence, Regenerate)
    assert remade.buffers == 0
    assert kept.buffers == len(recurrence.noising) - 1
    for a, b in zip(collect(remade), collect(kept), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_may_change_between_buffered_and_regenerated(seeded: Seeded) -> None:
    straight = collect(NoiseStream(spec("bisr"), SIZES, key=seeded(6)))
    buffered = NoiseStream(spec("bisr"), SIZES, key=seeded(6), buffered=True)
    for _ in range(7):
        buffered.add_([np.zeros(size, np.float32) for size in SIZES])
    saved = buffered.state_dict()
    assert saved["buffers"] is None
    for other in (False, True):
        resumed = NoiseStream(spec("bisr"), SIZES, key=seeded(6), buffered=other)
        resumed.load_state_dict(saved)
        for made, expected in zip(collect(resumed), straight, strict=True):
            np.testing.assert_array_equal(made, expected[7:])


@pytest.mark.parametrize("steps", [2, 4, STEPS])
@pytest.mark.parametrize("generator", GENERATORS)
def test_what_is_kept_where_memory_allows_changes_no_bit(generator: str, steps: int, seeded: Seeded) -> None:
    """BISR with p bands keeps p−1 buffers at the most, however much memory there is and however long it runs."""
    noise = NoiseSpec(strategy("bisr").recurrence, steps, 1.0)
    bands = min(5, steps)
    remade = NoiseStream(noise, SIZES, key=seeded(5), generator=generator)
    chosen = NoiseStream(noise, SIZES, key=seeded(5), generator=generator, memory=float("inf"))
    short = NoiseStream(noise, SIZES, key=seeded(5), generator=generator, memory=bands - 1.01)
    assert (remade.buffers, chosen.buffers, short.buffers) == (0, 0, 0)
    rows = [collect(stream) for stream in (remade, chosen, short)]
    for a, b, c in zip(*rows, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    worth = draws_to_keep(bands, "cpu", generator, memory=100)
    assert worth == bands - 1 or bands == 2
    assert (remade.buffers, chosen.buffers) == (0, worth)
    assert short.buffers == draws_to_keep(bands, "cpu", generator, memory=bands - 1.01) < max(worth, 1)
    assert short.buffers == 3 or bands < 5  # a part of them


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_a_part_of_the_draws_kept_changes_no_bit(keep: int, seeded: Seeded) -> None:
    """Whatever is kept of BISR's four old draws, also after a restart in the middle, the rows are the same."""
    key, shards = seeded(8), whole(SIZES)
    engines = [CpuEngine(spec("bisr").recipe(kept), "chacha8", key, shards, 1) for kept in (0, keep, keep)]
    assert [engine.recipe.buffers for engine in engines] == [0, min(keep, 4), min(keep, 4)]
    for step in range(12):
        if step in (2, 7):
            engines[2] = CpuEngine(spec("bisr").recipe(keep), "chacha8", key, shards, 1)
            engines[2].restore(step, None)
        rows = [[np.zeros(size, np.float32) for size in SIZES] for _ in engines]
        for engine, row in zip(engines, rows, strict=True):
            engine.add(row)
        for a, b, c in zip(*rows, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)


def test_kept_draws_come_back_after_a_restart(seeded: Seeded) -> None:
    straight = collect(NoiseStream(spec("bisr"), SIZES, key=seeded(6)))
    first = NoiseStream(spec("bisr"), SIZES, key=seeded(6), memory=4)
    for _ in range(7):
        first.add_([np.zeros(size, np.float32) for size in SIZES])
    assert first.buffers == 4
    second = NoiseStream(spec("bisr"), SIZES, key=seeded(6), memory=4)
    second.load_state_dict(first.state_dict())
    for made, expected in zip(collect(second), straight, strict=True):
        np.testing.assert_array_equal(made, expected[7:])
    assert second.buffers == 4


def test_only_regeneration_has_a_buffered_mode(seeded: Seeded) -> None:
    with pytest.raises(QuellError, match="always buffers"):
        NoiseStream(spec("bsr"), SIZES, key=seeded(1), buffered=True)


@pytest.mark.parametrize("case", ["bisr", "bsr", "blt", "tree"])
def test_resharding_keeps_every_bit(case: str, seeded: Seeded) -> None:
    """Three ranks and a replica of one run, stop, and two ranks with other cuts go on."""
    size, stop = 3000, 11
    [straight] = collect(NoiseStream(spec(case), [size], key=seeded(7)))

    def run(stream: NoiseStream, steps: int) -> NoiseStream:
        for _ in range(steps):
            stream.add_([np.zeros(shard.length, np.float32) for shard in stream.shards])
        return stream

    old = [Shard(0, 0, 1000), Shard(0, 1000, 1), Shard(0, 1001, 1999)]
    states = [run(NoiseStream(spec(case), shards=[shard], key=seeded(7)), stop).state_dict() for shard in old]
    for shard in (Shard(0, 0, 1700), Shard(0, 1700, 1300)):
        rank = NoiseStream(spec(case), shards=[shard], key=seeded(7))
        rank.reshard([shard], [*states, states[2]])
        assert rank.step == stop
        np.testing.assert_array_equal(collect(rank)[0], straight[stop:, shard.offset : shard.stop])
    alone = run(NoiseStream(spec(case), [size], key=seeded(7)), stop)
    alone.reshard([Shard(0, 500, 600), Shard(0, 2000, 10)])
    for made, shard in zip(collect(alone), alone.shards, strict=True):
        np.testing.assert_array_equal(made, straight[stop:, shard.offset : shard.stop])


def test_resharding_refuses_what_it_cannot_piece_together(seeded: Seeded) -> None:
    shards = [Shard(0, 0, 10), Shard(0, 10, 10)]
    ranks = [NoiseStream(spec("bsr"), shards=[shard], key=seeded(8)) for shard in shards]
    for rank in ranks:
        rank.add_(np.zeros(10, np.float32))
    with pytest.raises(QuellError, match="do not hold 5 of the elements 5 to 15"):
        ranks[0].reshard([Shard(0, 5, 10)])
    assert ranks[0].shards == (shards[0],)
    ranks[0].add_(np.zeros(10, np.float32))
    with pytest.raises(QuellError, match="different steps"):
        ranks[0].reshard([Shard(0, 5, 10)], [rank.state_dict() for rank in ranks])
    ranks[1].add_(np.zeros(10, np.float32))
    first, second = (rank.state_dict() for rank in ranks)
    with pytest.raises(QuellError, match="do not hold 10 of the elements 0 to 20"):
        ranks[0].reshard([Shard(0, 0, 20)], [first, first])  # as many elements as are needed, half of them missing
    with pytest.raises(QuellError, match="both hold element 5 of tensor 0: pass the states of one checkpoint"):
        ranks[0].reshard([Shard(0, 0, 20)], [first, {**second, "shards": [[0, 5, 10]]}])
    with pytest.raises(QuellError, match="it is damaged"):
        ranks[0].reshard([Shard(0, 0, 20)], [first, {**second, "buffers": [second["buffers"][0][:1]]}])
    with pytest.raises(QuellError, match="lacks the 3 buffers"):
        ranks[0].reshard([Shard(0, 0, 20)], [first, {**second, "buffers": None}])
    ranks[0].reshard([Shard(0, 0, 20)], [first, second])
    assert ranks[0].step == 2
    with pytest.raises(QuellError, match="two shards both hold element 3"):
        ranks[0].reshard([Shard(0, 0, 5), Shard(0, 3, 5)])
    with pytest.raises(QuellError, match="at least one state"):
        ranks[0].reshard([Shard(0, 0, 5)], [])


def test_many_tensors_differ_and_their_order_is_their_number(seeded: Seeded) -> None:
    made = collect(NoiseStream(spec("independent"), [64] * 5, key=seeded(9)))
    assert len({rows.tobytes() for rows in made}) == 5
    shards = tuple(reversed(whole([64] * 5)))
    turned = collect(NoiseStream(spec("independent"), shards=shards, key=seeded(9)))
    for a, b in zip(made, reversed(turned), strict=True):
        np.testing.assert_array_equal(a, b)


def _dtypes() -> list[Any]:
    torch = pytest.importorskip("torch")
    return [np.float32, np.float64, np.float16, torch.float32, torch.float64, torch.float16, torch.bfloat16]


def test_every_dtype_and_container_gets_the_same_release(seeded: Seeded) -> None:
    """Noise is added in float32 and the sum rounded to the grid; that release is what every dtype stores."""
    torch = pytest.importorskip("torch")
    reference = np.full((6, 50), 0.25, np.float32)
    NoiseStream(spec("bsr"), [reference], key=seeded(10)).add_([reference])
    for dtype in _dtypes():
        native = isinstance(dtype, torch.dtype)
        gradient = torch.full((6, 50), 0.25, dtype=dtype) if native else np.full((6, 50), 0.25, dtype)
        NoiseStream(spec("bsr"), [gradient], key=seeded(10)).add_([gradient])
        if native:
            assert torch.equal(gradient, torch.from_numpy(reference).to(dtype))
        else:
            np.testing.assert_array_equal(gradient, reference.astype(dtype))


def test_strides_do_not_change_which_noise_an_element_gets(seeded: Seeded) -> None:
    torch = pytest.importorskip("torch")
    shape = (4, 6, 10)
    [reference] = collect(NoiseStream(spec("lambda_cgd"), [shape], key=seeded(11)))
    layouts = [
        np.zeros((10, 6, 4), np.float32).T,
        np.zeros((4, 6, 20), np.float32)[:, :, ::2],
        np.zeros((4, 6, 10), np.float32)[::-1],
        torch.zeros(10, 6, 4).permute(2, 1, 0),
        torch.zeros(4, 6, 20)[:, :, ::2],
        torch.zeros(4, 6, 10, requires_grad=True),
    ]
    for gradient in layouts:
        assert tuple(gradient.shape) == shape
        stream = NoiseStream(spec("lambda_cgd"), [gradient], key=seeded(11))
        stream.add_(gradient)
        added = gradient if isinstance(gradient, np.ndarray) else gradient.detach().numpy()
        np.testing.assert_array_equal(added.reshape(-1).astype(np.float64), reference[0])


def test_empty_and_zero_dimensional_tensors(seeded: Seeded) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.zeros(()), torch.zeros(0, 5), torch.zeros(3)]
    stream = NoiseStream(spec("bsr"), tensors, key=seeded(12))
    stream.add_(tensors)
    assert tensors[0].item() != 0
    assert bool((tensors[2] != 0).all())
    nothing = NoiseStream(spec("bsr"), [], key=seeded(12))
    nothing.add_([])
    assert nothing.step == 1
