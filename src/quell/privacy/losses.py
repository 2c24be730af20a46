"""Compose privacy losses on a grid in milliseconds, rounded up.

A `Part` is one mechanism as a law of its privacy loss in each direction. It puts that law onto a grid in a way that
only raises δ (Proof 10 in docs/proofs.md; "connect the dots", arXiv:2207.04380). Fourier transforms compose the parts,
which may be different mechanisms, and rounding errors and what falls off the grid are part of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quell._types import Array

_TAIL = 1e-14  # probability that may fall off the grid, at either end
_CELLS = 1 << 15  # of the grid, at least
_MOST_PLACES = 1 << 20  # of one part's losses
_FINEST = 1e-9  # of the largest loss: a loss that is one number has no width of its own
_MARGIN, _STEEP = 64, 0.5  # cells kept free at the upper end, and the order of a Chernoff bound that makes use of them
_UPWARDS = 1e-10  # of a cell's probability that is moved up by one place: losses are known to about 10⁻¹⁵
_FOURIER = 4e-15  # relative error of a part's Fourier coefficients, twice log2(cells)·2⁻⁵³; of r parts r times that


class Part(Protocol):
    """The privacy loss of one mechanism; `sign` 1 is with the example against without it, −1 the reverse."""

    @property
    def widest(self) -> float:
        """How far apart its losses are."""

    def slices(self, sign: int) -> tuple[Array, Array]:
        """Losses and their probabilities on a coarse grid, to find out how far composed losses reach."""

    def on_grid(self, sign: int, width: float) -> tuple[int, Array, float]:
        """The number of the first place of a grid, the mass at each place, and the mass beyond the top."""


Parts = Sequence[tuple[int, Part]]  # how often each part occurs


@dataclass(frozen=True)
class Losses:
    """Composed privacy losses in one direction: their values, in order, and probabilities."""

    values: Array
    mass: Array
    lost: float  # how much larger δ may be: infinite losses, probability beyond the grid, and rounding

    def delta(self, epsilon: float) -> float:
        """δ at `epsilon`, without what is lost."""
        first = int(np.searchsorted(self.values, epsilon, side="right"))
        return float(-np.expm1(epsilon - self.values[first:]) @ self.mass[first:])

    def bound(self, epsilon: float) -> float:
        """An upper bound on δ at `epsilon`."""
        return min(1.0, self.delta(epsilon) + self.lost)


def compose_both(parts: Parts) -> tuple[Losses, Losses]:
    """Composed losses in both directions: with the example against without it, and the reverse."""
    return compose(parts, 1), compose(parts, -1)


def compose(parts: Parts, sign: int) -> Losses:
    """Composed losses of all parts in one direction (Proof 10)."""
    from scipy import fft

    together = sum(count for count, _ in parts)
    sparse = [(count, *part.slices(sign)) for count, part in parts]
    (depth, _), (height, order) = _reach(sparse, -1), _reach(sparse, 1)
    # Chords add up to a quarter of a squared cell to every part's variance: long runs need finer grids.
    cells = max(_CELLS, 1 << math.ceil(math.log2(600 * math.sqrt(together))))
    # Where hardly any noise is left, a loss is one number almost surely, and almost never a huge one.
    width = max((depth + height) / (cells - _MARGIN), max(part.widest for _, part in parts) / _MOST_PLACES)
    width = max(width, _FINEST * max(float(np.abs(loss).max()) for _, loss, _ in sparse))
    start = math.floor(-depth / width)
    spectrum, beyond = np.ones(cells // 2 + 1, dtype=np.complex128), 0.0
    orders = np.array([order, min(order, _STEEP / width)])  # a loss that ends in an edge is as sharp as the grid
    exponents = -orders * width * (start + cells)
    for count, part in parts:
        first, mass, missing = part.on_grid(sign, width)
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


def reach(parts: Parts) -> float:
    """How far apart the smallest and the largest loss are, composed or of one part, about."""
    both = ([(count, *part.slices(sign)) for count, part in parts] for sign in (1, -1))
    widest = max(part.widest for _, part in parts)
    return max(widest, *(_reach(sparse, -1)[0] + _reach(sparse, 1)[0] for sparse in both))


def chords(ours: Array, theirs: Array, losses: Array, width: float, lowest: float) -> Array:
    """Mass on the places of a grid, from the probabilities of its cells in both laws."""
    with np.errstate(over="ignore", invalid="ignore"):
        up = (ours - np.exp(losses[:-1]) * theirs) / -math.expm1(-width) + _UPWARDS * ours
    up = np.clip(np.where(np.isnan(up), ours, up), 0.0, ours)  # where e^loss overflows, everything moves up
    mass = np.zeros(len(losses))
    mass[1:] = up
    mass[:-1] += ours - up
    mass[0] += lowest
    return mass


def _reach(parts: list[tuple[int, Array, Array]], sign: int) -> tuple[float, float]:
    """About what the composed loss times `sign` exceeds with probability `_TAIL`, and that Chernoff bound's order."""
    spread = math.sqrt(sum(count * float(np.cov(loss, aweights=mass, bias=True)) for count, loss, mass in parts))
    orders = np.geomspace(0.1 / max(spread, 1.0), 1000.0 / min(spread + 1e-12, 1.0), 40)
    moments = np.zeros(len(orders))
    for count, loss, mass in parts:
        tilted = orders[:, None] * sign * loss + np.log(mass)
        top = tilted.max(axis=1)
        moments += count * (top + np.log(np.exp(tilted - top[:, None]).sum(axis=1)))
    ends = (moments - math.log(_TAIL)) / orders
    best = int(np.argmin(ends))
    return float(ends[best]), float(orders[best])
