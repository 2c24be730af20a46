"""A made-up scheme, as somebody would add it: the two halves of the data take turns, and their members flip coins.

Within a half that is Poisson sampling, every other step: strategies of at most two bands touch an example's columns
one at a time (arXiv:2306.08153, Theorem 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.errors import QuellError
from quell.participation import Participation
from quell.privacy.subsampled import CoinAccountant
from quell.schemes.batches import Batches
from quell.schemes.poisson import coin_evidence
from quell.schemes.randomness import Indices, coin_flips
from quell.schemes.scheme import Scheme
from quell.strategy.structure import Strategy


@dataclass(frozen=True)
class Halves(Scheme):
    """Even steps sample the first half of the data, odd steps the second."""

    name: ClassVar[str] = "halves"
    words: ClassVar[str] = "The two halves of the data take turns, and members join the batch at random."
    steps: int
    rate: float

    @classmethod
    def for_run(cls, participation: Participation, bands: int) -> Self:
        return cls(participation.steps, 2.0 / participation.separation)

    @classmethod
    def suits(cls, bands: int, separation: int) -> bool:
        return bands <= 2

    @property
    def separation(self) -> int:
        return 2

    @property
    def fraction(self) -> float:
        return self.rate / 2

    def batch(self, stream: Batches, step: int) -> Indices:
        half = stream.examples // 2
        first, size = (0, half) if step % 2 == 0 else (half, stream.examples - half)
        return np.asarray(first + coin_flips(stream.key, "halves", step, size, self.rate))

    def evidence(self, seen: Array, columns: Array, patterns: NDArray[np.bool_]) -> Array:
        return coin_evidence(seen, columns, 2, self.rate)

    def account(self, strategy: Strategy) -> CoinAccountant:
        if strategy.bands > 2:
            raise QuellError(f"{strategy!r} has more than the 2 bands that halves are priced for")
        return CoinAccountant.of(strategy, 2, self.rate)
