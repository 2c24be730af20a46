"""What float32 leaves of the promised noise: whitened rows, rounded coefficients, and the bits of a release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.linalg import toeplitz

from quell import QuellError
from quell.noise import Key, NoiseSpec, NoiseStream, generators
from quell.noise import spec as noise_spec
from quell.noise.audit import THRESHOLD, collect
from quell.noise.spec import Recipe
from quell.strategy import precision
from quell.strategy.recurrence import Exponentials, Fenwick, Recurrence, Regenerate, Ring

from .cases import CASES, STEPS, spec, strategy

Seeded = Callable[[int], Key]
SIZE = 4000
GENERATORS = ("chacha20", "philox")
NEAR_LIMIT = 1.21  # its powers reach 2,000 after 40 steps
DOUBLING = Ring(np.array([1.0, 2.0]))  # C⁻¹ grows like 2^t: refused

RECURRENCES: dict[str, Recurrence] = {
    **{case: strategy(case).recurrence for case in CASES},
    "a ring near the limit": Ring(np.array([1.0, NEAR_LIMIT])),
    "buffers near the limit": Exponentials(np.array([0.2]), np.array([NEAR_LIMIT])),
    "a random walk": Ring(np.array([1.0, -1.0])),
}


def matrix_of(recurrence: Recurrence) -> np.ndarray:
    """C in float64, from the definition of the recurrence."""
    match recurrence:
        case Regenerate():
            inverse = _lower(recurrence.noising)
        case Exponentials():
            powers = recurrence.decays[:, None] ** np.arange(STEPS - 1)
            inverse = _lower(np.concatenate([[1.0], recurrence.scales @ powers]))
        case Fenwick():
            return np.asarray(strategy("tree").matrix())
        case Ring() if recurrence.bands.ndim == 2:
            c = np.zeros((STEPS, STEPS))
            for d in range(recurrence.bands.shape[1]):
                c[np.arange(d, STEPS), np.arange(STEPS - d)] = recurrence.bands[d:, d]
            return c
        case Ring():
            inverse = np.linalg.inv(_lower(recurrence.bands))
    rows = np.ones(STEPS) if recurrence.row_scale is None else recurrence.row_scale
    return np.asarray(np.linalg.inv(inverse * rows[:, None]))


def _lower(column: np.ndarray) -> np.ndarray:
    padded = np.zeros(STEPS)
    padded[: len(column)] = column[:STEPS]
    return np.asarray(toeplitz(padded, np.eye(STEPS)[0]))


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("case", RECURRENCES)
def test_whitened_rows_have_the_promised_variance_at_every_step(case: str, generator: str, seeded: Seeded) -> None:
    """One, and what rounding releases to the grid adds: next to nothing, and 4% where growth is at its limit."""
    recurrence, scale = RECURRENCES[case], 0.3
    noise, c = NoiseSpec(recurrence, STEPS, scale), matrix_of(recurrence)
    rounding = np.square(c) @ np.square(np.broadcast_to(noise.recipe().grids, STEPS) / scale) / 12
    assert rounding.max() < (0.04 if "limit" in case else 1e-4)
    for buffered in (False, True) if isinstance(recurrence, Regenerate) else (False,):
        stream = NoiseStream(noise, [SIZE], key=seeded(41), generator=generator, buffered=buffered)
        found = np.mean(np.square(c @ collect(stream)[0] / scale), axis=1) - rounding
        np.testing.assert_allclose(found, 1.0, atol=THRESHOLD * np.sqrt(2 / SIZE))
        assert found.mean() == pytest.approx(1.0, abs=THRESHOLD * np.sqrt(2 / SIZE / STEPS))


@pytest.mark.parametrize("generator", GENERATORS)
def test_mutation_no_limit_on_growth(generator: str, seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit the refused strategy fails the same test; without the grid too, late rows have no noise."""
    with pytest.raises(QuellError, match="float32 would round away"):
        NoiseSpec(DOUBLING, STEPS, 0.3)
    monkeypatch.setattr(precision, "MOST_GROWTH", np.inf)

    def whitened() -> np.ndarray:
        stream = NoiseStream(NoiseSpec(DOUBLING, STEPS, 0.3), [SIZE], key=seeded(42), generator=generator)
        return np.asarray(matrix_of(DOUBLING) @ collect(stream)[0] / 0.3)

    assert np.all(np.abs(np.mean(whitened() ** 2, axis=1) - 1) > THRESHOLD * np.sqrt(2 / SIZE))
    monkeypatch.setattr(noise_spec, "GRID_BITS", 60)
    assert np.all(np.mean(whitened()[-8:] ** 2, axis=1) < 0.05)


def made_matrix(recipe: Recipe) -> np.ndarray:
    """The rows of noise per draw, with the float32 tables and exact sums."""
    rows, kept = np.zeros((STEPS, STEPS)), np.zeros((recipe.buffers, STEPS))
    for t in range(STEPS):
        taps = recipe.taps_at(t).astype(np.float64)
        row = np.eye(STEPS)[t]
        if recipe.kind == "regenerate":
            row = taps[: t + 1] @ np.eye(STEPS)[t - np.arange(min(len(taps), t + 1))]
        elif recipe.kind == "ring":
            row = taps[0] * row
            for d in range(1, min(len(taps), t + 1)):
                row = row + taps[d] * kept[(t - d) % recipe.buffers]
            if recipe.buffers:
                kept[t % recipe.buffers] = row
        elif recipe.kind == "exponentials":
            draw = row
            row = draw + taps[: recipe.buffers] @ kept
            kept = draw + taps[recipe.buffers :, None] * kept
        rows[t] = row * float(recipe.scale_at(t)[0])
    return rows


LONG_MEMORY = {
    "a regenerated step": Regenerate(np.array([1.0, -0.99999])),
    "a ring": Ring(np.array([1.0, 0.7, 0.45, 0.3, 1e-3])),
    "buffers": Exponentials(np.array([-0.3, -0.2]), np.array([0.9, 0.4])),
}


@pytest.mark.parametrize("case", [*(case for case in CASES if case != "tree"), *LONG_MEMORY])
def test_rounded_coefficients_never_make_less_noise(case: str) -> None:
    """C·(rows that are made) has no singular value below 1: it is the promised noise, and a little more."""
    recurrence = LONG_MEMORY.get(case) or RECURRENCES[case]
    noise = NoiseSpec(recurrence, STEPS, 1.0)
    values = np.linalg.svd(matrix_of(recurrence) @ made_matrix(noise.recipe()), compute_uv=False)
    assert values.min() >= 1.0
    assert values.max() <= (1 + noise.shortfall) / (1 - noise.shortfall) * (1 + 2e-6)


def test_mutation_no_scale_for_the_shortfall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_spec, "shortfall", lambda *_: 0.0)
    recurrence = LONG_MEMORY["buffers"]
    made = made_matrix(NoiseSpec(recurrence, STEPS, 1.0).recipe())
    assert np.linalg.svd(matrix_of(recurrence) @ made, compute_uv=False).min() < 1.0


def test_coefficients_that_float32_cannot_tell_apart_are_refused() -> None:
    remembers = Regenerate(np.array([1.0, -(1 - 2.0**-26)]))  # float32 makes it 1
    assert NoiseSpec(remembers, 10_000, 1.0).shortfall == pytest.approx(10_000 * 2.0**-26, rel=1e-3)
    with pytest.raises(QuellError, match=r"smaller by \d"):
        NoiseSpec(remembers, 4_000_000, 1.0).recipe()


@pytest.mark.parametrize(("first", "scale"), [(2.0**-90, 2.0**-90), (2.0**90, 2.0**90), (2.0**-101, 1e-9)])
def test_noise_that_would_underflow_or_overflow_is_refused(first: float, scale: float) -> None:
    for recurrence in (Regenerate(np.array([first])), Ring(np.array([1 / first, 0.5 / first]))):
        with pytest.raises(QuellError, match="outside what float32 noise can represent"):
            NoiseSpec(recurrence, 8, scale).recipe()


# ---- the bits of a release


def released(sums: Any, seeded: Seeded, case: str = "independent", scale: float = 1.3, key: int = 43) -> np.ndarray:
    """A copy of the sums with the first row of noise."""
    copy = sums.copy() if isinstance(sums, np.ndarray) else sums.clone()
    NoiseStream(spec(case, scale), [copy], key=seeded(key)).add_(copy)
    return np.asarray(copy if isinstance(sums, np.ndarray) else copy.double().numpy())


def test_a_float64_sum_keeps_no_low_bits(seeded: Seeded) -> None:
    """The attack: with and without an example, at any epsilon, sums differ in bits that float32 noise cannot reach."""
    without = np.full(SIZE, 0.1)
    with_example = without + 1e-13
    np.testing.assert_array_equal(released(without, seeded), released(with_example, seeded))
    as_single = released(without.astype(np.float32), seeded)
    np.testing.assert_array_equal(released(without, seeded), as_single.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-9, 1e-3, 0.7, 30.0, 1e4])
@pytest.mark.parametrize("case", ["independent", "bisr", "bsr normalised", "blt", "tree"])
def test_every_release_lies_on_the_grid(case: str, size: float, dtype: str, seeded: Seeded) -> None:
    torch = pytest.importorskip("torch")
    sums = torch.from_numpy(np.random.default_rng(1).normal(scale=size, size=2000)).to(getattr(torch, dtype))
    result = released(sums, seeded, case)
    grid = float(spec(case, 1.3).recipe().grids[0])
    if dtype in ("float64", "float32"):
        np.testing.assert_array_equal(result % grid, 0.0)
    else:  # what the grid leaves, rounded once more
        narrow = torch.from_numpy(released(sums.float(), seeded, case)).to(getattr(torch, dtype))
        np.testing.assert_array_equal(result, narrow.double().numpy())


def test_which_values_a_release_can_take_does_not_depend_on_the_sum(seeded: Seeded) -> None:
    """Mironov's attack on plain float32 sums: noise from 1 to 2 is a multiple of 2⁻²³, and results below 1 are finer.

    So the last bit of results just below 1 is the last bit of the sum that was to be hidden.
    """
    count, key = 400_000, seeded(44)
    noise = generators.normals("chacha20", key, 0, 0, 0, count) * np.float32(1.3)

    def odd(results: np.ndarray, unit: float) -> np.ndarray:
        below = results[(results > 0.9902) & (results < 1)].astype(np.float64)
        assert len(below) > 500
        return (below / unit) % 2

    for secret in (-167_773, -167_772):  # of 2⁻²⁴: about −0.01
        sums = np.full(count, secret * 2.0**-24, np.float32)
        finer = odd((sums + noise)[noise >= 1], 2.0**-24)
        assert np.all(finer == abs(secret) % 2)  # a plain sum tells the two apart with certainty
        NoiseStream(spec("independent", 1.3), [sums], key=key, replay=True).add_(sums)
        bits = odd(sums, float(spec("independent", 1.3).recipe().grids[0]))
        assert set(bits) == {0.0, 1.0}
        assert 0.4 < bits.mean() < 0.6


@pytest.mark.parametrize("case", ["independent", "bisr", "bsr", "blt"])
def test_the_low_bits_of_a_release_are_uniform_whatever_the_sum(case: str, seeded: Seeded) -> None:
    count = 1_000_000
    grid = float(spec(case, 1.3).recipe().grids[0])
    for shift in (0.0, 1e-6, 1.234567e-3):
        sums = np.full(count, shift, np.float32)
        result = released(sums, seeded, case)
        for most in (np.inf, 8000 * grid):  # all results, and the small ones, whose own grid is finest
            low = (result[np.abs(result) < most] / grid).astype(np.int64) % 8
            expected = len(low) / 8
            surprise = float(np.sum((np.bincount(low, minlength=8) - expected) ** 2) / expected)
            assert surprise < 40, (shift, most)  # chi-square with 7 degrees of freedom: 1 in 800,000


def test_past_the_end_and_for_huge_sums_nothing_is_invented(seeded: Seeded) -> None:
    sums = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 1e8], np.float32)
    result = released(sums, seeded)
    np.testing.assert_array_equal(result[:5], sums[:5])
    assert abs(result[5] - 1e8) <= 16
