"""The log of one run: a folder with `run.json`, what the run is, and `log.csv`, a row for every few steps.

Every column is public, follows from what the run has released, or is named "not private" and left out unless it was
asked for (docs/watching.md argues each of them). A row is written at once, so a crash leaves at most one torn line at
the end, which the next writer removes. A run that goes on from a checkpoint goes on with its log: steps that come again
are in it already, and are passed over. TensorBoard and Weights & Biases get a row after the file has it.
"""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quell import files
from quell.errors import QuellError, require_count
from quell.watching.services import Service, open_services

FORMAT, VERSION = "quell-log", 1
ABOUT, ROWS = "run.json", "log.csv"
MOST_BYTES = 1 << 30
_BINARY = getattr(os, "O_BINARY", 0)  # Windows would write other ends of lines
_TAIL = 1 << 16  # bytes at the end of a file in which its last row is looked for

Value = float | int | str | None
Row = Mapping[str, Value]  # by column; None where there is nothing to say

COLUMNS = {
    "step": "steps released so far",
    "steps_left": "steps of the plan that are left",
    "epsilon_at_most": "ε of all steps released so far is at most this, at the run's δ",
    "epsilon_is": "for what that ε was certified",
    "gradient_norm": "norm of the noisy mean gradient, as released",
    "noise_norm": "norm that its noise is expected to have",
    "noise_to_signal": "noise_norm over the norm of the gradient without noise, estimated from released norms; empty "
    "where the noise hides the gradient",
}
TIMES = {
    "step_seconds": "wall-clock time of a step, everything in the loop included",
    "noise_seconds": "time to make and add the noise of a step",
}
NORMS = {
    "clipped_share_not_private": "share of gradients that were clipped: NOT covered by the promise, never publish it",
    "median_norm_not_private": "median norm of gradients before clipping: NOT covered by the promise, never publish it",
}


@dataclass(frozen=True)
class Log:
    """Where and what to log of a run: `make_private(..., log=Log("runs/1"))`, or just `log="runs/1"`.

    By default everything that is logged is public or follows from what the run releases anyway, except for times: a
    batch of random size takes longer when it is larger (docs/watching.md).

    Args:
        folder: Where `run.json` and `log.csv` are written. One folder is for one run; a run that is resumed goes on
            with its own.
        every: Write a row after so many steps, with means over them.
        norms: Also log the share of clipped gradients and their median norm. Both depend on single examples and are
            NOT covered by the promise: for public data, or for eyes that may see the data.
        times: Log how long steps and their noise take.
        tensorboard: Also write the folder as TensorBoard reads it. Needs `pip install 'quell[tensorboard]'`.
        wandb: Also log to this project of Weights & Biases, or to the run that is active there. Needs
            `pip install 'quell[wandb]'`.

    >>> Log("runs/1", every=50).columns[:3]
    ('step', 'steps_left', 'epsilon_at_most')
    """

    folder: str | Path
    every: int = 10
    norms: bool = False
    times: bool = True
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        require_count("every", self.every)
        if not isinstance(self.folder, (str, Path)):
            raise QuellError(f"log is a {type(self.folder).__name__}: pass the path of a folder, or a quell.Log")
        for name in ("norms", "times", "tensorboard"):
            if not isinstance(getattr(self, name), bool):
                raise QuellError(f"{name}={getattr(self, name)!r} of a log must be True or False")
        if not (self.wandb is None or (isinstance(self.wandb, str) and self.wandb)):
            raise QuellError(f"wandb={self.wandb!r} of a log must be the name of a project, or None")

    @classmethod
    def of(cls, given: Log | str | Path) -> Log:
        """The log itself, or that of a folder with all defaults."""
        return given if isinstance(given, Log) else cls(given)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of `log.csv`."""
        return tuple(self.meanings)

    @property
    def meanings(self) -> dict[str, str]:
        """What every column holds."""
        return {**COLUMNS, **(TIMES if self.times else {}), **(NORMS if self.norms else {})}


class RunLog:
    """A run's log, open for writing. A folder that holds another run is refused."""

    def __init__(self, log: Log, about: Mapping[str, Any]) -> None:
        self.log, self._path = log, Path(log.folder) / ROWS
        content = {"format": FORMAT, "version": VERSION, **about, "columns": log.meanings}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY, 0o666)
            self.last = self._last_step()
            if self.last:
                self._require_same_run(content)
            else:  # nobody's yet: a run that never came to its first row leaves a folder that is free
                self._begin(content)
        except OSError as problem:
            raise QuellError(f"cannot write the log {log.folder}: {problem.strerror}") from problem
        self._failed = False
        self._services: list[Service] = open_services(log, content)

    def write(self, row: Row) -> None:
        """Add a row, unless its step is in the log already. A log that fails says so once, and training goes on."""
        step = row["step"]
        assert isinstance(step, int)
        if step <= self.last or self._failed:
            return
        try:
            _write_all(self._file, _line([row.get(name) for name in self.log.columns]))
        except OSError as problem:
            self._failed = True
            warnings.warn(f"the log {self._path} ends here: {problem.strerror}", stacklevel=2)
            return
        self.last = step
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
        for service in list(self._services):
            try:
                service.write(step, numbers)
            except Exception as problem:  # somebody else's code, after the step was released: never end a run
                self._services.remove(service)
                warnings.warn(f"no more rows go to {service.name}: {problem}", stacklevel=2)

    def require_continuation(self, released: int) -> None:
        """Before a run's first step: rows that are there already must be of steps that come again."""
        if self.last and not released:
            raise QuellError(
                f"the log {self.log.folder} has {self.last:,} steps of this key already, and nothing says that the "
                "same steps come again: choose another folder"
            )

    def close(self) -> None:
        """Let go of the files."""
        if self._file >= 0:
            os.close(self._file)
            self._file, self._failed = -1, True
        for service in self._services:
            service.close()
        self._services = []

    def _begin(self, content: dict[str, Any]) -> None:
        if self.log.norms:
            os.chmod(self._path, 0o600)
        with files.whole(self._path.with_name(ABOUT)) as file:
            file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
        os.ftruncate(self._file, 0)
        _write_all(self._file, _line(self.log.columns))

    def _require_same_run(self, content: dict[str, Any]) -> None:
        found, folder = read_about(self._path.parent), self._path.parent
        problem = None
        if any(found.get(name) != content.get(name) for name in ("key", "steps", "delta", "epsilon_at_the_end")):
            problem = f"{folder} holds the log of another run: choose another folder"
        elif found["columns"] != content["columns"]:
            problem = (
                f"the log {folder} was begun with other columns: go on with the same norms= and times=, or choose "
                "another folder"
            )
        if problem is not None:
            os.close(self._file)
            raise QuellError(problem)

    def _last_step(self) -> int:
        """Remove what a crash left of a line; the step of the last row, 0 where there is none."""
        size = os.fstat(self._file).st_size
        start = max(0, size - _TAIL)
        os.lseek(self._file, start, os.SEEK_SET)
        tail = os.read(self._file, size - start)
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            os.ftruncate(self._file, start + len(whole))
        steps = [step for line in whole.splitlines() if (step := _step_of(line)) is not None]
        return max(steps, default=0)


def read_about(folder: Path) -> dict[str, Any]:
    """What the run of a log is: the content of its `run.json`."""
    path = folder / ABOUT
    try:
        found = json.loads(files.read(path, MOST_BYTES))
    except OSError as problem:
        raise QuellError(f"cannot read the log {path}: {problem.strerror}; make_private(..., log=...) makes one") from (
            problem
        )
    except ValueError as problem:
        raise QuellError(f"{path} is damaged: choose the folder of another log") from problem
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("columns"), dict):
        raise QuellError(f"{path} is not the log of a run: make_private(..., log=...) makes one")
    texts = [*found.values(), *found["columns"], *found["columns"].values()]
    if not all(text.isprintable() for text in texts if isinstance(text, str)):  # it goes to a terminal
        raise QuellError(f"{path} is damaged: choose the folder of another log")
    return found


def _step_of(line: bytes) -> int | None:
    first = line.split(b",", 1)[0]
    return int(first) if first.isdigit() else None


def _line(values: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([f"{v:.7g}" if isinstance(v, float) else v for v in values])
    return text.getvalue().encode()


def _write_all(file: int, text: bytes) -> None:
    """One write, so that lines of a crashed writer are cut off at most at their end."""
    if os.write(file, text) < len(text):
        raise OSError(28, "no space left on the disk")
