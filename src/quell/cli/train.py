"""`quell train` and `quell predict`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.cli.options import output, stated, training
from quell.errors import QuellError
from quell.files import PREDICTIONS, require_writable
from quell.show import tables
from quell.show.outcomes import training_lines

_FILE = "A .csv or .tsv table; or arrays x and y (and x_test, y_test), in an .npz file or a folder of .npy files."
_CLASSES = "The classes, separated by commas; for arrays also how many. Taken for public."
_BATCH = "Examples per step. Default: a fortieth of them, 16 to 1,024."
_CUTS = "To predict a number: 10,20 makes the classes below 10, 10 to 20, 20 or more. Taken for public."
_RANGE = "COLUMN=LOW:HIGH, the range of a column's numbers (repeat it); LOW:HIGH for arrays. Taken for public."


def train(
    file: Annotated[Path, typer.Argument(help=_FILE)],
    target: Annotated[str | None, stated("The column to predict.")] = None,
    classes: Annotated[str | None, stated(_CLASSES)] = None,
    cuts: Annotated[str | None, stated(_CUTS)] = None,
    ranges: Annotated[list[str] | None, stated(_RANGE, "--range")] = None,
    category: Annotated[list[str] | None, stated("A column whose numbers are names (repeat it).")] = None,
    drop: Annotated[list[str] | None, stated("A column that the model must not see (repeat it).")] = None,
    epsilon: Annotated[float, options.the_run(options.EPSILON, **options.NUMBER)] = 8.0,
    delta: options.Delta = None,
    epochs: Annotated[int, options.the_run("Passes over the data.", **options.COUNT)] = 10,
    batch_size: Annotated[int | None, options.the_run(_BATCH, **options.COUNT)] = None,
    model: Annotated[str, training("linear, mlp or cnn; auto chooses by the shape of the examples.")] = "auto",
    lr: Annotated[
        float | None, training("Learning rate. Default: each run's best of a few trials, which the promise covers.")
    ] = None,
    momentum: options.Momentum = 0.9,
    clip: Annotated[float, training("Norm to which every example's gradient is clipped.")] = 1.0,
    sampling: options.Sampling = "best",
    runs: Annotated[int, training("Runs per row, each with its own start and noise.")] = 1,
    baselines: Annotated[
        bool, training("Compare with training without privacy and with DP-SGD. Results are then not to be shared.")
    ] = False,
    seed: Annotated[int | None, training("Make runs repeatable. Voids privacy: for public data only.")] = None,
    log: Annotated[Path | None, output("Log every private run to a folder in this one, for quell watch.")] = None,
    out: Annotated[Path | None, output("Folder for model, report, plan and page. Default: FILE-private, here.")] = None,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a small model on your own data, with differential privacy.

    Nothing is looked up in the data without noise: a number in a table is scaled by the --range you give, or by a fixed
    function (asinh); other texts are hashed. In arrays bytes are read as pixels and other numbers as they are, unless
    there is a --range. A quarter of the examples is held out for testing unless there are test arrays.
    """
    try:
        from quell.train import command
        from quell.train.data import Known
    except ModuleNotFoundError as missing:
        raise _needs(missing) from missing

    folder = command.Folder(out or Path(f"{file.resolve().stem}-private"), plot, searches=lr is None)
    with terminal.progress() as advance:
        found = command.train(
            file,
            folder,
            advance,
            lambda row: terminal.errors.print(f"{row.arm.name}: {row.mean:.1%} at lr {row.rates}", highlight=False),
            known=Known(target, classes, cuts, ranges or (), category or (), drop or ()),
            model=model,
            learning_rate=lr,
            max_grad_norm=clip,
            runs=runs,
            baselines=baselines,
            seed=seed,
            log=log,
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
    for line in training_lines(found):
        terminal.say(line)
    terminal.say_written(folder.files)


def predict(
    model: Annotated[Path, typer.Argument(help="The folder that quell train wrote, or its model.pt.")],
    file: Annotated[
        Path, typer.Argument(help="A table with the same columns, or arrays: x in an .npz file or folder.")
    ],
    out: Annotated[Path | None, output("Write a .csv file instead of printing.")] = None,
) -> None:
    """Predict the classes of new examples with a model of quell train: one line each, with its probability."""
    try:
        from quell.train.saved import Model
    except ModuleNotFoundError as missing:
        raise _needs(missing) from missing

    require_writable((out, PREDICTIONS))
    found = [
        tuple(PREDICTIONS.mark.strip().split(",")),
        *((name, f"{share:.4f}") for name, share in Model.load(model).predict(file)),
    ]
    if out is None:
        csv.writer(typer.get_text_stream("stdout")).writerows(found)
        return
    with open(out, "w", newline="", encoding="utf-8") as text:
        csv.writer(text).writerows(found)
    terminal.say_written([out])


def _needs(missing: ModuleNotFoundError) -> QuellError:
    return QuellError(f"this command needs {missing.name}: pip install 'quell[torch]'")
