"""`quell mechanisms`."""

from __future__ import annotations

from quell.cli import options, terminal
from quell.show import tables
from quell.strategy import FAMILIES


def mechanisms(as_json: options.AsJson = False) -> None:
    """List the mechanisms, one line each."""
    if as_json:
        terminal.print_json(
            [{"mechanism": f.name, "summary": f.summary, "parameters": list(f.takes)} for f in FAMILIES.values()]
        )
        return
    terminal.console.print(tables.families_table())
