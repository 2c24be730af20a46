"""`quell train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.cli.options import output, training
from quell.errors import QuellError
from quell.show import tables


def train(
    file: Annotated[Path, typer.Argument(help="An .npz file with arrays x and y, and optionally x_test and y_test.")],
    epochs: options.Epochs = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    batch_size: Annotated[int, options.the_run("Examples per step.", **options.COUNT)] = 32,
    model: Annotated[str, training("linear, mlp or cnn; auto chooses by the shape of x.")] = "auto",
    lr: Annotated[
        float | None, training("Learning rate. Default: each run's best of a few trials, which the promise covers.")
    ] = None,
    momentum: options.Momentum = 0.9,
    clip: Annotated[float, training("Norm to which every example's gradient is clipped.")] = 1.0,
    sampling: options.Sampling = "best",
    runs: Annotated[int, training("Runs per row, each with its own start and noise.")] = 1,
    baselines: Annotated[bool, training("Also train without privacy and with DP-SGD.")] = True,
    seed: Annotated[int | None, training("Make runs repeatable. Voids privacy: for public data only.")] = None,
    budget: Annotated[Path | None, training("Charge every run, with its trials, to this budget.")] = None,
    save_weights: Annotated[Path | None, output("Write the planned model's state_dict, for torch.")] = None,
    save_plan: Annotated[Path | None, output("Write the plan, for quell verify.")] = None,
    save_report: Annotated[Path | None, output("Write the privacy report: .md or .json.")] = None,
    plot: options.Plot = None,
    html: Annotated[Path | None, output("Write results and curves as one web page.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a small model on your arrays: without privacy, with DP-SGD, and as planned.

    x has shape (examples, features), or (examples, height, width) for images, with channels first or last. y holds
    integers from 0. Bytes are read as pixels and other numbers as they are. Without x_test a quarter of the examples
    is held out for testing.
    """
    asked = options.require("train", {"epochs": epochs, "epsilon": epsilon})
    try:
        from quell.train import command
    except ModuleNotFoundError as missing:
        raise QuellError(f"quell train needs {missing.name}: pip install 'quell[torch]'") from missing

    with terminal.progress() as advance:
        found = command.train(
            file,
            files := command.Files(save_weights, save_plan, save_report, plot, html),
            advance,
            lambda row: terminal.errors.print(f"{row.arm.name}: {row.mean:.1%} at lr {row.rates}", highlight=False),
            model=model,
            learning_rate=lr,
            max_grad_norm=clip,
            runs=runs,
            baselines=baselines,
            seed=seed,
            budget=budget,
            batch_size=batch_size,
            **asked,
            delta=delta,
            momentum=momentum,
            sampling=sampling,
        )
    if as_json:
        terminal.print_json(found)
        return
    terminal.say(found["setup"])
    terminal.console.print(tables.training_table(found["arms"]))
    for line in (found["verdict"], f"Promise of the planned run: {found['promise']}.", *found["notes"]):
        if line is not None:
            terminal.say(line)
    terminal.say_written(files.wanted)
