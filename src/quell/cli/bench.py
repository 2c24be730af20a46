"""`quell bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from quell import costs
from quell.cli import options, terminal


def bench(
    parameters: Annotated[
        int, typer.Option(help="Number of parameters to add noise to.", **options.COUNT)
    ] = 10_000_000,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Measure how long noise takes on this machine, for quell plan --device measured."""
    from quell.bench import measure

    cost = measure(parameters, device)
    path = costs.keep(cost, f"{device}, {parameters:,} float32 parameters")
    if as_json:
        terminal.print_json({"file": str(path), **vars(cost)})
        return
    terminal.say(
        f"Nanoseconds per parameter and step on this {device}: independent noise {cost.base:.3g}, "
        f"each further draw {cost.draw:.3g}, each buffer {cost.buffer:.3g}."
    )
    terminal.say_written([path])
