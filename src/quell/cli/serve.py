"""`quell serve`."""

from __future__ import annotations

from typing import Annotated

from quell.analysis.objective import DEFAULT_OBJECTIVE
from quell.cli import options, terminal
from quell.costs import USUAL
from quell.run import Run


def serve(
    port: Annotated[int, options.output("Port on this machine; 0 takes any free one.")] = 8765,
    browser: Annotated[bool, options.output("Open the page in a browser.", "--browser/--no-browser")] = True,
    examples: Annotated[int, options.the_run("Examples in the training set, at first.", **options.COUNT)] = 50_000,
    batch_size: Annotated[int, options.the_run("Examples per step, at first.", **options.COUNT)] = 128,
    epochs: Annotated[int, options.the_run("Passes over the data, at first.", **options.COUNT)] = 10,
    epsilon: Annotated[float, options.the_run("Privacy budget epsilon, at first.", **options.NUMBER)] = 8.0,
    delta: options.Delta = None,
    momentum: options.Momentum = 0.0,
    weight_decay: options.WeightDecay = 1.0,
    schedule: options.Schedule = None,
    adaptive: options.Adaptive = False,
    objective: Annotated[str, options.goal(options.GOALS)] = DEFAULT_OBJECTIVE,
    memory: options.Memory = USUAL,
    draws: options.Draws = 16,
    parameters: options.ModelSize = None,
    sampling: options.Sampling = "best",
) -> None:
    """Show plans live in a browser, with sliders, on this machine only."""
    from quell.serve import server

    run = Run.from_data(examples=examples, **options.data_of(locals()))
    server.serve(run, port, terminal.say, usual_delta=delta is None, browser=browser)
