"""Plans and comparisons for people: tables, sentences and plots."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quell.errors import QuellError, at_least
from quell.mechanism import Mechanism, Problem
from quell.planning import Plan, fits
from quell.verification import Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def mechanism_table(problem: Problem, mechanisms: Sequence[Mechanism], plan: Plan | None = None) -> Table:
    """One row per mechanism; the recommended one of a plan is marked, those beyond its limits are dimmed."""
    table = Table(
        box=box.SIMPLE_HEAD,
        caption="σ: noise multiplier. RMSE, MaxSE: error of the model's iterates per unit of clip norm. "
        "gain: DP-SGD's RMSE over this one. gap: this RMSE over the lower bound. buffers: model-sized vectors kept. "
        "draws: noise vectors made per step. p: bands, d: buffers. *: columns normalised.",
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    table.add_column("mechanism", no_wrap=True)
    for title in ("σ", "RMSE", "MaxSE", "gain", "gap", "buffers", "draws"):
        table.add_column(title, justify="right", no_wrap=True, min_width=max(len(title), 5))
    for index, mechanism in enumerate(mechanisms):
        chosen = plan is not None and index == plan.recommended
        style = "bold green" if chosen else ("dim" if plan is not None and not fits(plan.setup, mechanism) else None)
        table.add_row(
            ("➤ " if chosen else "  ") + label(mechanism),
            at_least(mechanism.noise_multiplier, 4),
            f"{mechanism.rmse:.4g}",
            f"{mechanism.maxse:.4g}",
            f"{problem.dpsgd.rmse / mechanism.rmse:.3g}×",
            f"{mechanism.rmse / problem.lower_bound:.3g}×",
            f"{mechanism.buffers:,}",
            f"{mechanism.draws:,}",
            style=style,
        )
    return table


def label(mechanism: Mechanism) -> str:
    """Family and parameters, short enough for a table."""
    symbols = {"bands": "p", "lambda": "λ", "gamma": "γ", "buffers": "d"}
    parameters = mechanism.strategy.parameters
    shown = {name: value for name, value in parameters.items() if name in symbols and (name, value) != ("lambda", 1.0)}
    settings = [f"{symbols[name]}={value:.4g}" for name, value in shown.items()]
    star = "*" if parameters.get("column_normalise") else ""
    return " ".join([f"{mechanism.name}{' (DP-SGD)' if mechanism.name == 'identity' else ''}{star}", *settings])


def details(problem: Problem, mechanism: Mechanism) -> str:
    """What lies behind one row: sensitivity, guarantee, and how an optimised strategy was found."""
    moved, how = mechanism.guarantee.sensitivity, mechanism.strategy.convergence
    lines = [
        f"Sensitivity {moved.value:.6g} ({moved.kind}; {moved.method}) for {problem.cycle.participation.count} uses "
        f"of an example at least {problem.cycle.separation:,} steps apart.",
        f"Promise: {mechanism.guarantee}.",
    ]
    if how is not None:
        lines.append(
            f"Found in {how.iterations} iterations, largest gradient entry {how.gradient_norm:.1e}, last step gained "
            f"{how.last_improvement:.1e}. {how.reason}"
        )
    return "\n".join(lines)


def recommendation(plan: Plan) -> str:
    """What to use and what it buys, in plain sentences."""
    chosen, problem = plan.mechanism, plan.problem
    gain = problem.dpsgd.rmse / chosen.rmse
    copies = "buffer" if chosen.buffers == 1 else "buffers"
    cost = "no extra memory" if not chosen.buffers else f"{chosen.buffers:,} model-sized {copies}"
    draws = "one noise vector" if chosen.draws == 1 else f"{chosen.draws} noise vectors"
    return (
        f"Use {label(chosen)} with noise multiplier {at_least(chosen.noise_multiplier)}: {gain:.2f} times less error "
        f"than DP-SGD at the same privacy, for {cost} and {draws} per step.\n"
        f"Without amplification no mechanism at all has an RMSE below {problem.lower_bound:.4g}. "
        f"Promise: {chosen.guarantee}."
    )


def plan_text(plan: Plan) -> str:
    """The whole plan as text."""
    text = io.StringIO()
    print_plan(plan, Console(width=120, file=text))
    return text.getvalue()


def print_plan(plan: Plan, console: Console) -> None:
    setup = plan.setup
    console.print(
        f"{setup.examples:,} examples, batches of {setup.batch_size:,}, {setup.epochs} epochs: {setup.steps:,} steps, "
        f"an example at most every {setup.steps_per_epoch:,} steps; target ({setup.epsilon:g}, {setup.delta:g})-DP",
        highlight=False,
    )
    console.print(mechanism_table(plan.problem, plan.mechanisms, plan))
    console.print(recommendation(plan), highlight=False)
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
