"""A log read while it is written: whole lines only, each once."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from quell.errors import QuellError
from quell.watching.log import ABOUT, ROWS, Row, Value, read_about


class Follower:
    """The rows of a log so far; `poll` reads those that have come since. A folder of one run's log stands for it.

    Lines that are damaged, or whose step does not follow the one before, are passed over.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / ABOUT).exists() and (inside := sorted(self.folder.glob(f"*/{ABOUT}"))):
            self.folder = inside[-1].parent
            if len(inside) > 1:
                raise QuellError(
                    f"{folder} holds the logs of {len(inside):,} runs: watch one of them, such as {self.folder}"
                )
        self.about = read_about(self.folder)
        self.rows: list[Row] = []
        self._offset = 0

    def poll(self) -> bool:
        """Whether there are new rows."""
        before = len(self.rows)
        for line in self._new_lines():
            row = _parsed(line, tuple(self.about["columns"]))
            if row is not None and row["step"] > (self.rows[-1]["step"] if self.rows else 0):  # type: ignore[operator]
                self.rows.append(row)
        return len(self.rows) > before

    @property
    def ended(self) -> bool:
        """Whether the last step of the plan is in the log."""
        return bool(self.rows) and self.rows[-1]["step"] == self.about["steps"]

    def _new_lines(self) -> Iterator[str]:
        try:
            with open(self.folder / ROWS, "rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):  # it is being written
                        return
                    self._offset += len(line)
                    yield line.decode("utf-8", "replace")
        except FileNotFoundError:
            return


def _parsed(line: str, names: tuple[str, ...]) -> Row | None:
    values = next(csv.reader([line]), [])
    if len(values) != len(names):
        return None
    try:
        return {name: _value(name, text) for name, text in zip(names, values, strict=True)}
    except ValueError:
        return None


def _value(name: str, text: str) -> Value:
    if name == "epsilon_is":
        return text
    if name in ("step", "steps_left"):
        return int(text)
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else None
