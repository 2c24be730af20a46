"""Fixed batches: the Gaussian mechanism, without amplification."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.participation import Participation
from quell.privacy.fixed import GaussianAccountant
from quell.schemes.batches import Batches
from quell.schemes.randomness import Indices
from quell.schemes.scheme import Scheme
from quell.strategy.structure import Strategy


@dataclass(frozen=True)
class Cyclic(Scheme):
    """Fixed batches in a fixed order, the same in every epoch: no amplification, `separation` steps apart.

    `shuffle` cuts the batches from a random order, drawn once, instead of the order of the data; privacy is the same.
    `participations` caps how often anyone takes part, which these batches do not do: it prices a data pipeline that
    keeps such a promise by itself (`Batches` refuses to make batches for it).

    >>> Cyclic(steps=781, separation=78).participation.count
    11
    """

    name: ClassVar[str] = "cyclic"
    adjacency: ClassVar[str] = "zero-out"
    words: ClassVar[str] = "Batches are fixed: the same ones in the same order in every epoch."
    amplifies: ClassVar[bool] = False
    per_user: ClassVar[bool] = True
    equal_sizes: ClassVar[bool] = True
    steps: int
    separation: int
    shuffle: bool = False
    participations: int = 0  # 0: as often as fits

    @classmethod
    def for_run(cls, participation: Participation, bands: int) -> Self:
        return cls(participation.steps, participation.separation, participations=participation.count)

    @property
    def participation(self) -> Participation:
        return Participation(self.steps, self.separation, self.participations)

    def batch(self, stream: Batches, step: int) -> Indices:
        b = self.separation
        first, stop = (stream.examples * (step % b + side) // b for side in (0, 1))
        return stream.shuffled[first:stop].astype(np.int64) if self.shuffle else np.arange(first, stop)

    @property
    def breaks_promise(self) -> str | None:
        if self.participation.unlimited:
            return None
        return (
            f"cyclic batches use every example {-(-self.steps // self.separation)} times, more than the "
            f"{self.participations} participations that the promise allows: bring your own batches"
        )

    def for_training(self) -> Scheme:
        """Cut from a random order, drawn once: data that is sorted by label would make batches of one label."""
        return replace(self, shuffle=True)

    def of_first(self, steps: int) -> Scheme:
        return Cyclic(steps, min(self.separation, steps))

    def evidence(self, seen: Array, columns: Array, patterns: NDArray[np.bool_]) -> Array:
        moves = patterns @ columns.T
        return np.asarray(np.sum((seen - 0.5 * moves) * moves, axis=1))

    def account(self, strategy: Strategy) -> GaussianAccountant:
        return GaussianAccountant.of(strategy, self.participation)
