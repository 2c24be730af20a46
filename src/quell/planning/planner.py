"""From a run to a plan: search, certify the best, recommend one.

A `Plan` is frozen data. It can be printed, saved as JSON, loaded, and verified from the file alone
(`quell.planning.file`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from threadpoolctl import threadpool_limits

from quell import privacy
from quell.errors import QuellError
from quell.planning.mechanism import MOST_NUMBERS, Mechanism
from quell.planning.prices import Prices
from quell.planning.search import Progress, order, search
from quell.planning.shapes import MOST_ROWS
from quell.privacy import Meaning
from quell.privacy.accountant import require_reach
from quell.run import Run
from quell.show import plots, tables, words
from quell.show.bar import progress_bar
from quell.show.notebook import framed
from quell.show.page import write as write_page
from quell.show.page.document import document
from quell.strategy import Parameter

if TYPE_CHECKING:
    from quell.planning.questions import Answers

FORMAT, VERSION = "quell-plan", 3
COMPARISONS = 8  # certificates by draws that share one failure probability: one for a plan, five for a target RMSE


@dataclass(frozen=True)
class Plan:
    """A run, its certified mechanisms, and which of them to use. Make one with `quell.plan`; `print(plan)` shows it.

    Args:
        run: What is trained and promised.
        mechanisms: The certified mechanisms, best first by the run's objective; what a plan file holds.
        recommended: The index of the one to use. Mechanisms beyond the run's limits are never recommended.
        estimates: Other mechanisms, whose noise is only estimated; never recommended or saved.
    """

    run: Run
    mechanisms: tuple[Mechanism, ...]
    recommended: int
    estimates: tuple[Mechanism, ...] = ()

    def __post_init__(self) -> None:
        assert all(mechanism.guarantee for mechanism in self.mechanisms)  # an estimate raises here

    @property
    def mechanism(self) -> Mechanism:
        """The recommended mechanism."""
        return self.mechanisms[self.recommended]

    @cached_property
    def alternatives(self) -> tuple[Mechanism, ...]:
        """All mechanisms, certified or estimated, best first by the run's objective."""
        everything = (*self.mechanisms, *self.estimates)
        return tuple(sorted(everything, key=lambda mechanism: mechanism.score(self.run.objective)))

    @cached_property
    def prices(self) -> Prices:
        """Prices of other mechanisms for the same run, and what they are compared with."""
        return Prices(self.run)

    def price(self, family: str, /, **parameters: Parameter) -> Mechanism:
        """Certify another mechanism for the plan's run and promise, for `make_private(..., mechanism=...)`.

        Args:
            family: The mechanism's name, as `quell mechanisms` lists it.
            parameters: The family's own parameters, such as `bands=4`.

        Returns:
            The mechanism, with the least noise that could be certified.
        """
        return self.prices.price(family, **parameters)

    @property
    def lower_bound(self) -> float:
        """The best possible RMSE without random batches (Proof 2 in docs/proofs.md)."""
        return self.prices.lower_bound

    @cached_property
    def dpsgd_equivalent_epsilon(self) -> float:
        """About the ε that DP-SGD would need for the recommended mechanism's RMSE."""
        return self.prices.equivalent_epsilon(self.mechanism)

    @cached_property
    def meaning(self) -> Meaning:
        """What the promise lets the best attacker find out; takes seconds where certificates are drawn."""
        chosen = self.mechanism
        return privacy.meaning(chosen.strategy, self.prices.scheme_of(chosen), chosen.guarantee)

    @cached_property
    def answers(self) -> Answers:
        """What must be computed before the plan can be explained; takes about a second."""
        from quell.planning.questions import answers

        return answers(self)

    def explain(self) -> str:
        """Why this mechanism, what you gain by it, and what would change the answer, in sentences."""
        return "\n".join(words.explanation(self, self.answers))

    @cached_property
    def page_content(self) -> dict[str, Any]:
        """The data of the plan's page: sentences, rows and curves."""
        from quell.planning.curves import page_content

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
        write_page(self.page(), path)

    def draw(self, path: str | Path | None = None) -> plots.Picture:
        """The page's charts as a picture, which a notebook shows; with a path, also as a .png, .svg or .pdf file."""
        return plots.draw_plan(self.page_content, path)

    def _repr_html_(self) -> str:
        return framed(self.page(), str(self))

    def __repr__(self) -> str:
        promise = self.run.promise
        level = words.level(promise.epsilon, promise.delta)
        return f"<Plan: {level} per {words.whom(self.run.drawn, promise.unit)} with {self.mechanism}>"

    def __str__(self) -> str:
        return tables.plan_text(self, self.answers)

    @property
    def epochs(self) -> int:
        """Passes over the data."""
        return self.run.epochs

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.run.steps

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the content of a plan file."""
        if len(self.mechanisms) > MOST_ROWS:
            raise QuellError(
                f"a plan file holds up to {MOST_ROWS} mechanisms, not {len(self.mechanisms):,}: keep fewer"
            )
        for mechanism in self.mechanisms:
            solution = mechanism.strategy.solution
            if solution is not None and solution.size > MOST_NUMBERS:
                raise QuellError(
                    f"{mechanism.strategy!r} has {solution.size:,} coefficients, too many for a plan file: "
                    "take a mechanism that is Toeplitz instead"
                )
        return {
            "format": FORMAT,
            "version": VERSION,
            "recommended": self.recommended,
            **self.prices.as_dict(self.mechanisms),
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, for `Plan.load` and `quell verify`; a crash leaves the old file or the new one."""
        from quell.planning.file import write

        if self.run.examples is None:
            raise QuellError("a plan file is about data: give examples and batch_size instead of steps")
        write(self.as_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file. Every claim in it is recomputed, and a file with a false one raises `QuellError`."""
        from quell.planning.file import verified_plan

        return verified_plan(path)


def plan(*, mechanism: str | None = None, progress: Progress | bool | None = None, **arguments: Any) -> Plan:
    """Compare mechanisms for a training run and recommend one, or certify the one that you name.

    Args:
        mechanism: A mechanism as tables show it, such as "bisr* p=16": nothing is searched, the plan is of this one.
        progress: True for a progress bar, in a terminal or a notebook; or what is called with (done, total, what).
        arguments: The run, as `quell.Run.from_data` takes it: `examples`, `batch_size`, `epochs`, `epsilon` and
            `delta`; optionally `momentum`, `weight_decay`, `learning_rates`, `adaptive`, `ema`, `optimizer`, `betas`,
            `memory`, `draws`, `time_limit`, `parameters`, `sampling`, `objective`, `separation` and `participations`.

    Returns:
        A plan. Its recommended mechanism is certified for (epsilon, delta) by the accountant of its sampling scheme
        (docs/privacy.md, docs/proofs.md).

    >>> chosen = plan(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5)
    >>> chosen.mechanism.rmse < chosen.prices.dpsgd.rmse
    True
    """
    known = inspect.signature(Run.from_data).parameters
    if unknown := sorted(set(arguments) - set(known)):
        raise QuellError(f"a plan does not know {', '.join(unknown)}: it takes {', '.join(sorted(known))}")
    required = [name for name, each in known.items() if each.default is inspect.Parameter.empty]
    if missing := [name for name in required if name not in arguments]:
        raise QuellError(f"a plan needs {', '.join(missing)} as well")
    run = Run.from_data(**arguments)
    if mechanism is not None:
        from quell.planning.named import named_plan

        chosen = partial(named_plan, run, mechanism)
    else:
        chosen = partial(make_plan, run)
    if not isinstance(progress, bool):
        return chosen(progress)
    with progress_bar(Console(stderr=True)) if progress else nullcontext() as advance:
        return chosen(advance)


def make_plan(run: Run, progress: Progress | None = None) -> Plan:
    """Search by estimates, then certify: what `plan` does, for a `Run`.

    Every mechanism without amplification is certified, because that is exact. Of the others only the best is: choosing
    the best of several certificates by draws would be choosing by luck (Proof 8 in docs/proofs.md). `plan_for_rmse`
    tries up to five, so certificates share their failure probability between `COMPARISONS`.

    Args:
        run: What is trained and promised.
        progress: Called with (done, total, what) while the search runs.

    Returns:
        The plan.
    """
    prices = Prices(run)
    with threadpool_limits(1):  # many small matrices: threads that wait for each other cost ten times what they save
        found = search(prices, progress)
        if not found:
            require_reach(run.epsilon, run.delta)
            raise QuellError(f"no mechanism goes with sampling={run.sampling} here: allow more schemes, or all (best)")
        wanted = [mechanism for mechanism in found if not mechanism.scheme.amplifies]
        if found[0] not in wanted:
            wanted.append(found[0])
        certified = []
        for done, m in enumerate(wanted):
            if progress is not None:
                progress(done, len(wanted), f"certifying {words.label(m)}")
            certified.append(prices.certify(m.strategy, m.scheme, COMPARISONS, m.noise_multiplier))
    rows = sorted(certified, key=lambda mechanism: mechanism.score(run.objective))
    rest = tuple(mechanism for mechanism in found if mechanism not in wanted)
    return Plan(run, tuple(rows), recommend(run, rows), rest)


def recommend(run: Run, mechanisms: Sequence[Mechanism]) -> int:
    """The index of the mechanism with the least score within the run's limits."""
    return min(range(len(mechanisms)), key=lambda i: order(run, mechanisms[i], run.objective))
