"""How to spend one promise on several trials: how many, by which law, and with how much noise each.

A way is compared with the others before anything is planned, by closed forms for fixed batches. Then the trials' plans
are made for the way that was chosen, one per batch size, and the ε of the whole search is certified from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from quell.budget.claims import ALL, Claim, as_plain, search_claim
from quell.errors import QuellError, require_count, require_finite, require_privacy, short
from quell.planning import Plan, make_plan
from quell.planning.search import Progress
from quell.privacy import gaussian_epsilon, gaussian_sigma
from quell.privacy.meaning import meaning
from quell.privacy.profile import GaussianProfile
from quell.privacy.selection import LAWS, Trials, selected_epsilon
from quell.run import Promise, Run, population, usual_delta
from quell.show import many_runs
from quell.show.notebook import preformatted
from quell.show.tables import text_of

T = TypeVar("T")

_ATTEMPTS = 6
_CLOSE = 0.97  # of the promised ε, from where a search is not planned again to use the rest


@dataclass(frozen=True)
class Way:
    """One way of making trials under one promise.

    Args:
        law: "geometric" or "truncated-poisson": a random number of trials, and only the best is released. "all": a
            fixed number, and everything may be released, also to whatever proposes the next trial.
        trials: How many on average, or exactly for "all".
        trial_epsilon: ε of one trial at the promise's δ, for fixed batches.
        noise: Noise of one trial over that of a single run with the whole promise.
        missed: The probability that one of the settings is never tried.
    """

    law: str
    trials: float
    trial_epsilon: float
    noise: float
    missed: float


@dataclass(frozen=True)
class TuningPlan:
    """What a search promises, and the plans of its trials, one per batch size. Make one with `quell.tuning.tune`."""

    promise: Promise
    trials: Trials | int
    plans: tuple[Plan, ...]
    ways: tuple[Way, ...]

    def _repr_html_(self) -> str:
        return preformatted(text_of(many_runs.ways_table(self.ways, self.law)))

    @property
    def law(self) -> str:
        return self.trials.law if isinstance(self.trials, Trials) else ALL

    @property
    def mean(self) -> float:
        """How many trials there are, on average."""
        return self.trials.mean if isinstance(self.trials, Trials) else float(self.trials)

    @cached_property
    def claim(self) -> Claim:
        """The certified ε of the whole search at the promise's δ, and what it was computed from."""
        kinds = [(plan.prices, plan.mechanism) for plan in self.plans]
        return search_claim(self.trials, kinds, self.promise.delta)

    @property
    def epsilon(self) -> float:
        """ε of the whole search, trials that are never shown included."""
        return self.claim.epsilon

    def covering(self, report: Any) -> Any:
        """The privacy report (`optimizer.privacy_report()`) of the trial that is released, with the search's promise.

        The report by itself states the promise of one trial, which is smaller.
        """
        return replace(
            report,
            epsilon_at_the_end=self.promise.epsilon,
            epsilon_so_far=self.promise.epsilon,
            epsilon_so_far_is="the whole search's",
            meaning=meaning(self.claim.profile),
            search=many_runs.search_covered(self),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data (documented in docs/json.md)."""
        return {
            "promise": asdict(self.promise),
            "epsilon": self.epsilon,
            "trials": as_plain(self.trials),
            "ways": [asdict(way) for way in self.ways],
            "plans": [plan.as_dict() for plan in self.plans],
        }


def ways(epsilon: float, delta: float, trials: float, settings: int) -> tuple[Way, ...]:
    """The ways of making about so many trials under one promise, the least noise first.

    >>> best, *others = ways(epsilon=4.0, delta=1e-5, trials=5, settings=5)
    >>> best.law, round(best.noise, 2), [(way.law, round(way.noise, 2)) for way in others]
    ('geometric', 1.33, [('truncated-poisson', 1.48), ('all', 2.24)])
    """
    epsilon, delta = require_privacy(epsilon, delta)
    settings, count = require_count("settings", settings), math.ceil(require_finite("trials", trials))
    found = [_way(law, epsilon, delta, Trials(trials, law), settings) for law in LAWS]
    found.append(_way(ALL, epsilon, delta, count, settings))
    return tuple(sorted(found, key=lambda way: way.noise))


def tune(
    *,
    batch_size: int | Sequence[int],
    epsilon: float,
    delta: float | None = None,
    trials: float = 10.0,
    law: str | None = None,
    settings: int = 5,
    progress: Progress | None = None,
    **arguments: Any,
) -> TuningPlan:
    """Plan trials whose best result, or all of them, may be released under one (epsilon, delta).

    Args:
        batch_size: One, or several to choose from.
        epsilon, delta: The promise of the whole search. Default of delta: `quell.run.usual_delta`.
        trials: How many trials, on average.
        law: "geometric", "truncated-poisson" or "all" (see `Way`). Default: the one with the least noise per trial.
        settings: How many settings there are to choose from, for `Way.missed`.
        progress: Called with (done, total, what) while plans are made.
        arguments: All other arguments of `quell.Run.from_data`.

    Returns:
        The plan; `TuningPlan.epsilon` is certified, and at most `epsilon`.

    >>> search = tune(examples=1000, batch_size=100, epochs=3, epsilon=4, delta=1e-5, sampling="cyclic", trials=5)
    >>> search.law, 3.99 < search.epsilon <= 4, round(search.plans[0].run.epsilon, 2)
    ('geometric', True, 2.88)
    """
    sizes = tuple(batch_size) if isinstance(batch_size, Sequence) else (batch_size,)
    if not sizes or len(set(sizes)) < len(sizes):
        raise QuellError(f"batch_size={short(batch_size)} must be one size, or several different ones")
    if delta is None:
        delta = usual_delta(population(*(arguments.get(name) for name in ("examples", "users", "groups")))[1])
    compared = ways(epsilon, delta, trials, settings)
    if law not in (None, *LAWS, ALL):
        raise QuellError(f"law={short(law)} is not known: use {', '.join((*LAWS, ALL))}")
    chosen = compared[0] if law is None else next(way for way in compared if way.law == law)
    number: Trials | int = int(chosen.trials) if chosen.law == ALL else Trials(chosen.trials, chosen.law)

    def planned(trial_epsilon: float) -> TuningPlan:
        runs = [Run.from_data(batch_size=size, epsilon=trial_epsilon, delta=delta, **arguments) for size in sizes]
        promise = Promise(epsilon, delta, runs[0].promise.unit)
        return TuningPlan(promise, number, tuple(make_plan(run, progress) for run in runs), compared)

    return fitted(epsilon, chosen.trial_epsilon, planned, lambda found: found.epsilon)


def fitted(epsilon: float, trial: float, make: Callable[[float], T], total: Callable[[T], float]) -> T:
    """What `make` makes of the largest ε per trial, near `trial`, with which the `total` of all trials is at most ε.

    The first one is right for fixed batches. Others cost a little more or less than Gaussian runs of the same promise.
    """
    best: tuple[float, T] | None = None
    trial *= 1 - 1e-9
    for _ in range(_ATTEMPTS):
        made = make(trial)
        spent = total(made)
        if spent <= epsilon and (best is None or spent > best[0]):
            best = spent, made
        if best is not None and (best[0] >= _CLOSE * epsilon or spent > epsilon):
            return best[1]
        trial *= 0.998 * epsilon / spent
    raise QuellError("the trials could not be planned for this promise: allow fewer trials, or sampling='cyclic'")


def _way(law: str, epsilon: float, delta: float, trials: Trials | int, settings: int) -> Way:
    """One way, for fixed batches: the largest μ of a trial that keeps the promise."""
    largest = 1.0 / gaussian_sigma(epsilon, delta)
    if isinstance(trials, Trials):
        low, high = largest / 1000, largest
        while high / low > 1 + 1e-12:
            middle = math.sqrt(low * high)
            enough = selected_epsilon([GaussianProfile(middle)], trials, delta) <= epsilon
            low, high = (middle, high) if enough else (low, middle)
        mu, mean, missed = low, trials.mean, trials.missed(settings)
    else:
        mu, mean, missed = largest / math.sqrt(trials), float(trials), max(0.0, 1.0 - trials / settings)
    return Way(law, mean, gaussian_epsilon(1.0 / mu, delta), largest / mu, missed)
