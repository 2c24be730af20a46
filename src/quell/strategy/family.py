"""What a strategy family is: a name (which is API), its parameters, how to build it, and what is worth trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from quell.sampling import Participation
from quell.strategy.structure import Parameter, Strategy
from quell.workload import Workload

Candidates = Iterable[Mapping[str, Parameter]]
HORIZON = "horizon"  # the parameter of families that can be shaped for sums that fade
DIVERGENCE = "divergence"  # the parameter of families that can be shaped for amplification
LEAST_DIVERGENCE, MOST_DIVERGENCE = 1e-12, 100.0  # of far too much noise; nobody's privacy: beyond, nothing changes
_MOST_WORK = 6e8  # operations that one candidate's error may take


@dataclass(frozen=True)
class Limits:
    """What noise may cost: `buffers`, model-sized vectors kept, and `draws`, noise vectors generated per step."""

    participation: Participation
    buffers: float
    draws: int

    def strategy_bands(self) -> list[dict[str, Parameter]]:
        """Bands of C to try: powers of two, and the most that memory and separation allow. More only hurt.

        Errors take steps × bands² operations where columns are normalised, which sets a limit for very long runs.
        """
        most = min(self.buffers + 1, self.participation.separation, math.sqrt(_MOST_WORK / self.participation.steps))
        return [{"bands": p} for p in sorted({*self._powers_of_two(most), *([int(most)] if most > 1 else [])})]

    def noising_bands(self) -> list[dict[str, Parameter]]:
        """Bands of C⁻¹ to try: powers of two that the draws per step allow."""
        return [{"bands": p} for p in self._powers_of_two(self.draws)]

    def _powers_of_two(self, most: float) -> list[int]:
        return [2**e for e in range(1, 63) if 2**e <= min(most, self.participation.steps)]


def alone(_: Limits) -> Candidates:
    """The grid of a family without parameters."""
    return [{}]


@dataclass(frozen=True)
class Family:
    """One strategy family. `grid` lists the parameter values a planner should try within given limits."""

    name: str
    summary: str
    build: Callable[..., Strategy]
    grid: Callable[[Limits], Candidates] = alone
    required: tuple[str, ...] = ()
    optional: Mapping[str, Parameter | None] = field(default_factory=dict)  # None: found by the family itself
    objectives: tuple[str, ...] = ("rmse", "maxse")
    normalisable: bool = False
    normalised: bool = False  # by default
    constant_rate_only: bool = False
    paper: str = ""  # what papers call it, where that is another name

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return (*self.required, *self.optional, *(("column_normalise",) if self.normalisable else ()))

    def candidates(self, workload: Workload, limits: Limits) -> Iterator[dict[str, Parameter]]:
        """Parameter values worth pricing within the limits, column-normalised variants included."""
        if self.constant_rate_only and not workload.is_toeplitz:
            return
        for parameters in self.grid(limits):
            variants = (False, True) if self.normalisable else (False,)
            yield from ({**parameters, "column_normalise": normalise} for normalise in variants)


def known_as(family: Family) -> str:
    """The family's name, and what papers call it."""
    return f"{family.name} ({family.paper})" if family.paper else family.name
