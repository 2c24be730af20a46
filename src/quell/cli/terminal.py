"""Standard output, standard error, and the progress bar between them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from quell.progress import listening

_WIDTH = 120  # of output that does not go to a terminal
console = Console()
errors = Console(stderr=True)


def set_width() -> None:
    """A file or a pipe has no width of its own."""
    if not console.is_terminal:
        console.width = int(os.environ.get("COLUMNS") or _WIDTH)


def say(text: str) -> None:
    """Print a sentence as it stands."""
    console.print(text, highlight=False, markup=False)


def say_written(paths: Sequence[Path | None]) -> None:
    for path in paths:
        if path is not None:
            say(f"Written: {path}")


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


class Count(ProgressColumn):
    """How many of how many, once the total is known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error that disappears when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), Count(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("pricing", total=None)
        with listening(lambda text: bar.update(task, description=text)):
            yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
