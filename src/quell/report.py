"""Plans and comparisons for people: tables, sentences and plots."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quell.errors import QuellError, at_least
from quell.mechanism import Mechanism, Problem
from quell.planning import Plan
from quell.questions import Choice, changes
from quell.sampling import Cyclic
from quell.search import pareto
from quell.strategy import FAMILIES
from quell.strategy.family import DIVERGENCE, HORIZON, known_as
from quell.verification import Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTION = (
    "σ: noise multiplier. RMSE, MaxSE: error of the model's iterates per unit of clip norm. gain: DP-SGD's RMSE, an "
    "estimate under amplification, over this one. mem: model-sized vectors kept. draws: noise vectors made per step."
)
_LETTERS = {
    "bands": "p: bands",
    "buffers": "d: buffers",
    HORIZON: "h: optimised for sums that fade over h steps",
    DIVERGENCE: "R: optimised for balls-in-bins sampling (--divergence R)",
}
_EXPENDABLE = ("draws", "gain", "MaxSE", "train", "sampling", "mem")  # in narrow terminals, first to last
_NOTABLE = 1.01  # the least gain over DP-SGD, an estimate, that is worth a number
_PLAN_CAPTION = " ~: estimated, not certified. ✗: beyond the limits."


def mechanism_table(
    problem: Problem, mechanisms: Sequence[Mechanism], plan: Plan | None = None, width: int = 120
) -> Table:
    """One row per mechanism; the recommended one of a plan is marked, and those beyond its limits.

    Where `width` is too little for all columns the least important are left out: a number is never cut short.
    """
    measure = "maxse" if plan is None or plan.setup.objective == "rmse" else plan.setup.objective
    cells = {
        "mechanism": [f"{_mark(each, plan)} {label(each)}" for each in mechanisms],
        "sampling": [each.sampling for each in mechanisms],
        "σ": [_noise(each) for each in mechanisms],
        "RMSE": [f"{each.rmse:.4g}" for each in mechanisms],
        {"maxse": "MaxSE", "training": "train"}[measure]: [f"{each.score(measure):.4g}" for each in mechanisms],
        "gain": [f"{problem.dpsgd.rmse / each.rmse:.2g}×" for each in mechanisms],
        "mem": [f"{each.buffers:,}" for each in mechanisms],
        "draws": [f"{each.draws:,}" for each in mechanisms],
    }
    widths = {title: max(map(cell_len, (title, *column))) for title, column in cells.items()}
    for title in _EXPENDABLE:
        if sum(widths.values()) + 2 * len(widths) + 1 > width and title in widths:
            del widths[title]
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=_caption(mechanisms, plan),
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    for title, least in widths.items():
        words = title in ("mechanism", "sampling")
        table.add_column(title, justify="left" if words else "right", no_wrap=True, min_width=None if words else least)
    for mechanism, row in zip(mechanisms, zip(*(cells[title] for title in widths), strict=True), strict=True):
        table.add_row(*row, style={"➤": "bold green", "✗": "dim"}.get(_mark(mechanism, plan)))
    return table


def _mark(mechanism: Mechanism, plan: Plan | None) -> str:
    if plan is None or plan.setup.fits(mechanism):
        return "➤" if plan is not None and mechanism is plan.mechanism else " "
    return "✗"


def _caption(mechanisms: Sequence[Mechanism], plan: Plan | None) -> str:
    """What the words and letters of a table mean, those that are in it."""
    letters = [text for name, text in _LETTERS.items() if any(name in each.strategy.parameters for each in mechanisms)]
    shown = [f" {', '.join(letters)}."] if letters else []
    if any(each.strategy.parameters.get("column_normalise") for each in mechanisms):
        shown.append(" *: columns normalised.")
    if plan is not None and plan.setup.objective == "training":
        shown.append(" train: the objective of the plan.")
    return "".join([_CAPTION, *shown, _PLAN_CAPTION if plan is not None else "", _names(mechanisms)])


def _names(mechanisms: Sequence[Mechanism]) -> str:
    """What papers call the mechanisms of a table."""
    shown = [FAMILIES[name] for name in dict.fromkeys(each.name for each in mechanisms) if name != "identity"]
    named = [f"{family.name} is {family.paper}" for family in shown if family.paper]
    return f" In papers {', '.join(named)}." if named else ""


def _noise(mechanism: Mechanism) -> str:
    if mechanism.certified:
        return at_least(mechanism.noise_multiplier, 4)
    return f"~{at_least(mechanism.noise_multiplier, 3)}"


def label(mechanism: Mechanism) -> str:
    """Family and parameters, short enough for a table."""
    symbols = {"bands": "p", "lambda": "λ", "gamma": "γ", "buffers": "d", HORIZON: "h", DIVERGENCE: "R"}
    parameters = mechanism.strategy.parameters
    shown = {name: value for name, value in parameters.items() if name in symbols and (name, value) != ("lambda", 1.0)}
    settings = [
        f"{symbols[name]}={value:.4g}" if isinstance(value, float) else f"{symbols[name]}={value}"
        for name, value in shown.items()
    ]
    star = "*" if parameters.get("column_normalise") else ""
    name = known_as(FAMILIES["identity"]) if mechanism.name == "identity" else mechanism.name
    return " ".join([f"{name}{star}", *settings])


def details(problem: Problem, mechanism: Mechanism) -> str:
    """What lies behind one row: sensitivity, guarantee, and how an optimised strategy was found."""
    moved, how = mechanism.guarantee.sensitivity, mechanism.strategy.convergence
    lines = [
        f"Sensitivity {moved.value:.6g} ({moved.kind}; {moved.method}) for {problem.cycle.participation.count} uses "
        f"of an example at least {problem.cycle.separation:,} steps apart.",
        f"Promise: {problem.promise(mechanism)}.",
    ]
    if how is not None:
        lines.append(
            f"Found in {how.iterations} iterations, largest gradient entry {how.gradient_norm:.1e}, last step gained "
            f"{how.last_improvement:.1e}. {how.reason}"
        )
    return "\n".join(lines)


def recommendation(plan: Plan) -> str:
    """What to use and what it buys, in two plain sentences."""
    chosen, problem = plan.mechanism, plan.problem
    promise = f"({plan.setup.epsilon:g}, {plan.setup.delta:g})-DP"
    if chosen.name == "identity":
        why = (
            "Nothing within your limits does better here."
            if chosen.sampling == Cyclic.name
            else "Nothing within your limits does better here: with so little privacy budget, or so few steps, what "
            "amplification gives independent noise is worth more than cancelling."
        )
        noise = at_least(chosen.noise_multiplier)
        return f"Use DP-SGD with {chosen.sampling} sampling and noise multiplier {noise}. {why}"
    gain = problem.dpsgd.rmse / chosen.rmse
    bought = (
        f"By RMSE it leaves {gain:.3g} times less error in the model than DP-SGD at the same {promise}, as if you had "
        f"trained DP-SGD at ε={_rough(plan.dpsgd_equivalent_epsilon)}."
        if gain >= _NOTABLE
        else f"By RMSE it is {'hardly' if gain > 1 else 'no'} better than DP-SGD at the same {promise}."
    )
    return (
        f"Use {label(chosen)} with {chosen.sampling} sampling and noise multiplier "
        f"{at_least(chosen.noise_multiplier)}: {_cost(chosen)}. {bought}"
    )


def explanation(plan: Plan) -> str:
    """The recommendation, the other choice, what would change the answer, the bound, and the promise."""
    chosen, problem, objective = plan.mechanism, plan.problem, plan.setup.objective
    lines = [recommendation(plan)]
    affordable = [mechanism for mechanism in plan.alternatives if plan.setup.fits(mechanism)]
    other = min(affordable, key=lambda mechanism: mechanism.rmse)
    if objective == "training" and other is not chosen and other.rmse < 0.99 * chosen.rmse:
        cancels = other.buffers > 0 or other.draws > 1
        why = "it cancels more than training tends to like: --objective rmse" if cancels else "--objective rmse"
        lines.append(
            f"By RMSE alone the choice would be {label(other)} with {other.sampling} sampling (RMSE {other.rmse:.4g} "
            f"instead of {chosen.rmse:.4g}); {why}."
        )
    first = min(affordable, key=lambda mechanism: mechanism.score(objective))
    if first is not chosen and not first.certified:
        lines.append(
            f"{label(first)} is estimated {1 - first.score(objective) / chosen.score(objective):.1%} better, less than "
            "an estimate may be off; one mechanism is certified, and the estimates before that favoured this one."
        )
    with_any_memory = replace(plan.setup, memory=None)
    front = pareto([each for each in plan.alternatives if with_any_memory.fits(each)], objective)
    lines.append(
        "Error against memory: "
        + "; ".join(f"{_copies(each.buffers)}: {label(each)} {each.score(objective):.4g}" for each in front)
        + "."
    )
    for change in changes(plan):
        if abs(1 - change.ratio) < 0.005:
            continue
        verb = "lower" if change.ratio < 1 else "raise"
        per = "" if change.what.endswith("memory") else " per example seen"
        lines.append(
            f"With {change.what}, {label(change.mechanism)} ({change.mechanism.sampling}) would {verb} the error{per} "
            f"by {abs(1 - change.ratio):.0%}."
        )
    ratio = chosen.rmse / plan.lower_bound
    where = (
        f"this one is {ratio:.3g} times that" if ratio >= 1 else f"amplification takes this one to {ratio:.3g} of that"
    )
    lines.append(f"Without amplification no mechanism at all has an RMSE below {plan.lower_bound:.4g}; {where}.")
    lines.append(f"Promise: {problem.promise(chosen)}.")
    if chosen.sampling != Cyclic.name:
        lines.append(f"It holds only if batches are formed by {chosen.sampling} sampling, as Quell's loaders do.")
    return "\n".join(lines)


def choices_table(choices: Sequence[Choice]) -> Table:
    """Ways to spend a fixed number of steps."""
    table = Table("epochs", "batch", "mechanism", "sampling", "σ", "error per example seen", box=box.SIMPLE_HEAD)
    least = choices[0].noise_per_example
    for choice in choices:
        table.add_row(
            f"{choice.setup.epochs:,}",
            f"{choice.setup.batch_size:,}",
            label(choice.mechanism),
            choice.mechanism.sampling,
            f"~{at_least(choice.mechanism.noise_multiplier, 4)}",
            f"{choice.noise_per_example / least:.3f} × that of one epoch",
        )
    return table


def _cost(mechanism: Mechanism) -> str:
    memory = "no extra memory" if not mechanism.buffers else f"{_copies(mechanism.buffers)} of memory"
    return f"{memory}, {'one noise vector' if mechanism.draws == 1 else f'{mechanism.draws} noise vectors'} per step"


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _copies(buffers: int) -> str:
    return "1 model copy" if buffers == 1 else f"{buffers:,} model copies"


def _rough(epsilon: float) -> str:
    return f"{epsilon:.3g}" if epsilon < 1000 else "1000 or more"


def plan_html(plan: Plan) -> str:
    """The plan for a notebook."""
    return f"<pre>{html.escape(plan_text(plan))}</pre>"


def plan_text(plan: Plan) -> str:
    """The whole plan as text."""
    text = io.StringIO()
    print_plan(plan, Console(width=120, file=text))
    return text.getvalue()


def print_plan(plan: Plan, console: Console) -> None:
    setup, problem = plan.setup, plan.problem
    uses = (
        f"a user at most {_counted(problem.cycle.participation.count, 'time')}, every "
        f"{_counted(problem.cycle.separation, 'step')}"
        if setup.user_level
        else f"an example at most every {_counted(setup.steps_per_epoch, 'step')}"
    )
    console.print(
        f"{_counted(setup.examples, 'example')}, batches of {setup.batch_size:,}, {_counted(setup.epochs, 'epoch')}: "
        f"{_counted(setup.steps, 'step')}, "
        f"{uses}; target ({setup.epsilon:g}, {setup.delta:g})-DP",
        highlight=False,
    )
    console.print(mechanism_table(problem, plan.alternatives, plan, console.width))
    console.print(plan.explain(), highlight=False)
    for note in setup.notes:
        console.print(f"Note: {note}.", style="yellow", highlight=False)


def check_table(checks: Sequence[Check]) -> Table:
    """The claims that failed, or all of them when none did."""
    false = [check for check in checks if not check.holds]
    table = Table("claim", "stated", "recomputed", "", title="False claims" if false else None)
    for check in false or checks:
        shown = (escape(text) for text in (check.claim, _number(check.stated), _number(check.recomputed)))
        table.add_row(*shown, "ok" if check.holds else "FALSE")
    return table


def plot_sweep(problem: Problem, swept: str, mechanisms: Sequence[Mechanism], path: str | Path) -> None:
    """RMSE and MaxSE of one family against the swept parameter."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    values = [float(m.strategy.parameters[swept]) for m in mechanisms]
    axes.plot(values, [m.rmse for m in mechanisms], marker="o", label="RMSE")
    axes.plot(values, [m.maxse for m in mechanisms], marker="s", label="MaxSE")
    axes.axhline(problem.dpsgd.rmse, color="#cc3311", label="DP-SGD, RMSE")
    axes.axhline(problem.lower_bound, color="#228833", linestyle="--", label="lower bound, RMSE")
    if swept == "bands":
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(swept)
    axes.set_title(
        f"{mechanisms[0].name} at ({problem.epsilon:g}, {problem.delta:g})-DP, {problem.workload.steps:,} steps"
    )
    axes.legend()
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty matplotlib figure, without a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise QuellError("plots need matplotlib: pip install 'quell[plot]'") from missing
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write the figure in the format that the path's extension names."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as problem:
        raise QuellError(
            f"cannot write the plot {path}: {problem}; use a name ending in .png, .svg or .pdf"
        ) from problem


def _number(value: float | str) -> str:
    return f"{value:.8g}" if isinstance(value, float) else str(value)
