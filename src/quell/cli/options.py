"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quell.errors import QuellError, require_count
from quell.schemes import SCHEMES
from quell.strategy import FAMILIES, Parameter
from quell.strategy.family import DIVERGENCE, HORIZON

RUN, OPTIMIZER, GOAL = "The run and its promise", "The optimizer", "The goal"  # panels of --help
LIMITS, USERS, OUTPUT = "Limits", "Privacy per user instead of per example", "Output"
DESIGN = "The mechanism's parameters"


def option(text: str, *names: str, panel: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def _takers(parameter: str) -> str:
    return ", ".join(family.name for family in FAMILIES.values() if parameter in family.takes)


_WITH_RULE = ", ".join(family.name for family in FAMILIES.values() if "training" in family.objectives)

Epsilon = Annotated[float, option("Privacy budget epsilon. Smaller is more private; 1 to 10 is common.", panel=RUN)]
Delta = Annotated[float, option("Privacy parameter delta: at most 1/examples.", panel=RUN)]
Epochs = Annotated[int, option("Passes over the data.", panel=RUN)]
Steps = Annotated[int, option("Optimizer steps of the whole run.", panel=RUN)]
Separation = Annotated[
    int | None, option("Fewest steps between two uses of an example. Default: steps // epochs.", panel=RUN)
]
Momentum = Annotated[float, option("Momentum of the optimizer.", panel=OPTIMIZER)]
WeightDecay = Annotated[
    float,
    option("Factor that multiplies the weights each step: 1 - lr * weight_decay. 1 means no decay.", panel=OPTIMIZER),
]
Schedule = Annotated[
    str | None, option("Learning-rate schedule: cosine or linear. Default: constant.", panel=OPTIMIZER)
]
Adaptive = Annotated[bool, option("The optimizer rescales gradients, as Adam does.", "--adaptive", panel=OPTIMIZER)]
Memory = Annotated[
    str,
    option(
        "Memory for noise: a number of model copies, a size such as 8GB (with --parameters), or unlimited.",
        "--memory",
        "--max-memory",
        panel=LIMITS,
    ),
]
Draws = Annotated[int, option("Most noise vectors that may be generated per step.", panel=LIMITS)]
ModelSize = Annotated[int | None, option("Number of the model's parameters, for sizes in GB and times.", panel=LIMITS)]
Schemes = Annotated[
    str,
    option(
        f"Ways of forming batches that your data pipeline can do: some of {', '.join(SCHEMES)}; or best for all.",
        panel=LIMITS,
    ),
]
Sampling = Annotated[str, option(f"How batches are formed: {', '.join(SCHEMES)}, or best.", panel=RUN)]
GOALS = "What to minimise: rmse (average error), maxse (worst-step error), or training (predicted training error)."
AsJson = Annotated[bool, option("Print JSON instead of a table.", "--json", panel=OUTPUT)]
Plot = Annotated[Path | None, option("Also draw a plot: a .png, .svg or .pdf file.", panel=OUTPUT)]

# One mechanism's parameters, as text: a value or, for quell compare, a sweep.
Bands = Annotated[str | None, option("Diagonals of C, or of its inverse for banded-inverse families.", panel=DESIGN)]
Lambda = Annotated[str | None, option("Share of old noise that is cancelled.", "--lambda", panel=DESIGN)]
Gamma = Annotated[str | None, option("Power of a fractional mechanism.", panel=DESIGN)]
Buffers = Annotated[str | None, option("Buffers of a blt.", panel=DESIGN)]
Horizon = Annotated[str | None, option("Optimised mechanisms: how many steps back the design looks.", panel=DESIGN)]
Divergence = Annotated[
    str | None,
    option(f"{_takers(DIVERGENCE)}: design for random batches; 0.3 suits epsilon 2, 3 suits 8.", panel=DESIGN),
]
Objective = Annotated[
    str | None,
    option(
        "What an optimised mechanism minimises: rmse (default) or maxse. "
        f"For {_WITH_RULE} also training: a rule for lambda that cancels less (docs/strategies.md).",
        panel=DESIGN,
    ),
]
Normalise = Annotated[
    bool | None,
    option("Scale every column of C to norm 1, or don't.", "--column-normalise/--no-column-normalise", panel=DESIGN),
]


def values_of(
    bands: str | None,
    lambda_: str | None,
    gamma: str | None,
    buffers: str | None,
    horizon: str | None,
    divergence: str | None,
    objective: str | None,
    column_normalise: bool | None,
) -> dict[str, list[Parameter]]:
    """The values given for each parameter of a mechanism: one, or those of a sweep."""
    texts = {"bands": bands, "lambda": lambda_, "gamma": gamma, "buffers": buffers}
    texts |= {HORIZON: horizon, DIVERGENCE: divergence}
    found: dict[str, list[Parameter]] = {name: _sweep(name, text) for name, text in texts.items() if text is not None}
    if objective is not None:
        found["objective"] = [objective]
    if column_normalise is not None:
        found["column_normalise"] = [column_normalise]
    return found


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
    return size * 1e9 / (4 * require_count("parameters", parameters))
