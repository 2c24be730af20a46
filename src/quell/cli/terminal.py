"""Standard output, standard error, and the progress bar between them."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from quell.progress import listening

_WIDTH = 120  # of output that does not go to a terminal
console = Console()
errors = Console(stderr=True)


def set_width() -> None:
    """A file or a pipe has no width of its own."""
    for each in (console, errors):
        if not each.is_terminal:
            each.width = int(os.environ.get("COLUMNS") or _WIDTH)


def width() -> int:
    return console.width


def say(text: str) -> None:
    """Print sentences, broken between words only."""
    console.print(wrapped(text, console.width), highlight=False, markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """Print what went wrong, in the one style that all errors have."""
    shown = Text(wrapped(f"quell: {text}", errors.width))
    shown.stylize("bold red", 0, len("quell:"))
    errors.print(shown, soft_wrap=True)


def wrapped(text: str, columns: int) -> str:
    """Lines of at most so many columns. Longer words stay whole, and indented lines too: they are there to be pasted.

    >>> print(wrapped("cannot write /a-long/path: it is a folder\\n  quell plan --save plan.json", 20))
    cannot write
    /a-long/path: it is
    a folder
      quell plan --save plan.json
    """
    lines = text.split("\n")
    return "\n".join(
        line if line.startswith(" ") else textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )


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
    """A progress bar on standard error that disappears when done.

    Every stage has a bar of its own, because nobody knows how long the next one takes. Where a stage is one piece of
    work, the bar only shows that it goes on, and announcements show how.
    """
    detail = TextColumn("{task.fields[detail]}", style="dim", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (TextColumn("{task.description}"), BarColumn(20), Count(), TimeElapsedColumn(), detail)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("pricing", total=None, detail="")

        def advance(done: int, total: int, stage: str) -> None:
            known = total if total > 1 else None
            bar.update(task, completed=done, total=known, description=stage, detail="")

        with listening(lambda text: bar.update(task, detail=text)):
            yield advance
