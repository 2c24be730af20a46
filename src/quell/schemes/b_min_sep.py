"""b-min-sep sampling: examples join at random, with a pause after each use (Dong & Ganesh 2026, arXiv:2602.09338)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.errors import QuellError, require_finite
from quell.participation import Participation
from quell.privacy.accountant import Accountant
from quell.privacy.chain import ChainAccountant
from quell.schemes.balls_in_bins import BallsInBins
from quell.schemes.batches import Batches
from quell.schemes.poisson import Poisson
from quell.schemes.randomness import Indices, coin_flips, unit_interval, words
from quell.schemes.scheme import Scheme
from quell.strategy.structure import Strategy, TreeStrategy

_BLOCK = 1 << 20


@dataclass(frozen=True)
class BMinSep(Scheme):
    """At every step, whoever took part in none of the last `separation` − 1 steps joins with probability `rate`.

    The chain starts in its stationary law, so that expected batch sizes are the same from the first step on; with
    rate 1 it is `BallsInBins`.

    >>> round(BMinSep(steps=100, separation=10, rate=0.5).fraction, 6)
    0.090909
    """

    name: ClassVar[str] = "b_min_sep"
    words: ClassVar[str] = "Each {unit} joins batches at random, with a fixed pause after each use."
    drawn: ClassVar[bool] = True
    steps: int
    separation: int
    rate: float

    @classmethod
    def for_run(cls, participation: Participation, bands: int) -> Self:
        return cls.of_fraction(participation.steps, bands, 1.0 / participation.separation)

    @classmethod
    def of_fraction(cls, steps: int, separation: int, fraction: float) -> Self:
        """The scheme whose batches hold this share of the examples in expectation."""
        waiting = 1.0 - (separation - 1) * require_finite("fraction", fraction)
        if not 0 < fraction <= waiting * (1 + 1e-12):
            raise QuellError(
                f"a separation of {separation:,} steps (one per band) cannot give batches with a share of {fraction:g} "
                f"of the data: use at most {int(1 / fraction):,} bands, or balls_in_bins"
            )
        return cls(steps, separation, min(1.0, fraction / waiting))

    @classmethod
    def suits(cls, bands: int, separation: int) -> bool:
        return bands <= separation

    @property
    def fraction(self) -> float:
        return self.rate / (1.0 + (self.separation - 1) * self.rate)

    def batch(self, stream: Batches, step: int) -> Indices:
        """One batch. It depends on the batches before, so this replays them; iterate instead if you need all."""
        return next(self.batches(stream, step))

    def batches(self, stream: Batches, start: int) -> Iterator[Indices]:
        """At every step each example is drawn with probability `rate`; those that are ready join and then pause."""
        key, examples, b, rate = stream.key, stream.examples, self.separation, self.rate
        ready = np.empty(examples, dtype=np.int32)  # the first step at which an example may take part
        for block, first in enumerate(range(0, examples, _BLOCK)):
            size = min(_BLOCK, examples - first)
            # In the stationary law an example is ready with probability 1/(1 + (b−1)·rate), else equally likely to
            # wait for any of 1 … b−1 steps.
            place = unit_interval(words(key, "b min sep start", block, size)) * (1.0 + (b - 1) * rate)
            waits = np.minimum(np.floor((place - 1.0) / rate) + 1, b - 1)
            ready[first : first + size] = np.where(place < 1.0, 0.0, waits)
        for step in range(self.steps):
            heads = coin_flips(key, "b min sep", step, examples, rate)
            batch = heads[ready[heads] <= step]
            ready[batch] = step + b
            if step >= start:
                yield batch

    def evidence(self, seen: Array, columns: Array, patterns: NDArray[np.bool_]) -> Array:
        """The sum over all patterns, step by step: what is ready, and what was used and waits (Proof 12)."""
        b, steps = self.separation, columns.shape[1]
        once = seen @ columns - 0.5 * np.sum(columns**2, axis=0)
        still = math.log1p(-self.rate) if self.rate < 1 else -math.inf
        start = -math.log1p((b - 1) * self.rate)  # ln of the chance to be ready at first
        ready = np.full(len(seen), start)
        used: list[Array] = []
        for step in range(steps):
            if 0 < step < b:  # whoever waited from the start comes back, one after another
                ready = np.logaddexp(ready, start + math.log(self.rate))
            if step >= b:
                ready = np.logaddexp(ready, used[step - b])
            used.append(ready + math.log(self.rate) + once[:, step])
            ready = ready + still
        late = [np.full(len(seen), start + math.log(self.rate))] * max(0, b - steps)
        return np.asarray(np.logaddexp.reduce([ready, *late, *used[max(0, steps - b) :]], axis=0))

    def account(self, strategy: Strategy) -> Accountant:
        if self.rate == 1.0:  # the same law, and a tighter accountant
            return BallsInBins(self.steps, self.separation).account(strategy)
        if strategy.bands > self.separation:
            raise QuellError(
                f"{strategy!r} has {strategy.bands:,} bands in C, but b_min_sep with separation {self.separation} is "
                f"priced for at most {self.separation} bands: use balls_in_bins, which takes any C >= 0"
            )
        if self.separation == 1:  # nobody waits: independent coins, and an accountant that does not draw
            return Poisson(self.steps, self.rate).account(strategy)
        if isinstance(strategy, TreeStrategy):  # which has fewer bands than the separation in runs of a few steps
            raise QuellError("trees are not priced under b_min_sep: use balls_in_bins, which takes any C >= 0")
        return ChainAccountant.of(strategy, self)
