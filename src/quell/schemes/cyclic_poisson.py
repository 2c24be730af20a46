"""Cyclic Poisson sampling: groups take turns, and their members join at random. For C with few bands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.errors import QuellError, require_finite
from quell.participation import Participation
from quell.privacy.subsampled import CoinAccountant
from quell.schemes.batches import Batches
from quell.schemes.poisson import coin_evidence, instead
from quell.schemes.randomness import Indices, coin_flips
from quell.schemes.scheme import Scheme
from quell.strategy.structure import Strategy


@dataclass(frozen=True)
class CyclicPoisson(Scheme):
    """Every example is put into one of `groups` groups, once; step t samples group t mod groups, each member with
    probability `rate`. For C with at most `groups` bands (arXiv:2306.08153, Theorem 2).

    >>> CyclicPoisson.of_fraction(steps=3900, groups=16, fraction=128 / 50_000).rate
    0.04096
    """

    name: ClassVar[str] = "cyclic_poisson"
    words: ClassVar[str] = "Each {unit} has one of a few turns. Those whose turn it is join the batch at random."
    steps: int
    groups: int
    rate: float

    @classmethod
    def for_run(cls, participation: Participation, bands: int) -> Self:
        return cls.of_fraction(participation.steps, bands, 1.0 / participation.separation)

    @classmethod
    def of_fraction(cls, steps: int, groups: int, fraction: float) -> Self:
        """The scheme whose batches hold this share of the examples in expectation: rate = groups · fraction."""
        if not 0 < require_finite("fraction", fraction) * groups <= 1:
            raise QuellError(
                f"{groups:,} groups (one per band) cannot give batches with a share of {fraction:g} of the data: a "
                f"group holds 1/{groups:,} of it, so use at most {int(1 / fraction):,} bands, or balls_in_bins"
            )
        return cls(steps, groups, groups * fraction)

    @classmethod
    def suits(cls, bands: int, separation: int) -> bool:
        return bands <= separation

    @property
    def separation(self) -> int:
        return self.groups

    @property
    def fraction(self) -> float:
        return self.rate / self.groups

    def batch(self, stream: Batches, step: int) -> Indices:
        members = stream.members(step % self.groups)
        return members[coin_flips(stream.key, "cyclic poisson", step, len(members), self.rate)]

    def evidence(self, seen: Array, columns: Array, patterns: NDArray[np.bool_]) -> Array:
        return coin_evidence(seen, columns, self.groups, self.rate)

    def account(self, strategy: Strategy) -> CoinAccountant:
        if strategy.bands > self.groups:
            raise QuellError(
                f"{strategy!r} has {strategy.bands:,} bands in C, but cyclic_poisson with {self.groups} groups is "
                f"priced for at most {self.groups} bands: {instead(strategy)}"
            )
        return CoinAccountant.of(strategy, self.groups, self.rate)
