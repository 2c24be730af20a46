"""`quell verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.planning.file import verify as verify_file
from quell.show import tables


def verify(
    file: Annotated[Path, typer.Argument(help="A plan written by quell plan --save.")],
    as_json: options.AsJson = False,
) -> None:
    """Recompute every claim in a plan file from first principles."""
    checks = verify_file(file)
    false = [check for check in checks if not check.holds]
    if as_json:
        terminal.print_json({"file": str(file), "true": not false, "checks": [vars(check) for check in checks]})
    elif false:
        terminal.errors.print(tables.check_table(checks))
        terminal.errors.print(
            f"{file} is not a true plan: {len(false)} of {len(checks)} claims fail.", markup=False, style="red"
        )
    else:
        terminal.say(f"{file}: all {len(checks)} claims hold.")
    if false:
        raise typer.Exit(1)
