"""What a strategy family is: a name (which is API), its parameters, how to build it, and what is worth trying.

A family is one file of this package that ends in a `Family` record, and one line in the registry. The search, the page
and the questions around a plan learn everything they know of it from the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from quell.participation import Participation
from quell.strategy.structure import Parameter, Strategy
from quell.workload import Workload

Parameters = Mapping[str, Parameter]
Candidates = Iterable[Parameters]
Line = list[dict[str, Parameter]]  # parameter values in an order along which scores have one valley

NORMALISE = "column_normalise"  # the parameter of families whose columns can be scaled to norm 1
HORIZON = "horizon"  # how many steps back an optimised design looks
DIVERGENCE = "divergence"  # the parameter of families that can be shaped for amplification
LEAST_DIVERGENCE, MOST_DIVERGENCE = 1e-12, 100.0  # of far too much noise; nobody's privacy: beyond, nothing changes
_DIVERGENCES = np.geomspace(1 / 8, 4, 11)  # that are tried, in those of the Gaussian mechanism with the same promise
_SHORTEST, _LONGEST = 8.0, 4.0  # the horizons that are tried, in steps and in runs
_MOST_WORK = 6e8  # operations that one candidate's error may take


@dataclass(frozen=True)
class Space:
    """What a search may try for a run, within limits on what noise may cost.

    `buffers` are model-sized vectors kept, `draws` noise vectors generated per step. `divergence` is the Rényi
    divergence of order 2 of the Gaussian mechanism with the run's promise, where strategies are to be shaped for
    amplification; `plain` says that there will be none.
    """

    workload: Workload
    participation: Participation
    buffers: float
    draws: int
    divergence: float | None = None
    plain: bool = False
    look_ahead: float = 0.0  # buffers that are looked at beyond a smaller limit: what would more memory buy?

    @property
    def beyond(self) -> Space:
        """The same with the larger memory that a search looks at beyond the limit."""
        return replace(self, buffers=max(self.buffers, self.look_ahead))

    @property
    def correlates(self) -> bool:
        """Whether noise can be cancelled over time in a workload that families know how to decode."""
        return self.workload.given is None and self.workload.steps > 1

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

    @property
    def horizons(self) -> list[int]:
        longest = _LONGEST * self.workload.steps
        halves = range(max(1, math.ceil(2 * math.log2(longest / _SHORTEST))))
        return sorted({round(longest / 2 ** (half / 2)) for half in halves})

    @property
    def divergences(self) -> list[float]:
        if self.divergence is None:
            return []
        near = np.clip(self.divergence * _DIVERGENCES, LEAST_DIVERGENCE, MOST_DIVERGENCE)
        return sorted({float(f"{divergence:.3g}") for divergence in near})


def alone(_: Space) -> Candidates:
    """The grid of a family without parameters."""
    return [{}]


def along_the_grid(family: Family, space: Space) -> Iterator[Line]:
    """The line of a family whose grid is in order: as it is, columns not normalised."""
    values = [{**each, NORMALISE: False} for each in family.grid_in_order(space) if not each.get(NORMALISE)]
    if values:
        yield values


def no_lines(family: Family, space: Space) -> Iterator[Line]:
    """No lines: for a baseline, which is only listed without amplification."""
    return iter(())


def shaped(family: Family, space: Space, size: Parameters) -> Iterator[Line]:
    """Lines of an optimised family of one size, optimised for amplification or for a shorter horizon.

    The optimum without amplification cancels more noise than is good for amplified RMSE and for training, especially
    with momentum. The optimum for a shorter horizon cancels less, and the optimum for a divergence as much as pays
    under amplification. All of them are priced for the true workload and sampling.
    """
    if not space.correlates:
        return
    shape = {**size, NORMALISE: family.normalisable and space.plain}  # amplified it gains little
    if DIVERGENCE in family.optional and space.divergences:
        yield [{**shape, DIVERGENCE: divergence} for divergence in space.divergences]
    yield [{**shape, HORIZON: horizon} for horizon in space.horizons]


@dataclass(frozen=True, eq=False)
class Family:
    """One strategy family.

    `grid` lists the parameter values worth trying without amplification. With amplification noise costs a tenth of a
    second to estimate, so there the search goes along `lines` of parameter values by golden sections; `first` are
    those that tend to hold the best, and rule the others out.
    """

    name: str
    summary: str
    build: Callable[..., Strategy]
    grid: Callable[[Space], Candidates] = alone
    lines: Callable[[Family, Space], Iterator[Line]] = along_the_grid
    first: Callable[[Family, Space], Iterator[Line]] = no_lines
    required: tuple[str, ...] = ()
    optional: Mapping[str, Parameter | None] = field(default_factory=dict)  # None: found by the family itself
    objectives: tuple[str, ...] = ("rmse", "maxse")
    normalisable: bool = False
    normalised: bool = False  # by default
    constant_rate_only: bool = False
    sturdy: bool = False  # quick to find and good for most runs: `planning.questions` compares runs with these only
    instant_steps: float = 0.0  # the most steps of a run for which its grid is priced in milliseconds
    rough_version: str | None = None  # a family that is almost as good: a search asks first whether that could win
    paper: str = ""  # what papers call it, where that is another name

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return (*self.required, *self.optional, *((NORMALISE,) if self.normalisable else ()))

    @property
    def title(self) -> str:
        """The family's name, and what papers call it."""
        return f"{self.name} ({self.paper})" if self.paper else self.name

    def candidates(self, space: Space) -> Iterator[dict[str, Parameter]]:
        """Parameter values worth pricing, column-normalised variants included."""
        if self.constant_rate_only and not space.workload.is_toeplitz:
            return
        for parameters in self.grid(space):
            variants = (False, True) if self.normalisable else (False,)
            yield from ({**parameters, NORMALISE: normalise} for normalise in variants)

    def grid_in_order(self, space: Space) -> Line:
        """All candidates within the limits and beyond, from the smallest."""
        both = {repr(each): each for limits in (space, space.beyond) for each in self.candidates(limits)}
        size = "bands" if "bands" in self.required else "buffers"
        return sorted(both.values(), key=lambda each: int(each.get(size, 0)))
