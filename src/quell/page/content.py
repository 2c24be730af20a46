"""What the page says about a plan, as plain data: sentences, a table, curves and the privacy statement.

Everything here is text or numbers; how it looks is the template's business. Text is inserted into the page as text,
never as markup.
"""

from __future__ import annotations

from typing import Any

from quell.errors import at_least
from quell.mechanism import Mechanism
from quell.page.curves import cancellation_curves, epsilon_curve, error_curve
from quell.planning import Plan
from quell.privacy import Guarantee
from quell.report import details, label, recommendation
from quell.sampling import Cyclic
from quell.search import pareto

_BATCHES = {
    "cyclic": "Batches are fixed: the same ones in the same order in every epoch.",
    "balls_in_bins": "Every example is put into one batch of the epoch at random, once, and stays there.",
    "poisson": "At every step each example joins the batch by its own random coin, independently of all others.",
    "cyclic_poisson": "Every example belongs to one group; groups take turns, and members join by their own coin.",
    "b_min_sep": "Each example joins by its own random coin, after a fixed pause since it was last used.",
}
_NEIGHBOURS = {
    "zero-out": "The comparison is with the same run in which this one example's gradient is set to zero (zero-out).",
    "add-remove": "The comparison is with the same run on the data without this one example (add-remove).",
}


def content_of(plan: Plan, thorough: bool = True) -> dict[str, Any]:
    """The page's data, ready for JSON.

    `thorough` adds what takes seconds: what would change the answer, and ε for other noise under amplification.
    """
    setup, problem, shown = plan.setup, plan.problem, plan.alternatives
    recommended = _place(shown, plan.mechanism)
    return {
        "setup": f"{setup.examples:,} examples, batches of {setup.batch_size:,}, {setup.epochs:,} epochs: "
        f"{setup.steps:,} steps. Target: ({setup.epsilon:g}, {setup.delta:g})-differential privacy.",
        "recommendation": (plan.explain() if thorough else recommendation(plan)).splitlines(),
        "notes": [f"{note}." for note in setup.notes],
        "privacy": privacy_statement(plan),
        "steps": setup.steps,
        "lower_bound": problem.lower_bound,
        "recommended": recommended,
        "frontier": [_place(shown, mechanism) for mechanism in pareto(shown, "rmse")],
        "baseline": _row(plan, problem.dpsgd, False),
        "baseline_estimated": problem.dpsgd.sampling != Cyclic.name,  # without amplification estimates are exact
        "mechanisms": [
            _row(plan, mechanism, thorough and index == recommended) for index, mechanism in enumerate(shown)
        ],
    }


def privacy_statement(plan: Plan) -> list[dict[str, str]]:
    """What is promised, to whom, and on which conditions, for someone who does not read formulas."""
    guarantee, unit = plan.mechanism.guarantee, plan.problem.unit
    epsilon, delta = at_least(guarantee.epsilon), at_least(guarantee.delta)
    hidden = "the secret key of the noise and the gradients before noise is added"
    if guarantee.sampling != Cyclic.name:
        hidden += ", and which examples were in which batch"
    statement = {
        "The promise": "Whatever anyone concludes from the trained model, they would have concluded almost the same "
        f"without any one {unit}: no conclusion becomes more or less likely by more than a factor e^ε, ε = {epsilon}, "
        f"except with probability δ = {delta}.",
        "Who is protected": _protected(plan),
        "How batches must be formed": f"{_batches(plan)} The promise is void for batches formed in another way. "
        f"(Scheme: {guarantee.sampling}.)",
        "What an adversary may see": "Every noisy update and every intermediate model, this plan, the code, and all "
        "other examples.",
        "What must stay hidden": f"From everyone who should learn nothing: {hidden}.",
        "What training must do": f"Clip what each {unit} contributes to a step, and add the planned noise to every "
        f"step: noise multiplier {at_least(plan.mechanism.noise_multiplier)} times the clip norm, correlated "
        f"as {label(plan.mechanism)} prescribes. quell verify recomputes these numbers from a saved plan.",
        "How it is known": _proof(guarantee),
        "What is not covered": f"Groups of {unit}s, choices made by looking at the private data (such as tuned "
        "learning rates), and what the data as a whole reveal about anyone, in it or not.",
    }
    return [{"title": title, "text": text} for title, text in statement.items()]


def _protected(plan: Plan) -> str:
    neighbours, pattern = _NEIGHBOURS[plan.mechanism.guarantee.adjacency], plan.problem.cycle.participation
    if not plan.setup.user_level:
        return f"Each single example. {neighbours} A person who contributed several examples is protected less."
    return (
        f"Each single user, with all their examples, as long as these take part in at most {pattern.count:,} steps "
        f"that are at least {pattern.separation:,} apart. {neighbours.replace('example', 'user')}"
    )


def _batches(plan: Plan) -> str:
    if plan.setup.user_level:
        return "In any way that keeps every user's steps as few and as far apart as stated."
    return _BATCHES[plan.mechanism.guarantee.sampling]


def _place(mechanisms: tuple[Mechanism, ...], wanted: Mechanism) -> int:
    return next(index for index, mechanism in enumerate(mechanisms) if mechanism is wanted)


def _proof(guarantee: Guarantee) -> str:
    text = f"By the {guarantee.method}, with {guarantee.sensitivity.kind} sensitivity."
    if guarantee.failure_probability:
        text += (
            f" Random draws of the accountant may mislead it with probability {guarantee.failure_probability:.1g}; "
            "that is already part of δ."
        )
    return text


def _row(plan: Plan, mechanism: Mechanism, with_estimates: bool) -> dict[str, Any]:
    """One mechanism: the numbers of its table row, and its curves."""
    problem = plan.problem
    return {
        "label": label(mechanism),
        "family": mechanism.name,
        "sigma": at_least(mechanism.noise_multiplier, 4),
        "rmse": mechanism.rmse,
        "maxse": mechanism.maxse,
        "gain": problem.dpsgd.rmse / mechanism.rmse,
        "gap": mechanism.rmse / problem.lower_bound,
        "buffers": mechanism.buffers,
        "draws": mechanism.draws,
        "sampling": mechanism.sampling,
        "certified": mechanism.certified,
        "fits": plan.setup.fits(mechanism),
        "details": details(problem, mechanism).splitlines() if mechanism.certified else [f"{mechanism.claim}."],
        "planned": {
            "sigma": float(at_least(mechanism.noise_multiplier, 5)),
            "epsilon": float(at_least(mechanism.claim.epsilon, 5)),
        },
        "error": error_curve(mechanism, problem.workload),
        "cancellation": cancellation_curves(mechanism.strategy, problem.workload),
        "epsilon": epsilon_curve(problem, mechanism, with_estimates),
    }
