"""What a comparison found: a table, a picture, a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from quell.errors import QuellError, at_least
from quell.mechanism import Mechanism
from quell.page.curves import error_curve
from quell.page.document import assemble
from quell.planning import Plan
from quell.report import label, new_figure, save_figure
from quell.trial.comparison import Outcome, Recipe

_COLOURS = {"not private": "#5a626c", "DP-SGD": "#b3341c", "planned": "#1f6f43"}
_KINDS = {"not private": "frontier", "DP-SGD": "dpsgd", "planned": "recommended"}  # of the page's style
_NOISE_TITLE = "Noise in the model after each step"


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row per way of training."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("training", "mechanism", "batches"):
        found.add_column(title, no_wrap=True)
    for title in ("σ", "lr", "accuracy"):
        found.add_column(title, justify="right", no_wrap=True)
    for row in rows(outcomes):
        style = "bold green" if row["name"] == "planned" else None
        found.add_row(*(row[key] for key in _COLUMNS), style=style)
    return found


_COLUMNS = ("name", "mechanism", "batches", "sigma", "learning_rate", "accuracy")


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """The table as text."""
    found = []
    for outcome in outcomes:
        mechanism = outcome.arm.mechanism
        spread = "" if outcome.deviation is None else f" ± {100 * outcome.deviation:.1f}"
        found.append(
            {
                "name": outcome.arm.name,
                "mechanism": "no noise" if mechanism is None else _short(mechanism),
                "batches": "shuffled" if mechanism is None else mechanism.guarantee.sampling,
                "sigma": "–" if mechanism is None else at_least(mechanism.noise_multiplier, 4),
                "rmse": "–" if mechanism is None else f"{mechanism.rmse:.4g}",
                "learning_rate": f"{outcome.learning_rate:.3g}",
                "accuracy": f"{100 * outcome.mean:.1f}%{spread}",
            }
        )
    return found


def verdict(outcomes: Sequence[Outcome]) -> str | None:
    """Planned against DP-SGD, with as much confidence as the runs support; None where there is nothing to compare."""
    by_name = {outcome.arm.name: outcome for outcome in outcomes}
    if not {"planned", "DP-SGD"} <= by_name.keys():
        return None
    planned, dpsgd = by_name["planned"], by_name["DP-SGD"]
    margin = 100 * (planned.mean - dpsgd.mean)
    if len(planned.runs) == 1:
        how = "in one run each, which shows little: use --runs 3"
    elif min(planned.finals) > max(dpsgd.finals):
        how = "every planned run above every DP-SGD run"
    elif max(planned.finals) < min(dpsgd.finals):
        how = "every planned run below every DP-SGD run"
    else:
        how = "but the runs overlap, so this may be chance"
    return f"At the same (ε, δ) the planned mechanism is {margin:+.1f} points from DP-SGD ({how})."


def notes(recipe: Recipe, outcomes: Sequence[Outcome]) -> list[str]:
    """What the promise does not cover."""
    found = []
    if recipe.seed is not None:
        found.append("A seed makes the runs repeatable and voids their privacy: leave it out for data that matters.")
    elif len(outcomes) > 1 or len(outcomes[0].runs) > 1:
        found.append("The promise is that of one planned run; each further run that you publish spends as much again.")
    if outcomes[0].searched:
        held = len(recipe.data.validation)
        found.append(
            f"Learning rates were chosen on {held:,} examples held out from training, from the same grid for all; that "
            "choice is outside the promise (--lr avoids it)."
        )
    if not recipe.data.own_test:
        found.append(f"Accuracy is that on {len(recipe.data.test):,} examples held out from the file.")
    return found


def content(recipe: Recipe, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All of it as plain data: for `--json` and the page."""
    setup = recipe.plan.setup
    series = []
    for outcome, row in zip(outcomes, rows(outcomes), strict=True):
        mechanism = outcome.arm.mechanism
        series.append(
            {
                **row,
                "kind": _KINDS[outcome.arm.name],
                "finals": outcome.finals,
                "searched": {f"{rate:g}": value for rate, value in outcome.searched.items()},
                "accuracies": [run.accuracies for run in outcome.runs],
                "curve": outcome.curve,
                "noise": None if mechanism is None else _noise(recipe.plan, mechanism),
            }
        )
    return {
        "setup": f"{setup.examples:,} training examples, batches of {setup.batch_size:,}, {setup.epochs} epochs, "
        f"momentum {setup.momentum:g}; private rows promise ({setup.epsilon:g}, {setup.delta:g})-DP",
        "verdict": verdict(outcomes),
        "notes": notes(recipe, outcomes),
        "promise": str(recipe.plan.mechanism.guarantee),
        "arms": series,
    }


def draw(recipe: Recipe, outcomes: Sequence[Outcome], path: str | Path) -> None:
    """Noise and accuracy side by side: every run thin, their mean thick."""
    figure = new_figure(11, 4.5)
    noise, accuracy = figure.subplots(1, 2)
    for outcome in outcomes:
        name, colour = outcome.arm.name, _COLOURS[outcome.arm.name]
        epochs = range(1, recipe.plan.epochs + 1)
        for run in outcome.runs:
            accuracy.plot(epochs, [100 * value for value in run.accuracies], color=colour, alpha=0.3, linewidth=1)
        means = [100 * value for value in outcome.curve]
        accuracy.plot(epochs, means, color=colour, marker="o", markersize=3, label=name)
        if outcome.arm.mechanism is not None:
            curve = _noise(recipe.plan, outcome.arm.mechanism)
            noise.plot(curve["x"], curve["y"], color=colour, label=f"{name}: {label(outcome.arm.mechanism)}")
    noise.set(title=_NOISE_TITLE, xlabel="step", ylabel="standard deviation / (lr · clip norm)", yscale="log")
    accuracy.set(title="Test accuracy", xlabel="epoch", ylabel="%")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    for axes in (noise, accuracy):
        axes.legend(fontsize="small")
    figure.suptitle(content(recipe, outcomes)["setup"], fontsize="medium")
    save_figure(figure, path)


def write_page(recipe: Recipe, outcomes: Sequence[Outcome], path: str | Path) -> None:
    """One HTML file that needs no network."""
    text = io.StringIO()
    Console(width=120, file=text).print(table(outcomes))
    scripts = ("charts.js", "training.js")
    page = assemble("Quell training", "training.html", scripts, content(recipe, outcomes), text.getvalue())
    try:
        Path(path).write_text(page.html, encoding="utf-8")
    except OSError as problem:
        raise QuellError(f"cannot write the page to {path}: {problem.strerror}") from problem


def _noise(plan: Plan, mechanism: Mechanism) -> dict[str, list[float]]:
    return error_curve(mechanism, plan.problem.workload)


def _short(mechanism: Mechanism) -> str:
    return "independent noise" if mechanism.name == "identity" else label(mechanism)
