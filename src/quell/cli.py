"""The command `quell`: a thin layer that reads options, calls the library and prints.

Bad input is answered with one sentence on standard error and exit status 2; a plan that fails verification with
status 1.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quell import __version__, costs, page, planning, questions, report, verification, workload
from quell.costs import DEVICES
from quell.errors import QuellError, require_count
from quell.mechanism import Mechanism, Problem
from quell.page import plots
from quell.progress import listening
from quell.sampling import SCHEMES, Cyclic, scheme_names
from quell.setup import Setup, refuse_decay_rate
from quell.strategy import FAMILIES, Parameter, build
from quell.strategy.family import DIVERGENCE, HORIZON, known_as

HELP = """
Train models with differential privacy under [bold]correlated noise[/bold].

Noise added at one step is partly cancelled at later steps, so far less of it reaches the model for the same privacy.

[bold]Examples[/bold]

  quell plan --examples 50000 --batch-size 128 --epochs 10 --epsilon 8 --delta 1e-5
  quell plan ... --save plan.json --html plan.html
  quell verify plan.json
  quell price bisr --bands 64 --steps 3900 --epochs 10 --epsilon 8 --delta 1e-5
  quell compare bisr --bands 2,4,8 --steps 3900 --epochs 10 --epsilon 8 --delta 1e-5

Exit status: 0 success, 1 a plan fails verification, 2 the request cannot be honoured, 130 Ctrl-C.
"""

_INTERRUPTED = 130  # the exit status of programs that Ctrl-C ended
_WIDTH = 120  # of output that does not go to a terminal

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)

_RUN, _OPTIMIZER, _GOAL = "The run and its promise", "The optimizer", "The goal"  # panels of --help
_LIMITS, _USERS, _OUTPUT = "What the run can do", "Privacy per user instead of per example", "Output"

Epsilon = Annotated[float, typer.Option(rich_help_panel=_RUN, help="Privacy budget epsilon; smaller is more private.")]
Delta = Annotated[float, typer.Option(rich_help_panel=_RUN, help="Privacy parameter delta; at most 1/examples.")]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
Steps = Annotated[int, typer.Option(help="Optimizer steps of the whole run.")]
Separation = Annotated[
    int | None, typer.Option(help="Least steps between two uses of an example. Default: steps // epochs.")
]
Momentum = Annotated[float, typer.Option(rich_help_panel=_OPTIMIZER, help="Momentum beta of the optimizer.")]
WeightDecay = Annotated[
    float,
    typer.Option(
        rich_help_panel=_OPTIMIZER, help="Factor alpha that multiplies the weights each step; 1 for no decay."
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(rich_help_panel=_OPTIMIZER, help="Learning-rate schedule: cosine or linear. Default: constant."),
]
Memory = Annotated[
    str,
    typer.Option(
        "--memory", "--max-memory", rich_help_panel=_LIMITS, help="Noise memory: model copies, '8GB', or 'unlimited'."
    ),
]
Draws = Annotated[int, typer.Option(rich_help_panel=_LIMITS, help="Noise vectors that may be generated per step.")]
ModelSize = Annotated[
    int | None, typer.Option(rich_help_panel=_LIMITS, help="Size of the model, for GB and noise time.")
]
_GOALS = "What to make small: rmse, maxse, or training, the rmse with forgetting."
Goal = Annotated[str, typer.Option(rich_help_panel=_GOAL, help=_GOALS)]
Adaptive = Annotated[
    bool, typer.Option("--adaptive", rich_help_panel=_OPTIMIZER, help="The optimizer is adaptive, like Adam.")
]
Schemes = Annotated[
    str,
    typer.Option(
        rich_help_panel=_LIMITS, help=f"Schemes your data pipeline can do: some of {', '.join(SCHEMES)}; or best."
    ),
]
Sampling = Annotated[str, typer.Option(help=f"How batches are formed: {', '.join(SCHEMES)}, or best.")]
AsJson = Annotated[bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="Print JSON instead of a table.")]
Plot = Annotated[
    Path | None, typer.Option(rich_help_panel=_OUTPUT, help="Also draw a plot: a .png, .svg or .pdf file.")
]
Normalise = Annotated[
    bool | None,
    typer.Option("--column-normalise/--no-column-normalise", help="Scale every column of C to norm 1, or don't."),
]
Objective = Annotated[
    str | None,
    typer.Option(
        help="What an optimised mechanism minimises: rmse (default) or maxse. lambda_cgd has training as well: "
        "a third of the memory 1/(1-lambda) of the least rmse, a rule, not the objective training of quell plan."
    ),
]


@app.command()
def plan(
    examples: Annotated[int, typer.Option(rich_help_panel=_RUN, help="Size of the training set.")],
    epsilon: Epsilon,
    delta: Delta,
    batch_size: Annotated[int | None, typer.Option(rich_help_panel=_RUN, help="Examples per step.")] = None,
    epochs: Annotated[int | None, typer.Option(rich_help_panel=_RUN, help="Passes over the data.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(rich_help_panel=_RUN, help="Instead of epochs and batch size: how best to spend so many steps?"),
    ] = None,
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 1.0,
    schedule: Schedule = None,
    adaptive: Adaptive = False,
    objective: Annotated[
        str | None,
        typer.Option(rich_help_panel=_GOAL, help=f"{_GOALS} Default: training; rmse with --target-rmse."),
    ] = None,
    memory: Memory = "4",
    draws: Draws = 16,
    parameters: ModelSize = None,
    noise_share: Annotated[
        float | None, typer.Option(rich_help_panel=_LIMITS, help="Most of a step's time for noise: 0.03 is 3%.")
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(rich_help_panel=_LIMITS, help="How long a step takes, for --noise-share.")
    ] = None,
    device: Annotated[
        str, typer.Option(rich_help_panel=_LIMITS, help=f"Whose noise costs: {', '.join(DEVICES)}, measured.")
    ] = "h200",
    sampling: Schemes = "best",
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", rich_help_panel=_GOAL, help="Leave amplification by sampling out: an answer in a few seconds."
        ),
    ] = False,
    separation: Annotated[
        int | None, typer.Option(rich_help_panel=_USERS, help="Per user: least steps between participations.")
    ] = None,
    participations: Annotated[
        int | None, typer.Option(rich_help_panel=_USERS, help="Per user: most participations.")
    ] = None,
    target_rmse: Annotated[
        float | None,
        typer.Option(rich_help_panel=_GOAL, help="Find the least epsilon with this RMSE, starting at --epsilon."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(rich_help_panel=_OUTPUT, help="Write the plan to this file, for quell verify.")
    ] = None,
    plot: Plot = None,
    html: Annotated[
        Path | None, typer.Option(rich_help_panel=_OUTPUT, help="Write the plan as one interactive web page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare mechanisms for a training run and recommend one.

    Give --examples, --batch-size, --epochs, --epsilon and --delta; everything else has a default.
    """
    if steps is None and (batch_size is None or epochs is None):
        raise QuellError("a plan needs --batch-size and --epochs, or --steps alone to find them")
    unused: dict[str, object] = {"--batch-size": batch_size, "--epochs": epochs, "--target-rmse": target_rmse}
    unused |= {"--save": save, "--plot": plot, "--html": html}
    if steps is not None and (given := [name for name, value in unused.items() if value is not None]):
        raise QuellError(
            f"--steps only compares ways to spend them, so it does not go with {', '.join(given)}: choose one, then "
            "plan it with --batch-size and --epochs"
        )
    setup = Setup(
        examples=examples,
        batch_size=1 if batch_size is None else batch_size,
        epochs=1 if epochs is None else epochs,
        epsilon=epsilon,
        delta=delta,
        momentum=momentum,
        weight_decay=weight_decay,
        learning_rates=schedule,
        memory=_memory(memory, parameters),
        draws=draws,
        sampling=_sampling(sampling, fast),
        objective=_goal(objective, target_rmse),
        adaptive=adaptive,
        time_limit=_time_limit(noise_share, step_seconds, parameters, device),
        separation=separation,
        participations=participations,
    )
    if steps is not None:
        _print_choices(steps, setup, as_json)
        return
    with _progress() as advance:
        if target_rmse is None:
            chosen = planning.make_plan(setup, advance)
        else:
            chosen = questions.plan_for_rmse(setup, target_rmse, advance)
        if save is not None:
            chosen.save(save)
        if plot is not None:
            plots.draw(chosen, plot)
        if html is not None:
            page.write(chosen, html)
    if as_json:
        _print_json(chosen.as_dict())
        return
    report.print_plan(chosen, console)
    for path in (save, plot, html):
        if path is not None:
            console.print(f"Written: {path}", highlight=False, markup=False)


@app.command()
def serve(
    port: Annotated[int, typer.Option(help="Port on this machine; 0 takes any free one.")] = 8765,
    examples: Annotated[int, typer.Option(help="Size of the training set, to begin with.")] = 50_000,
    batch_size: Annotated[int, typer.Option(help="Examples per step, to begin with.")] = 128,
    epochs: Epochs = 10,
    epsilon: Epsilon = 8.0,
    delta: Delta = 1e-5,
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 1.0,
    schedule: Schedule = None,
    adaptive: Adaptive = False,
    objective: Goal = "training",
    memory: Memory = "4",
    draws: Draws = 16,
    parameters: ModelSize = None,
    sampling: Schemes = "best",
) -> None:
    """Show plans live in a browser, with sliders, on this machine only."""
    from quell.page import server

    setup = Setup(
        examples=examples,
        batch_size=batch_size,
        epochs=epochs,
        epsilon=epsilon,
        delta=delta,
        momentum=momentum,
        weight_decay=weight_decay,
        learning_rates=schedule,
        memory=_memory(memory, parameters),
        draws=draws,
        sampling=sampling,
        objective=objective,
        adaptive=adaptive,
    )
    server.serve(setup, port, lambda text: console.print(text, highlight=False))


@app.command()
def bench(
    parameters: Annotated[int, typer.Option(help="Size of the gradient to add noise to.")] = 10_000_000,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure what noise costs on this machine, for quell plan --device measured."""
    from quell.bench import measure

    cost = measure(parameters, device)
    path = costs.keep(cost, f"{device}, {parameters:,} float32 parameters")
    if as_json:
        _print_json({"file": str(path), **vars(cost)})
        return
    console.print(
        f"Nanoseconds per parameter and step on this {device}: independent noise {cost.base:.3g}, "
        f"each further draw {cost.draw:.3g}, each buffer {cost.buffer:.3g}.\nWritten: {path}",
        highlight=False,
        markup=False,
    )


@app.command()
def price(
    mechanism: Annotated[str, typer.Argument(help="A mechanism's name; see quell mechanisms.")],
    steps: Steps,
    epochs: Epochs,
    epsilon: Epsilon,
    delta: Delta,
    bands: Annotated[int | None, typer.Option(help="Diagonals of C, or of C^-1 for banded-inverse families.")] = None,
    lambda_: Annotated[float | None, typer.Option("--lambda", help="Share of old noise that is cancelled.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Power of a fractional mechanism.")] = None,
    buffers: Annotated[int | None, typer.Option(help="Buffers of a blt.")] = None,
    horizon: Annotated[
        int | None,
        typer.Option(help="For optimised mechanisms: optimise for sums that fade over so many steps."),
    ] = None,
    divergence: Annotated[
        float | None,
        typer.Option(
            help="For band_inv and band_toeplitz: optimise for balls-in-bins; 0.3 suits epsilon 2, 3 suits 8."
        ),
    ] = None,
    objective: Objective = None,
    column_normalise: Normalise = None,
    separation: Separation = None,
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 1.0,
    schedule: Schedule = None,
    sampling: Sampling = "cyclic",
    as_json: AsJson = False,
) -> None:
    """Price one named mechanism: the noise it needs and the error that causes."""
    problem = _problem(steps, epochs, separation, epsilon, delta, momentum, weight_decay, schedule, sampling)
    given = {
        "bands": bands,
        "lambda": lambda_,
        "gamma": gamma,
        "buffers": buffers,
        HORIZON: horizon,
        DIVERGENCE: divergence,
        "objective": objective,
        "column_normalise": column_normalise,
    }
    parameters: dict[str, Parameter] = {name: value for name, value in given.items() if value is not None}
    with _progress():
        priced = problem.price(mechanism, **parameters)
    if as_json:
        _print_json(problem.row(priced))
        return
    console.print(report.mechanism_table(problem, [priced], width=console.width))
    console.print(report.details(problem, priced), highlight=False)


@app.command()
def compare(
    mechanism: Annotated[str, typer.Argument(help="A family's name; see quell mechanisms.")],
    steps: Steps,
    epochs: Epochs,
    epsilon: Epsilon,
    delta: Delta,
    bands: Annotated[str | None, typer.Option(help="One value, or a sweep: 2,4,8 or start:stop:count.")] = None,
    lambda_: Annotated[str | None, typer.Option("--lambda", help="One value, or a sweep.")] = None,
    gamma: Annotated[str | None, typer.Option(help="One value, or a sweep.")] = None,
    buffers: Annotated[str | None, typer.Option(help="One value, or a sweep.")] = None,
    horizon: Annotated[str | None, typer.Option(help="One value, or a sweep.")] = None,
    divergence: Annotated[str | None, typer.Option(help="One value, or a sweep.")] = None,
    objective: Objective = None,
    column_normalise: Normalise = None,
    separation: Separation = None,
    momentum: Momentum = 0.0,
    weight_decay: WeightDecay = 1.0,
    schedule: Schedule = None,
    sampling: Sampling = "cyclic",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Sweep one parameter of a family."""
    problem = _problem(steps, epochs, separation, epsilon, delta, momentum, weight_decay, schedule, sampling)
    given = {"bands": bands, "lambda": lambda_, "gamma": gamma, "buffers": buffers}
    given |= {HORIZON: horizon, DIVERGENCE: divergence}
    values = {name: _sweep(name, text) for name, text in given.items() if text is not None}
    swept = [name for name, several in values.items() if len(several) > 1]
    if len(swept) != 1:
        raise QuellError("compare sweeps exactly one parameter: give several values to one, for example --bands 2,4,8")
    fixed: dict[str, Parameter] = {name: single[0] for name, single in values.items() if name != swept[0]}
    if column_normalise is not None:
        fixed["column_normalise"] = column_normalise
    if objective is not None:
        fixed["objective"] = objective
    priced: list[Mechanism] = []
    options = values[swept[0]]
    with _progress() as advance:
        for done, value in enumerate(options):
            advance(done, len(options), f"{swept[0]}={value:g}")
            parameters = {**fixed, swept[0]: value}
            strategy = build(mechanism, problem.workload, problem.cycle.participation, None, **parameters)
            # A reader takes the best row, so certificates by draws share their failure probability.
            priced.append(problem.priced(strategy, comparisons=len(options)))
    if plot is not None:
        report.plot_sweep(problem, swept[0], priced, plot)
    rows = [problem.row(row) for row in priced]
    if as_json:
        _print_json(rows)
    elif as_csv:
        columns = [key for key in rows[0] if key not in ("guarantee", "solution")]
        writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    else:
        console.print(report.mechanism_table(problem, priced, width=console.width))


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A plan written by quell plan --save.")],
    as_json: AsJson = False,
) -> None:
    """Recompute every claim in a plan file from first principles."""
    checks = verification.verify(file)
    false = [check for check in checks if not check.holds]
    if as_json:
        _print_json({"file": str(file), "true": not false, "checks": [vars(check) for check in checks]})
    elif false:
        errors.print(report.check_table(checks))
        errors.print(
            f"{file} is not a true plan: {len(false)} of {len(checks)} claims fail.", markup=False, style="red"
        )
    else:
        console.print(f"{file}: all {len(checks)} claims hold.", highlight=False, markup=False)
    if false:
        raise typer.Exit(1)


@app.command()
def train(
    file: Annotated[Path, typer.Argument(help="An .npz file with arrays x and y, and perhaps x_test and y_test.")],
    epochs: Epochs,
    epsilon: Epsilon,
    delta: Delta,
    batch_size: Annotated[int, typer.Option(help="Examples per step.")] = 32,
    model: Annotated[str, typer.Option(help="linear, mlp or cnn; auto goes by the shape of x.")] = "auto",
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: each row's best of a small grid.")] = None,
    momentum: Momentum = 0.9,
    clip: Annotated[float, typer.Option(help="Norm that every example's gradient is clipped to.")] = 1.0,
    sampling: Sampling = "best",
    runs: Annotated[int, typer.Option(help="Runs per row; each has its own start and noise.")] = 1,
    baselines: Annotated[bool, typer.Option(help="Also train without privacy and with DP-SGD.")] = True,
    seed: Annotated[int | None, typer.Option(help="Repeatable runs, without privacy: for public data only.")] = None,
    save_weights: Annotated[Path | None, typer.Option(help="Write the planned model's state_dict, for torch.")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan, for quell verify.")] = None,
    save_report: Annotated[Path | None, typer.Option(help="Write the privacy report: .md or .json.")] = None,
    plot: Plot = None,
    html: Annotated[Path | None, typer.Option(help="Write results and curves as one web page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model on your arrays: without privacy, with DP-SGD, and as planned.

    x is (examples, features) or images, (examples, height, width) with channels first or last; y holds integers from 0.
    Bytes are read as pixels, other numbers as they are. Without x_test a quarter of the examples is held out.
    """
    try:
        from quell.trial import command, results
    except ModuleNotFoundError as missing:
        raise QuellError(f"quell train needs {missing.name}: pip install 'quell[torch]'") from missing

    with _progress() as advance:
        recipe, outcomes = command.train(
            file,
            files := command.Files(save_weights, save_plan, save_report, plot, html),
            advance,
            lambda row: errors.print(f"{row.arm.name}: {row.mean:.1%} at lr {row.learning_rate:g}", highlight=False),
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
    found = results.content(recipe, outcomes)
    if as_json:
        _print_json(found)
        return
    console.print(f"{found['setup']}.", highlight=False)
    console.print(results.table(outcomes))
    for line in (found["verdict"], f"Promise of the planned run: {found['promise']}.", *found["notes"]):
        if line is not None:
            console.print(line, highlight=False)
    for path in files.wanted:
        console.print(f"Written: {path}", highlight=False, markup=False)


@app.command()
def mechanisms(as_json: AsJson = False) -> None:
    """List the mechanisms, one line each."""
    if as_json:
        _print_json(
            [{"mechanism": f.name, "summary": f.summary, "parameters": list(f.takes)} for f in FAMILIES.values()]
        )
        return
    table = Table("mechanism", "parameters", "what it does")
    for family in FAMILIES.values():
        table.add_row(known_as(family), ", ".join(family.takes), family.summary)
    console.print(table)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"quell {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = int(os.environ.get("COLUMNS") or _WIDTH)


def main() -> None:
    """Entry point: turns errors a person can fix into one sentence."""
    try:
        app()
    except QuellError as problem:
        errors.print(Text.assemble(("quell: ", "bold red"), str(problem)), soft_wrap=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # Typer turns Ctrl-C into this, in silence
            errors.print("quell: interrupted")
        raise


def _problem(
    steps: int,
    epochs: int,
    separation: int | None,
    epsilon: float,
    delta: float,
    momentum: float,
    weight_decay: float,
    schedule: str | None,
    sampling: str,
) -> Problem:
    refuse_decay_rate(weight_decay)
    scheme = Cyclic.from_epochs(steps, epochs) if separation is None else Cyclic(steps, separation)
    rates = None if schedule is None else workload.schedule(schedule, scheme.participation.steps)
    task = workload.sgd(steps, momentum, weight_decay, rates)
    return Problem(task, scheme, epochs, epsilon, delta, ",".join(scheme_names(sampling)))


def _memory(text: str, parameters: int | None) -> float | None:
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


def _sampling(sampling: str, fast: bool) -> str:
    if not fast:
        return sampling
    if scheme_names(sampling) not in (scheme_names("best"), (Cyclic.name,)):
        raise QuellError(f"--fast goes without amplification, so it does not go with --sampling {sampling}: drop one")
    return Cyclic.name


def _goal(objective: str | None, target_rmse: float | None) -> str:
    if target_rmse is None:
        return "training" if objective is None else objective
    if objective not in (None, "rmse"):
        raise QuellError(
            f"--target-rmse looks for the least rmse, so it does not go with --objective {objective}: drop one"
        )
    return "rmse"


def _time_limit(
    share: float | None, step_seconds: float | None, parameters: int | None, device: str
) -> costs.TimeLimit | None:
    if share is None:
        if step_seconds is not None:
            raise QuellError("--step-seconds is for --noise-share, the part of a step that noise may take: give both")
        return None
    if step_seconds is None or parameters is None:
        raise QuellError("--noise-share needs --step-seconds and --parameters as well")
    return costs.TimeLimit.of_share(share, step_seconds, parameters, device)


def _print_choices(steps: int, setup: Setup, as_json: bool) -> None:
    with _progress() as advance:
        choices = questions.choices_for_steps(steps, setup, advance)
    if as_json:
        keys = ("epochs", "batch_size")
        _print_json(
            [
                {
                    **{key: getattr(choice.setup, key) for key in keys},
                    "mechanism": choice.mechanism.name,
                    "sampling": choice.mechanism.sampling,
                    "noise_per_example": choice.noise_per_example,
                }
                for choice in choices
            ]
        )
        return
    console.print(report.choices_table(choices))
    best = min(choices, key=lambda choice: choice.noise_per_example)
    console.print(
        f"Of these, {best.setup.epochs} epochs with batches of {best.setup.batch_size:,} leave the least error per "
        "example seen (estimates: plan that run to certify it).",
        highlight=False,
    )


def _sweep(name: str, text: str) -> list[float]:
    """'2,4,8' or 'start:stop:count' (evenly spaced, ends included)."""
    try:
        if ":" in text:
            start, stop, count = text.split(":")
            first, last, points = float(start), float(stop), int(count)
            if points < 2:
                raise ValueError
            values = [first + (last - first) * i / (points - 1) for i in range(points)]
            whole = name in ("bands", "buffers", HORIZON)
            return list(dict.fromkeys(round(value) for value in values)) if whole else values
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise QuellError(f"--{name} {text!r} is not a sweep: write 2,4,8 or start:stop:count") from None


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


class _Count(ProgressColumn):
    """So many of so many, once it is known how many there are."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error that disappears when done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        _Count(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("pricing", total=None)
        with listening(lambda text: bar.update(task, description=text)):
            yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
