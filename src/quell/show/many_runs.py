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

_FIXED = "plans fixed in advance"
_FREE = "plans chosen with earlier results in view"


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
        f"{words.counted(spent.runs, 'run')} together: {_epsilon(used)} at δ = {words.number(spent.delta)} per "
        f"{allowed.unit}{share}, for {decisive}.",
        f"For {other}: {_epsilon(counted[other])}. Adding up promises: {_epsilon(spent.naive_epsilon)} at δ = "
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
