"""δ of composed subsampled Gaussians in milliseconds, for searches: an estimate, where `poisson` proves.

The library behind `poisson` fills its grid cell by cell in Python, and a search asks hundreds of times. Here one step's
privacy loss, l(y) = ln(1 − q + q·exp((2y − 1)/2σ²)), is split between neighbouring cells of a grid so that its mean
stays, and composed by one Fourier transform. The grid spans what Chernoff bounds leave of the composed loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quell._types import Array

_SLICES = 1 << 14  # of one step's output
_FAR = 9.0  # standard deviations of it that are looked at
_TAIL = 1e-14  # probability that may fall off the grid, at either end
_SPARSE = 32  # every so manieth slice is enough for them
_CELLS = 1 << 15  # of the grid, at least


@dataclass(frozen=True)
class Losses:
    """Composed privacy losses in one direction: their values, in order, and probabilities."""

    values: Array
    mass: Array

    def delta(self, epsilon: float) -> float:
        first = int(np.searchsorted(self.values, epsilon, side="right"))
        return float(-np.expm1(epsilon - self.values[first:]) @ self.mass[first:])


def coin_delta(rounds: int, rate: float, sigma: float, epsilon: float) -> float:
    """About δ at `epsilon` of `rounds` Gaussian mechanisms of noise `sigma`, each entered with probability `rate`.

    >>> from quell.privacy.gaussian import gaussian_delta
    >>> round(coin_delta(4, 1.0, 2.0, 3.0) / gaussian_delta(1.0, 3.0), 2)
    1.0
    """
    return max(losses.delta(epsilon) for losses in _both(rounds, rate, sigma))


def coin_epsilon(rounds: int, rate: float, sigma: float, delta: float) -> float:
    """About ε at `delta`."""
    both = _both(rounds, rate, sigma)
    low, high = 0.0, max(float(losses.values[-1]) for losses in both)
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if max(losses.delta(middle) for losses in both) > delta else (low, middle)
    return high


def _both(rounds: int, rate: float, sigma: float) -> tuple[Losses, Losses]:
    """With the example against without it, and the other way round."""
    from scipy.special import ndtr

    edges = np.linspace(-_FAR * sigma, 1 + _FAR * sigma, _SLICES + 1)
    middles = 0.5 * (edges[1:] + edges[:-1])
    without, entered = (np.diff(ndtr((edges - mean) / sigma)) for mean in (0.0, 1.0))
    stays = math.log1p(-rate) if rate < 1 else -math.inf
    loss = np.logaddexp(stays, math.log(rate) + (2 * middles - 1) / (2 * sigma**2))
    return _composed(loss, (1 - rate) * without + rate * entered, rounds), _composed(-loss, without, rounds)


def _composed(loss: Array, mass: Array, rounds: int) -> Losses:
    from scipy import fft

    mass = mass / mass.sum()
    low, high = -_reach(-loss, mass, rounds), _reach(loss, mass, rounds)
    # Splitting adds up to a quarter of a squared cell to every round's variance: long runs need finer grids.
    cells = max(_CELLS, 1 << math.ceil(math.log2(600 * math.sqrt(rounds))))
    width = (high - low) / cells
    below = np.floor(loss / width)
    share, places = loss / width - below, below.astype(np.int64)
    grid = np.bincount(places % cells, mass * (1 - share), cells) + np.bincount(
        (places + 1) % cells, mass * share, cells
    )
    together = fft.irfft(fft.rfft(grid) ** rounds, cells)
    first = math.floor(low / width)
    return Losses(
        width * (first + np.arange(cells, dtype=np.float64)), np.roll(np.maximum(together, 0.0), -(first % cells))
    )


def _reach(loss: Array, mass: Array, rounds: int) -> float:
    """What the composed loss exceeds with probability `_TAIL` at most, by Chernoff, about."""
    loss, mass = loss[::_SPARSE], mass[::_SPARSE] / mass[::_SPARSE].sum()
    spread = math.sqrt(rounds) * float(np.std(loss)) + 1e-12
    orders = np.geomspace(0.1, 1000.0, 20)[:, None] / spread
    top = orders * float(loss.max())
    moments = top[:, 0] + np.log(np.exp(orders * loss - top) @ mass + 1e-300)
    return float(np.min((rounds * moments - math.log(_TAIL)) / orders[:, 0]))
