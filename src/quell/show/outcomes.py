"""Every sentence about runs that were made: `quell train` and audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from quell.show.words import counted, describe_run, level, noise

if TYPE_CHECKING:
    from quell.run import Run

TRIAL_PLAN = "trial-plan.json"  # the plan that `quell train` saves where it searched for a learning rate


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


def training_title(file: str, target: str | None, day: date) -> str:
    """
    >>> training_title("patients.csv", "outcome", date(2026, 5, 1)), training_title("data.npz", None, date(2026, 5, 1))
    ('patients.csv: outcome, trained with Quell on 2026-05-01', 'data.npz, trained with Quell on 2026-05-01')
    """
    file = file if file.isprintable() else ascii(file)
    return f"{file}{'' if target is None else f': {target}'}, trained with Quell on {day.isoformat()}"


def training(run: Run, compared: bool, table: bool, parts: Mapping[str, int]) -> str:
    """The run in sentences; `parts` says how many rows, or examples, were for what."""
    used = ", ".join(f"{count:,} to {what}" for what, count in parts.items() if count)
    each = " The target holds for each private row by itself." if compared else ""
    return (
        f"{counted(sum(parts.values()), 'row' if table else 'example')}: {used}. {describe_run(run)} Momentum "
        f"{run.optimizer.momentum:g}.{each}"
    )


def training_lines(found: Mapping[str, Any]) -> list[str]:
    """What is said below the table of a training, whose content `quell.train.content` makes."""
    lines = (found["verdict"], f"Promise of the planned run: {found['promise']}.", *found["notes"])
    return [line for line in lines if line is not None]


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


def training_notes(
    seeded: bool, compared: bool, runs: int, validation: int, test: int, points: float, table: bool
) -> list[str]:
    """What the promise covers beside the model's weights, and what it does not cover.

    Args:
        seeded: Whether a seed voids all privacy.
        compared: Whether the same model was also trained without privacy and with DP-SGD.
        runs: How often each was trained.
        validation, test: How many examples were held out to choose learning rates on (0: none) and to test on.
        points: The standard deviation of the noise in the accuracy, in percentage points.
        table: Whether the examples are rows of a table.
    """
    found = []
    if seeded:
        found.append("A seed makes the runs repeatable and voids their privacy: leave it out for data that matters.")
    elif compared:
        found.append(
            "The promise is that of one planned run. The row that is not private has none, and each further private "
            "run spends as much again: this comparison is for you, not for others."
        )
    elif runs > 1:
        found.append("The promise is that of one planned run; each further run that you publish spends as much again.")
    if validation:
        protected = "" if seeded else ", by scores with noise, so that the promise holds for these examples too"
        found.append(
            f"Learning rates were chosen on {validation:,} examples held out from training{protected}."
            f"{' All rows choose from the same grid.' if compared else ''} Each private run is the best of a random "
            "number of trials. The promise covers all of them, as long as their number, their scores and the other "
            f"models stay secret. {TRIAL_PLAN} is the plan of one trial, whose own ε is smaller than the promise. What "
            "is said about attacks on a search follows from (ε, δ) alone and is loose: with --lr it is tighter."
        )
    protected = (
        ""
        if seeded
        else f", with noise that protects them as the promise says (a standard deviation of {points:.2g} points)"
    )
    found.append(f"Accuracy is measured on {test:,} examples that were held out from training{protected}.")
    known = "the number of rows, the names of the columns" if table else "the number and the shape of the examples"
    found.append(f"Taken for public: {known}, and what was stated with the command (classes, ranges).")
    return found
