"""The plan's batches as index arrays of one shape, with masks: compiled code sees one size, whatever was drawn.

And random keys for the rows of a batch, which are those of examples, never of places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Integral
from operator import index
from typing import Any

import jax
import numpy as np
from jax import Array
from numpy.typing import ArrayLike, NDArray

from quell.adapters.users import Owned
from quell.errors import QuellError, require_count
from quell.jax.given import number
from quell.jax.private import Private
from quell.jax.state import step_of
from quell.noise.generators import chacha_block
from quell.noise.guard import ReleaseGuard
from quell.schemes import Batches

RARELY = 1e-12  # how likely any batch of a run may be larger than the chosen size

Padded = tuple[NDArray[np.signedinteger], NDArray[np.bool_]]


@dataclass(frozen=True)
class PaddedBatches:
    """The batches of a run, each as (size,) indices and a mask of those that count; the others are 0.

    Where users are drawn, indices are (size, rows_per_user): a row of them for each user, whom the mask counts or not.
    """

    drawn: Batches
    size: int
    users: Owned | None = None
    run: tuple[int, ...] = ()  # its name, as its states have it
    guard: ReleaseGuard | None = None  # of the run, which knows what was released
    secret: bytes | None = field(default=None, repr=False)  # what `keys` are made of, derived from the run's key

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "guard": None}  # which holds the run's key, that workers that load data do not need

    def __len__(self) -> int:
        return len(self.drawn)

    def __iter__(self) -> Iterator[Padded]:
        if self.guard is not None and self.guard.released:
            raise QuellError(
                f"{self.guard.released:,} steps of this run were released already: go on with the one that is due, "
                "for indices, mask in batches(...).starting(state)"
            )
        return self.starting(0)

    def __getitem__(self, step: int) -> Padded:
        """The batch of one step, as data loaders that look items up want it."""
        step = index(step)
        if step >= len(self):
            raise IndexError(step)
        return self._padded(step, self.drawn.at(step))

    def starting(self, step: Any) -> Iterator[Padded]:
        """The batches from a step to the end of the run.

        Args:
            step: The number of the step, or the optimizer's state, for the step that is due in it; the state of
                another run is refused.

        Returns:
            An iterator over `(indices, mask)`.
        """
        first = self._number(step)
        return (self._padded(number, batch) for number, batch in enumerate(self.drawn.starting(first), start=first))

    def keys(self, step: Any, indices: ArrayLike) -> Array:
        """A random key for each row of a batch, for dropout or augmentation: pass it to the loss as part of the unit.

        A row's key follows from the run's secret key, the step and the row's index, never from its place in the batch.
        If it followed from the place, one example less would move all behind it to other random numbers, and the sum of
        a step by several clip norms. A step that comes again after a restart has the same keys.

        Args:
            step: The number of the step, or the optimizer's state, for the step that is due in it.
            indices: What these batches gave for that step, or a part of it, such as that of one process.

        Returns:
            Threefry keys of the shape of `indices`, whatever `jax_default_prng_impl` is. They are secret. Call this
            outside `jit`.

        >>> import quell, quell.jax
        >>> plan = quell.plan(examples=100, batch_size=10, epochs=1, epsilon=8, delta=1e-3, sampling="cyclic")
        >>> drawn = batches(quell.jax.privatize(plan, np.zeros(3), max_grad_norm=1.0), 100)
        >>> indices, mask = drawn[0]
        >>> bool((drawn.keys(0, indices)[2:] == drawn.keys(0, indices[2:])).all())
        True
        """
        if isinstance(indices, jax.core.Tracer):
            raise QuellError("keys are made on the host: call keys outside jit, and pass them as part of the batch")
        if self.secret is None:
            raise QuellError("these batches have no run's key: make them with quell.jax.batches")
        number, rows = self._number(step), np.asarray(indices)
        if not 0 <= number < len(self):
            raise QuellError(f"step {number:,} is not one of the {len(self):,} steps of this run")
        examples = self.drawn.examples if self.users is None else self.users.examples
        if not np.issubdtype(rows.dtype, np.integer) or np.any((rows < 0) | (rows >= examples)):
            raise QuellError(f"indices must be integers from 0 to {examples - 1:,}: pass those that the batches gave")
        low, high = _halves(rows.astype(np.uint64).ravel())
        counter = low, high, *_halves(np.full(rows.size, number, np.uint64))
        made = chacha_block(20, np.frombuffer(self.secret, "<u4").astype(np.uint32), counter)[:2]
        return jax.random.wrap_key_data(made.T.reshape(*rows.shape, 2), impl="threefry2x32")

    def _number(self, step: Any) -> int:
        return index(step) if hasattr(step, "__index__") else step_of(step, self.run)

    def _padded(self, step: int, batch: NDArray[Any]) -> Padded:
        if len(batch) > self.size:
            raise QuellError(f"the batch of step {step:,} does not fit into size={self.size:,}: pass a larger size")
        rows = batch if self.users is None else self.users.taken(batch, step).reshape(-1, self.users.most)
        most = self.drawn.examples if self.users is None else self.users.examples
        indices = np.zeros((self.size, *rows.shape[1:]), np.int32 if most <= 2**31 else np.int64)
        indices[: len(rows)] = rows
        return indices, np.arange(self.size) < len(rows)


def _halves(numbers: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The low and the high 32 bits."""
    return numbers.astype(np.uint32), (numbers >> np.uint64(32)).astype(np.uint32)


def batches(private: Private, examples: int, *, size: int | None = None, devices: int = 1) -> PaddedBatches:
    """The batches that the plan's promise is about, padded to one shape.

    Args:
        private: What `privatize` returned for the plan.
        examples: How many examples the data has.
        size: Units of a padded batch. Default: so many that no batch is larger, but for one run in 10¹².
        devices: Among how many devices a batch is split; the default size is a multiple of it.

    Returns:
        `(indices, mask)` for every step: iterate, start at a step, or look one up. A batch may count nobody at all; it
        gets noise too, so do not skip it. With users, `indices` has a row of `rows_per_user` for each user, and `mask`
        one entry for each.

    >>> import quell, quell.jax
    >>> plan = quell.plan(examples=100, batch_size=10, epochs=1, epsilon=8, delta=1e-3, sampling="cyclic")
    >>> private = quell.jax.privatize(plan, np.zeros(3), max_grad_norm=1.0)
    >>> [(indices.shape, int(mask.sum())) for indices, mask in batches(private, 100)][0]
    ((10,), 10)
    """
    if not isinstance(private, Private):
        raise QuellError(f"batches takes what privatize returned, not a {type(private).__name__}")
    drawn, users = private.drawn, private.users
    if drawn is None:
        raise QuellError("there is no plan to draw batches of: call privatize with a Plan, not with a mechanism")
    known, examples = drawn.examples if users is None else users.examples, number(examples)
    if not isinstance(examples, Integral):
        raise QuellError(f"examples is a {type(examples).__name__}: pass how many the data has, as in len(data)")
    if examples != known:
        raise QuellError(
            f"the data has {examples:,} examples, but privatize was called for {known:,}: train on those, or make a "
            "plan for this data"
        )
    parts = require_count("devices", devices)
    if size is None:
        size = -(-_roomy(drawn) // parts) * parts
    host = private.host
    secret = host.key.derive("quell random keys of rows")
    return PaddedBatches(drawn, require_count("size", size), users, tuple(host.name.tolist()), host.guard, secret)


def _roomy(drawn: Batches) -> int:
    """By Bernstein's inequality for independent coins, over all steps together."""
    mean = drawn.expected_size
    if drawn.scheme.equal_sizes:
        return math.ceil(mean)
    third = math.log(len(drawn) / RARELY) / 3
    return min(drawn.examples, math.ceil(mean + third + math.sqrt(third**2 + 6 * third * mean)))
