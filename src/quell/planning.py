"""From a set-up to a plan: price the mechanisms that fit, mark the one to use.

A `Plan` is frozen data. It can be printed, saved as JSON, loaded, and re-verified from the file alone
(`quell.verification`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quell.error import error
from quell.errors import QuellError
from quell.mechanism import MOST_NUMBERS, Mechanism, Problem
from quell.progress import announce
from quell.sampling import Cyclic
from quell.sensitivity import sensitivity
from quell.setup import Setup
from quell.strategy import FAMILIES, Limits, Parameter, Strategy, build

FORMAT, VERSION = "quell-plan", 1
COMPARISONS = len(FAMILIES)  # a plan takes the best of so many certificates, which share one failure probability
_FINALISTS = 3  # candidates of a family that are estimated under an amplifying scheme

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """A set-up, the mechanisms that were compared, and the recommended one.

    `mechanisms` are sorted by RMSE, best first; those beyond the set-up's memory or draws are listed but never
    recommended.
    """

    setup: Setup
    mechanisms: tuple[Mechanism, ...]
    recommended: int

    @property
    def mechanism(self) -> Mechanism:
        """The recommended mechanism."""
        return self.mechanisms[self.recommended]

    @property
    def epochs(self) -> int:
        return self.setup.epochs

    @property
    def steps(self) -> int:
        return self.setup.steps

    @cached_property
    def problem(self) -> Problem:
        return problem_of(self.setup)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the content of a plan file."""
        setup = dataclasses.asdict(self.setup)
        for mechanism in self.mechanisms:
            solution = mechanism.strategy.solution
            if solution is not None and solution.size > MOST_NUMBERS:
                raise QuellError(
                    f"{mechanism.strategy!r} has {solution.size:,} coefficients, too many for a plan file: "
                    "take band_toeplitz instead of band"
                )
        return {
            "format": FORMAT,
            "version": VERSION,
            "setup": setup,
            "recommended": self.recommended,
            "mechanisms": [self.problem.row(mechanism) for mechanism in self.mechanisms],
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically: a crash leaves the old file or the new one, never half of one."""
        target = Path(path)
        try:
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(self.as_dict(), file, indent=2)
                    file.write("\n")
                os.chmod(temporary, 0o644)  # a plan holds no secrets; colleagues verify it
                os.replace(temporary, target)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as problem:
            raise QuellError(f"cannot write the plan to {target}: {problem.strerror}") from problem

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file and re-verify every claim in it; a plan that does not check out is refused."""
        from quell.verification import verified_plan

        return verified_plan(path)

    def __str__(self) -> str:
        from quell.report import plan_text

        return plan_text(self)


def plan(progress: Progress | None = None, **setup: Any) -> Plan:
    """Compare the mechanisms for a training set-up (the fields of `Setup`) and recommend one.

    >>> chosen = plan(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5)
    >>> chosen.mechanism.rmse < chosen.problem.dpsgd.rmse
    True
    """
    known = {field.name for field in dataclasses.fields(Setup)}
    if unknown := sorted(set(setup) - known):
        raise QuellError(f"a plan does not know {', '.join(unknown)}: it takes {', '.join(sorted(known))}")
    required = [f.name for f in dataclasses.fields(Setup) if f.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in setup]:
        raise QuellError(f"a plan needs {', '.join(missing)} as well")
    return make_plan(Setup(**setup), progress)


def make_plan(setup: Setup, progress: Progress | None = None) -> Plan:
    """The plan of a set-up: the best mechanism of every family, each with a certified guarantee.

    Within a family candidates are ranked by their RMSE without amplification, and where the scheme amplifies
    the first few again by estimates under it; only the one that is kept is certified.
    """
    problem = problem_of(setup)
    best: list[Mechanism] = []
    for done, (name, candidates) in enumerate(found := list(_candidates(setup, problem))):
        if progress is not None:
            progress(done, len(found), name)
        try:
            best.append(_best_of(setup, problem, name, candidates))
        except (
            QuellError
        ) as refusal:  # a search that did not converge, a scheme that does not fit: the others still can
            announce(str(refusal))
    if progress is not None:
        progress(len(found), len(found), "done")
    if not best:
        raise QuellError(f"no mechanism goes with sampling={setup.sampling} here: use balls_in_bins, cyclic or best")
    rows = sorted(best, key=lambda mechanism: mechanism.rmse)
    return Plan(setup, tuple(rows), recommend(setup, rows))


def _best_of(setup: Setup, problem: Problem, name: str, candidates: list[dict[str, Parameter]]) -> Mechanism:
    """The mechanism of one family with the least RMSE that fits the set-up, certified."""
    plain: list[tuple[tuple[bool, float], Strategy]] = []
    refusals: list[QuellError] = []
    for parameters in candidates:
        try:
            strategy = build(name, problem.workload, problem.cycle.participation, None, **parameters)
            moved = sensitivity(strategy, problem.cycle.participation)
            cost = strategy.recurrence
            misfit = cost.buffers > setup.buffer_limit or cost.draws > setup.draws
            plain.append(((misfit, moved.value * error(strategy, problem.workload).rmse), strategy))
        except QuellError as refusal:
            refusals.append(refusal)
    if not plain:
        raise refusals[0]
    plain.sort(key=lambda entry: entry[0])
    if setup.sampling == Cyclic.name:
        return problem.priced(plain[0][1])
    options = [
        (misfit, problem.estimated(strategy, sampling), sampling, strategy)
        for (misfit, _), strategy in plain[:_FINALISTS]
        for sampling in problem.schemes_for(strategy)
    ]
    _, _, sampling, strategy = min(options, key=lambda option: option[:2])
    return problem.priced(strategy, sampling, COMPARISONS)  # where the two do not go together, this says why


def recommend(setup: Setup, mechanisms: list[Mechanism] | tuple[Mechanism, ...]) -> int:
    """The smallest RMSE that fits; DP-SGD always does."""
    return min(range(len(mechanisms)), key=lambda i: _rank(setup, mechanisms[i]))


def fits(setup: Setup, mechanism: Mechanism) -> bool:
    """Whether the mechanism's noise stays within the set-up's memory and draws."""
    return mechanism.buffers <= setup.buffer_limit and mechanism.draws <= setup.draws


def problem_of(setup: Setup) -> Problem:
    return Problem(setup.workload, setup.cycle, setup.epochs, setup.epsilon, setup.delta, setup.sampling)


def _rank(setup: Setup, mechanism: Mechanism) -> tuple[bool, float]:
    return not fits(setup, mechanism), mechanism.rmse


def _candidates(setup: Setup, problem: Problem) -> Iterator[tuple[str, list[dict[str, Parameter]]]]:
    limits = Limits(problem.cycle.participation, setup.buffer_limit, setup.draws)
    for family in FAMILIES.values():
        candidates = list(family.candidates(problem.workload, limits))
        if "training" in family.objectives and setup.sampling != Cyclic.name:
            candidates += [{**options, "objective": "training"} for options in candidates]  # amplification likes less
        if candidates:
            yield family.name, candidates
