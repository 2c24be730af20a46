"""One progress bar: a line on a terminal that disappears when done, a display that is updated in place in a notebook.

Where neither is there, as in a file or a pipe, nothing is shown.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from quell.progress import listening

Advance = Callable[[int, int, str], None]  # done, total, what

_PAUSE = 0.1  # seconds between two updates of a notebook, which keeps every message


class Count(ProgressColumn):
    """How many of how many, once the total is known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


@contextmanager
def progress_bar(console: Console) -> Iterator[Advance]:
    """A bar on the console.

    Every stage has a bar of its own, because nobody knows how long the next one takes. Where a stage is one piece of
    work, the bar only shows that it goes on, and announcements show how.
    """
    if console.is_jupyter:
        with _in_notebook() as advance:
            yield advance
        return
    detail = TextColumn("{task.fields[detail]}", style="dim", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (TextColumn("{task.description}"), BarColumn(20), Count(), TimeElapsedColumn(), detail)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("pricing", total=None, detail="")

        def advance(done: int, total: int, stage: str) -> None:
            bar.tasks[task].total = total if total > 1 else None  # which update() cannot take back
            bar.update(task, completed=done, description=stage, detail="")

        with listening(lambda text: bar.update(task, detail=text)):
            yield advance


@contextmanager
def _in_notebook() -> Iterator[Advance]:
    handle = import_module("IPython.display").display(_shown(0, 0, "pricing"), raw=True, display_id=True)
    stage, last = (0, 0, "pricing"), 0.0

    def update(done: int, total: int, name: str, detail: str = "") -> None:
        nonlocal stage, last
        stage = done, total, name
        if time.monotonic() - last >= _PAUSE:
            last = time.monotonic()
            handle.update(_shown(done, total, f"{name} {detail}".strip()), raw=True)

    try:
        with listening(lambda text: update(*stage, text)):
            yield update
    finally:
        handle.update({"text/plain": "", "text/html": ""}, raw=True)


def _shown(done: int, total: int, text: str) -> dict[str, str]:
    place, share = (f"{done}/{total}", f' value="{done}" max="{total}"') if total > 1 else ("", "")
    return {
        "text/plain": f"{text} {place}".strip(),
        "text/html": f"<progress{share}></progress> {html.escape(text)} {place}",
    }
