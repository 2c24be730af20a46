"""The search behind a plan: every family, its parameters, every allowed sampling scheme; ranked by quick estimates.

Without amplification noise is exact and costs milliseconds, so everything is tried. With it, an estimate takes a tenth
of a second (`quell.quick`), so it is spent where it can matter:

* Each family has one to three *lines*: an ordered list of parameter values along which the score has one valley (bands,
  buffers, γ, the memory 1/(1−λ) on a logarithmic scale, a horizon, a divergence). Golden sections find the bottom in
  few evaluations.
* A candidate whose noise must be so large that it cannot beat the best one known, by a bound that costs milliseconds
  (`quell.quick.least`), is not estimated at all.
* The first guess for a candidate's noise is as far above its bound as that of the last one estimated was above its own.

Nothing here is a promise: `quell.planning` certifies what it recommends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from quell.errors import QuellError
from quell.mechanism import MOST_BINS, Mechanism, Problem
from quell.privacy import Estimate, gaussian_sigma
from quell.progress import announce
from quell.quick import least, steepness
from quell.sampling import BallsInBins, Cyclic, scheme_names
from quell.setup import Setup
from quell.strategy import FAMILIES, Limits, Parameter, Strategy, build
from quell.strategy.family import DIVERGENCE, HORIZON, LEAST_DIVERGENCE, MOST_DIVERGENCE
from quell.strategy.fractional import best_lambda

Progress = Callable[[int, int, str], None]
Parameters = dict[str, Parameter]
_Key = tuple[str, str, str]  # family, parameters in words, scheme

_LOOK_AHEAD = 16  # buffers that are looked at beyond a smaller limit: what would more memory buy?
_POINTS = 20  # values on a continuous line
_GOLDEN = (math.sqrt(5) - 1) / 2
_UNAMPLIFIED = ("tree", "dense", "diagonal", "band")  # baselines, and one whose Gram matrix takes seconds
_SHAPED = {"band_inv": 2, "band_toeplitz": 16}  # for amplification and horizons as well, with at least so many bands
_DIVERGENCES = np.geomspace(1 / 8, 4, 11)  # that are tried, in those of the Gaussian mechanism with the same promise
_SHORTEST, _LONGEST = 8.0, 4.0  # the horizons that are tried, in steps and in runs
_CLOSE, _FINALISTS = 1.02, 4  # how close to the best, and how many of those are looked at again
_FINE = 0.0015  # relative error of σ that the estimates of finalists may have
_MOST_GRAM = 4e7  # steps × separation up to which column-normalised strategies are amplified


@dataclass
class Search:
    """What has been tried so far for one set-up."""

    setup: Setup
    problem: Problem
    seen: dict[_Key, Mechanism | None] = field(default_factory=dict)  # None: cannot be had
    strategies: dict[tuple[str, str], Strategy | None] = field(default_factory=dict)
    parameters: dict[tuple[str, str], Parameters] = field(default_factory=dict)
    sizes: dict[tuple[Parameter | None, ...], bool] = field(default_factory=dict)  # whether they fit
    bounds: dict[_Key, float] = field(default_factory=dict)  # on the noise under amplification
    latest: dict[str, float] = field(default_factory=dict)  # noise over its bound, of the last one under a scheme

    @property
    def mechanisms(self) -> list[Mechanism]:
        return [mechanism for mechanism in self.seen.values() if mechanism is not None]

    def least_score(self, objective: str) -> float:
        """The best that is known among what fits."""
        return min((m.score(objective) for m in self.mechanisms if self.setup.fits(m)), default=math.inf)

    def score(self, family: str, parameters: Parameters, *, sampling: str, objective: str) -> float:
        """The objective of one candidate, or a lower bound on it where that already rules the candidate out."""
        key = family, _words(parameters), sampling
        if key not in self.seen:
            strategy = self._strategy(family, parameters)
            if strategy is None or sampling not in self.problem.schemes_for(strategy):
                return math.inf
            try:
                if sampling != Cyclic.name:
                    bound = self._least(key, strategy) * self.problem.unit_score(strategy, objective)
                    if bound > self.least_score(objective):
                        return bound
                self._estimate(key, strategy)
            except QuellError as refusal:  # a scheme that does not fit, an error that overflows: others still can
                announce(str(refusal))
                self.seen[key] = None
        mechanism = self.seen[key]
        return math.inf if mechanism is None else mechanism.score(objective)

    def run_off(self, objective: str) -> None:
        """Estimate those that could be the best more carefully: the first estimates are a percent off."""
        fitting = [(m.score(objective), key) for key, m in self.seen.items() if m and self.setup.fits(m)]
        close = sorted(entry for entry in fitting if entry[0] < _CLOSE * min(fitting)[0])
        wanted = _FINE * steepness(self.setup.epsilon, self.setup.delta)  # of δ
        for _, key in close[:_FINALISTS] if len(close) > 1 else ():
            mechanism = self.seen[key]
            if mechanism is not None and isinstance(mechanism.claim, Estimate) and mechanism.claim.relative_error:
                near, effort = mechanism.noise_multiplier, math.ceil((mechanism.claim.relative_error / wanted) ** 2)
                self.seen[key] = self.problem.estimated(mechanism.strategy, key[2], near, effort)

    def show_ruled_out(self, objective: str) -> None:
        """Estimate the most promising one of every family that only had bounds under amplification, for the table."""
        shown = {family for family, _, sampling in self.seen if sampling != Cyclic.name}
        promising: dict[str, tuple[float, _Key, Strategy]] = {}
        for key, noise in self.bounds.items():
            strategy = self.strategies[key[:2]]
            if key[0] in shown or strategy is None:
                continue
            bound = noise * self.problem.unit_score(strategy, objective)
            if key[0] not in promising or bound < promising[key[0]][0]:
                promising[key[0]] = bound, key, strategy
        for _, key, strategy in promising.values():
            self._estimate(key, strategy)

    def _least(self, key: _Key, strategy: Strategy) -> float:
        if key not in self.bounds:
            scheme = self.problem.scheme_of(strategy, key[2])
            self.bounds[key] = least(strategy, scheme, self.setup.epsilon, self.setup.delta)
        return self.bounds[key]

    def _estimate(self, key: _Key, strategy: Strategy) -> None:
        sampling = key[2]
        bound = self.bounds.get(key, 0.0)
        near = bound * self.latest[sampling] if bound and sampling in self.latest else None
        self.seen[key] = found = self.problem.estimated(strategy, sampling, near)
        if bound:
            self.latest[sampling] = found.noise_multiplier / bound

    def refine(self, objective: str) -> None:
        """Try the best amplified one that fits with its columns normalised, which costs time and gains a percent."""
        ranked = sorted(self.seen.items(), key=lambda entry: entry[1].score(objective) if entry[1] else math.inf)
        for (family, words, sampling), mechanism in ranked:
            if mechanism is None or not self.setup.fits(mechanism):
                continue
            small = self.problem.workload.steps * self.problem.cycle.separation <= _MOST_GRAM
            if sampling != Cyclic.name and FAMILIES[family].normalisable and small:
                parameters = {**self.parameters[family, words], "column_normalise": True}
                self.score(family, parameters, sampling=sampling, objective=objective)
            return

    def fits(self, family: str, parameters: Parameters) -> bool:
        """Whether a candidate stays within the set-up's limits."""
        size = family, parameters.get("bands"), parameters.get("buffers")  # nothing else decides what noise costs
        if size not in self.sizes:
            strategy = self._strategy(family, parameters)
            self.sizes[size] = strategy is not None and self.setup.fits(strategy.recurrence)
        return self.sizes[size]

    def _strategy(self, family: str, parameters: Parameters) -> Strategy | None:
        key = family, _words(parameters)
        if key not in self.strategies:
            self.parameters[key] = parameters
            try:
                self.strategies[key] = build(
                    family, self.problem.workload, self.problem.cycle.participation, None, **parameters
                )
            except QuellError as refusal:  # a search that did not converge: the others still can
                announce(str(refusal))
                self.strategies[key] = None
        return self.strategies[key]


def search(
    setup: Setup, problem: Problem, progress: Progress | None = None, families: tuple[str, ...] | None = None
) -> list[Mechanism]:
    """Mechanisms worth showing, estimated: the best of every family, and the best for every amount of memory.

    Sorted by the set-up's objective, those that fit first. All families are searched by default, and then for the least
    RMSE as well; some families only for the objective.
    """
    state = Search(setup, problem)
    participation = problem.cycle.participation
    within, beyond = (
        Limits(participation, buffers, setup.draws)
        for buffers in (setup.buffer_limit, max(setup.buffer_limit, _LOOK_AHEAD))
    )
    schemes = scheme_names(setup.sampling)
    amplifying = [name for name in schemes if name != Cyclic.name]
    plain, lines = (
        [line for line in each if families is None or line[0] in families]
        for each in (_grids(problem, within, beyond), _lines(problem, within, beyond))
    )
    wanted = (setup.objective, "rmse") if families is None else (setup.objective,)
    objectives = dict.fromkeys(wanted) if amplifying else {}
    without = lines if Cyclic.name in schemes and not _amplifies_all(problem) else []
    tick = _ticks(progress, len(plain) + len(without) + len(lines) * len(objectives))
    unamplified = partial(state.score, sampling=Cyclic.name, objective=setup.objective)
    for family, values in plain:
        tick(family)
        for parameters in values if Cyclic.name in schemes else ():
            if family != "band" or _matters(unamplified, parameters, state.least_score(setup.objective)):
                unamplified(family, parameters)
    for family, values in without:
        tick(family)
        _valley(partial(unamplified, family), values)
    for objective in objectives:
        for family, values in lines:
            tick(family)
            fitting = [each for each in values if state.fits(family, each)]
            for sampling in amplifying:
                for group in (fitting, values):  # the best within the limits, and the best there is
                    _valley(partial(state.score, family, sampling=sampling, objective=objective), group)
        state.refine(objective)
    state.show_ruled_out(setup.objective)
    state.run_off(setup.objective)
    return worth_showing(setup, state.mechanisms)


def _amplifies_all(problem: Problem) -> bool:
    """Whether balls-in-bins sampling is tried, which amplifies any C ≥ 0; the other schemes want few bands."""
    return BallsInBins.name in scheme_names(problem.sampling) and problem.cycle.separation <= MOST_BINS


def _matters(score: Callable[..., float], parameters: Parameters, best: float) -> bool:
    """Whether `band`, which takes seconds and is a third of a percent better than its Toeplitz version, could win."""
    return score("band_toeplitz", {**parameters, "column_normalise": True}) < 1.02 * best


def worth_showing(setup: Setup, mechanisms: list[Mechanism]) -> list[Mechanism]:
    """The best of every family and for every amount of memory, by the set-up's objective and by RMSE."""
    kept: dict[int, Mechanism] = {}
    for objective in (setup.objective, "rmse"):
        ranked = sorted(mechanisms, key=lambda m: rank(setup, m, objective))
        families: set[str] = set()
        for mechanism in ranked:
            if mechanism.name not in families and (objective == setup.objective or not families):
                kept[id(mechanism)] = mechanism
            families.add(mechanism.name)
        for mechanism in pareto(mechanisms, objective):
            kept[id(mechanism)] = mechanism
    return sorted(kept.values(), key=lambda m: rank(setup, m, setup.objective))


def rank(setup: Setup, mechanism: Mechanism, objective: str) -> tuple[bool, float]:
    """What fits comes first, and among that the best."""
    return not setup.fits(mechanism), mechanism.score(objective)


def pareto(mechanisms: list[Mechanism] | tuple[Mechanism, ...], objective: str) -> list[Mechanism]:
    """Those that nothing with as little memory beats, least memory first."""
    front: list[Mechanism] = []
    for mechanism in sorted(mechanisms, key=lambda m: (m.buffers, m.score(objective))):
        if not front or mechanism.score(objective) < front[-1].score(objective) * 0.995:
            front.append(mechanism)
    return front


def _grids(problem: Problem, within: Limits, beyond: Limits) -> Iterator[tuple[str, list[Parameters]]]:
    """(family, parameter values): all that is worth trying without amplification, within the limits and beyond."""
    for family in FAMILIES.values():
        both = [each for limits in (within, beyond) for each in family.candidates(problem.workload, limits)]
        size = "bands" if "bands" in family.required else "buffers"
        values = sorted({_words(each): each for each in both}.values(), key=lambda each: int(each.get(size, 0)))
        if family.name == "fractional":  # its best powers take time; more draws are always better
            values = [each for each in values if each["bands"] == max(int(other["bands"]) for other in values)]
        if values:
            yield family.name, values


def _lines(problem: Problem, within: Limits, beyond: Limits) -> Iterator[tuple[str, list[Parameters]]]:
    """(family, parameter values in order): what is worth trying with amplification, columns not normalised.

    What tends to be best comes first: it rules the others out.
    """
    toeplitz = problem.workload.given is None and problem.workload.steps > 1
    if toeplitz:
        yield from _less_cancelling(problem, within)
    if toeplitz and within.draws > 1:
        powers = np.linspace(0.0, 1.0, _POINTS + 1)[1:]
        yield "fractional", [{"bands": within.draws, "gamma": float(power)} for power in powers]
        longest = math.log(1.0 / (1.0 - min(best_lambda(problem.workload, problem.cycle.participation), 1 - 1e-12)))
        memories = np.linspace(0.0, longest, _POINTS + 1)[1:]
        yield "lambda_cgd", [{"lambda": -math.expm1(-float(memory))} for memory in memories]
    for family, values in _grids(problem, within, beyond):
        if family not in ("lambda_cgd", "fractional", *_UNAMPLIFIED):
            yield family, [{**each, "column_normalise": False} for each in values if not each.get("column_normalise")]


def _less_cancelling(problem: Problem, limits: Limits) -> Iterator[tuple[str, list[Parameters]]]:
    """Optimised families, shaped for amplification or for plain sums that fade.

    What is optimal without amplification cancels too much for amplified RMSE, and for training; with momentum more so.
    The optimum for sums that fade cancels less, and that for the noise which amplification leaves just as much as pays;
    they are as good strategies as any, and priced for the true workload and sampling.
    """
    bands = {name: max((int(each["bands"]) for each in FAMILIES[name].grid(limits)), default=0) for name in _SHAPED}
    sizes = {"blt": {"buffers": int(min(limits.buffers, 2))}, **{name: {"bands": most} for name, most in bands.items()}}
    plain = problem.sampling == Cyclic.name
    gaussian = 1.0 / gaussian_sigma(problem.epsilon, problem.delta) ** 2  # its Rényi divergence of order 2
    near = np.clip(gaussian * _DIVERGENCES, LEAST_DIVERGENCE, MOST_DIVERGENCE)
    divergences = sorted({float(f"{divergence:.3g}") for divergence in near})
    longest = _LONGEST * problem.workload.steps
    halves = range(max(1, math.ceil(2 * math.log2(longest / _SHORTEST))))
    horizons = sorted({round(longest / 2 ** (half / 2)) for half in halves})
    for family, size in sizes.items():
        if max(size.values()) < _SHAPED.get(family, 1):
            continue
        normalise = FAMILIES[family].normalisable and plain  # amplified it gains little
        shape = {**size, "column_normalise": normalise}
        if family in _SHAPED and _amplifies_all(problem):
            yield family, [{**shape, DIVERGENCE: divergence} for divergence in divergences]
        yield family, [{**shape, HORIZON: horizon} for horizon in horizons]


def _ticks(progress: Progress | None, total: int) -> Callable[[str], None]:
    done = iter(range(total))
    return lambda name: progress(next(done), total, name) if progress is not None else None


def _valley(score: Callable[[Parameters], float], values: list[Parameters]) -> None:
    """Find the least score of values in order, by golden sections; the scores remember themselves."""
    known: dict[int, float] = {}

    def at(index: int) -> float:
        if index not in known:
            known[index] = score(values[index])
        return known[index]

    low, high = 0, len(values) - 1
    while high - low > 2:
        left = high - round(_GOLDEN * (high - low))
        right = max(low + round(_GOLDEN * (high - low)), left + 1)
        low, high = (low, right) if at(left) <= at(right) else (left, high)
    for index in range(low, high + 1):
        at(index)


def _words(parameters: Parameters) -> str:
    return repr(sorted(parameters.items()))
