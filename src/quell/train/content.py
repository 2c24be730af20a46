"""What a comparison found, as plain data: for `--json`, the table, the picture and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quell.planning.curves import error_curve
from quell.show import tables, words
from quell.show.outcomes import training, training_lines, training_notes, verdict
from quell.show.page import write
from quell.show.page.document import assemble
from quell.show.statement import promised
from quell.strategy import INDEPENDENT
from quell.train import counting
from quell.train.comparison import Outcome, Setting

_KINDS = {"not private": "frontier", "DP-SGD": "dpsgd", "planned": "recommended"}  # of the page's style


def content_of(title: str, recipe: Setting, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Rows, curves and sentences of a comparison (documented in docs/json.md)."""
    finals = {outcome.arm.name: outcome.finals for outcome in outcomes}
    both = {"planned", "DP-SGD"} <= finals.keys()
    return {
        "title": title,
        "setup": training(recipe.run, len(outcomes) > 1, recipe.data.columns is not None, recipe.data.parts),
        "verdict": verdict(finals["planned"], finals["DP-SGD"]) if both else None,
        "notes": notes_of(recipe, outcomes),
        "promise": words.promise(replace(recipe.plan.mechanism.guarantee, epsilon=recipe.run.epsilon))
        + (", the search for a learning rate included" if recipe.search is not None else ""),
        "explained": _explained(recipe, outcomes[-1]),
        "arms": [_arm(recipe, outcome) for outcome in outcomes],
    }


def _explained(recipe: Setting, planned: Outcome) -> dict[str, str]:
    """The promise for people who do not read formulas; nothing where a seed voids it."""
    report = planned.runs[0].report
    if recipe.seed is not None or report is None:
        return {}
    return promised(report.epsilon_at_the_end, report.delta, recipe.run.promise.unit, report.meaning)


def notes_of(recipe: Setting, outcomes: Sequence[Outcome]) -> list[str]:
    """What the promise covers beside the model, and what it does not cover."""
    last, tests = recipe.epsilon_of_accuracy(recipe.plan.epochs - 1), len(recipe.data.test)
    run = recipe.run
    too_likely = [] if run.examples is None else words.too_likely(run.delta, run.examples, run.drawn)
    return too_likely + training_notes(
        seeded=recipe.seed is not None,
        compared=len(outcomes) > 1,
        runs=len(outcomes[0].runs),
        validation=len(recipe.data.validation) if recipe.search is not None else 0,
        test=tests,
        points=100 * counting.deviation(last) / tests,
        table=recipe.data.columns is not None,
    )


def write_page(content: dict[str, Any], path: Path) -> None:
    """One HTML file that needs no network."""
    table = tables.text_of(tables.training_table(content["arms"]))
    text = "\n".join([content["setup"], table, *training_lines(content), *content["explained"].values()])
    write(assemble(content["title"], "training.html", ("charts.js", "training.js"), content, text).html, path)


def _arm(recipe: Setting, outcome: Outcome) -> dict[str, Any]:
    mechanism = outcome.arm.mechanism
    spread = "" if outcome.deviation is None else f" ± {100 * outcome.deviation:.1f}"
    row: dict[str, Any] = {"name": outcome.arm.name, "mechanism": "no noise", "batches": "shuffled"}
    row |= {"sigma": "–", "rmse": "–", "noise": None}
    if mechanism is not None:
        row |= {
            "mechanism": "independent noise" if mechanism.family is INDEPENDENT else words.label(mechanism),
            "batches": mechanism.sampling,
            "sigma": words.noise(mechanism.noise_multiplier),
            "rmse": words.amount(mechanism.rmse),
            "noise": error_curve(mechanism, recipe.plan.run.workload),
        }
    return row | {
        "learning_rate": outcome.rates,
        "accuracy": f"{100 * outcome.mean:.1f}%{spread}",
        "kind": _KINDS[outcome.arm.name],
        "finals": outcome.finals,
        "searched": {f"{rate:g}": value for rate, value in outcome.searched.items()},
        "accuracies": [run.accuracies for run in outcome.runs],
        "curve": outcome.curve,
    }
