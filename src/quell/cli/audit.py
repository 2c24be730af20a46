"""`quell audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quell.auditing import rehearse
from quell.cli import options, terminal
from quell.files import PLOT, require_writable
from quell.planning import Plan
from quell.show import plots


def audit(
    file: Annotated[Path, typer.Argument(help="A plan written by quell plan --save.")],
    canaries: Annotated[
        int, typer.Option(help="Made-up examples to look for. More of them prove more.", **options.COUNT)
    ] = 20_000,
    confidence: Annotated[
        float, typer.Option(help="Probability that the lower bound is true.", **options.NUMBER)
    ] = 0.95,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Attack a plan's batches and noise, and say how large ε is at least.

    The plan is run without data, for made-up examples alone, as training would draw its batches and its noise. For an
    audit of a training run pass canaries= to make_private.
    """
    require_writable((plot, PLOT))
    if plot is not None:
        plots.require_picture(plot)
    with terminal.progress() as advance:
        advance(0, 1, "audit")
        found = rehearse(Plan.load(file), canaries, confidence)
    if plot is not None:
        found.plot(plot)
    if as_json:
        terminal.print_json(found.as_dict())
    else:
        terminal.say(str(found))
        terminal.say_written([plot])
    if found.broken:
        raise typer.Exit(1)
