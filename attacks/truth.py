"""True δ, computed without a line of `quell.privacy`: dense matrices, enumeration, FFT and importance sampling.

One example that takes part by the pattern x moves the released C·G + noise by C·x. Every function returns a δ that the
mechanism really has (`Measured.lower` is below it up to the stated chance), so a claim below it is false.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp, ndtr

from quell.schemes import BallsInBins, BMinSep, Scheme

Array = NDArray[np.float64]
ERRORS = 5.0  # a sampled δ counts only so many standard errors lower: chance 3e-7, and less where values are skewed
_MOST_PATTERNS = 4000
_CELLS = 1 << 19  # of the grid of privacy losses


@dataclass(frozen=True)
class Measured:
    """δ, about, and a value that it is surely, or all but surely, not below."""

    delta: float
    lower: float


def gaussian_delta(move: float, epsilon: float) -> float:
    """δ of a Gaussian whose mean moves by `move` standard deviations."""
    if move <= 0:
        return 0.0
    return float(ndtr(move / 2 - epsilon / move) - np.exp(epsilon + log_ndtr(-move / 2 - epsilon / move)))


def fixed_delta(matrix: Array, separation: int, count: int, sigma: float, epsilon: float, seed: int) -> Measured:
    """δ when an attacker may choose the pattern: the worst found, all of them if they are few."""
    move = worst_move(matrix, separation, count, np.random.default_rng(seed))
    delta = gaussian_delta(move / sigma, epsilon)
    return Measured(delta, delta * (1 - 1e-6))


def worst_move(matrix: Array, separation: int, count: int, random: np.random.Generator) -> float:
    """max over patterns x with entries −1, 0, 1 of ‖C·x‖, over all patterns or (where there are too many) over some."""
    steps = len(matrix)
    patterns = all_patterns(steps, separation, count)
    if patterns is None:
        patterns = np.array([_random_pattern(steps, separation, count, random) for _ in range(_MOST_PATTERNS)])
    gram = matrix.T @ matrix
    signed = patterns.copy()
    if gram.min() < 0:  # turn signs, one step at a time, as long as that helps
        for step in list(range(steps)) * 3:
            pull = signed @ gram[step] - signed[:, step] * gram[step, step]
            signed[:, step] = patterns[:, step] * np.where(pull < 0, -1.0, 1.0)
    return math.sqrt(float(np.max(np.einsum("pi,pi->p", signed @ gram, signed))))


def all_patterns(steps: int, separation: int, count: int) -> Array | None:
    """(patterns, steps) every way to take part, at most `count` times, so far apart; None where there are too many."""
    found: list[tuple[int, ...]] = [(step,) for step in range(steps)]
    ends = list(found)
    for _ in range(count - 1):
        ends = [(*taken, step) for taken in ends for step in range(taken[-1] + separation, steps)]
        found += ends
        if len(found) > _MOST_PATTERNS:
            return None
    patterns = np.zeros((len(found), steps))
    for row, taken in enumerate(found):
        patterns[row, list(taken)] = 1.0
    return patterns


def _random_pattern(steps: int, separation: int, count: int, random: np.random.Generator) -> Array:
    """As often as allowed, with random pauses that are mostly the shortest."""
    pattern, step = np.zeros(steps), int(random.integers(0, separation)) if random.random() < 0.5 else 0
    for _ in range(count):
        if step >= steps:
            break
        pattern[step] = 1.0
        step += separation + int(random.geometric(0.7)) - 1
    return pattern


def patterns(scheme: Scheme) -> tuple[Array, Array]:
    """(patterns, steps) the ways to take part, and their probabilities."""
    if isinstance(scheme, BallsInBins):
        return bin_patterns(scheme.steps, scheme.separation)
    assert isinstance(scheme, BMinSep)
    return chain_patterns(scheme.steps, scheme.separation, scheme.rate)


def bin_patterns(steps: int, bins: int) -> tuple[Array, Array]:
    """The patterns of balls in bins, and their probabilities."""
    rows = np.array([np.arange(steps) % bins == j for j in range(bins)], dtype=np.float64)
    return rows, np.full(bins, 1.0 / bins)


def chain_patterns(steps: int, separation: int, rate: float) -> tuple[Array, Array]:
    """The patterns of b-min-sep sampling with their probabilities."""
    found: dict[tuple[int, ...], float] = {}
    stationary = 1 + (separation - 1) * rate
    open_ = [(0, (), 1 / stationary)] + [(wait, (), rate / stationary) for wait in range(1, separation)]
    waiting: list[tuple[int, tuple[int, ...], float]] = list(open_)
    while waiting:
        ready, taken, probability = waiting.pop()
        for step in range(ready, steps):
            now = probability * (1 - rate) ** (step - ready) * rate
            waiting.append((step + separation, (*taken, step), now))
        found[taken] = found.get(taken, 0.0) + probability * (1 - rate) ** max(0, steps - ready)
        assert len(found) <= _MOST_PATTERNS, "the schemes of the attacks are small enough to list their patterns"
    rows = np.zeros((len(found), steps))
    for row, taken in enumerate(found):
        rows[row, list(taken)] = 1.0
    chances = np.array(list(found.values()))
    return rows[chances > 0], chances[chances > 0]


def mixture_delta(
    means: Array, chances: Array, sigma: float, epsilon: float, seed: int, effort: float = 1.0
) -> Measured:
    """δ of "one of these means, by these chances" against "mean 0", noise σ on both: the worse direction.

    By importance sampling from a mixture of stretched (remove) or shifted (add) copies, which contains the law itself.
    """
    random = np.random.default_rng(seed)
    points = np.asarray(np.linalg.qr(means.T / sigma, mode="r")).T if len(means) < means.shape[1] else means / sigma
    draws = int(effort * min(60_000, max(5_000, 5e6 / len(points))))
    both = [_remove(points, np.log(chances), epsilon, draws, random), _add(points, chances, epsilon, draws, random)]
    measured = [(values.mean(), values.std() / math.sqrt(draws)) for values in both]
    return Measured(
        max(float(mean) for mean, _ in measured), max(float(mean - ERRORS * error) for mean, error in measured)
    )


def log_ratio(outputs: Array, points: Array, logs: Array) -> Array:
    """ln of the density of the mixture over that of the noise alone, all in units of σ."""
    alpha = 0.5 * np.sum(points**2, axis=1)
    return np.concatenate([_log_sum(part @ points.T + (logs - alpha)) for part in _parts(outputs, points)])


def _log_sum(values: Array) -> Array:
    """ln of the sum of exponentials of every row, four times as fast as scipy's; overwrites its argument."""
    top = values.max(axis=1)
    values -= top[:, None]
    np.exp(values, out=values)
    return np.asarray(top + np.log(values.sum(axis=1)))


def _remove(points: Array, logs: Array, epsilon: float, draws: int, random: np.random.Generator) -> Array:
    stretches = np.array([1.0, 1.3, 1.7, 2.3, 3.2])
    chosen = random.choice(len(points), size=draws, p=np.exp(logs) / np.exp(logs).sum())
    factors = np.resize(stretches, draws)
    outputs = factors[:, None] * points[chosen] + random.standard_normal((draws, points.shape[1]))
    loss = log_ratio(outputs, points, logs)
    proposals = [log_ratio(outputs, stretch * points, logs) for stretch in stretches]
    weight = np.exp(loss - logsumexp(proposals, axis=0) + math.log(len(stretches)))
    return np.asarray(-weight * np.expm1(np.minimum(epsilon - loss, 0.0)))


def _add(points: Array, chances: Array, epsilon: float, draws: int, random: np.random.Generator) -> Array:
    centre = chances @ points
    length = float(centre @ centre)
    shifts = np.array([0.0, 0.5, 1.0, 1.6]) * min(epsilon / max(length, 1e-300), 8.0 / math.sqrt(max(length, 1e-300)))
    outputs = random.standard_normal((draws, points.shape[1])) - np.resize(shifts, draws)[:, None] * centre
    along = outputs @ centre
    proposals = [-shift * along - 0.5 * shift**2 * length for shift in shifts]
    weight = np.exp(-logsumexp(proposals, axis=0) + math.log(len(shifts)))
    loss = log_ratio(outputs, points, np.log(chances))
    return np.asarray(-weight * np.expm1(np.minimum(epsilon + loss, 0.0)))


def _parts(outputs: Array, points: Array) -> list[Array]:
    return np.array_split(outputs, max(1, len(outputs) * len(points) // 2**21))


def coin_delta(moves: Array, rate: float, epsilon: float) -> Measured:
    """δ of Gaussians whose means move by `moves` standard deviations, each with probability `rate`, composed by FFT.

    Losses are rounded down to the grid and what leaves it is dropped, so the result is below the true δ.
    """
    deltas = [_composed(moves[moves > 1e-12], rate, epsilon, removed) for removed in (True, False)]
    return Measured(max(deltas), max(deltas) * (1 - 1e-6) - 1e-11)


def _composed(moves: Array, rate: float, epsilon: float, removed: bool) -> float:
    sizes, counts = np.unique(np.round(moves, 9), return_counts=True)
    low, high = _reach(sizes, counts, rate, removed)
    step = (high + low) / _CELLS
    first, last = -math.floor(low / step), math.floor(high / step)
    grid = np.arange(first, last + 1)
    spectrum = np.ones(_CELLS // 2 + 1, dtype=np.complex128)
    for size, count in zip(sizes, counts, strict=True):
        cells = np.zeros(_CELLS)
        np.add.at(
            cells, grid[:-1] % _CELLS, _masses(np.asarray(step * grid, dtype=np.float64), float(size), rate, removed)
        )
        spectrum *= np.fft.rfft(cells) ** int(count)
    total = np.fft.irfft(spectrum, _CELLS)
    beyond = grid[grid * step > epsilon]
    return max(0.0, float(-np.sum(total[beyond % _CELLS] * np.expm1(epsilon - beyond * step))))


def _masses(edges: Array, size: float, rate: float, removed: bool) -> Array:
    """The probabilities of a single loss between neighbouring edges, where the example was (or was not) there."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inside = np.exp(edges if removed else -edges) - (1 - rate)
        place = np.where(inside > 0, (np.log(np.maximum(inside, 1e-320) / rate) + size**2 / 2) / size, -np.inf)
    below = (1 - rate) * ndtr(place) + rate * ndtr(place - size) if removed else ndtr(place)
    return np.asarray(np.abs(np.diff(below)))


def _reach(sizes: Array, counts: NDArray[np.integer], rate: float, removed: bool) -> tuple[float, float]:
    """How far the sum of the losses reaches below and above 0, but for 1e-14 of its mass (Chernoff's bound)."""
    tilts = np.concatenate([-np.logspace(1.5, -2, 60), np.logspace(-2, 1.5, 60)])
    moments = np.zeros(len(tilts))
    for size, count in zip(sizes, counts, strict=True):
        x = np.linspace(-12, 12 + size, 4001)
        loss = np.logaddexp(np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + x * size - size**2 / 2)
        density = -0.5 * x**2 - 0.5 * math.log(2 * math.pi) + math.log(x[1] - x[0])
        density, loss = (density + loss, loss) if removed else (density, -loss)
        moments += count * logsumexp(density + tilts[:, None] * loss, axis=1)
    bounds = (moments + 33.0) / np.abs(tilts)
    return max(1e-3, float(bounds[tilts < 0].min())), max(1e-3, float(bounds[tilts > 0].min()))
