"""`quell diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.planning import Plan
from quell.planning.difference import differences
from quell.show.differences import difference_table, sentences


def diff(
    first: Annotated[Path, typer.Argument(help="A plan written by quell plan --save.")],
    second: Annotated[Path | None, typer.Argument(help="Another plan. Required.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what differs between two plans: promise, noise, error, memory and cost. Both are verified first."""
    options.require("diff", {"second": second})
    assert second is not None
    with terminal.progress() as advance:
        plans = []
        for done, path in enumerate((first, second)):
            advance(done, 2, f"verifying {path.name}")
            plans.append(Plan.load(path))
    found = differences(*plans)
    if as_json:
        content = {"first": str(first), "second": str(second), "differences": [each.as_dict() for each in found]}
        terminal.print_json({**content, "words": sentences(found)})
        return
    terminal.say(f"A: {first}\nB: {second}")
    for line in sentences(found):
        terminal.say(line)
    if found:
        terminal.console.print(difference_table(found))
