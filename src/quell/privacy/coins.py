"""δ of composed subsampled Gaussians in milliseconds, rounded up; the rounds may have different noise.

Losses of each round are put onto a grid in a way that only raises δ (Proof 10 in docs/proofs.md; "connect the dots",
arXiv:2207.04380), and Fourier transforms compose the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quell._types import Array

Rounds = Sequence[tuple[int, float]]  # how many rounds have noise of which σ, in units of what the example adds

_FAR = 9.0  # standard deviations of one round's output that are looked at
_SLICES = 1 << 9  # of it, to find out how far the composed loss reaches
_TAIL = 1e-14  # probability that may fall off the grid, at either end
_CELLS = 1 << 15  # of the grid, at least
_MOST_PLACES = 1 << 20  # of one round's losses
_MARGIN, _STEEP = 64, 0.5  # cells kept free at the upper end, and the order of a Chernoff bound that makes use of them
_UPWARDS = 1e-10  # of a cell's probability that is moved up by one place: losses are known to about 10⁻¹⁵
_FOURIER = 4e-15  # relative error of a round's Fourier coefficients, twice log2(cells)·2⁻⁵³; of r rounds r times that


@dataclass(frozen=True)
class Losses:
    """Composed privacy losses in one direction: their values, in order, and probabilities."""

    values: Array
    mass: Array
    lost: float  # how much larger δ may be: probability beyond the grid, and rounding

    def delta(self, epsilon: float) -> float:
        """δ at `epsilon`, without what is lost."""
        first = int(np.searchsorted(self.values, epsilon, side="right"))
        return float(-np.expm1(epsilon - self.values[first:]) @ self.mass[first:])


def coin_delta(rounds: Rounds, rate: float, epsilon: float) -> float:
    """About δ at `epsilon` of Gaussian mechanisms that are each entered with probability `rate`.

    >>> from quell.privacy.gaussian import gaussian_delta
    >>> round(coin_delta([(4, 2.0)], 1.0, 3.0) / gaussian_delta(1.0, 3.0), 2)
    1.0
    """
    return max(losses.delta(epsilon) for losses in _both(rounds, rate))


def coin_bound(rounds: Rounds, rate: float, epsilon: float) -> float:
    """An upper bound on the same δ (Proof 10)."""
    return max(losses.delta(epsilon) + losses.lost for losses in _both(rounds, rate))


def coin_epsilon(rounds: Rounds, rate: float, delta: float) -> float:
    """About ε at `delta`."""
    both = _both(rounds, rate)
    low, high = 0.0, max(float(losses.values[-1]) for losses in both)
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if max(losses.delta(middle) for losses in both) > delta else (low, middle)
    return high


def reach(rounds: Rounds, rate: float) -> float:
    """How far apart the smallest and the largest loss are, composed or of one round, about."""
    both = ([(count, *_slices(rate, sigma, sign)) for count, sigma in rounds] for sign in (1, -1))
    return max(_widest(rounds, rate), *(_reach(sparse, -1)[0] + _reach(sparse, 1)[0] for sparse in both))


def _widest(rounds: Rounds, rate: float) -> float:
    """How far apart the losses of one round are."""
    return max(_loss(rate, sigma, 1 + _FAR * sigma) - _loss(rate, sigma, -_FAR * sigma) for _, sigma in rounds)


def _both(rounds: Rounds, rate: float) -> tuple[Losses, Losses]:
    """Losses of both directions: with the example against without it, and the reverse."""
    return _composed(rounds, rate, 1), _composed(rounds, rate, -1)


def _composed(rounds: Rounds, rate: float, sign: int) -> Losses:
    from scipy import fft

    together = sum(count for count, _ in rounds)
    sparse = [(count, *_slices(rate, sigma, sign)) for count, sigma in rounds]
    (depth, _), (height, order) = _reach(sparse, -1), _reach(sparse, 1)
    # Chords add up to a quarter of a squared cell to every round's variance: long runs need finer grids.
    cells = max(_CELLS, 1 << math.ceil(math.log2(600 * math.sqrt(together))))
    # Where hardly any noise is left, a loss is one number almost surely, and almost never a huge one.
    width = max((depth + height) / (cells - _MARGIN), _widest(rounds, rate) / _MOST_PLACES)
    start = math.floor(-depth / width)
    spectrum, beyond = np.ones(cells // 2 + 1, dtype=np.complex128), 0.0
    orders = np.array([order, min(order, _STEEP / width)])  # a loss that ends in an edge is as sharp as the grid
    exponents = -orders * width * (start + cells)
    for count, sigma in rounds:
        first, mass, missing = _round(rate, sigma, sign, width)
        places = first + np.arange(len(mass))
        spectrum *= fft.rfft(np.bincount(places % cells, mass, cells)) ** count
        beyond += count * missing
        tilted = orders[:, None] * width * places[mass > 0] + np.log(mass[mass > 0])
        top = tilted.max(axis=1)
        exponents += count * (top + np.log(np.exp(tilted - top[:, None]).sum(axis=1)))
    found = np.roll(np.maximum(fft.irfft(spectrum, cells), 0.0), -(start % cells))
    # Beyond the upper end, by Chernoff. By Parseval the errors of all cells are √(Σ|coefficients|²) together at most.
    beyond += math.exp(min(float(exponents.min()), 0.0))
    beyond += _FOURIER * together * math.sqrt(cells * float(found.max()))
    return Losses(width * (start + np.arange(cells, dtype=np.float64)), found, beyond)


def _round(rate: float, sigma: float, sign: int, width: float) -> tuple[int, Array, float]:
    """One round on the grid: the number of the first place, the mass at each, and the mass left out at the top."""
    from scipy.special import ndtr

    ends = [_loss(rate, sigma, y) for y in (-_FAR * sigma, 1 + _FAR * sigma)]
    first, last = math.floor(ends[0] / width), math.ceil(ends[1] / width)
    losses = width * np.arange(first, last + 1, dtype=np.float64)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # no y has a loss of ln(1 − q) or less
        small, large = np.log(np.maximum(np.expm1(losses) + rate, 0.0)), losses + np.log1p((rate - 1) * np.exp(-losses))
    y = sigma**2 * (np.where(losses < 1, small, large) - math.log(rate)) + 0.5

    def between(mean: float) -> Array:
        """The probability of each cell, from the tail it lies in."""
        left, right = ndtr((y - mean) / sigma), ndtr((mean - y) / sigma)
        return np.asarray(np.where(y[1:] < mean, np.diff(left), -np.diff(right)))

    without, entered = between(0.0), between(1.0)
    ours, theirs = (1 - rate) * without + rate * entered, without
    top = float((1 - rate) * ndtr(-y[-1] / sigma) + rate * ndtr((1 - y[-1]) / sigma))
    bottom = float(ndtr(y[0] / sigma))
    if sign > 0:  # what is left out at the bottom counts at the first place, a larger loss
        lowest = (1 - rate) * bottom + rate * float(ndtr((y[0] - 1) / sigma))
        return first, _chords(ours, theirs, losses, width, lowest), top
    return -last, _chords(theirs[::-1], ours[::-1], -losses[::-1], width, float(ndtr(-y[-1] / sigma))), bottom


def _chords(ours: Array, theirs: Array, losses: Array, width: float, lowest: float) -> Array:
    """Mass on the places of a grid, from the probabilities of its cells in both laws."""
    with np.errstate(over="ignore", invalid="ignore"):
        up = (ours - np.exp(losses[:-1]) * theirs) / -math.expm1(-width) + _UPWARDS * ours
    up = np.clip(np.where(np.isnan(up), ours, up), 0.0, ours)  # where e^loss overflows, everything moves up
    mass = np.zeros(len(losses))
    mass[1:] = up
    mass[:-1] += ours - up
    mass[0] += lowest
    return mass


def _loss(rate: float, sigma: float, y: float) -> float:
    stays = math.log1p(-rate) if rate < 1 else -math.inf
    return float(np.logaddexp(stays, math.log(rate) + (2 * y - 1) / (2 * sigma**2)))


def _slices(rate: float, sigma: float, sign: int) -> tuple[Array, Array]:
    """One round's losses and their probabilities on a coarse grid."""
    from scipy.special import ndtr

    edges = np.linspace(-_FAR * sigma, 1 + _FAR * sigma, _SLICES + 1)
    middles = 0.5 * (edges[1:] + edges[:-1])
    without, entered = (np.diff(ndtr((edges - mean) / sigma)) for mean in (0.0, 1.0))
    stays = math.log1p(-rate) if rate < 1 else -math.inf
    loss = np.logaddexp(stays, math.log(rate) + (2 * middles - 1) / (2 * sigma**2))
    mass = (1 - rate) * without + rate * entered if sign > 0 else without
    there = mass > 0
    return sign * loss[there], mass[there] / mass.sum()


def _reach(rounds: list[tuple[int, Array, Array]], sign: int) -> tuple[float, float]:
    """About what the composed loss times `sign` exceeds with probability `_TAIL`, and that Chernoff bound's order."""
    spread = math.sqrt(sum(count * float(np.cov(loss, aweights=mass, bias=True)) for count, loss, mass in rounds))
    orders = np.geomspace(0.1 / max(spread, 1.0), 1000.0 / min(spread + 1e-12, 1.0), 40)
    moments = np.zeros(len(orders))
    for count, loss, mass in rounds:
        tilted = orders[:, None] * sign * loss + np.log(mass)
        top = tilted.max(axis=1)
        moments += count * (top + np.log(np.exp(tilted - top[:, None]).sum(axis=1)))
    ends = (moments - math.log(_TAIL)) / orders
    best = int(np.argmin(ends))
    return float(ends[best]), float(orders[best])
