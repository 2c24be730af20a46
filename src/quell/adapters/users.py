"""Whose examples are whose in a run that is private per user: the ids that were given, compared with the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quell.adapters.choice import refuse_other_data, refuse_user_level
from quell.errors import QuellError, require_count
from quell.noise import Key
from quell.schemes.randomness import Indices
from quell.schemes.users import UserRows, numbered, shared

if TYPE_CHECKING:
    from quell.planning import Plan


@dataclass(frozen=True, eq=False)
class Owned:
    """The rows that a run's units are made of: at most `most` of each user's at a step."""

    rows: UserRows
    examples: int  # how many rows the data has, also those of nobody
    most: int
    steps_per_turn: int
    name: dict[str, Any]  # what a resumed run must have in common

    def taken(self, users: Indices, step: int) -> Indices:
        """The rows of the users of a step, in blocks of `most`."""
        return self.rows.taken(users, step // self.steps_per_turn, self.most)


def require_planned_units(plan: Plan, users: Any, rows_per_user: int, examples: int | None = None) -> Indices | None:
    """The number of each example's user, None where batches are of examples; refused unless the plan is for them.

    `users` has one id per example; `examples` is how many the data has, where that is known.
    """
    most = require_count("rows_per_user", rows_per_user)
    if plan.run.drawn == "example":
        if users is not None or most > 1:
            raise QuellError(
                "users and rows_per_user are for a plan whose batches are drawn of users, and this plan's are drawn of "
                "examples: make a plan with users= (how many there are) in place of examples="
            )
        refuse_user_level(plan)
        if examples is not None:
            refuse_other_data(plan, examples)
        return None
    if users is None:
        raise QuellError(
            "the plan's promise is per user, but nothing says whose the examples are: pass users= to make_private, or "
            "in JAX to privatize, one id per example; in PyTorch a data set may have an attribute `users` instead"
        )
    numbers = (numbered if plan.run.drawn == "user" else shared)(users)
    if examples is not None and len(numbers) != examples:
        raise QuellError(f"there are {len(numbers):,} ids of users for {examples:,} examples: pass one per example")
    if (found := int(numbers.max(initial=-1)) + 1) != plan.run.examples:
        raise QuellError(
            f"the examples are those of {found:,} {plan.run.drawn}s, but the plan is for {plan.run.examples:,}: make a "
            f"plan with {plan.run.drawn}s={found}"
        )
    return numbers


def owned_rows(numbers: Indices, plan: Plan, rows_per_user: int, key: Key) -> Owned:
    """The rows of a run's users, in an order that the run's key decides."""
    rows = UserRows.of(numbers, key.derive("quell rows of users"))
    name = {"users": rows.digest(key.derive("quell users")), "rows_per_user": rows_per_user}
    return Owned(rows, len(numbers), rows_per_user, plan.run.steps_per_epoch, name)
