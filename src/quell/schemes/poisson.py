"""Poisson sampling: each example joins each step at random. For independent noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.errors import QuellError
from quell.participation import Participation
from quell.privacy.subsampled import CoinAccountant
from quell.schemes.batches import Batches
from quell.schemes.randomness import Indices, coin_flips
from quell.schemes.scheme import Scheme
from quell.strategy.structure import Strategy


@dataclass(frozen=True)
class Poisson(Scheme):
    """Every example joins every batch with probability `rate`, independently: for independent noise (C of one band).

    >>> Poisson(steps=3900, rate=128 / 50_000).participation.count
    3900
    """

    name: ClassVar[str] = "poisson"
    words: ClassVar[str] = "At every step each {unit} joins the batch at random, independently of all others."
    best_for_independent_noise: ClassVar[bool] = True
    groups: ClassVar[int] = 1  # it is cyclic Poisson sampling with one group
    steps: int
    rate: float

    @classmethod
    def for_run(cls, participation: Participation, bands: int) -> Self:
        return cls(participation.steps, 1.0 / participation.separation)

    @classmethod
    def suits(cls, bands: int, separation: int) -> bool:
        return bands == 1

    @property
    def separation(self) -> int:
        return 1

    @property
    def fraction(self) -> float:
        return self.rate

    def batch(self, stream: Batches, step: int) -> Indices:
        return coin_flips(stream.key, "poisson", step, stream.examples, self.rate)

    def evidence(self, seen: Array, columns: Array, patterns: NDArray[np.bool_]) -> Array:
        return coin_evidence(seen, columns, self.groups, self.rate)

    def account(self, strategy: Strategy) -> CoinAccountant:
        if strategy.bands > 1:
            raise QuellError(
                f"{strategy!r} has {strategy.bands:,} bands in C, but poisson sampling is priced for independent noise "
                f"(1 band) only: {instead(strategy)}"
            )
        return CoinAccountant.of(strategy, self.groups, self.rate)


def coin_evidence(seen: Array, columns: Array, groups: int, rate: float) -> Array:
    """For coins that are flipped at every turn of a group. Columns of a group do not overlap, so its steps multiply."""
    once = seen @ columns - 0.5 * np.sum(columns**2, axis=0)
    stay = math.log1p(-rate) if rate < 1 else -math.inf
    coins = np.logaddexp(stay, math.log(rate) + once)
    each = [coins[:, group::groups].sum(axis=1) for group in range(groups)]
    return np.asarray(np.logaddexp.reduce(each, axis=0) - math.log(groups))


def instead(strategy: Strategy) -> str:
    """What to use instead, in words, for a strategy that has too many bands."""
    advice = "use balls_in_bins, which takes any C >= 0"
    if strategy.bands < strategy.steps:
        advice += f", or cyclic_poisson with at least {strategy.bands:,} groups"
    return advice
