"""`quell verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.planning.file import checked
from quell.show import tables, words


def verify(
    file: Annotated[Path, typer.Argument(help="A plan written by quell plan --save.")],
    as_json: options.AsJson = False,
) -> None:
    """Recompute every claim in a plan file from first principles, and say what its promise means."""
    checks, plan = checked(file)
    false = [check for check in checks if not check.holds]
    meaning = None if false or plan is None else plan.meaning
    if as_json:
        content = {"file": str(file), "true": not false, "checks": [vars(check) for check in checks]}
        terminal.print_json({**content, "meaning": None if meaning is None else meaning.as_dict()})
    elif false:
        terminal.errors.print(tables.check_table(checks))
        terminal.errors.print(
            f"{file} is not a true plan: {len(false)} of {len(checks)} claims fail.", markup=False, style="red"
        )
    else:
        terminal.say(f"{file}: all {len(checks)} claims hold.")
        if plan is not None and meaning is not None:
            protected = words.whom(plan.run.drawn, plan.run.promise.unit)
            terminal.say(f"Promise: {words.promise(plan.mechanism.guarantee, protected)}.")
            terminal.say(words.attacker(meaning, plan.run.promise.unit))
    if false:
        raise typer.Exit(1)
