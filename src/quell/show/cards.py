"""A plan in four cards: how much less noise, what is promised, what it costs, and how it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quell.errors import at_least
from quell.show import words
from quell.strategy import INDEPENDENT

if TYPE_CHECKING:
    from quell.planning import Plan
    from quell.planning.questions import Answers


class Card(NamedTuple):
    """A fact to be seen at a glance: what it is about, the fact in two to five words, and what belongs to it."""

    title: str
    value: str
    note: str


def headline(plan: Plan) -> str:
    """What to use, in one sentence."""
    chosen = plan.mechanism
    name = "DP-SGD" if chosen.family is INDEPENDENT else words.label(chosen)
    return f"Use {name} with {chosen.sampling} sampling and noise multiplier {words.noise(chosen.noise_multiplier)}."


def cards(plan: Plan, answers: Answers) -> list[Card]:
    """The four cards of a plan."""
    chosen, guarantee, unit = plan.mechanism, plan.mechanism.guarantee, plan.run.promise.unit
    protected = words.whom(plan.run.drawn, unit)
    promised = f"ε = {at_least(guarantee.epsilon)}, δ = {words.number(guarantee.delta)}"
    return [
        Card("Noise", *_gain(plan, answers)),
        Card("Promise", promised, f"per {protected}, with batches by {guarantee.sampling} sampling"),
        Card("Cost", words.copies(chosen.buffers), f"{words.counted(chosen.draws, 'noise vector')} per step"),
        Card("Proof", "certified", words.certified_by(guarantee)),
    ]


def _gain(plan: Plan, answers: Answers) -> tuple[str, str]:
    chosen, gain = plan.mechanism, answers.dpsgd.rmse / plan.mechanism.rmse
    if chosen.family is INDEPENDENT:
        searched = len(plan.alternatives) > 1
        return "that of DP-SGD", "nothing within your limits does better here" if searched else "independent noise"
    if gain < words.NOTABLE:
        return "no less than DP-SGD's", "by RMSE at the same promise"
    needed = words.equal_epsilon(answers)
    about = "~" if answers.dpsgd_is_estimated else ""
    return f"{about}{words.times(gain)}× less", f"than DP-SGD (by RMSE), which would need ε = {needed}"
