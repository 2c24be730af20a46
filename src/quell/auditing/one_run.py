"""A lower bound on ε from one run: many coins are flipped, and an attacker guesses how they fell.

Every canary is in the data or not, by a fair coin of its own. Whoever sees what the run releases guesses coins, and may
abstain. Under (ε, δ)-DP the number of correct guesses is hardly ever above what a biased coin with
P[correct] = e^ε/(1 + e^ε) gives (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846, Theorem 5.2), however the canaries
depend on one another. An ε under which the guesses would be too good to be true is refuted.

Canaries that cannot influence one another are as many runs as there are canaries. Then the rates at which scores exceed
a threshold, with the canary and without it, prove more: under (ε, δ)-DP, P[hit] ≤ e^ε·P[false alarm] + δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom

from quell._types import Array
from quell.errors import QuellError, require_finite

_NUMBERS = 12  # of guesses that are tried
_FEWEST = 8
_LARGEST = 60.0  # no number of guesses that fits into memory proves more
_THRESHOLDS = 40


@dataclass(frozen=True)
class LowerBound:
    """ε is at least `epsilon`, unless something has happened whose probability is below 1 − `confidence`."""

    epsilon: float
    confidence: float
    canaries: int
    guesses: int
    correct: int


def lower_bound(scores: Array, included: NDArray[np.bool_], delta: float, confidence: float = 0.95) -> LowerBound:
    """The largest ε that the scores refute.

    The same number of coins is guessed from both ends of the scores. Several such numbers are tried, each with its
    share of the failure probability.

    Args:
        scores: One per canary: the larger, the more the attacker believes that it was included. They must depend on
            what the run released, and not on the coins in any other way.
        included: How the coins fell: fair, and independent of one another.
        delta: The δ of the promise.
        confidence: Probability that the bound is true.

    Returns:
        The bound; its ε is 0 if nothing is refuted.

    >>> coins = np.arange(2000) % 2 == 0
    >>> round(lower_bound(np.where(coins, 1.0, -1.0), coins, delta=1e-5).epsilon, 2)  # every guess is right
    5.6
    >>> lower_bound(np.arange(2000.0), coins, delta=1e-5).epsilon  # the scores know nothing
    0.0
    """
    values, coins = _checked(scores, included, confidence)
    ranked, count = coins[np.argsort(-values, kind="stable")], len(coins)
    sides = sorted({int(side) for side in np.geomspace(_FEWEST, count // 2, _NUMBERS)})
    found = []
    for side in sides:
        correct = int(ranked[:side].sum() + (~ranked[-side:]).sum())
        epsilon = _refuted(count, 2 * side, correct, delta, (1 - confidence) / len(sides))
        found.append(LowerBound(epsilon, confidence, count, 2 * side, correct))
    return max(found, key=lambda each: each.epsilon)


def independent_bound(scores: Array, included: NDArray[np.bool_], delta: float, confidence: float = 0.95) -> LowerBound:
    """The ε that scores prove if no canary's score depends on another canary's coin.

    On one half of the canaries a threshold is chosen, on the other half the rates are bounded (Clopper and Pearson),
    for scores that are high with the canary and for scores that are low without it.

    Args:
        scores: As for `lower_bound`.
        included: As for `lower_bound`.
        delta: The δ of the promise.
        confidence: Probability that the bound is true.

    Returns:
        The bound. Its guesses are the scores beyond the threshold, the correct ones those on the right side.

    >>> random = np.random.default_rng(0)
    >>> coins = random.random(40_000) < 0.5
    >>> 1.6 < independent_bound(random.normal(size=40_000) + coins, coins, delta=1e-2).epsilon < 2.4  # 2.3 is true
    True
    """
    values, coins = _checked(scores, included, confidence)
    return max(
        (_by_threshold(values, coins, delta, confidence), _by_threshold(-values, ~coins, delta, confidence)),
        key=lambda each: each.epsilon,
    )


def _by_threshold(values: Array, coins: NDArray[np.bool_], delta: float, confidence: float) -> LowerBound:
    half = len(values) // 2
    (likely, unlikely), (hits, alarms) = (
        (values[part][coins[part]], values[part][~coins[part]]) for part in (slice(0, half), slice(half, None))
    )
    failure = (1 - confidence) / 4  # two rates, for each of the two kinds of scores
    if not len(likely) or not len(hits):
        return LowerBound(0.0, confidence, len(values), 0, 0)
    candidates = np.quantile(likely, 1 - np.geomspace(min(0.5, max(1.2 * delta, 4 / len(likely))), 0.5, _THRESHOLDS))
    threshold = max(candidates, key=lambda t: rate_bound(likely > t, unlikely > t, delta, failure))
    proven = rate_bound(hits > threshold, alarms > threshold, delta, failure)
    right, wrong = int((hits > threshold).sum()), int((alarms > threshold).sum())
    return LowerBound(max(0.0, proven), confidence, len(values), right + wrong, right)


def rate_bound(hits: NDArray[np.bool_], alarms: NDArray[np.bool_], delta: float, failure: float) -> float:
    """ln((P − δ)/Q) with the rate of hits P bounded from below and that of false alarms Q from above."""
    k, m, j, n = int(hits.sum()), len(hits), int(alarms.sum()), len(alarms)
    lower = float(beta.ppf(failure, k, m - k + 1)) if k else 0.0
    upper = float(beta.ppf(1 - failure, j + 1, n - j)) if j < n else 1.0
    return math.log((lower - delta) / upper) if lower > delta else -math.inf


def _checked(scores: Array, included: NDArray[np.bool_], confidence: float) -> tuple[Array, NDArray[np.bool_]]:
    values, coins = np.asarray(scores, np.float64), np.asarray(included, bool)
    if values.shape != coins.shape or values.ndim != 1 or len(values) < 2 * _FEWEST:
        raise QuellError(
            f"scores of shape {values.shape} and coins of shape {coins.shape}: give one of each per canary, and at "
            f"least {2 * _FEWEST}"
        )
    if not 0 < require_finite("confidence", confidence) < 1:
        raise QuellError(f"confidence={confidence:g} must lie between 0 and 1, such as 0.95")
    return np.nan_to_num(values, nan=0.0), coins


def _refuted(canaries: int, guesses: int, correct: int, delta: float, failure: float) -> float:
    """The largest ε under which so many correct guesses have a probability below `failure`, by bisection."""
    if chance(canaries, guesses, correct, 0.0, delta) >= failure:
        return 0.0
    low, high = 0.0, _LARGEST
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if chance(canaries, guesses, correct, middle, delta) < failure else (low, middle)
    return low


def chance(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of at least so many correct guesses under (ε, δ)-DP (Theorem 5.2 there)."""
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    beyond = float(binom.sf(correct - 1, guesses, rate))
    below = np.cumsum(binom.pmf(correct - np.arange(1, correct + 1), guesses, rate))
    steepest = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, beyond + 2 * canaries * delta * steepest)
