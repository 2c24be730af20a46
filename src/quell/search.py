"""The search behind a plan: every family, its parameters, every allowed sampling scheme; ranked by quick estimates.

Without amplification noise is exact and costs milliseconds, so everything is tried. With it, an estimate takes a tenth
of a second (`quell.quick`), so it is spent where it can matter:

* Each family is one or two *lines*: an ordered list of parameter values along which the score has one valley (bands,
  buffers, γ, or the memory 1/(1−λ) on a logarithmic scale). Golden sections find the bottom in few evaluations.
* A candidate whose noise must be so large that it cannot beat the best one known, by a bound that costs milliseconds
  (`quell.quick.least`), is not estimated at all.
* The first guess for a candidate's noise is its neighbour's.

Nothing here is a promise: `quell.planning` certifies what it recommends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quell.errors import QuellError
from quell.mechanism import Mechanism, Problem
from quell.progress import announce
from quell.quick import least
from quell.sampling import Cyclic, scheme_names
from quell.setup import Setup
from quell.strategy import FAMILIES, Limits, Parameter, Strategy, build
from quell.strategy.fractional import best_lambda

Progress = Callable[[int, int, str], None]
Parameters = dict[str, Parameter]

_LOOK_AHEAD = 16  # buffers that are looked at beyond a smaller limit: what would more memory buy?
_POINTS = 20  # values on a continuous line
_GOLDEN = (math.sqrt(5) - 1) / 2
_BASELINES = ("tree", "dense", "diagonal")  # never best; listed without amplification


@dataclass
class Search:
    """What has been tried so far for one set-up. Keys are (family, parameters in words, scheme)."""

    setup: Setup
    problem: Problem
    seen: dict[tuple[str, str, str], Mechanism | None] = field(default_factory=dict)  # None: cannot be had
    strategies: dict[tuple[str, str], Strategy | None] = field(default_factory=dict)
    latest: dict[tuple[str, str], float] = field(default_factory=dict)  # noise of the last one of a family and scheme

    @property
    def mechanisms(self) -> list[Mechanism]:
        return [mechanism for mechanism in self.seen.values() if mechanism is not None]

    def least_score(self, objective: str) -> float:
        """The best that is known among what fits."""
        fitting = (m.score(objective) for m in self.mechanisms if self.setup.allows(m.buffers, m.draws))
        return min(fitting, default=math.inf)

    def score(self, family: str, parameters: Parameters, sampling: str, objective: str) -> float:
        """The objective of one candidate, or a lower bound on it where that already rules the candidate out."""
        key = family, _words(parameters), sampling
        if key not in self.seen:
            strategy = self._strategy(family, parameters)
            if strategy is None or sampling not in self.problem.schemes_for(strategy):
                return math.inf
            try:
                if sampling != Cyclic.name:
                    scheme = self.problem.scheme_of(strategy, sampling)
                    noise = least(strategy, scheme, self.setup.epsilon, self.setup.delta)
                    bound = noise * self.problem.unit_score(strategy, objective)
                    if bound > self.least_score(objective):
                        return bound
                near = self.latest.get((family, sampling))
                self.seen[key] = found = self.problem.estimated(strategy, sampling, near)
                self.latest[family, sampling] = found.noise_multiplier
            except QuellError as refusal:  # a scheme that does not fit, an error that overflows: others still can
                announce(str(refusal))
                self.seen[key] = None
        mechanism = self.seen[key]
        return math.inf if mechanism is None else mechanism.score(objective)

    def _strategy(self, family: str, parameters: Parameters) -> Strategy | None:
        key = family, _words(parameters)
        if key not in self.strategies:
            try:
                participation = self.problem.cycle.participation
                self.strategies[key] = build(family, self.problem.workload, participation, None, **parameters)
            except QuellError as refusal:  # a search that did not converge: the others still can
                announce(str(refusal))
                self.strategies[key] = None
        return self.strategies[key]


def search(setup: Setup, problem: Problem, progress: Progress | None = None) -> list[Mechanism]:
    """Mechanisms worth showing, estimated: the best of every family, and the best for every amount of memory.

    Both the set-up's objective and RMSE are searched for. Sorted by the objective, those that fit first.
    """
    state = Search(setup, problem)
    limits = Limits(problem.cycle.participation, max(setup.buffer_limit, _LOOK_AHEAD), setup.draws)
    jobs = [(objective, line) for objective in dict.fromkeys((setup.objective, "rmse")) for line in _lines(problem, limits)]
    for done, (objective, (family, values)) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), family)
        for sampling in scheme_names(setup.sampling):
            if sampling == Cyclic.name:
                for parameters in values if len(values) < _POINTS else ():
                    state.score(family, parameters, sampling, objective)
            elif family not in _BASELINES or Cyclic.name not in scheme_names(setup.sampling):
                _valley(lambda i: state.score(family, values[i], sampling, objective), len(values))
    if progress is not None:
        progress(len(jobs), len(jobs), "done")
    return worth_showing(setup, state.mechanisms)


def worth_showing(setup: Setup, mechanisms: list[Mechanism]) -> list[Mechanism]:
    """The best of every family and for every amount of memory, by the set-up's objective and by RMSE."""
    kept: dict[int, Mechanism] = {}
    for objective in (setup.objective, "rmse"):
        ranked = sorted(mechanisms, key=lambda m: (not setup.allows(m.buffers, m.draws), m.score(objective)))
        families: set[str] = set()
        for mechanism in ranked:
            if mechanism.name not in families and (objective == setup.objective or not families):
                kept[id(mechanism)] = mechanism
            families.add(mechanism.name)
        for mechanism in pareto(mechanisms, objective):
            kept[id(mechanism)] = mechanism
    return sorted(kept.values(), key=lambda m: (not setup.allows(m.buffers, m.draws), m.score(setup.objective)))


def pareto(mechanisms: list[Mechanism] | tuple[Mechanism, ...], objective: str) -> list[Mechanism]:
    """Those that nothing with as little memory beats, least memory first."""
    front: list[Mechanism] = []
    for mechanism in sorted(mechanisms, key=lambda m: (m.buffers, m.score(objective))):
        if not front or mechanism.score(objective) < front[-1].score(objective) * 0.995:
            front.append(mechanism)
    return front


def _lines(problem: Problem, limits: Limits) -> Iterator[tuple[str, list[Parameters]]]:
    """(family, parameter values in order): the grids of all families, and lines for λ and γ."""
    for family in FAMILIES.values():
        candidates = list(family.candidates(problem.workload, limits))
        for normalise in (False, True):
            values = [each for each in candidates if each.get("column_normalise", False) is normalise]
            if values:
                yield family.name, values
    if limits.draws < 2 or problem.workload.steps < 2 or not problem.workload.is_toeplitz:
        return
    most = math.log(1.0 / (1.0 - min(best_lambda(problem.workload, problem.cycle.participation), 1 - 1e-12)))
    memories = np.linspace(0.0, most, _POINTS + 1)[1:]
    yield "lambda_cgd", [{"lambda": -math.expm1(-float(memory))} for memory in memories]
    for bands in sorted({min(4, limits.draws), limits.draws}):
        powers = np.linspace(0.0, 1.0, _POINTS + 1)[1:]
        yield "fractional", [{"bands": bands, "gamma": float(power)} for power in powers]


def _valley(score: Callable[[int], float], count: int) -> int:
    """The index of the least score, by golden sections over the indices."""
    known: dict[int, float] = {}

    def at(index: int) -> float:
        if index not in known:
            known[index] = score(index)
        return known[index]

    low, high = 0, count - 1
    while high - low > 2:
        left = high - round(_GOLDEN * (high - low))
        right = low + round(_GOLDEN * (high - low))
        right = max(right, left + 1)
        low, high = (low, right) if at(left) <= at(right) else (left, high)
    for index in range(low, high + 1):
        at(index)
    return min(known, key=known.__getitem__)


def _words(parameters: Parameters) -> str:
    return repr(sorted(parameters.items()))
