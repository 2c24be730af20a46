"""What limits on users cost in data and gain in noise, as a table and in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from quell.show import words

if TYPE_CHECKING:
    from quell.planning.users import UserLimits


def limits_table(limits: UserLimits) -> Table:
    """What limits on users cost in data and gain in noise."""
    table = Table("participations", "σ", f"error per {limits.drawn} seen", box=box.SIMPLE_HEAD)
    for rows in limits.limits[0].seen:
        table.add_column(f"rows seen, {rows:,} a step", justify="right")
    for each in limits.limits:
        shares = [f"{share:.1%}" for share in each.seen.values()]
        noise = words.noise(each.noise_multiplier, estimated=True)
        table.add_row(f"{each.participations:,}", noise, f"{each.error:.2f} × the plan's", *shares)
    return table


def limit_sentences(limits: UserLimits) -> list[str]:
    """What a table of users says about a plan, beside the table of limits."""
    found = [
        f"{words.counted(limits.units, limits.drawn)} have {words.counted(limits.rows, 'row')}: {limits.median:,} in "
        f"the median, at most {limits.most:,}. This is about private data: do not publish it with the plan.",
        "Fewer participations need less noise and leave more data unseen; more rows a step cost time, not privacy "
        f"(make_private(..., rows_per_user={limits.rows_per_user})).",
    ]
    if limits.left_out:
        found.append(
            f"{words.counted(limits.left_out, 'row')} more are left out, because somebody would be in two groups with "
            "them."
        )
    if limits.example_epsilon is not None:
        found.append(
            f"The same noise over as many steps, in batches of {limits.example_batch:,} of the "
            f"{limits.rows:,} examples, would be private per example with about ε = {limits.example_epsilon:.2g} at "
            "the same δ (estimated)."
        )
    return found
