"""δ of composed subsampled Gaussians in milliseconds, rounded up; the rounds may have different noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quell._types import Array
from quell.privacy import losses
from quell.privacy.losses import Losses, chords, compose_both

Rounds = Sequence[tuple[int, float]]  # how many rounds have noise of which σ, in units of what the example adds

_FAR = 9.0  # standard deviations of one round's output that are looked at
_SLICES = 1 << 9  # of it, to find out how far the composed loss reaches


@dataclass(frozen=True)
class Coin:
    """One round: a Gaussian mechanism that is entered with probability `rate`; at rate 1 the Gaussian mechanism."""

    sigma: float
    rate: float

    @property
    def widest(self) -> float:
        return self._loss(1 + _FAR * self.sigma) - self._loss(-_FAR * self.sigma)

    def slices(self, sign: int) -> tuple[Array, Array]:
        from scipy.special import ndtr

        rate, sigma = self.rate, self.sigma
        edges = np.linspace(-_FAR * sigma, 1 + _FAR * sigma, _SLICES + 1)
        middles = 0.5 * (edges[1:] + edges[:-1])
        without, entered = (np.diff(ndtr((edges - mean) / sigma)) for mean in (0.0, 1.0))
        loss = np.logaddexp(self._stays, math.log(rate) + (2 * middles - 1) / (2 * sigma**2))
        mass = (1 - rate) * without + rate * entered if sign > 0 else without
        there = mass > 0
        return sign * loss[there], mass[there] / mass.sum()

    def on_grid(self, sign: int, width: float) -> tuple[int, Array, float]:
        from scipy.special import ndtr

        rate, sigma = self.rate, self.sigma
        ends = [self._loss(y) for y in (-_FAR * sigma, 1 + _FAR * sigma)]
        first, last = math.floor(ends[0] / width), math.ceil(ends[1] / width)
        grid = width * np.arange(first, last + 1, dtype=np.float64)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # no y has a loss of ln(1 − q) or less
            small, large = np.log(np.maximum(np.expm1(grid) + rate, 0.0)), grid + np.log1p((rate - 1) * np.exp(-grid))
        y = sigma**2 * (np.where(grid < 1, small, large) - math.log(rate)) + 0.5

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
            return first, chords(ours, theirs, grid, width, lowest), top
        return -last, chords(theirs[::-1], ours[::-1], -grid[::-1], width, float(ndtr(-y[-1] / sigma))), bottom

    @property
    def _stays(self) -> float:
        return math.log1p(-self.rate) if self.rate < 1 else -math.inf

    def _loss(self, y: float) -> float:
        return float(np.logaddexp(self._stays, math.log(self.rate) + (2 * y - 1) / (2 * self.sigma**2)))


def coin_delta(rounds: Rounds, rate: float, epsilon: float) -> float:
    """About δ at `epsilon` of Gaussian mechanisms that are each entered with probability `rate`.

    >>> from quell.privacy.gaussian import gaussian_delta
    >>> round(coin_delta([(4, 2.0)], 1.0, 3.0) / gaussian_delta(1.0, 3.0), 2)
    1.0
    """
    return max(each.delta(epsilon) for each in _both(rounds, rate))


def coin_bound(rounds: Rounds, rate: float, epsilon: float) -> float:
    """An upper bound on the same δ (Proof 10)."""
    return max(each.bound(epsilon) for each in _both(rounds, rate))


def coin_epsilon(rounds: Rounds, rate: float, delta: float) -> float:
    """About ε at `delta`."""
    both = _both(rounds, rate)
    low, high = 0.0, max(float(each.values[-1]) for each in both)
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if max(each.delta(middle) for each in both) > delta else (low, middle)
    return high


def reach(rounds: Rounds, rate: float) -> float:
    """How far apart the smallest and the largest loss are, composed or of one round, about."""
    return losses.reach(coins(rounds, rate))


def coins(rounds: Rounds, rate: float) -> list[tuple[int, Coin]]:
    """The rounds as parts of a composition."""
    return [(count, Coin(sigma, rate)) for count, sigma in rounds]


def _both(rounds: Rounds, rate: float) -> tuple[Losses, Losses]:
    return compose_both(coins(rounds, rate))
