"""What a run tells its log (`quell.watching`), without letting the host wait for the device.

Numbers of single steps stay on the device. When a row is due they start on their way to the host together, and the row
is written at a later step, when they have arrived. Rank 0 writes. The others take part where a number needs all ranks:
norms of sharded gradients, and norms of single examples, which then are gathered once per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from quell.adapters.so_far import SoFar, run_facts
from quell.torch.distributed import decided, gather, sum_over_ranks
from quell.torch.engine.bounds import norm_of
from quell.torch.sharding import any_sharded, own_square
from quell.torch.transfer import Awaited
from quell.watching.log import Log, Row, RunLog

if TYPE_CHECKING:
    from quell.torch.run import TrainingRun


@dataclass(eq=False)
class Interval:
    """What was seen since the last row."""

    squares: list[Tensor] = field(default_factory=list)  # () the squared norm of each release, on its device
    norms: list[Tensor] = field(default_factory=list)  # `lengths` of single gradients, where they were asked for
    noise: list[tuple[Any, Any]] = field(default_factory=list)  # when the noise of each step began and ended
    seconds: list[float] = field(default_factory=list)  # of whole steps


@dataclass(eq=False)
class Due:
    """A row that waits for its numbers."""

    step: int
    released: int
    squares: Awaited
    norms: Awaited | None
    interval: Interval


class Watch:
    """Beside a run: told before and after the noise of every step."""

    def __init__(self, log: Log | str | Path, run: TrainingRun, params: Iterable[nn.Parameter]) -> None:
        self.log, self._run = Log.of(log), run
        self._params = list(params)
        self._sharded = any_sharded(self._params)
        self._file: RunLog | None = None
        decided(self._open)
        elements = sum(parameter.numel() for parameter in self._params)
        self._so_far = SoFar(run.mechanism, run.batches, run.max_grad_norm, elements)
        self._interval = Interval()
        self._due: Due | None = None
        self._next: int | None = None  # the step that follows the last one seen
        self._clock = 0.0  # when that one ended
        self._begin: Any = None

    def _open(self) -> None:
        """On rank 0 only."""
        run = self._run
        facts = run_facts(run.mechanism, run.batches, run.noise.key, run.max_grad_norm)
        self._file = RunLog(self.log, {**facts, "every": self.log.every})

    def before_noise(self) -> None:
        step = self._run.step
        if self._next is None:
            decided(self._require_continuation)
        if step != self._next:  # the first step, or one that a checkpoint went back to
            self._interval = Interval()
        self._begin = self._now()

    def after_noise(self, released: Sequence[Tensor], norms: list[Tensor]) -> None:
        run, interval, now = self._run, self._interval, perf_counter()
        if self._next is not None and run.step == self._next + 1:
            interval.seconds.append(now - self._clock)
        self._clock, self._next = now, run.step
        if self.log.times:
            interval.noise.append((self._begin, self._now()))
        interval.norms += norms
        if self._file is not None or self._sharded:
            interval.squares.append(self._square(released))
        last = run.step == run.noise.steps
        if last or run.step % self.log.every == 0:
            self._write()  # at the latest now, although the host may have to wait
            self._finish(interval)
            self._interval = Interval()
        if self._due is not None and self._due.squares.arrived:  # on a CPU at once: a crash loses nothing
            self._write()
        if last:
            self.close()

    def close(self) -> None:
        """Write the row that waits, and let go of the files."""
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _require_continuation(self) -> None:
        """On rank 0 only."""
        if self._file is not None:
            self._file.require_continuation(self._run.released)

    def _now(self) -> Any:
        """A time on the device that makes the noise."""
        if not self._params[0].is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _square(self, released: Sequence[Tensor]) -> Tensor:
        """() the squared norm of what was released; of sharded tensors, this rank's part of it."""
        if self._sharded:
            return own_square(self._params, released)
        return norm_of(released).double().square()

    def _finish(self, interval: Interval) -> None:
        """Send the numbers of an interval on their way."""
        squares, norms = interval.squares, interval.norms
        together = torch.stack(squares) if squares else torch.zeros(0)
        if self._sharded:
            sum_over_ranks([together])
        seen = torch.cat(norms) if norms else torch.zeros(0, 2)
        if self.log.norms and self._run.world > 1:
            seen = torch.tensor([unit for held in gather(seen.tolist()) for unit in held])
        if self._file is not None:
            asked = Awaited(seen) if self.log.norms else None
            kept = replace(interval, squares=[], norms=[])
            self._due = Due(self._run.step, self._run.released, Awaited(together), asked, kept)

    def _write(self) -> None:
        due, self._due = self._due, None
        if due is None or self._file is None or due.step <= self._file.last:
            return
        self._file.write(self._row(due))

    def _row(self, due: Due) -> Row:
        row = self._so_far.row(due.step, due.released, due.squares.numbers())
        if self.log.times:
            seconds = due.interval.seconds
            row["step_seconds"] = sum(seconds) / len(seconds) if seconds else None
            noise = [_between(*both) for both in due.interval.noise]
            row["noise_seconds"] = median(noise) if noise else None  # the first step compiles
        if due.norms is not None:
            norms, relative = np.nan_to_num(np.reshape(due.norms.numbers(), (-1, 2)), nan=np.inf, posinf=np.inf).T
            row["clipped_share_not_private"] = float(np.mean(relative > 1)) if len(norms) else None
            row["median_norm_not_private"] = float(np.median(norms)) if len(norms) else None
        return row


def _between(begin: Any, end: Any) -> float:
    """Seconds between two times of the same device."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1000
