"""What limits on users cost in data and gain in noise, for a plan whose batches are drawn of users.

A user takes part `epochs` times and brings `rows_per_user` rows each time, so at most the product of the two of the
user's rows is ever seen. Fewer participations need less noise; more rows per step need none. Everything here is
estimated, and is about private data: for whoever plans the run, not for publication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from quell.errors import QuellError, require_count
from quell.participation import Participation
from quell.planning.planner import Plan
from quell.planning.questions import same_kind
from quell.schemes.randomness import Indices

_FACTORS = (0.25, 0.5, 1, 2, 4)  # of the plan's epochs
_ROWS = (1, 4, 16)  # per user and step, beside those that were asked for


@dataclass(frozen=True)
class Limit:
    """So many participations of each user: their noise, their error and the data that they leave unseen.

    `error` is the RMSE per user seen, relative to the plan's own. `seen` is, by rows per user and step, the
    largest share of all rows that can be seen.
    """

    participations: int
    noise_multiplier: float
    error: float
    seen: dict[int, float]


@dataclass(frozen=True)
class UserLimits:
    """What a table of users says about a plan: of `units`, which are users or groups of them.

    `left_out` counts rows of no group. `example_epsilon` is None where that could not be priced.
    """

    drawn: str
    units: int
    rows: int
    left_out: int
    median: int
    most: int
    rows_per_user: int
    limits: tuple[Limit, ...]
    example_batch: int
    example_epsilon: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data: `user_limits` of `quell plan --users table --json`."""
        return asdict(self)


def user_limits(plan: Plan, counts: Indices, rows_per_user: int = 1, left_out: int = 0) -> UserLimits:
    """What limits cost and gain.

    Args:
        plan: A plan that was made with `users=` or `groups=`.
        counts: (users,) how many rows each user (or group) has.
        rows_per_user: How many rows a user brings to a step.
        left_out: How many rows belong to no group.

    Returns:
        The limits, fewest participations first.
    """
    run, most = plan.run, require_count("rows_per_user", rows_per_user)
    if run.drawn == "example" or len(counts) != run.examples:
        raise QuellError(
            f"the table has {len(counts):,} users, but the plan is for {run.examples or 0:,} {run.drawn}s: make a plan "
            f"with users={len(counts)}"
        )
    rows, batch = int(counts.sum()), most * (run.batch_size or 0)
    return UserLimits(
        run.drawn,
        len(counts),
        rows,
        left_out,
        int(np.median(counts)),
        int(counts.max()),
        most,
        tuple(_limits(plan, counts, rows + left_out, sorted({*_ROWS, most}))),
        batch,
        _example_epsilon(plan, rows + left_out, batch),
    )


def _limits(plan: Plan, counts: Indices, total: int, rows: Sequence[int]) -> Iterator[Limit]:
    run, chosen = plan.run, plan.mechanism
    for epochs in sorted({max(1, round(run.epochs * factor)) for factor in _FACTORS}):
        found = chosen if epochs == run.epochs else same_kind(plan, epochs=epochs)
        if found is None:
            continue
        error = found.rmse / chosen.rmse * run.epochs / epochs
        seen = {each: float(np.minimum(counts, each * epochs).sum() / total) for each in rows}
        yield Limit(epochs, found.noise_multiplier, error, seen)


def _example_epsilon(plan: Plan, rows: int, batch: int) -> float | None:
    """About the ε per example of the same noise over as many steps, with batches of examples instead of users."""
    chosen, steps = plan.mechanism, plan.steps
    pattern = Participation(steps, min(steps, max(1, rows // batch)))
    try:
        scheme = chosen.scheme.for_run(pattern, max(1, chosen.strategy.bands))
        with threadpool_limits(1):
            return scheme.accountant(chosen.strategy).estimate_epsilon(chosen.noise_multiplier, plan.run.delta)
    except QuellError:  # more bands than such batches allow
        return None
