"""The search behind a plan: families, their parameters and the allowed sampling schemes, ranked by estimates.

Without amplification the noise is exact and takes milliseconds, so everything is tried. With amplification an estimate
takes a tenth of a second, so there are four steps:

* `generate`: each family names *lines* of parameter values along which its score has one minimum (bands, buffers, γ, a
  memory on a logarithmic scale, a horizon, a divergence). Golden sections find the minimum in few evaluations.
* `rule_out`: a candidate that cannot beat the best one known, by a lower bound on its noise that takes milliseconds
  (Proof 13 in docs/proofs.md), is not estimated.
* `rank`: the others are estimated. The first guess for a candidate's noise is its lower bound times the ratio of noise
  to bound of the last candidate.
* `run_off`: those that could be the best are estimated more carefully, because first estimates are a percent off.

Nothing here is a promise: `quell.planning.planner` certifies what it recommends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quell.errors import QuellError
from quell.planning.mechanism import Mechanism
from quell.planning.prices import Prices
from quell.privacy import Estimate, gaussian_sigma
from quell.privacy.accountant import gaussian_slope
from quell.progress import announce
from quell.run import Run
from quell.schemes import Scheme
from quell.strategy import FAMILIES, Family, Parameter, Space, Strategy
from quell.strategy.family import NORMALISE

Progress = Callable[[int, int, str], None]
Parameters = dict[str, Parameter]

_LOOK_AHEAD = 16  # buffers that are tried beyond a smaller limit, to say what more memory would gain
_GOLDEN = (math.sqrt(5) - 1) / 2
_CLOSE, _FINALISTS = 1.02, 4  # how close to the best, and how many of those are looked at again
_FINE = 0.0015  # relative error of σ that the estimates of finalists may have
_MOST_GRAM = 4e7  # steps × separation up to which column-normalised strategies are amplified


@dataclass(frozen=True)
class Candidate:
    """One strategy under one scheme; hashable, the key of everything that a search computes."""

    family: str
    parameters: tuple[tuple[str, Parameter], ...]
    kind: type[Scheme]

    @classmethod
    def of(cls, family: str, parameters: Parameters, kind: type[Scheme]) -> Candidate:
        return cls(family, tuple(sorted(parameters.items())), kind)

    @property
    def design(self) -> tuple[str, tuple[tuple[str, Parameter], ...]]:
        """The strategy without the scheme."""
        return self.family, self.parameters


@dataclass(frozen=True)
class Line:
    """Candidates of one family under one scheme, in order, and the objective whose minimum is searched for.

    `every` means that all of them are tried, which without amplification takes milliseconds.
    """

    family: Family
    values: Sequence[Parameters]
    kind: type[Scheme]
    objective: str
    every: bool = False


@dataclass
class Tried:
    """What has been priced so far, so that every number is computed once."""

    prices: Prices
    strategies: dict[object, Strategy | None] = field(default_factory=dict)  # None: cannot be built
    found: dict[Candidate, Mechanism | None] = field(default_factory=dict)  # None: cannot be priced
    bounds: dict[Candidate, float] = field(default_factory=dict)  # on the noise of those under amplification
    sizes: dict[object, bool] = field(default_factory=dict)  # whether they fit
    latest: dict[type[Scheme], float] = field(default_factory=dict)  # noise over its bound, of the last one

    @property
    def run(self) -> Run:
        return self.prices.run

    @property
    def mechanisms(self) -> list[Mechanism]:
        return [mechanism for mechanism in self.found.values() if mechanism is not None]

    def least_score(self, objective: str) -> float:
        """The best known score within the limits."""
        return min((m.score(objective) for m in self.mechanisms if self.run.limits.fits(m)), default=math.inf)

    def strategy(self, candidate: Candidate) -> Strategy | None:
        """The strategy, or None where it cannot be built."""
        if candidate.design not in self.strategies:
            try:
                self.strategies[candidate.design] = self.prices.build(candidate.family, **dict(candidate.parameters))
            except QuellError as refusal:  # a search that did not converge: the others still can
                announce(str(refusal))
                self.strategies[candidate.design] = None
        return self.strategies[candidate.design]

    def fits(self, candidate: Candidate) -> bool:
        """Whether it stays within the limits; only bands and buffers decide what its noise costs."""
        parameters = dict(candidate.parameters)
        size = candidate.family, parameters.get("bands"), parameters.get("buffers")
        if size not in self.sizes:
            strategy = self.strategy(candidate)
            self.sizes[size] = strategy is not None and self.run.limits.fits(strategy.recurrence)
        return self.sizes[size]


def search(
    prices: Prices, progress: Progress | None = None, families: Iterable[Family] | None = None
) -> list[Mechanism]:
    """Mechanisms worth showing, estimated: the best of every family, and the best for every amount of memory.

    Args:
        prices: The prices of the run.
        progress: Called with (done, total, what) for every line, and for every leader that is estimated again.
        families: Families to search, for the run's objective only. Default: all, and for the least RMSE as well.

    Returns:
        Mechanisms sorted by the run's objective, those within the limits first.
    """
    run, tried = prices.run, Tried(prices)
    objectives = tuple(dict.fromkeys([run.objective, *(["rmse"] if families is None else [])]))
    lines = generate(run, objectives, tuple(FAMILIES.values() if families is None else families))
    for done, line in enumerate(lines):
        if progress is not None:
            progress(done, len(lines), f"searching {line.family.name}")
        follow(line, tried)
        if done + 1 == len(lines) or lines[done + 1].objective != line.objective:
            normalise_best(tried, line.objective)
    show_ruled_out(tried, run.objective)
    run_off(tried, run.objective, progress)
    return worth_showing(run, tried.mechanisms)


def generate(run: Run, objectives: Sequence[str], families: Sequence[Family]) -> list[Line]:
    """All lines of the search. Those that tend to be best come first, because they rule others out."""
    amplifying = [kind for kind in run.schemes if kind.amplifies]
    fixed = [kind for kind in run.schemes if not kind.amplifies]
    amplifies_all = any(
        kind.takes_any_strategy and kind.suits(run.steps, run.participation.separation) for kind in amplifying
    )
    space = space_of(run, shape=amplifies_all)
    lines = [(family, values) for family in families for values in family.first(family, space)]
    lines += [(family, values) for family in families for values in family.lines(family, space)]
    found = [
        Line(family, values, kind, run.objective, every=True)
        for family in families
        for kind in fixed
        if (values := family.grid_in_order(space))
    ]
    if not amplifies_all:
        found += [Line(family, values, kind, run.objective) for family, values in lines for kind in fixed]
    for objective in objectives:
        found += [Line(family, values, kind, objective) for family, values in lines for kind in amplifying]
    return found


def space_of(run: Run, shape: bool = False) -> Space:
    """What may be tried for a run; with `shape`, strategies are also optimised for amplification."""
    gaussian = 1.0 / gaussian_sigma(run.epsilon, run.delta) ** 2  # its Rényi divergence of order 2
    return Space(
        run.designed_for,
        run.participation,
        run.limits.buffers,
        run.limits.draws,
        divergence=gaussian if shape else None,
        plain=not any(kind.amplifies for kind in run.schemes),
        look_ahead=_LOOK_AHEAD,
    )


def follow(line: Line, tried: Tried) -> None:
    """Try all candidates of a line, or find its minimum: among those within the limits, and among all."""

    def score(parameters: Parameters) -> float:
        return rank(Candidate.of(line.family.name, parameters, line.kind), tried, line.objective)

    if not line.every:
        fitting = [each for each in line.values if tried.fits(Candidate.of(line.family.name, each, line.kind))]
        _valley(score, fitting)
        _valley(score, line.values)
        return
    for parameters in line.values:
        rough = line.family.rough_version
        if rough is not None:
            almost = Candidate.of(rough, {**parameters, NORMALISE: True}, line.kind)
            if rank(almost, tried, line.objective) >= _CLOSE * tried.least_score(line.objective):
                continue
        score(parameters)


def rank(candidate: Candidate, tried: Tried, objective: str) -> float:
    """The estimated score of a candidate, or a lower bound on it if that already rules the candidate out."""
    if candidate not in tried.found:
        strategy = tried.strategy(candidate)
        if strategy is None or candidate.kind not in tried.prices.kinds_for(strategy):
            return math.inf
        try:
            bound = rule_out(candidate, strategy, tried, objective)
            if bound is not None:
                return bound
            tried.found[candidate] = estimated(candidate, strategy, tried)
        except QuellError as refusal:  # a scheme that does not fit, an error that overflows: others still can
            announce(str(refusal))
            tried.found[candidate] = None
    mechanism = tried.found[candidate]
    return math.inf if mechanism is None else mechanism.score(objective)


def rule_out(candidate: Candidate, strategy: Strategy, tried: Tried, objective: str) -> float | None:
    """A lower bound on the candidate's score if that is worse than the best score known, else None."""
    if not candidate.kind.amplifies:
        return None
    if candidate not in tried.bounds:
        tried.bounds[candidate] = tried.prices.at_least(strategy, candidate.kind)
    bound = tried.prices.score(strategy, objective, tried.bounds[candidate])
    return bound if bound > tried.least_score(objective) else None


def estimated(candidate: Candidate, strategy: Strategy, tried: Tried) -> Mechanism:
    """The candidate with its estimated noise."""
    bound, over = tried.bounds.get(candidate, 0.0), tried.latest.get(candidate.kind)
    near = bound * over if bound and over is not None else None
    found = tried.prices.estimate(strategy, candidate.kind, near)
    if bound:
        tried.latest[candidate.kind] = found.noise_multiplier / bound
    return found


def normalise_best(tried: Tried, objective: str) -> None:
    """Try the best amplified candidate with normalised columns, which takes time and gains about a percent."""
    priced = {candidate: m for candidate, m in tried.found.items() if m is not None and tried.run.limits.fits(m)}
    if not priced or tried.run.steps * tried.run.participation.separation > _MOST_GRAM:
        return
    best = min(priced, key=lambda candidate: priced[candidate].score(objective))
    if best.kind.amplifies and FAMILIES[best.family].normalisable:
        rank(Candidate.of(best.family, {**dict(best.parameters), NORMALISE: True}, best.kind), tried, objective)


def show_ruled_out(tried: Tried, objective: str) -> None:
    """For the table: estimate the most promising candidate of every family that was ruled out by bounds alone."""
    shown = {candidate.family for candidate in tried.found if candidate.kind.amplifies}
    promising: dict[str, tuple[float, Candidate, Strategy]] = {}
    for candidate, noise in tried.bounds.items():
        strategy = tried.strategy(candidate)
        if candidate.family in shown or strategy is None:
            continue
        bound = tried.prices.score(strategy, objective, noise)
        if candidate.family not in promising or bound < promising[candidate.family][0]:
            promising[candidate.family] = bound, candidate, strategy
    for _, candidate, strategy in promising.values():
        tried.found[candidate] = estimated(candidate, strategy, tried)


def run_off(tried: Tried, objective: str, progress: Progress | None = None) -> None:
    """Estimate the candidates that could be the best more carefully."""
    fitting = [(m.score(objective), m, c) for c, m in tried.found.items() if m and tried.run.limits.fits(m)]
    least = min((score for score, _, _ in fitting), default=0.0)
    close = sorted((each for each in fitting if each[0] < _CLOSE * least), key=lambda each: each[0])
    wanted = _FINE * gaussian_slope(tried.run.epsilon, tried.run.delta)  # of δ
    leaders = close[:_FINALISTS] if len(close) > 1 else []
    for done, (_, mechanism, candidate) in enumerate(leaders):
        if isinstance(mechanism.claim, Estimate) and mechanism.claim.relative_error:
            if progress is not None:
                progress(done, len(leaders), "comparing the leaders")
            near, effort = mechanism.noise_multiplier, math.ceil((mechanism.claim.relative_error / wanted) ** 2)
            tried.found[candidate] = tried.prices.estimate(mechanism.strategy, candidate.kind, near, effort)


def worth_showing(run: Run, mechanisms: list[Mechanism]) -> list[Mechanism]:
    """The best of every family and for every amount of memory, by the run's objective and by RMSE."""
    kept: dict[int, Mechanism] = {}
    for objective in (run.objective, "rmse"):
        families: set[str] = set()
        for mechanism in sorted(mechanisms, key=lambda m: order(run, m, objective)):
            if mechanism.name not in families and (objective == run.objective or not families):
                kept[id(mechanism)] = mechanism
            families.add(mechanism.name)
        for mechanism in pareto(mechanisms, objective):
            kept[id(mechanism)] = mechanism
    return sorted(kept.values(), key=lambda m: order(run, m, run.objective))


def order(run: Run, mechanism: Mechanism, objective: str) -> tuple[bool, float]:
    """A sort key: mechanisms within the limits first, then by score."""
    return not run.limits.fits(mechanism), mechanism.score(objective)


def pareto(mechanisms: Iterable[Mechanism], objective: str) -> list[Mechanism]:
    """The mechanisms that no other with as little memory beats by half a percent, least memory first."""
    front: list[Mechanism] = []
    for mechanism in sorted(mechanisms, key=lambda m: (m.buffers, m.score(objective))):
        if not front or mechanism.score(objective) < front[-1].score(objective) * 0.995:
            front.append(mechanism)
    return front


def _valley(score: Callable[[Parameters], float], values: Sequence[Parameters]) -> None:
    """Find the least score of ordered values by golden sections; `score` remembers what it computed."""
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
