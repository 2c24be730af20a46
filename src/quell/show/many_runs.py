"""What people read about several runs on the same data: a budget's sentences and its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from quell.errors import at_least
from quell.show import words

if TYPE_CHECKING:
    from quell.budget import Allowance, Entry, Spent
    from quell.tuning import TuningPlan, Way

_FIXED = "plans fixed in advance"
_FREE = "plans that may depend on earlier results"


def budget_title(allowed: Allowance) -> str:
    return (
        f"{allowed.name}: ε = {at_least(allowed.epsilon)} at δ = {words.number(allowed.delta)} per {allowed.unit}, for "
        f"{_FIXED if allowed.fixed_plans else _FREE}."
    )


def budget_spent(allowed: Allowance, spent: Spent) -> list[str]:
    """What all runs together have spent, in each of the ways of counting."""
    if not spent.runs:
        return ["Nothing is charged."]
    counted = {_FIXED: spent.epsilon, _FREE: spent.adaptive_epsilon}
    decisive = _FIXED if allowed.fixed_plans else _FREE
    other = _FREE if allowed.fixed_plans else _FIXED
    used = counted[decisive]
    left = "the budget is spent" if used >= allowed.epsilon else f"{used / allowed.epsilon:.0%} of the budget"
    share = f" ({left})" if spent.delta == allowed.delta and math.isfinite(used) else ""
    return [
        f"Spent by {words.counted(spent.runs, 'run')}: {_epsilon(used)} at δ = {words.number(spent.delta)} per "
        f"{allowed.unit}{share}, for {decisive}.",
        f"For {other}: {_epsilon(counted[other])}. The sum of all promises: {_epsilon(spent.naive_epsilon)} at δ = "
        f"{words.number(spent.naive_delta)}.",
    ]


def charged(spent: Spent, new: bool) -> str:
    if not new:
        return "This run was charged before, with this plan: it goes on."
    return f"Charged. {words.counted(spent.runs, 'run')} so far."


def budget_table(entries: Sequence[Entry]) -> Table:
    """One row per run."""
    table = Table("charged (UTC)", "run", "mechanism", "promise", "loss", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for entry in entries:
        promise = words.level(entry.epsilon, entry.delta)
        table.add_row(
            entry.when[:16], entry.run, entry.kind, f"{promise} per {entry.unit}", _LOSSES[entry.profile["kind"]]
        )
    return table


_LOSSES = {"gaussian": "Gaussian", "coins": "distribution", "points": "certified points"}


def _epsilon(value: float) -> str:
    return f"ε = {at_least(value, 4)}" if math.isfinite(value) else "no ε is known"


# Searches

_RELEASED = {"all": "all trials"}


def ways_table(ways: Sequence[Way], law: str) -> Table:
    """The ways of making several trials under one promise; marks the one that was chosen."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("number of trials", "may be released"):
        table.add_column(title, no_wrap=True)
    for title in ("trials", "ε of one", "noise", "missed"):
        table.add_column(title, justify="right", no_wrap=True)
    for way in ways:
        cells = (f"{way.trials:g}", f"{way.trial_epsilon:.3g}", f"{way.noise:.2f}×", f"{way.missed:.0%}")
        name = f"{'➤' if way.law == law else ' '} {'fixed' if way.law == 'all' else way.law}"
        style = "bold green" if way.law == law else None
        table.add_row(name, _RELEASED.get(way.law, "the best trial"), *cells, style=style)
    return table


WAYS = (
    "ε of one: the ε of each trial, with fixed batches. noise: a trial's noise divided by that of one run with the "
    "whole promise. missed: the probability that a given setting is never tried."
)


def search_covered(search: TuningPlan) -> str:
    """What the promise of a released trial covers, for its report."""
    if search.law == "all":
        return f"the promise covers {words.counted(int(search.mean), 'run')}, all of which may be released"
    return (
        f"this run is the best of a random number of runs ({search.law}, {search.mean:g} on average), and the "
        "promise covers all of them as long as the others, their scores and their number stay secret. The rates of the "
        "best attack follow from (ε, δ) alone here, and are loose: a single run has tighter ones"
    )


def search_lines(search: TuningPlan) -> list[str]:
    """What each trial does, what the whole search promises, and on which conditions."""
    trials = [
        f"Each trial{'' if len(search.plans) == 1 else f' with batches of {plan.run.batch_size:,}'}: "
        f"{words.label(plan.mechanism)} with {plan.mechanism.sampling} sampling and noise multiplier "
        f"{words.noise(plan.mechanism.noise_multiplier)}."
        for plan in search.plans
    ]
    secret = (
        "Everything may be released, and settings may depend on earlier scores."
        if search.law == "all"
        else "Release only the best trial. The number of trials, their scores and the other models must stay secret, "
        "and settings must be drawn at random."
    )
    return [
        *trials,
        f"The whole search: {words.level(search.epsilon, search.promise.delta)} per {search.claim.unit}, all trials "
        f"included. {secret}",
        "Scores must come from data that the promise does not cover, such as held-out examples.",
    ]
