"""What a plan's page says, as plain data: cards, sentences, a table, curves and the privacy statement.

Everything here is text or numbers; how it looks is decided by the template. Text is inserted into the page as text,
never as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quell.errors import at_least
from quell.run import OBJECTIVES
from quell.show import words
from quell.show.cards import cards, headline
from quell.show.legend import letters
from quell.show.lines import python_lines
from quell.show.page.reading import command, glossary, scale
from quell.show.statement import privacy_statement

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan
    from quell.planning.curves import Curves
    from quell.planning.questions import Answers
    from quell.run import Run

_ERRORS = ("training", "rmse", "maxse")  # shown beside the one that the plan minimised, which comes first


def plan_content(
    plan: Plan, answers: Answers, curves: dict[int, Curves], brief: bool, preview: bool = False
) -> dict[str, Any]:
    """A plan's page as plain data, ready for JSON.

    Args:
        plan: The plan.
        answers: What was asked about it (`quell.planning.questions.answers`).
        curves: The curves and the plan file of every alternative and of `answers.dpsgd`, by the mechanism's `id`.
        brief: Only the recommendation, not the whole explanation.
        preview: Whether a search is still running, so that the recommendation is not the final one.
    """
    shown, run = plan.alternatives, plan.run
    place = {id(mechanism): index for index, mechanism in enumerate(shown)}

    def row(mechanism: Mechanism) -> dict[str, Any]:
        return {**_row(plan, mechanism, answers), **curves[id(mechanism)]}

    return {
        "setup": words.describe_run(run),
        "preview": preview,
        "headline": headline(plan),
        "cards": [card._asdict() for card in cards(plan, answers)],
        "scale": scale(run.epsilon),
        "why": [words.recommendation(plan, answers)] if brief else words.explanation(plan, answers),
        "legend": [(letter, full) for letter, (_, full) in letters(shown).items()],
        "terms": glossary(plan),
        "errors": [OBJECTIVES[name].column for name in _errors(run)],
        "notes": words.notes(run),
        "privacy": [{"title": title, "text": text} for title, text in privacy_statement(plan, answers.meaning).items()],
        "promise": words.level(run.epsilon, run.delta),
        "delta": words.number(run.delta),
        "python": "\n".join(python_lines("plan.json", run.user_level)),
        "steps": run.steps,
        "lower_bound": answers.lower_bound,
        "recommended": place[id(plan.mechanism)],
        "frontier": [place[id(mechanism)] for mechanism in answers.rmse_frontier],
        "baseline": row(answers.dpsgd),
        "baseline_estimated": answers.dpsgd_is_estimated,
        "mechanisms": [row(mechanism) for mechanism in shown],
    }


def _errors(run: Run) -> list[str]:
    """The objectives that are shown, first the one that rows are sorted by."""
    return list(dict.fromkeys([run.objective, *_ERRORS]))


def _row(plan: Plan, mechanism: Mechanism, answers: Answers) -> dict[str, Any]:
    """The numbers of one mechanism's row, and what lies behind them."""
    estimated = not mechanism.certified
    about = "~" if estimated or answers.dpsgd_is_estimated else ""
    noise = words.noise(mechanism.noise_multiplier)
    shown = _errors(plan.run)
    return {
        "label": words.label(mechanism),
        "family": mechanism.name,
        "sigma": noise,
        "rmse": mechanism.rmse,
        "unit_rmse": mechanism.unit_error.rmse,
        "buffers": mechanism.buffers,
        "sampling": mechanism.sampling,
        "certified": mechanism.certified,
        "fits": plan.run.limits.fits(mechanism),
        "cells": {
            "σ": words.noise(mechanism.noise_multiplier, estimated),
            **{OBJECTIVES[name].column: words.amount(mechanism.score(name)) for name in shown},
            "gain": f"{about}{words.times(answers.dpsgd.rmse / mechanism.rmse)}×",
            "mem": f"{mechanism.buffers:,}",
            "draws": f"{mechanism.draws:,}",
            "batches": mechanism.sampling,
            "noise is": "certified ✓" if mechanism.certified else "estimated",
        },
        "cost": f"{words.copies(mechanism.buffers)}, {words.counted(mechanism.draws, 'noise vector')} per step",
        "scores": {OBJECTIVES[name].column: mechanism.score(name) for name in shown},
        "details": words.details(plan.run, mechanism) if mechanism.certified else [words.estimated(mechanism.claim)],  # type: ignore[arg-type]
        "command": command(plan.run, mechanism),
        "planned": {"sigma": float(noise), "epsilon": float(at_least(mechanism.claim.epsilon, 4))},
    }
