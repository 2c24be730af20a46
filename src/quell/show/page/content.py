"""What a plan's page says, as plain data: sentences, a table, curves and the privacy statement.

Everything here is text or numbers; how it looks is decided by the template. Text is inserted into the page as text,
never as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quell.errors import at_least
from quell.show import words
from quell.show.legend import legend
from quell.show.statement import privacy_statement

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan
    from quell.planning.curves import Curves
    from quell.planning.questions import Answers


def plan_content(plan: Plan, answers: Answers, curves: dict[int, Curves], brief: bool) -> dict[str, Any]:
    """A plan's page as plain data, ready for JSON.

    Args:
        plan: The plan.
        answers: What was asked about it (`quell.planning.questions.answers`).
        curves: The curves of every alternative and of `answers.dpsgd`, by the mechanism's `id`.
        brief: Only the recommendation, not the whole explanation.
    """
    shown = plan.alternatives
    place = {id(mechanism): index for index, mechanism in enumerate(shown)}

    def row(mechanism: Mechanism) -> dict[str, Any]:
        return {**_row(plan, mechanism, answers), **curves[id(mechanism)]}

    return {
        "setup": words.describe_run(plan.run),
        "recommendation": [words.recommendation(plan, answers)] if brief else words.explanation(plan, answers),
        "legend": legend(shown, objective=plan.run.objective),
        "notes": words.notes(plan.run),
        "privacy": [{"title": title, "text": text} for title, text in privacy_statement(plan, answers.meaning).items()],
        "steps": plan.run.steps,
        "lower_bound": answers.lower_bound,
        "recommended": place[id(plan.mechanism)],
        "frontier": [place[id(mechanism)] for mechanism in answers.rmse_frontier],
        "baseline": row(answers.dpsgd),
        "baseline_estimated": answers.dpsgd_is_estimated,
        "mechanisms": [row(mechanism) for mechanism in shown],
    }


def _row(plan: Plan, mechanism: Mechanism, answers: Answers) -> dict[str, Any]:
    """The numbers of one mechanism's row, and what lies behind them."""
    return {
        "label": words.label(mechanism),
        "family": mechanism.name,
        "sigma": words.noise(mechanism.noise_multiplier),
        "rmse": mechanism.rmse,
        "maxse": mechanism.maxse,
        "training": mechanism.training,
        "gain": answers.dpsgd.rmse / mechanism.rmse,
        "buffers": mechanism.buffers,
        "draws": mechanism.draws,
        "sampling": mechanism.sampling,
        "certified": mechanism.certified,
        "fits": plan.run.limits.fits(mechanism),
        "details": words.details(plan.run, mechanism) if mechanism.certified else [words.estimated(mechanism.claim)],  # type: ignore[arg-type]
        "planned": {
            "sigma": float(at_least(mechanism.noise_multiplier, 5)),
            "epsilon": float(at_least(mechanism.claim.epsilon, 5)),
        },
    }
