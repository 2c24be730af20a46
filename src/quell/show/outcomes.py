"""Every sentence about runs that were made: `quell train` and audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quell.show.words import counted, describe_run, level, noise

if TYPE_CHECKING:
    from quell.run import Run


def audited(found: Mapping[str, Any]) -> str:
    """What an audit found, in sentences."""
    bound, sure = found["bound"], f"with {found['bound']['confidence']:.0%} confidence"
    lines = [
        f"Promised: {level(found['epsilon'], found['delta'])}.",
        f"Measured, {sure}: ε is at least {bound['epsilon']:.2f} whatever the mechanism is.",
        f"If its noise is normal, as designed: the noise multiplier is at most {found['measured_multiplier']:.4g} "
        f"({noise(found['noise_multiplier'])} promised), so ε is at least {found['measured_epsilon']:.2f} (estimated).",
        f"{bound['canaries']:,} canaries over {counted(found['steps'], 'step')}. The attacker was sure of "
        f"{bound['guesses']:,} coins and right about {bound['correct']:,}.",
    ]
    if bound["epsilon"] > found["epsilon"]:
        lines.append("The promise is broken: an attacker does better than it allows.")
    lines += [f"The promise is broken: {fault}." for fault in found["faults"]]
    if not found["broken"]:
        lines.append("Nothing was found that breaks the promise.")
    return "\n".join(lines)


def training(run: Run) -> str:
    return f"{describe_run(run)} Momentum {run.optimizer.momentum:g}. The target holds for each private row by itself."


def verdict(planned: Sequence[float], dpsgd: Sequence[float]) -> str:
    """Final accuracies of the plan against those of DP-SGD, with as much confidence as the runs support."""
    margin = 100 * (sum(planned) / len(planned) - sum(dpsgd) / len(dpsgd))
    if len(planned) > 1 and (min(planned) > max(dpsgd) or max(planned) < min(dpsgd)):
        winner, loser = ("The plan", "DP-SGD") if margin > 0 else ("DP-SGD", "the plan")
        return f"{winner} beats {loser} by {abs(margin):.1f} points, in every run."
    doubt = (
        "but the runs overlap, so this may be chance"
        if len(planned) > 1
        else "in one run each, which shows little: use --runs 3"
    )
    return f"The plan is {abs(margin):.1f} points {'above' if margin >= 0 else 'below'} DP-SGD, {doubt}."


def training_notes(seeded: bool, several: bool, validation: int, test: int) -> list[str]:
    """What the promise does not cover. `validation` and `test` count examples held out for them (0: none)."""
    found = []
    if seeded:
        found.append("A seed makes the runs repeatable and voids their privacy: leave it out for data that matters.")
    elif several:
        found.append("The promise is that of one planned run; each further run that you publish spends as much again.")
    if validation:
        found.append(
            f"Learning rates were chosen on {validation:,} examples held out from training, which the promise does not "
            "protect, from the same grid for all rows. Each private run is the best of a random number of trials. The "
            "promise covers all of them, as long as their number, their scores and the other models stay secret. A "
            "saved plan is that of one trial."
        )
    if test:
        found.append(f"Accuracy is measured on {test:,} examples held out from the file.")
    return found
