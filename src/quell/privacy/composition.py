"""What several runs on the same data cost together, from what is known of each of them.

Three answers:

| | holds | how |
|---|---|---|
| `Together.epsilon` | for plans that were fixed in advance | losses composed on a grid; Gaussian runs by Σ μ² |
| `Together.adaptive_epsilon` | also for plans chosen by what earlier runs released | Proof 18 |
| `Together.naive` | what adding up promises would say, for comparison | Σ ε at Σ δ |

What is released *inside* a run may always depend on everything before. The difference is about plans: with the losses
of earlier runs in view one could choose, for each outcome, the mechanism whose curve is worst there. For Gaussian
mechanisms that gains nothing, so the adaptive answer replaces each run by a Gaussian one that dominates it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from quell._types import Array
from quell.privacy.coins import Coin
from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon
from quell.privacy.losses import Losses, Part, compose_both
from quell.privacy.profile import (
    CoinProfile,
    GaussianProfile,
    PointProfile,
    Profile,
    both_ways,
    curve,
    furthest,
    spread,
)

_RESERVED = 0.1  # of δ, for what is lost outside of Gaussians where plans depend on earlier results
_SLACK = 1e-3  # of a run's promised δ, or of all runs' if that is less: what its dominating Gaussian may leave out
_LARGEST = 1e3  # μ that is looked for
_STRIDE = 8  # of the grid of losses, when it is compared with a Gaussian curve
_SPLITS = 151  # values of ε at which the curve of one step is looked at, for two
_SAFETY = 1e-9  # relative, against rounding in sums of a few hundred squares and in differences of tails


@dataclass(frozen=True)
class Charge:
    """One run: its profile, and the (ε, δ) that it promised."""

    profile: Profile
    epsilon: float
    delta: float


@dataclass(frozen=True)
class Together:
    """All of these runs.

    >>> one = Charge(GaussianProfile(1.0), 4.4, 1e-5)
    >>> both = Together((one, one))
    >>> both.epsilon(2e-5) == gaussian_epsilon(1 / math.sqrt(2) / (1 + 1e-9), 2e-5) < both.adaptive_epsilon(2e-5)
    True
    >>> both.naive
    (8.8, 2e-05)
    """

    charges: tuple[Charge, ...]

    @property
    def naive(self) -> tuple[float, float]:
        """Σ ε and Σ δ of the promises."""
        return math.fsum(each.epsilon for each in self.charges), math.fsum(each.delta for each in self.charges)

    def delta(self, epsilon: float) -> float:
        """An upper bound on δ at `epsilon`, for plans that were fixed in advance."""
        if not self.charges:
            return 0.0
        failure = math.fsum(each.profile.failure for each in self.charges)
        if self._others:
            return min(1.0, max(each.bound(epsilon) for each in self._losses) + failure)
        return min(1.0, gaussian_delta(1.0 / self._gaussian, epsilon) + failure)

    def epsilon(self, delta: float) -> float:
        """The smallest ε at `delta` that is known for plans fixed in advance; infinite where none is."""
        if not self.charges:
            return 0.0
        total, naive = self.naive
        known = total if naive <= delta else math.inf
        if self._others:
            return min(known, _smallest(self.delta, delta, max(float(each.values[-1]) for each in self._losses)))
        return min(known, _gaussian_epsilon(self._gaussian, delta, [each.profile.failure for each in self.charges]))

    def adaptive_epsilon(self, delta: float) -> float:
        """The same for plans chosen with everything in view that earlier runs released (Proof 18)."""
        if len(self.charges) < 2:  # the first plan is chosen before anything is released
            return self.epsilon(delta)
        covers = [dominating_gaussian(each.profile, _SLACK * min(each.delta, delta)) for each in self.charges]
        mu = math.sqrt(math.fsum(cover[0] ** 2 for cover in covers)) * (1 + _SAFETY)
        lost = math.fsum([cover[1] for cover in covers] + [each.profile.failure for each in self.charges])
        if lost > _RESERVED * delta:  # how δ is shared must be fixed in advance too
            return math.inf
        return _gaussian_epsilon(mu, (1 - _RESERVED) * delta, [])

    @cached_property
    def _gaussian(self) -> float:
        """μ of all Gaussian runs together, rounded up."""
        mus = (each.profile.mu for each in self.charges if isinstance(each.profile, GaussianProfile))
        return math.sqrt(math.fsum(mu**2 for mu in mus)) * (1 + _SAFETY)

    @cached_property
    def _others(self) -> Counter[Profile]:
        return Counter(each.profile for each in self.charges if not isinstance(each.profile, GaussianProfile))

    @cached_property
    def _losses(self) -> tuple[Losses, Losses]:
        parts: list[tuple[int, Part]] = [
            (runs * count, part) for profile, runs in self._others.items() for count, part in profile.parts
        ]
        if self._gaussian:
            parts.append((1, Coin(1.0 / self._gaussian, 1.0)))
        return compose_both(parts)


def repeated(profile: Profile, times: int, delta: float) -> Profile:
    """The profile of as many runs of one kind, for plans fixed in advance.

    Where it consists of points, these end where δ is a thousandth of `delta`.
    """
    if times == 1:
        return profile
    if isinstance(profile, GaussianProfile):
        return GaussianProfile(profile.mu * math.sqrt(times) * (1 + _SAFETY), times * profile.failure)
    if isinstance(profile, CoinProfile):
        rounds = tuple((times * count, sigma) for count, sigma in profile.rounds)
        return CoinProfile(rounds, profile.rate, times * profile.failure)
    sure = Together((Charge(replace(profile, failure=0.0), math.inf, 1.0),) * times)
    at = spread(furthest(sure.epsilon, delta))
    return PointProfile(tuple((epsilon, sure.delta(epsilon)) for epsilon in at), times * profile.failure)


@lru_cache(maxsize=256)
def changed(charge: Charge) -> Charge:
    """A run that hides whether a user is there, for neighbours in which the user *changes*: two steps between them.

    P ≤ e^a·P' + δ(a) and P' ≤ e^b·P" + δ(b) give P ≤ e^{a+b}·P" + δ(a) + e^a·δ(b), here at its best a for each a + b on
    a grid. For Gaussian runs μ doubles.

    >>> changed(Charge(GaussianProfile(0.5), 1.0, 1e-5)).profile
    GaussianProfile(mu=1.0, failure=0.0)
    """
    profile = charge.profile
    promised = 2.0 * charge.epsilon, min(1.0, (1.0 + math.exp(charge.epsilon)) * charge.delta)
    if isinstance(profile, GaussianProfile):
        return Charge(replace(profile, mu=2.0 * profile.mu), *promised)
    once = Together((Charge(replace(profile, failure=0.0), math.inf, 1.0),))
    a = np.linspace(0.0, furthest(once.epsilon, charge.delta, 1e-8), _SPLITS)
    delta = np.array([once.delta(float(each)) for each in a])
    points = []
    for place in range(2 * _SPLITS - 1):
        first = np.arange(max(0, place - _SPLITS + 1), min(place, _SPLITS - 1) + 1)
        least = float(np.min(delta[first] + np.exp(a[first]) * delta[place - first]))
        points.append((float(a[1] * place), min(1.0, least * (1 + _SAFETY))))
    return Charge(PointProfile(tuple(points), profile.failure), *promised)


@lru_cache(maxsize=256)
def dominating_gaussian(profile: Profile, slack: float) -> tuple[float, float]:
    """(μ, s) such that a run is dominated by one that gives everything away with probability s and else is μ-GDP.

    s is `slack`, or what the run's own curve leaves at its end if that is more; μ is infinite where no μ is enough.

    >>> mu, lost = dominating_gaussian(GaussianProfile(0.7), 1e-8)
    >>> mu, lost
    (0.7, 0.0)
    """
    if isinstance(profile, GaussianProfile):
        return profile.mu, 0.0
    curves = [curve(losses) for losses in both_ways(profile)]  # each of at least 2¹⁵ values
    slack = max(slack, 2.0 * max(float(delta[-2 * _STRIDE]) for _, delta in curves))  # beyond, nothing is compared
    # On [ε_j, ε_{j+1}] the run's δ is at most that at the left end, and the Gaussian one's at least that at the right.
    # Before the first ε of the grid, where that is not below 0, nothing is known but δ ≤ 1.
    ends = np.concatenate([epsilon[::_STRIDE] for epsilon, _ in curves])
    needed = np.concatenate([np.append(1.0, delta[:-_STRIDE:_STRIDE]) for _, delta in curves])
    kept = (ends > 0) & (needed > slack)
    ends, needed = ends[kept], needed[kept]

    def enough(mu: float) -> bool:
        return bool(np.all(needed <= slack + (1.0 - slack) * _gaussian_curve(mu, ends)))

    low, high = 1e-6, _LARGEST
    if not enough(high):
        return math.inf, slack
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high, slack


def _gaussian_curve(mu: float, epsilon: Array) -> Array:
    """δ of the Gaussian mechanism at many ε, rounded down."""
    from scipy.special import log_ndtr

    above, below = log_ndtr(0.5 * mu - epsilon / mu), log_ndtr(-0.5 * mu - epsilon / mu)
    return np.asarray(np.exp(above) * -np.expm1(np.minimum(epsilon + below - above, 0.0)) * (1 - 1e-6))


def _gaussian_epsilon(mu: float, delta: float, lost: Sequence[float]) -> float:
    """ε of μ-GDP at what `lost` leaves of δ, infinite if that is nothing."""
    left = delta - math.fsum(lost)
    if not math.isfinite(mu) or left <= 0:
        return math.inf
    return gaussian_epsilon(1.0 / mu, left) if mu else 0.0


def _smallest(bound: Callable[[float], float], delta: float, most: float) -> float:
    """The smallest ε ≥ 0 with bound(ε) ≤ delta, to nine digits and rounded up; infinite if there is none."""
    if bound(0.0) <= delta:
        return 0.0
    low, high = 0.0, max(most, 1.0)
    if bound(high) > delta:
        return math.inf
    while high - low > 1e-10 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if bound(middle) > delta else (low, middle)
    return high
