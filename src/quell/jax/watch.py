"""What a run tells its log (`quell.watching`): the squared norm of every release, by a callback that returns nothing.

Norms of single gradients go along where the log wants them and the loop has them from `clipped_grad`. Steps have no
time of their own for noise: it is made inside one compiled program, mixed with the rest.

The host hears of a step twice: before its noise is made, when the step asks for the key, and after it. The second call
may come late, also after the next step has begun, so a row is written when all of its steps have been heard of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import io_callback
from numpy.typing import NDArray

from quell.adapters.so_far import SoFar, run_facts
from quell.errors import QuellError
from quell.jax.processes import counts_steps
from quell.noise import Key
from quell.schemes import Batches
from quell.watching.log import Log, RunLog

if TYPE_CHECKING:
    from quell.planning import Mechanism


class Watch:
    """Beside a run, on the host."""

    def __init__(
        self,
        log: Log | str | Path,
        mechanism: Mechanism,
        batches: Batches | None,
        key: Key,
        max_grad_norm: float,
        params: Any,
    ) -> None:
        self.log = Log.of(log)
        if batches is None:
            raise QuellError("a log is about a plan's batches: call privatize with a Plan, not with a mechanism")
        self._steps = mechanism.strategy.steps
        elements = sum(math.prod(leaf.shape) for leaf in jax.tree_util.tree_leaves(params))
        self._so_far = SoFar(mechanism, batches, max_grad_norm, elements)
        facts = run_facts(mechanism, batches, key, max_grad_norm)
        self._file = RunLog(self.log, {**facts, "every": self.log.every}) if counts_steps() else None
        self._turn = Lock()  # callbacks may come from several threads
        self._first, self._next = 0, -1  # the first step of the row to come, and the step that is due
        self._bound = max_grad_norm
        self._squares: dict[int, float] = {}
        self._norms: dict[int, NDArray[np.float32]] = {}  # of single gradients
        self._seconds: list[float] = []
        self._clock = 0.0

    def wanted(self, norms: Any) -> Any:
        """The norms of a step's units, if the log wants them; refused if it does and there are none."""
        if not self.log.norms:
            return None
        if norms is None:
            raise QuellError(
                "the log wants norms, and update was given none: take them from clipped_grad(..., with_norms=True) and "
                "call optimizer.update(sums, state, params, norms=norms)"
            )
        return jnp.asarray(norms, jnp.float32).ravel()

    def begin(self, step: int, released: int) -> None:
        """A step is about to be released, and `released` were before."""
        with self._turn:
            now = perf_counter()
            if self._next < 0 and self._file is not None:
                self._file.require_continuation(released)
            if step == self._next:
                self._seconds.append(now - self._clock)
            else:  # the first one, or one that a checkpoint went back to
                self._first, self._squares, self._norms, self._seconds = step, {}, {}, []
            self._next, self._clock, self._released = step + 1, now, max(released, step + 1)

    def tell(self, manual: Sequence[str], step: Array, noisy: Sequence[Array], sound: Array, norms: Any) -> None:
        """Inside the program of a step: the norm of its noisy sums to `told`, unless the step was refused."""
        if manual:
            raise QuellError(
                "log= does not work inside shard_map, where no device has the whole gradient: leave it out"
            )
        rows = [jnp.square(jnp.atleast_1d(total).astype(jnp.float32)).sum(-1) for total in noisy]
        square = sum((row.sum() for row in rows), jnp.float32(0))  # in two stages, which round less than one
        io_callback(self.told, None, step, jnp.where(sound, square, jnp.nan), norms)

    def told(self, step: Any, square: Any, norms: Any = None) -> None:
        """What a step has released has this squared norm; `norms` are those of its units."""
        with self._turn:
            if math.isnan(square):
                return
            self._squares[int(step)] = float(square)
            if norms is not None:
                self._norms[int(step)] = np.asarray(norms)
            end = min((self._first // self.log.every + 1) * self.log.every, self._steps)
            due = range(self._first, end)
            if not all(each in self._squares for each in due):
                return
            row = self._so_far.row(end, max(self._released, end), [self._squares.pop(each) for each in due])
            if self.log.times and self._seconds:
                row["step_seconds"] = sum(self._seconds) / len(self._seconds)
            if self.log.norms:
                seen = np.concatenate([self._norms.pop(each) for each in due])
                seen = seen[~np.isnan(seen)]  # of units that count
                row["clipped_share_not_private"] = float(np.mean(seen > self._bound)) if len(seen) else None
                row["median_norm_not_private"] = float(np.median(seen)) if len(seen) else None
            self._first, self._seconds = end, []
            if self._file is not None:
                self._file.write(row)
                if end == self._steps:
                    self._file.close()

    def close(self) -> None:
        with self._turn:
            if self._file is not None:
                self._file.close()
