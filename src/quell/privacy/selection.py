"""The best of a random number of trials: what it costs to release one trial's result and hide all others.

Trying five learning rates and keeping the best model costs as much as releasing all five, if their number is fixed. If
the number is random and hidden, with a law that is flat enough, much less: nobody can tell whether the released trial
won against few or many (Liu & Talwar 2019; Papernot & Steinke 2022, arXiv:2110.03620). Those theorems go through Rényi
divergences. Here the whole profile of one trial is used, which costs less and fits certified points (Proof 19; for
a close relative see arXiv:2402.06701).

Every trial must be an independent draw of the same mechanism: parameters drawn from a law that does not depend on
other trials, then a private run. The score must be a function of what a trial releases and of data that the promise
does not cover, such as held-out examples that were never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from secrets import SystemRandom
from typing import Any

from quell.errors import QuellError, require_finite, short
from quell.privacy.gaussian import gaussian_delta
from quell.privacy.profile import GaussianProfile, PointProfile, Profile, both_ways, furthest, spread

LAWS = ("geometric", "truncated-poisson")
_MOST = 1e4  # trials, on average
_TOP = 200.0  # the largest ε that is looked at

Delta = Callable[[float], float]  # from ε ≥ 0 to an upper bound on δ, in both directions


@dataclass(frozen=True)
class Trials:
    """A random number of trials, at least one: "geometric", or "truncated-poisson" (a Poisson law without its zero).

    For the same mean the geometric law costs less privacy, and the Poisson law seldom makes very few or many trials.

    >>> geometric = Trials(5.0)
    >>> [round(geometric.probability(k), 3) for k in (1, 2, 3)]
    [0.2, 0.16, 0.128]
    """

    mean: float
    law: str = "geometric"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", require_finite("mean", self.mean))
        if self.law not in LAWS:
            raise QuellError(f"law={short(self.law)} is not known: use {' or '.join(LAWS)}")
        if not 1 < self.mean <= _MOST:
            raise QuellError(f"mean={self.mean:g} trials must lie between 1 and {_MOST:,.0f}: 10 for five settings")

    @cached_property
    def rate(self) -> float:
        """Of the Poisson law before its zero is left out: rate/(1 − e^−rate) is the mean."""
        low, high = 0.0, self.mean
        for _ in range(200):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if middle < -self.mean * math.expm1(-middle) else (low, middle)
        return high

    def probability(self, count: int) -> float:
        """Of exactly so many trials."""
        if self.law == "geometric":
            return (1.0 - 1.0 / self.mean) ** (count - 1) / self.mean
        return math.exp(count * math.log(self.rate) - self.rate - math.lgamma(count + 1)) / -math.expm1(-self.rate)

    def missed(self, settings: int) -> float:
        """The probability that one of so many equally likely settings is never tried."""
        keep = 1.0 - 1.0 / settings
        if self.law == "geometric":
            return keep / (self.mean - keep * (self.mean - 1.0))
        return math.exp(-self.rate / settings) * math.expm1(-self.rate * keep) / math.expm1(-self.rate)

    def draw(self, random: Random | None = None) -> int:
        """A number of trials, from the operating system's entropy unless told otherwise. Keep it secret."""
        place, count = (random or SystemRandom()).random(), 1
        while (place := place - self.probability(count)) >= 0 and count < 100 * _MOST:
            count += 1
        return count

    def loss(self, delta: Delta) -> float:
        """ln ρ: how much more ε a selection costs than one of its trials, whose δ(ε) is given (Proof 19)."""
        if self.law == "truncated-poisson":
            return self.rate * min(1.0, delta(0.0)) * (1 + 1e-12)
        low, high = 0.0, math.log(self.mean)  # at ln(mean) any δ is enough
        for _ in range(100):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if math.expm1(middle) < (self.mean - 1.0) * delta(middle) else (low, middle)
        return 2.0 * high

    def as_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "law": self.law}


def selected(profiles: Sequence[Profile], trials: Trials, delta: float) -> PointProfile:
    """What is known of the best of `trials` trials, each of which runs a mechanism with one of these profiles.

    `delta` is the promise's: where m·δ of a trial is a thousandth of it, the points end.
    """
    known = delta_of(profiles)
    more, at = trials.loss(known), spread(furthest(lambda small: _smallest(known, small / trials.mean), delta))
    points = [(epsilon + more, min(1.0, trials.mean * known(epsilon))) for epsilon in at]
    return PointProfile(tuple(points), _failure(profiles))


def selected_epsilon(profiles: Sequence[Profile], trials: Trials, delta: float) -> float:
    """ε at `delta` of the same selection, directly; infinite where none is known."""
    known, left = delta_of(profiles), delta - _failure(profiles)
    if left <= 0:
        return math.inf
    return _smallest(known, left / trials.mean) + trials.loss(known)


def worst_of(profiles: Sequence[Profile], delta: float) -> Profile:
    """A profile at or above all of these, for runs of which anybody may choose the kind; `delta` as in `selected`."""
    different = tuple(dict.fromkeys(profiles))
    if len(different) == 1:
        return different[0]
    gaussian = [each for each in different if isinstance(each, GaussianProfile)]
    if len(gaussian) == len(different):
        return GaussianProfile(max(each.mu for each in gaussian), _failure(different))
    known = delta_of(different)
    points = tuple(
        (epsilon, min(1.0, known(epsilon))) for epsilon in spread(furthest(partial(_smallest, known), delta))
    )
    return PointProfile(points, _failure(different))


def _failure(profiles: Sequence[Profile]) -> float:
    """That any of the certificates behind these profiles fails: all of them are used."""
    return math.fsum(each.failure for each in dict.fromkeys(profiles))


def delta_of(profiles: Sequence[Profile]) -> Delta:
    """The largest δ of any of these profiles at every ε, failure probabilities left out."""
    if not profiles:
        raise QuellError("a selection needs at least one kind of trial")
    functions = [_delta_of(profile) for profile in dict.fromkeys(profiles)]
    return lambda epsilon: max(function(epsilon) for function in functions)


def _delta_of(profile: Profile) -> Delta:
    if isinstance(profile, GaussianProfile):
        sigma = 1.0 / profile.mu
        return lambda epsilon: gaussian_delta(sigma, epsilon)
    both = both_ways(profile)
    return lambda epsilon: max(losses.bound(epsilon) for losses in both)


def _smallest(known: Delta, delta: float) -> float:
    """The smallest ε with known(ε) ≤ delta, rounded up; infinite if there is none."""
    if known(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while known(high) > delta:
        if high > _TOP:
            return math.inf
        low, high = high, 2.0 * high
    while high - low > 1e-11 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if known(middle) > delta else (low, middle)
    return high
