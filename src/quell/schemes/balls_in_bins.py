"""Balls in bins: each example is put into one batch of the epoch at random, once, and stays there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.participation import Participation
from quell.privacy.mixture import BinAccountant
from quell.schemes.batches import Batches
from quell.schemes.randomness import Indices
from quell.schemes.scheme import Scheme
from quell.strategy.structure import Strategy

_MOST_BINS = 16_384  # up to which a search tries it unasked: every draw of the accountant takes so many numbers


@dataclass(frozen=True)
class BallsInBins(Scheme):
    """Every example is put into one of `separation` bins, once; bin j is the batch of steps j, j + b, j + 2b, …

    Batch sizes vary around their expectation (arXiv:2412.16802; with correlated noise arXiv:2410.06266).

    >>> BallsInBins(steps=3900, separation=390).fraction == 1 / 390
    True
    """

    name: ClassVar[str] = "balls_in_bins"
    words: ClassVar[str] = "Each {unit} is put into one batch of the epoch at random and stays there in later epochs."
    takes_any_strategy: ClassVar[bool] = True
    drawn: ClassVar[bool] = True
    unknown: ClassVar[str] = ": its bins are drawn once and kept in every epoch"
    steps: int
    separation: int

    @classmethod
    def for_run(cls, participation: Participation, bands: int) -> Self:
        return cls(participation.steps, participation.separation)

    @classmethod
    def suits(cls, bands: int, separation: int) -> bool:
        return separation <= _MOST_BINS

    def batch(self, stream: Batches, step: int) -> Indices:
        return stream.members(step % self.separation)

    def evidence(self, seen: Array, columns: Array, patterns: NDArray[np.bool_]) -> Array:
        bins = np.arange(columns.shape[1]) % self.separation == np.arange(self.separation)[:, None]
        moves = bins @ columns.T
        each = seen @ moves.T - 0.5 * np.sum(moves**2, axis=1)
        return np.asarray(np.logaddexp.reduce(each, axis=1) - math.log(self.separation))

    def account(self, strategy: Strategy) -> BinAccountant:
        return BinAccountant.of(strategy, self)
