"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quell.analysis.objective import OBJECTIVES
from quell.cli import users
from quell.cli.help import example_of
from quell.errors import QuellError, read_count
from quell.run import Run
from quell.schemes import FIXED, SCHEMES
from quell.strategy import FAMILIES, Parameter
from quell.strategy.family import DIVERGENCE, HORIZON
from quell.workload import adam_momentum

Given = dict[str, Any]  # a command's options by name


def _count(text: str | int) -> int:
    try:
        return read_count("it", text, least=-(10**18))  # which numbers make sense is checked where they are used
    except QuellError:
        raise typer.BadParameter(f"{text!r} is not a count, such as 50000, 50,000 or 50k") from None


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number, such as 8, 0.5 or 1e-5") from None


def _panel(title: str, **how: Any) -> Callable[..., Any]:
    """Makes options of one panel of --help, from a help text and names (default: the name of the parameter)."""
    how |= {"rich_help_panel": title}
    return lambda text, *names, **more: typer.Option(..., *names, help=text, **how, **more)


COUNT: dict[str, Any] = {"parser": _count, "metavar": "<count>"}
NUMBER: dict[str, Any] = {"parser": _number, "metavar": "<number>"}

the_run, optimizer, goal = _panel("The run and its promise"), _panel("The optimizer"), _panel("The goal")
limit, user, output = _panel("Limits"), _panel("Privacy per user instead of per example"), _panel("Output")
design, training = _panel("The mechanism's parameters", metavar="<text>"), _panel("Training")
stated = _panel("What is known about the data", metavar="<text>")

_ALL = ", ".join(SCHEMES)
_DIVERGENT = ", ".join(family.name for family in FAMILIES.values() if DIVERGENCE in family.takes)
_WITH_RULE = ", ".join(family.name for family in FAMILIES.values() if "training" in family.objectives)
GOALS = f"What to minimise: {', '.join(f'{name} ({each.meaning[0]})' for name, each in OBJECTIVES.items())}."


def mechanism_names(incomplete: str) -> list[str]:
    return [name for name in FAMILIES if name.startswith(incomplete)]


def _scheme_names(incomplete: str) -> list[str]:
    return [name for name in (*SCHEMES, "best") if name.startswith(incomplete)]


_MECHANISM = "A mechanism's name (see quell mechanisms), or a row of a table: 'blt d=2 h=88'. Required."
MechanismName = Annotated[str | None, typer.Argument(help=_MECHANISM, autocompletion=mechanism_names)]
EPSILON = "Privacy budget epsilon. Smaller is more private; 1 to 10 is common."
Epsilon = Annotated[float | None, the_run(f"{EPSILON} Required.", **NUMBER)]
_DELTA = "Privacy parameter delta: at most 1/examples. Default: a power of ten, at most 1/(10 * examples)."
Delta = Annotated[float | None, the_run(_DELTA, **NUMBER)]
Examples = Annotated[int | None, the_run("Examples in the training set: 50000, 50,000 or 50k. Required.", **COUNT)]
BatchSize = Annotated[int | None, the_run("Examples per step. Required.", **COUNT)]
Epochs = Annotated[int | None, the_run("Passes over the data. Required.", **COUNT)]
Steps = Annotated[int | None, the_run("Instead of --examples and --batch-size: steps of the whole run.", **COUNT)]
Sampling = Annotated[
    str,
    the_run(
        f"How batches are formed: {_ALL}; several with commas, of which the plan takes the best; or best.",
        autocompletion=_scheme_names,
    ),
]
Momentum = Annotated[float, optimizer("Momentum of the optimizer.", **NUMBER)]
_DECAY = "Factor on the weights each step: 1 - lr * weight_decay. 1 means no decay."
WeightDecay = Annotated[float, optimizer(_DECAY, **NUMBER)]
Schedule = Annotated[str | None, optimizer("Learning-rate schedule: cosine or linear. Default: constant.")]
_OPTIMIZER = "The optimizer: sgd, adam or adamw. For the latter two --momentum is the first beta (default: 0.9)."
OptimizerName = Annotated[str, optimizer(_OPTIMIZER)]
Adaptive = Annotated[bool, optimizer("Another optimizer that rescales gradients, as Adam does.", "--adaptive")]
_EMA = "The average of the weights is used, with this share of the past: 0.98. Default: the weights themselves."
Ema = Annotated[float | None, optimizer(_EMA, **NUMBER)]
_MEMORY = (
    "Memory for noise: a number of model copies, a size such as 8GB (with --parameters), or unlimited. Default: 4 "
    "copies, or 1GB if that is more and --parameters is given."
)
Memory = Annotated[str, limit(_MEMORY, "--memory", "--max-memory")]
Draws = Annotated[int, limit("Most noise vectors that may be generated per step.", **COUNT)]
ModelSize = Annotated[int | None, limit("Number of the model's parameters, for memory in GB and times.", **COUNT)]
AsJson = Annotated[bool, output("Print JSON instead of a table.", "--json")]
Plot = Annotated[Path | None, output("Also draw a plot: a .png, .svg or .pdf file.")]
Save = Annotated[Path | None, output("Write the plan to this file, for quell verify.")]

_USERS = (
    "How many users there are, or a table with the user of each example (.csv, .tsv, .txt, .npy): batches are drawn of "
    "users, and --batch-size counts users."
)
_COLUMN = "The column of that table with the users' ids. Where examples have several users: sender,receiver."
_SEPARATION = "Batches of examples: fewest steps between two participations of a user (with --steps: of an example)."
_NORMALISE = "--column-normalise/--no-column-normalise"
_OBJECTIVE = (
    f"What an optimised mechanism minimises: rmse (default) or maxse. For {_WITH_RULE} also training: a rule for "
    "lambda that cancels less (docs/strategies.md)."
)


def run_options(
    examples: Examples = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 1.0,
    schedule: Schedule = None,
    optimizer: OptimizerName = "sgd",
    adaptive: Adaptive = False,
    ema: Ema = None,
    users: Annotated[str | None, user(_USERS)] = None,
    user_column: Annotated[str | None, user(_COLUMN)] = None,
    separation: Annotated[int | None, user(_SEPARATION, **COUNT)] = None,
    participations: Annotated[int | None, user("Batches of examples: most participations of a user.", **COUNT)] = None,
) -> None:
    """What plan, price and compare ask about a run."""


def mechanism_options(
    mechanism: MechanismName = None,
    steps: Steps = None,
    sampling: Annotated[
        str | None,
        the_run(
            f"How batches are formed: {_ALL}, or best. Default: best, or {FIXED.name} with --steps.",
            autocompletion=_scheme_names,
        ),
    ] = None,
    bands: Annotated[str | None, design("Diagonals of C, or of its inverse for banded-inverse families.")] = None,
    lambda_: Annotated[str | None, design("Share of old noise that is cancelled.", "--lambda")] = None,
    gamma: Annotated[str | None, design("Power of a fractional mechanism.")] = None,
    buffers: Annotated[str | None, design("Buffers of a blt.")] = None,
    horizon: Annotated[str | None, design("Optimised mechanisms: how many steps back the design looks.")] = None,
    divergence: Annotated[
        str | None, design(f"{_DIVERGENT}: design for random batches; 0.3 suits epsilon 2, 3 suits 8.")
    ] = None,
    objective: Annotated[str | None, design(_OBJECTIVE)] = None,
    column_normalise: Annotated[bool | None, design("Scale every column of C to norm 1, or don't.", _NORMALISE)] = None,
) -> None:
    """What price and compare ask about a mechanism, as text: a value or, for compare, a sweep."""


def shared(*templates: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of the templates in front of its own; it gets them as its first argument."""
    common = [each for make in templates for each in inspect.signature(make, eval_str=True).parameters.values()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def parsed(**options: Any) -> None:
            given = {each.name: options.pop(each.name) for each in common}
            command(given, **options)

        everything = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*common, *own)]
        parsed.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        parsed.__annotations__ = {each.name: each.annotation for each in everything}
        return parsed

    return decorate


def require(command: str, given: Given) -> Given:
    """The options that a command needs; refuses a request without them: all at once, with an example to paste."""
    if missing := [_ARGUMENTS.get(name, flag(name)) for name, value in given.items() if value is None]:
        raise QuellError(f"{command} needs {', '.join(missing)} as well; for example\n{example_of(command)}")
    return given


_ARGUMENTS = {"mechanism": "a mechanism", "second": "a second plan file"}  # which have no flag


def flag(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"


def run_of(command: str, given: Given) -> Run:
    """The run of `run_options` and `mechanism_options`, given by its data or by its steps."""
    needed = {name: given[name] for name in ("mechanism", "epochs", "epsilon")}
    if given["steps"] is None:
        require(command, needed | data_needed(given))
        counted, _ = users.population(given["examples"], given["users"], given["user_column"])
        return Run.from_data(**{**counted, **_run(given, "batch_size", "participations")})
    require(command, needed | {"delta": given["delta"]})
    if twice := [flag(name) for name in (*_PEOPLE, "batch_size", "participations") if given[name] is not None]:
        raise QuellError(f"--steps stands for a run without data, so it does not go with {', '.join(twice)}: drop one")
    return Run.from_steps(**_run(given, "steps"))


_PEOPLE = ("examples", "users", "user_column")


def data_needed(given: Given) -> Given:
    """The options that a run over data needs; --users stands for --examples."""
    count = {} if given["users"] is not None else {"examples (or --users)": given["examples"]}
    return count | {"batch_size": given["batch_size"]}


def data_of(given: Given) -> Given:
    """The arguments of `Run.from_data` that were given, except for how many examples or users there are."""
    return _run(given, "batch_size", "participations", "draws", "objective", "memory", "parameters")


def _run(given: Given, *more: str) -> Given:
    """What was given of the promise and the optimizer, and more, as `Run` takes it."""
    names = (
        "epochs",
        "epsilon",
        "delta",
        "sampling",
        "separation",
        "momentum",
        "weight_decay",
        "adaptive",
        "ema",
        *more,
    )
    found = {name: given[name] for name in names if given.get(name) is not None}
    if (named := given.get("optimizer", "sgd")) != "sgd":
        betas = (given["momentum"] or 0.9, 0.999)
        found |= {"momentum": adam_momentum(named, betas, given["momentum"]), "adaptive": True}
    return found | {"learning_rates": given["schedule"]}


def values_of(given: Given) -> dict[str, list[Parameter]]:
    """The values given for each parameter of a mechanism, one or those of a sweep."""
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
