"""`quell train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.cli.options import option
from quell.errors import QuellError
from quell.show import tables

_TRAINING = "Training"


def train(
    file: Annotated[Path, typer.Argument(help="An .npz file with arrays x and y, and optionally x_test and y_test.")],
    epochs: options.Epochs,
    epsilon: options.Epsilon,
    delta: options.Delta,
    batch_size: Annotated[int, option("Examples per step.", panel=options.RUN)] = 32,
    model: Annotated[str, option("linear, mlp or cnn; auto chooses by the shape of x.", panel=_TRAINING)] = "auto",
    lr: Annotated[
        float | None, option("Learning rate. Default: each row's best of a small grid.", panel=_TRAINING)
    ] = None,
    momentum: options.Momentum = 0.9,
    clip: Annotated[float, option("Norm to which every example's gradient is clipped.", panel=_TRAINING)] = 1.0,
    sampling: options.Sampling = "best",
    runs: Annotated[int, option("Runs per row, each with its own start and noise.", panel=_TRAINING)] = 1,
    baselines: Annotated[bool, option("Also train without privacy and with DP-SGD.", panel=_TRAINING)] = True,
    seed: Annotated[
        int | None, option("Make runs repeatable. Voids privacy: for public data only.", panel=_TRAINING)
    ] = None,
    save_weights: Annotated[
        Path | None, option("Write the planned model's state_dict, for torch.", panel=options.OUTPUT)
    ] = None,
    save_plan: Annotated[Path | None, option("Write the plan, for quell verify.", panel=options.OUTPUT)] = None,
    save_report: Annotated[Path | None, option("Write the privacy report: .md or .json.", panel=options.OUTPUT)] = None,
    plot: options.Plot = None,
    html: Annotated[Path | None, option("Write results and curves as one web page.", panel=options.OUTPUT)] = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a small model on your arrays: without privacy, with DP-SGD, and as planned.

    x has shape (examples, features), or (examples, height, width) for images, with channels first or last. y holds
    integers from 0. Bytes are read as pixels and other numbers as they are. Without x_test a quarter of the examples
    is held out for testing.
    """
    try:
        from quell.train import command
    except ModuleNotFoundError as missing:
        raise QuellError(f"quell train needs {missing.name}: pip install 'quell[torch]'") from missing

    with terminal.progress() as advance:
        found = command.train(
            file,
            files := command.Files(save_weights, save_plan, save_report, plot, html),
            advance,
            lambda row: terminal.errors.print(
                f"{row.arm.name}: {row.mean:.1%} at lr {row.learning_rate:g}", highlight=False
            ),
            model=model,
            learning_rate=lr,
            max_grad_norm=clip,
            runs=runs,
            baselines=baselines,
            seed=seed,
            batch_size=batch_size,
            epochs=epochs,
            epsilon=epsilon,
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
