"""`quell tune`."""

from __future__ import annotations

from typing import Annotated

from quell.cli import options, terminal
from quell.cli.options import the_run, training
from quell.costs import USUAL
from quell.errors import read_count
from quell.show import many_runs

_LAW = (
    "How many trials: geometric or truncated-poisson (a random number; the best is released), or all (a fixed number)."
)


def tune(
    examples: options.Examples = None,
    batch_size: Annotated[
        str | None, the_run("Examples per step, or several sizes to choose from: 64,128. Required.")
    ] = None,
    epochs: options.Epochs = None,
    epsilon: Annotated[
        float | None, the_run("Privacy budget epsilon of the whole search. Required.", **options.NUMBER)
    ] = None,
    delta: options.Delta = None,
    trials: Annotated[float, training("How many trials, on average.")] = 10.0,
    law: Annotated[str | None, training(f"{_LAW} Default: the one with the least noise.")] = None,
    settings: Annotated[int, training("How many settings there are to choose from.")] = 5,
    momentum: options.Momentum = 0.0,
    sampling: options.Sampling = "best",
    memory: options.Memory = USUAL,
    as_json: options.AsJson = False,
) -> None:
    """Plan a search over settings, such as learning rates, that stays inside one promise.

    Compares a random number of trials with releasing all of them, then plans the trials. quell.tuning.Search runs them.
    """
    needed = {"examples": examples, "batch_size": batch_size, "epochs": epochs, "epsilon": epsilon}
    asked = options.require("tune", needed)
    from quell import tuning

    with terminal.progress() as advance:
        found = tuning.tune(
            **asked | {"batch_size": _sizes(asked["batch_size"])},
            delta=delta,
            trials=trials,
            law=law,
            settings=settings,
            momentum=momentum,
            sampling=sampling,
            memory=memory,
            progress=advance,
        )
    if as_json:
        terminal.print_json(found.as_dict())
        return
    terminal.console.print(many_runs.ways_table(found.ways, found.law))
    for line in (many_runs.WAYS, *many_runs.search_lines(found)):
        terminal.say(line)


def _sizes(text: str) -> list[int]:
    return [read_count("batch_size", part) for part in text.split(",")]
