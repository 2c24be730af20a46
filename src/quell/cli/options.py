"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quell.errors import QuellError, require_count
from quell.planning import Prices
from quell.run import Run
from quell.schemes import SCHEMES
from quell.strategy import FAMILIES, Parameter
from quell.strategy.family import DIVERGENCE, HORIZON


def _panel(title: str) -> Callable[..., Any]:
    """Makes options of one panel of --help, from a help text and names (default: the name of the parameter)."""
    return lambda text, *names: typer.Option(*names, help=text, rich_help_panel=title)


the_run, optimizer, goal = _panel("The run and its promise"), _panel("The optimizer"), _panel("The goal")
limit, user, output = _panel("Limits"), _panel("Privacy per user instead of per example"), _panel("Output")
design, training = _panel("The mechanism's parameters"), _panel("Training")

_ALL = ", ".join(SCHEMES)
_DIVERGENT = ", ".join(family.name for family in FAMILIES.values() if DIVERGENCE in family.takes)
_WITH_RULE = ", ".join(family.name for family in FAMILIES.values() if "training" in family.objectives)
GOALS = "What to minimise: rmse (average error), maxse (worst-step error), or training (predicted training error)."

Epsilon = Annotated[float, the_run("Privacy budget epsilon. Smaller is more private; 1 to 10 is common.")]
Delta = Annotated[float, the_run("Privacy parameter delta: at most 1/examples.")]
Epochs = Annotated[int, the_run("Passes over the data.")]
Steps = Annotated[int, the_run("Optimizer steps of the whole run.")]
Separation = Annotated[int | None, the_run("Fewest steps between two uses of an example. Default: steps // epochs.")]
Sampling = Annotated[str, the_run(f"How batches are formed: {_ALL}, or best.")]
Momentum = Annotated[float, optimizer("Momentum of the optimizer.")]
WeightDecay = Annotated[float, optimizer("Factor on the weights each step: 1 - lr * weight_decay. 1 means no decay.")]
Schedule = Annotated[str | None, optimizer("Learning-rate schedule: cosine or linear. Default: constant.")]
Adaptive = Annotated[bool, optimizer("The optimizer rescales gradients, as Adam does.", "--adaptive")]
_MEMORY = "Memory for noise: a number of model copies, a size such as 8GB (with --parameters), or unlimited."
Memory = Annotated[str, limit(_MEMORY, "--memory", "--max-memory")]
Draws = Annotated[int, limit("Most noise vectors that may be generated per step.")]
ModelSize = Annotated[int | None, limit("Number of the model's parameters, for sizes in GB and times.")]
Schemes = Annotated[str, limit(f"Ways of forming batches that your data pipeline can do: {_ALL}; or best for all.")]
AsJson = Annotated[bool, output("Print JSON instead of a table.", "--json")]
Plot = Annotated[Path | None, output("Also draw a plot: a .png, .svg or .pdf file.")]

# One mechanism's parameters, as text: a value or, for quell compare, a sweep.
Bands = Annotated[str | None, design("Diagonals of C, or of its inverse for banded-inverse families.")]
Lambda = Annotated[str | None, design("Share of old noise that is cancelled.", "--lambda")]
Gamma = Annotated[str | None, design("Power of a fractional mechanism.")]
Buffers = Annotated[str | None, design("Buffers of a blt.")]
Horizon = Annotated[str | None, design("Optimised mechanisms: how many steps back the design looks.")]
Divergence = Annotated[str | None, design(f"{_DIVERGENT}: design for random batches; 0.3 suits epsilon 2, 3 suits 8.")]
_OBJECTIVE = (
    f"What an optimised mechanism minimises: rmse (default) or maxse. For {_WITH_RULE} also training: a rule for "
    "lambda that cancels less (docs/strategies.md)."
)
Objective = Annotated[str | None, design(_OBJECTIVE)]
_NORMALISE = "--column-normalise/--no-column-normalise"
Normalise = Annotated[bool | None, design("Scale every column of C to norm 1, or don't.", _NORMALISE)]


def prices_of(given: dict[str, Any]) -> Prices:
    """The prices of a run that is given by its steps; `given` are a command's options by name."""
    names = ("steps", "epochs", "separation", "epsilon", "delta", "sampling", "momentum", "weight_decay")
    return Prices(Run.from_steps(learning_rates=given["schedule"], **{name: given[name] for name in names}))


def data_of(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Run.from_data` that were given; `given` as in `prices_of`."""
    run = ("examples", "batch_size", "epochs", "epsilon", "delta", "sampling", "separation", "participations")
    rest = ("momentum", "weight_decay", "adaptive", "draws", "objective")
    found = {name: given[name] for name in (*run, *rest) if given.get(name) is not None}
    return found | {"learning_rates": given["schedule"], "memory": memory_of(given["memory"], given["parameters"])}


def values_of(given: dict[str, Any]) -> dict[str, list[Parameter]]:
    """The values given for each parameter of a mechanism, one or those of a sweep; `given` as in `prices_of`."""
    options = {"lambda": "lambda_"} | {name: name for name in ("bands", "gamma", "buffers", HORIZON, DIVERGENCE)}
    found = {name: _sweep(name, given[option]) for name, option in options.items() if given[option] is not None}
    return found | {name: [given[name]] for name in ("objective", "column_normalise") if given[name] is not None}


def _sweep(name: str, text: str) -> list[Parameter]:
    """'16', '2,4,8' or 'start:stop:count' (evenly spaced, ends included)."""
    try:
        if ":" in text:
            start, stop, count = text.split(":")
            first, last, points = float(start), float(stop), int(count)
            if points < 2:
                raise ValueError
            values = [first + (last - first) * i / (points - 1) for i in range(points)]
            whole = name in ("bands", "buffers", HORIZON)
            return list(dict.fromkeys(round(value) for value in values)) if whole else list(values)
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise QuellError(
            f"--{name} {text!r} is neither a number nor a sweep: write 16, 2,4,8 or start:stop:count"
        ) from None


def memory_of(text: str, parameters: int | None) -> float | None:
    """Model copies from '4', '8GB' (float32 buffers) or 'unlimited'."""
    if parameters is not None:
        require_count("parameters", parameters)
    if text == "unlimited":
        return None
    try:
        if not text.upper().endswith("GB"):
            return float(text)
        size = float(text[:-2])
    except ValueError:
        raise QuellError(
            f"memory={text!r} must be a number of model copies, a size such as 8GB, or 'unlimited'"
        ) from None
    if parameters is None:
        raise QuellError(f"memory={text!r} needs --parameters, the size of the model, as well")
    return size * 1e9 / (4 * parameters)
