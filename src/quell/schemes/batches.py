"""From a scheme to the batches themselves: index arrays, reproducible from a key, resumable at any step.

    from quell.schemes import BallsInBins, Batches
    stream = Batches(BallsInBins(steps=3900, separation=390), examples=50_000, key=key)
    for batch in stream.starting(step): ...          # or stream.at(step)

The stream is a function of (scheme, examples, key, step): every worker computes the same batch and takes its share of
it, and a run that was interrupted continues where it was. Batch sizes vary and a batch may be empty; divide gradient
sums by `expected_size`, never by the size that came up, which is private. Memory is at most four bytes per example:
400 MB for 10⁸ examples, made once in about a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quell.errors import QuellError, require_count
from quell.schemes.randomness import Indices, checked_key, grouped, permuted
from quell.schemes.scheme import Scheme


@dataclass(frozen=True)
class Batches:
    """The batches of a scheme over `examples` examples, from a secret 256-bit `key`.

    >>> from quell.schemes import Cyclic
    >>> stream = Batches(Cyclic(steps=4, separation=2), examples=5, key=bytes(32))
    >>> [batch.tolist() for batch in stream]
    [[0, 1], [2, 3, 4], [0, 1], [2, 3, 4]]
    >>> stream.expected_size
    2.5
    """

    scheme: Scheme
    examples: int
    key: bytes = field(repr=False)
    unit: str = "example"  # what the indices are those of: "user" where users are drawn

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", require_count("examples", self.examples))
        checked_key(self.key)
        if reason := self.scheme.breaks_promise:
            raise QuellError(reason)

    @property
    def expected_size(self) -> float:
        """The expected batch size, by which gradient sums are divided."""
        return self.examples * self.scheme.fraction

    def __len__(self) -> int:
        return self.scheme.steps

    def __iter__(self) -> Iterator[Indices]:
        return self.starting(0)

    def starting(self, step: int) -> Iterator[Indices]:
        """The batches from `step` to the end of the run."""
        return self.scheme.batches(self, self._checked(step, self.scheme.steps))

    def at(self, step: int) -> Indices:
        """The batch of one step."""
        return self.scheme.batch(self, self._checked(step, self.scheme.steps - 1))

    def _checked(self, step: int, most: int) -> int:
        step = require_count("step", step, least=0)
        if step > most:
            raise QuellError(
                f"step {step:,} is beyond the {self.scheme.steps:,} steps that the guarantee covers: make a new plan, "
                f"or stop after step {self.scheme.steps - 1:,}"
            )
        return step

    def members(self, group: int) -> Indices:
        """The members of one of `separation` groups; each example is in one group, drawn once."""
        order, starts = self._groups
        return order[starts[group] : starts[group + 1]].astype(np.int64)

    @cached_property
    def _groups(self) -> tuple[NDArray[np.unsignedinteger], Indices]:
        return grouped(self.key, self.scheme.name, self.examples, self.scheme.separation)

    @cached_property
    def shuffled(self) -> NDArray[np.unsignedinteger]:
        """All examples in a random order, drawn once."""
        return permuted(self.key, self.scheme.name, self.examples)
