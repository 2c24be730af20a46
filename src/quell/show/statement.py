"""The promise in full: a page's privacy statement, and the privacy report of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quell.errors import at_least
from quell.schemes import SCHEMES
from quell.show import words

if TYPE_CHECKING:
    from quell.adapters.report import PrivacyReport
    from quell.planning import Plan
    from quell.privacy import Meaning

_NEIGHBOURS = {
    "zero-out": "The comparison is with the same run in which this one {unit}'s gradients are set to zero (zero-out).",
    "add-remove": "The comparison is with the same run on the data without this one {unit} (add-remove).",
}


_HIDDEN = "What must stay hidden"


def hidden(sampling: str, unit: str) -> str:
    """What nobody may see who should learn nothing, where batches are drawn of `unit`."""
    secret = f", and which {unit}s were in which batch" if SCHEMES[sampling].amplifies else ""
    return (
        f"The secret key of the noise and the gradients before noise is added{secret}: from everyone who should learn "
        "nothing."
    )


def promised(epsilon: float, delta: float, unit: str, meaning: Meaning | None) -> dict[str, str]:
    """What a promise says about any one unit, and what it means to an attacker, where that was asked."""
    return {
        "The promise": "Whatever anyone concludes from the trained model, they would have concluded almost the same "
        f"without any one {unit}: no conclusion becomes more or less likely by more than a factor e^ε, "
        f"ε = {at_least(epsilon)}, except with probability δ = {words.number(delta)}.",
        **({} if meaning is None else {"What an attacker can find out": words.attacker(meaning, unit)}),
    }


def privacy_statement(plan: Plan, meaning: Meaning | None = None) -> dict[str, str]:
    """What is promised, to whom, and on which conditions, for someone who does not read formulas.

    `meaning` is what the best attacker can find out, where it was asked.
    """
    guarantee, unit, pattern = plan.mechanism.guarantee, plan.run.promise.unit, plan.run.participation
    neighbours = _NEIGHBOURS[guarantee.adjacency].format(unit=unit)
    formed = plan.mechanism.scheme.words.format(unit=plan.run.drawn)
    if plan.run.own_pattern:
        protected = (
            f"Each single user, with all their examples, as long as these take part in at most {pattern.count:,} steps "
            f"that are at least {pattern.separation:,} apart. {neighbours}"
        )
        formed = "In any way that keeps every user's steps as few and as far apart as stated."
    elif plan.run.drawn == "group":
        protected = (
            "Each single user, with all their examples, also those that they share with others. The comparison is with "
            "the same run in which the gradients of all of these are set to zero. Which examples there are, and who "
            "owns which, is public: nothing is promised about that."
        )
        formed += " A group is all users who own the same examples, and everyone is in one group at most."
    elif plan.run.user_level:
        protected = f"Each single user, with all their examples, however many these are. {neighbours}"
    else:
        protected = f"Each single example. {neighbours} A person who contributed several examples is protected less."
    return {
        **promised(guarantee.epsilon, guarantee.delta, unit, meaning),
        "Who is protected": protected,
        "How batches must be formed": f"{formed} The promise is void for batches formed in another way. "
        f"(Scheme: {guarantee.sampling}.)",
        "What an adversary may see": "Every noisy update and every intermediate model, this plan, the code, and all "
        f"{'other examples' if unit == 'example' else 'data of other users'}.",
        _HIDDEN: hidden(guarantee.sampling, plan.run.drawn),
        "What training must do": f"Clip what each {unit} contributes to a step, and add the planned noise to every "
        f"step: noise multiplier {words.noise(plan.mechanism.noise_multiplier)} times the clip norm, correlated as "
        f"{words.label(plan.mechanism)} prescribes. quell verify recomputes these numbers from a saved plan.",
        "How it is known": words.proof(guarantee),
        "What is not covered": f"Groups of {unit}s, choices made by looking at the private data (such as tuned "
        "learning rates), and what the data as a whole reveal about anyone, in it or not.",
    }


def assumption(sampling: str, unit: str) -> str:
    """How batches are formed, and whether that must stay secret."""
    kind = SCHEMES[sampling]
    secret = "Who was in which batch stays secret." if kind.amplifies else "Nothing about them has to stay secret."
    return f"{kind.words.format(unit=unit)} {secret}"


def report_markdown(report: PrivacyReport) -> str:
    """A privacy report as Markdown."""
    end, spent = at_least(report.epsilon_at_the_end), at_least(report.epsilon_so_far)
    delta, chance = words.number(report.delta), report.failure_probability
    unit = "example" if report.drawn == "example" else "user"
    clipped = "is clipped to" if report.clipped else "must be clipped by the training loop, which nothing checks, to"
    warning = " ".join([words.SEEDED] * report.seeded + words.too_likely(report.delta, report.examples, report.drawn))
    rows = {
        "promise at the end": f"({end}, {delta})-DP after {report.steps:,} steps",
        "spent so far": f"ε = {spent} at δ = {delta} after {report.steps_done:,} steps ({report.epsilon_so_far_is})",
        "unit of privacy": report.unit,
        "neighbours": report.adjacency,
        "sampling": f"{report.sampling}. {report.sampling_assumption}",
        "mechanism": f"{report.mechanism}, noise multiplier {words.noise(report.noise_multiplier)}",
        "clipping": f"what {report.unit} adds to a step {clipped} norm {report.max_grad_norm:g}; sums are divided "
        f"by {report.expected_batch_size:g}",
        "best attack": words.attacker(report.meaning, unit),
        _HIDDEN.lower(): hidden(report.sampling, report.drawn),
        "bound": report.bound + (f" ({words.failure(chance)})" if chance else ""),
        "key": report.key,
        "random generator": report.generator,
        "versions": ", ".join(f"{name} {number}" for name, number in report.versions.items()),
    }
    if report.search is not None:
        rows = {"search": report.search, **rows}
    if warning:
        rows = {"warning": warning, **rows}
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["# Privacy report", "", "| | |", "|---|---|", *lines, ""])
