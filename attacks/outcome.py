"""What every attack returns, and how its cases are spread over processes.

An attack is a function `attack(count, seed, workers) -> list[Outcome]`: it makes `count` cases from the seed, tries to
break each one and sums up. A case ends as a `Trial`. Processes are started afresh, not forked, because torch and numba
may have threads; with one worker everything happens in this process, where a test can plant a bug.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Trial:
    """One case: what was measured over what was promised (None: nothing to measure), and the flaw that was found."""

    group: str
    ratio: float | None = None
    flaw: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Outcome:
    """One row of the table. `tightest` is the largest ratio of what was measured to what was promised."""

    attack: str
    tried: int
    breaks: tuple[str, ...]
    tightest: float | None
    note: str = ""


def summed(attack: str, trials: Sequence[Trial], note: str = "") -> Outcome:
    """One row for these trials. What Quell refused was tried as well: a refusal keeps the promise."""
    ratios = [trial.ratio for trial in trials if trial.ratio is not None]
    flaws = tuple(trial.flaw for trial in trials if trial.flaw)
    refused = sum(trial.refused for trial in trials)
    notes = [text for text in (note, f"{refused:,} refused" if refused else "") if text]
    return Outcome(attack, len(trials), flaws, max(ratios, default=None), ", ".join(notes))


def by_group(attack: str, trials: Sequence[Trial]) -> list[Outcome]:
    """One row per group, in the order in which groups first appear by name."""
    groups = sorted({trial.group for trial in trials})
    return [summed(f"{attack}, {group}", [trial for trial in trials if trial.group == group]) for group in groups]


def spread(work: Callable[[Case], Result], cases: Iterable[Case], workers: int) -> list[Result]:
    """`work` done on every case, by this process or by so many fresh ones."""
    if workers == 1:
        return [work(case) for case in cases]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return list(pool.imap_unordered(work, cases, chunksize=1))
