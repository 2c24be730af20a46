"""From a set-up to a plan: price the mechanisms that fit, mark the one to use.

A `Plan` is frozen data. It can be printed, saved as JSON, loaded, and re-verified from the file alone
(`quell.verification`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from quell.errors import QuellError
from quell.mechanism import MOST_NUMBERS, Mechanism, Problem
from quell.quick import quick_epsilon
from quell.sampling import Cyclic
from quell.search import Progress, rank, search
from quell.setup import Setup
from quell.show import plots, tables, words
from quell.show.page import write
from quell.show.page.document import document

if TYPE_CHECKING:
    from quell.questions import Answers

FORMAT, VERSION = "quell-plan", 2
MOST_ROWS, MOST_BYTES = 256, 1 << 27  # of a plan file; plans have about twenty rows, and a few megabytes at most
COMPARISONS = 8  # certificates by draws that share one failure probability: one for a plan, five for a target RMSE


@dataclass(frozen=True)
class Plan:
    """A set-up, the certified mechanisms, the recommended one, and what else the search saw.

    `mechanisms` all carry a guarantee; they are what a plan file holds. `estimates` are mechanisms whose noise is only
    estimated: they show what else there is, and are never recommended or saved. Both are sorted by the set-up's
    objective, best first; those beyond the set-up's limits are listed but never recommended.
    """

    setup: Setup
    mechanisms: tuple[Mechanism, ...]
    recommended: int
    estimates: tuple[Mechanism, ...] = ()

    def __post_init__(self) -> None:
        for mechanism in self.mechanisms:
            mechanism.guarantee  # noqa: B018 - refuses an estimate

    @property
    def mechanism(self) -> Mechanism:
        """The recommended mechanism."""
        return self.mechanisms[self.recommended]

    @cached_property
    def alternatives(self) -> tuple[Mechanism, ...]:
        """Every mechanism that was looked at, certified or estimated, best first by the set-up's objective."""
        everything = (*self.mechanisms, *self.estimates)
        return tuple(sorted(everything, key=lambda mechanism: mechanism.score(self.setup.objective)))

    @property
    def lower_bound(self) -> float:
        """No mechanism without amplification has a smaller RMSE."""
        return self.problem.lower_bound

    @cached_property
    def dpsgd_equivalent_epsilon(self) -> float:
        """The ε that DP-SGD would have to spend for the recommended mechanism's RMSE, about."""
        return equivalent_epsilon(self.problem, self.mechanism)

    @cached_property
    def answers(self) -> Answers:
        """What has to be computed before the plan can be explained; takes about a second."""
        from quell.questions import answers

        return answers(self)

    def explain(self) -> str:
        """Why this mechanism, what it buys, and what would change the answer, in plain sentences."""
        return "\n".join(words.explanation(self, self.answers))

    @cached_property
    def page_content(self) -> dict[str, Any]:
        """The data of the plan's page: sentences, rows and curves."""
        from quell.curves import page_content

        return page_content(self, self.answers, thorough=True)

    def page(self) -> str:
        """The plan as one HTML page that needs no network.

        >>> page = plan(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5, sampling="cyclic").page()
        >>> page.startswith("<!doctype html>") and "://" not in page.replace("http://www.w3.org/2000/svg", "")
        True
        """
        return document(self.page_content, str(self)).html

    def write_page(self, path: str | Path) -> None:
        """Write `page()` to a file."""
        write(self.page(), path)

    def draw(self, path: str | Path) -> None:
        """Write the page's charts as a picture: .png, .svg or .pdf."""
        plots.draw_plan(self.page_content, path)

    def _repr_html_(self) -> str:
        return tables.plan_html(self, self.answers)

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
        if len(self.mechanisms) > MOST_ROWS:
            raise QuellError(
                f"a plan file holds up to {MOST_ROWS} mechanisms, not {len(self.mechanisms):,}: keep fewer"
            )
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
        content = json.dumps(self.as_dict(), indent=2) + "\n"
        if len(content) > MOST_BYTES:
            raise QuellError(
                f"the plan would take {len(content):,} bytes, more than the {MOST_BYTES:,} that are read again: "
                "keep fewer mechanisms, or name a schedule instead of listing its learning rates"
            )
        try:
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(content)
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
        return tables.plan_text(self, self.answers)


def plan(*, progress: Progress | None = None, **setup: Any) -> Plan:
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
    """The plan of a set-up: a search by estimates, then certificates for what it recommends.

    Mechanisms whose noise is exact, without amplification, are all certified; of the others the best by the set-up's
    objective, and no more than that: the best of several certificates by draws would be luck. `plan_for_rmse` takes
    the first of up to five that is good enough, so they share their failure probability between `COMPARISONS`.
    """
    problem = problem_of(setup)
    with threadpool_limits(1):  # many small matrices: threads that wait for each other cost ten times what they save
        found = search(setup, problem, progress)
        if not found:
            raise QuellError(f"no mechanism goes with sampling={setup.sampling} here: add balls_in_bins or cyclic")
        wanted = [mechanism for mechanism in found if mechanism.sampling == Cyclic.name]
        if found[0] not in wanted:
            wanted.append(found[0])
        certified = [problem.certified(mechanism, COMPARISONS) for mechanism in wanted]
    rows = sorted(certified, key=lambda mechanism: mechanism.score(setup.objective))
    rest = tuple(mechanism for mechanism in found if mechanism not in wanted)
    return Plan(setup, tuple(rows), recommend(setup, rows), rest)


def recommend(setup: Setup, mechanisms: list[Mechanism] | tuple[Mechanism, ...]) -> int:
    """The least score that fits."""
    return min(range(len(mechanisms)), key=lambda i: rank(setup, mechanisms[i], setup.objective))


def problem_of(setup: Setup) -> Problem:
    cycle = setup.cycle
    uses = cycle.participation.count if setup.user_level else setup.epochs
    unit = "user" if setup.user_level else "example"
    return Problem(setup.workload, cycle, uses, setup.epsilon, setup.delta, setup.sampling, setup.adaptive, unit)


def equivalent_epsilon(problem: Problem, mechanism: Mechanism) -> float:
    """The ε at which DP-SGD, under the scheme of the problem's yardstick, has the mechanism's RMSE, about."""
    dpsgd = problem.dpsgd
    noise = mechanism.rmse / dpsgd.unit_error.rmse
    return quick_epsilon(dpsgd.strategy, problem.scheme_of(dpsgd.strategy, dpsgd.sampling), noise, problem.delta)
