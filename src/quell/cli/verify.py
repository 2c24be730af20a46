"""`quell verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.planning.file import checked
from quell.show import words


def verify(
    file: Annotated[Path, typer.Argument(help="A plan written by quell plan --save.")],
    as_json: options.AsJson = False,
) -> None:
    """Recompute every claim in a plan file from first principles, and say what its promise means."""
    checks, plan = checked(file)
    holds = plan is not None and all(check.holds for check in checks)
    meaning = plan.meaning if plan is not None and holds else None
    terminal.report(file, checks, as_json, meaning=None if meaning is None else meaning.as_dict())
    if plan is not None and meaning is not None and not as_json:
        protected = words.whom(plan.run.drawn, plan.run.promise.unit)
        terminal.say(f"Promise: {words.promise(plan.mechanism.guarantee, protected)}.")
        terminal.say(words.attacker(meaning, plan.run.promise.unit))
    if not holds:
        raise typer.Exit(1)
