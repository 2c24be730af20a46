"""Balls in bins with independent noise: an interval for δ from convolutions, no draws (Proof 9 in docs/proofs.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quell._types import Array
from quell.privacy.tilting import Direction

FINE, COARSE = 1 << 17, 1 << 13  # grid points
_ROUNDING = 1e-12  # absolute error allowed to the convolutions, per unit of K; from below for every bin


def orthogonal_delta(
    levels: Sequence[tuple[float, int]], direction: Direction, epsilon: float, grid: int = FINE
) -> tuple[float, float]:
    """An interval [lower, upper] for δ in one direction; `levels` lists (α = ‖m_j‖²/2σ², number of such bins).

    >>> low, high = orthogonal_delta([(0.5, 1)], "remove", 1.0)  # one bin is the Gaussian mechanism with σ = 1
    >>> round(low, 8), round(high, 8)
    (0.12693674, 0.12693674)
    """
    bins = sum(count for _, count in levels)
    scale = math.exp(epsilon)
    reach = scale if direction == "remove" else 1.0 / scale
    cell = reach * bins / grid
    sums = _sums([_split(alpha, cell, grid) for alpha, _ in levels], [count for _, count in levels])
    short = float(np.sum(sums * (reach - cell / bins * np.arange(grid + 1))))  # E(reach − S)₊
    rounding = _ROUNDING * max(1.0, reach)
    below = rounding * bins  # negative rounding errors are cut off at 0, which adds up, always upwards
    if direction == "add":
        return max(0.0, scale * (short - below) - scale * reach * cell), scale * (short + rounding)
    upper = 1.0 - scale + short + rounding
    down = [_moved_down(alpha, cell, grid) for alpha, _ in levels]
    short = float(
        np.sum(_sums([part for part, _ in down], [n for _, n in levels]) * (reach - cell / bins * np.arange(grid + 1)))
    )
    kept = sum(mean * count for (_, mean), (_, count) in zip(down, levels, strict=True)) / bins
    return max(0.0, kept - scale + short - below), max(0.0, upper)


def _split(alpha: float, cell: float, grid: int) -> Array:
    """(grid + 1,) mass on the grid points: each cell's mass is split between its ends so that the mean is kept."""
    mass, moment = _cells(alpha, cell, grid)
    right = np.clip(moment / cell - np.arange(grid) * mass, 0.0, mass)
    on_grid = np.zeros(grid + 1)
    on_grid[:-1] += mass - right
    on_grid[1:] += right
    return on_grid


def _moved_down(alpha: float, cell: float, grid: int) -> tuple[Array, float]:
    """The mass of each cell at its lower end, and the mean including everything beyond the grid."""
    mass, moment = _cells(alpha, cell, grid)
    kept = float(np.sum(mass * np.arange(grid))) * cell + (1.0 - float(np.sum(moment)))
    return np.concatenate([mass, [0.0]]), kept


def _cells(alpha: float, cell: float, grid: int) -> tuple[Array, Array]:
    """Probability and first moment of every cell under the log-normal law of mean 1 and log-variance 2α."""
    from scipy.special import ndtr

    spread = math.sqrt(2 * alpha)
    logs = np.log(cell * np.arange(1, grid + 1))
    below = np.concatenate([[0.0], ndtr((logs + alpha) / spread)])
    moments = np.concatenate([[0.0], ndtr((logs - alpha) / spread)])
    return np.diff(below), np.diff(moments)


def _sums(parts: Sequence[Array], counts: Sequence[int]) -> Array:
    """The law of a sum of `counts[i]` independent copies of each part, cut off at the end of the grid."""
    total: Array | None = None
    for part, count in zip(parts, counts, strict=True):
        power = part
        while count:
            if count & 1:
                total = power if total is None else _convolve(total, power)
            count >>= 1
            if count:
                power = _convolve(power, power)
    assert total is not None
    return total


def _convolve(first: Array, second: Array) -> Array:
    from scipy import fft

    size = fft.next_fast_len(2 * len(first), real=True)
    transformed = fft.rfft(first, size)
    other = transformed if first is second else fft.rfft(second, size)
    return np.asarray(np.maximum(fft.irfft(transformed * other, size)[: len(first)], 0.0))
