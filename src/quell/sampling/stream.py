"""From a scheme to the batches themselves: index arrays, reproducible from a key, resumable at any step.

    from quell.sampling import BallsInBins, Batches
    stream = Batches(BallsInBins(steps=3900, separation=390), examples=50_000, key=key)
    for batch in stream.starting(step): ...          # or stream.at(step)

The stream is a function of (scheme, examples, key, step): every worker computes the same batch and takes its share of
it, and a run that was interrupted continues where it was. Batch sizes vary and a batch may be empty; divide gradient
sums by `expected_size`, never by the size that came up, which is private. Memory is four bytes per example (none for
`Poisson` and unshuffled `Cyclic`): 400 MB for 10⁸ examples, made once in about a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quell.errors import QuellError, require_count
from quell.sampling.randomness import Indices, checked_key, coin_flips, grouped, permuted, unit_interval, words
from quell.sampling.schemes import BallsInBins, BMinSep, Cyclic, CyclicPoisson, Poisson, Scheme

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Batches:
    """The batches of a scheme over `examples` examples, from a secret 256-bit `key`.

    >>> stream = Batches(Cyclic(steps=4, separation=2), examples=5, key=bytes(32))
    >>> [batch.tolist() for batch in stream]
    [[0, 1], [2, 3, 4], [0, 1], [2, 3, 4]]
    >>> stream.expected_size
    2.5
    """

    scheme: Scheme
    examples: int
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", require_count("examples", self.examples))
        checked_key(self.key)
        self.scheme.participation  # noqa: B018 - refuses a scheme whose numbers do not fit together
        if isinstance(self.scheme, Cyclic) and not self.scheme.participation.unlimited:
            raise QuellError(
                f"cyclic batches use every example {-(-self.scheme.steps // self.scheme.separation)} times, more than "
                f"the {self.scheme.participations} participations that the promise allows: bring your own batches"
            )

    @property
    def expected_size(self) -> float:
        """What gradient sums are divided by."""
        return self.examples * self.scheme.fraction

    def __len__(self) -> int:
        return self.scheme.steps

    def __iter__(self) -> Iterator[Indices]:
        return self.starting(0)

    def starting(self, step: int) -> Iterator[Indices]:
        """The batches from `step` to the end of the run."""
        step = self._checked(step, self.scheme.steps)
        if isinstance(self.scheme, BMinSep):
            yield from _b_min_sep(self.scheme, self.examples, self.key, step)
            return
        for now in range(step, self.scheme.steps):
            yield self.at(now)

    def at(self, step: int) -> Indices:
        """The batch of one step. `BMinSep` has a memory, so there this replays the steps before; iterate instead."""
        step = self._checked(step, self.scheme.steps - 1)
        match self.scheme:
            case Cyclic(separation=b, shuffle=shuffle):
                first, stop = (self.examples * (step % b + side) // b for side in (0, 1))
                return self._shuffled[first:stop].astype(np.int64) if shuffle else np.arange(first, stop)
            case BallsInBins(separation=b):
                return self._members(step % b)
            case Poisson(rate=rate):
                return coin_flips(self.key, "poisson", step, self.examples, rate)
            case CyclicPoisson(groups=groups, rate=rate):
                members = self._members(step % groups)
                return members[coin_flips(self.key, "cyclic poisson", step, len(members), rate)]
            case BMinSep():
                return next(self.starting(step))

    def _checked(self, step: int, most: int) -> int:
        step = require_count("step", step, least=0)
        if step > most:
            raise QuellError(
                f"step {step:,} is beyond the {self.scheme.steps:,} steps that the guarantee covers: make a new plan, "
                f"or stop after step {self.scheme.steps - 1:,}"
            )
        return step

    def _members(self, group: int) -> Indices:
        order, starts = self._groups
        return order[starts[group] : starts[group + 1]].astype(np.int64)

    @cached_property
    def _groups(self) -> tuple[NDArray[np.unsignedinteger], Indices]:
        return grouped(self.key, self.scheme.name, self.examples, self.scheme.separation)

    @cached_property
    def _shuffled(self) -> NDArray[np.unsignedinteger]:
        return permuted(self.key, self.scheme.name, self.examples)


def batches(scheme: Scheme, examples: int, key: bytes, start: int = 0) -> Iterator[Indices]:
    """The batches of a scheme from step `start` on.

    >>> import secrets
    >>> sizes = [len(batch) for batch in batches(BallsInBins(6, 3), examples=100, key=secrets.token_bytes(32))]
    >>> sum(sizes[:3]), sizes[:3] == sizes[3:]
    (100, True)
    """
    return Batches(scheme, examples, key).starting(start)


def _b_min_sep(scheme: BMinSep, examples: int, key: bytes, start: int) -> Iterator[Indices]:
    """Everyone flips a coin at every step; heads counts for those who are ready, and makes them wait b steps."""
    ready = np.empty(examples, dtype=np.int32)  # the first step at which an example may take part
    b, rate = scheme.separation, scheme.rate
    for block, first in enumerate(range(0, examples, _BLOCK)):
        size = min(_BLOCK, examples - first)
        # In the stationary law an example is ready with probability 1/(1 + (b−1)·rate), else equally likely to wait
        # for any of 1 … b−1 steps.
        place = unit_interval(words(key, "b min sep start", block, size)) * (1.0 + (b - 1) * rate)
        ready[first : first + size] = np.where(place < 1.0, 0.0, np.minimum(np.floor((place - 1.0) / rate) + 1, b - 1))
    for step in range(scheme.steps):
        heads = coin_flips(key, "b min sep", step, examples, rate)
        batch = heads[ready[heads] <= step]
        ready[batch] = step + b
        if step >= start:
            yield batch
