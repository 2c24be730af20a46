"""Standard output, standard error, and the progress bar between them."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from quell.show.bar import Advance, progress_bar

if TYPE_CHECKING:
    from quell.planning.file import Check

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
            console.print(f"Written: {path}", highlight=False, markup=False, soft_wrap=True)  # a path to copy, whole


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def report(file: Path, checks: Sequence[Check], as_json: bool, **more: Any) -> None:
    """Whether the claims of a file hold, as sentences and a table or as JSON, with `more` in it."""
    from quell.show.tables import check_table  # which needs what a plan needs

    false = [check for check in checks if not check.holds]
    if as_json:
        print_json({"file": str(file), "true": not false, "checks": [vars(check) for check in checks], **more})
    elif false:
        errors.print(check_table(checks))
        errors.print(f"{file}: {len(false)} of {len(checks)} claims are false.", markup=False, style="red")
    else:
        say(f"{file}: all {len(checks)} claims hold.")


def progress() -> AbstractContextManager[Advance]:
    """A progress bar on standard error that disappears when done."""
    return progress_bar(errors)
