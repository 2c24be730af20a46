"""The plan's batches as index arrays of one shape, with masks: compiled code sees one size, whatever was drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quell.adapters.choice import refuse_other_data, refuse_user_level, select
from quell.adapters.scheme import scheme_of
from quell.errors import QuellError, require_count
from quell.noise import Key
from quell.schemes import Batches

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan

RARELY = 1e-12  # how likely any batch of a run may be larger than the chosen size

Padded = tuple[NDArray[np.int32], NDArray[np.bool_]]


@dataclass(frozen=True)
class PaddedBatches:
    """The batches of a run, each as `size` indices and a mask of those that count; the others are 0."""

    drawn: Batches
    size: int

    def __len__(self) -> int:
        return len(self.drawn)

    def __iter__(self) -> Iterator[Padded]:
        return self.starting(0)

    def __getitem__(self, step: int) -> Padded:
        """The batch of one step, as data loaders that look items up want it."""
        if step >= len(self):
            raise IndexError(step)
        return self._padded(step, self.drawn.at(step))

    def starting(self, step: int) -> Iterator[Padded]:
        """The batches from `step` to the end of the run."""
        for number, batch in enumerate(self.drawn.starting(step), start=step):
            yield self._padded(number, batch)

    def _padded(self, step: int, batch: NDArray[Any]) -> Padded:
        if len(batch) > self.size:
            raise QuellError(f"the batch of step {step:,} does not fit into size={self.size:,}: pass a larger size")
        indices = np.zeros(self.size, np.int32)
        indices[: len(batch)] = batch
        return indices, np.arange(self.size) < len(batch)


def batches(
    plan: Plan, examples: int, key: Key, *, mechanism: str | Mechanism | None = None, size: int | None = None
) -> PaddedBatches:
    """The batches that the plan's promise is about, padded to one shape.

    Args:
        plan: The plan.
        examples: How many examples the data has.
        key: The run's key: `private.key` of what `privatize` returned.
        mechanism: The same as for `privatize`.
        size: Rows of a padded batch. Default: so many that no batch is larger, but for one run in 10¹².

    Returns:
        `(indices, mask)` for every step: iterate, start at a step, or look one up. A batch may count no row at all; it
        gets noise too, so do not skip it.

    >>> import quell
    >>> plan = quell.plan(examples=100, batch_size=10, epochs=1, epsilon=8, delta=1e-3, sampling="cyclic")
    >>> [(indices.shape, int(mask.sum())) for indices, mask in batches(plan, 100, Key.generate())][0]
    ((10,), 10)
    """
    refuse_user_level(plan)
    refuse_other_data(plan, examples)
    drawn = Batches(scheme_of(plan, select(plan, mechanism)), examples, key.derive("quell batches"))
    return PaddedBatches(drawn, _roomy(drawn) if size is None else require_count("size", size))


def _roomy(drawn: Batches) -> int:
    """By Bernstein's inequality for independent coins, over all steps together."""
    mean = drawn.expected_size
    if drawn.scheme.equal_sizes:
        return math.ceil(mean)
    third = math.log(len(drawn) / RARELY) / 3
    return min(drawn.examples, math.ceil(mean + third + math.sqrt(third**2 + 6 * third * mean)))
