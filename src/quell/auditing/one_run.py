"""A lower bound on ε from one run: many coins are flipped, and an attacker guesses how they fell.

Every canary is in the data or not, by a fair coin of its own. Whoever sees what the run releases guesses coins, and may
abstain. An ε under which so many guesses could hardly be right is refuted. Two theorems say how many could be (Proof 20
in docs/proofs.md):

- However canaries depend on one another, a promise about each of them bounds the law of the number of correct guesses.
  The promise may be (ε, δ), or the whole curve of a Gaussian mechanism, which proves more where the run is one.
- Canaries that cannot influence one another are as many runs as there are canaries. Given all scores, their coins are
  still independent. So the scores may decide which coins are guessed, and how many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, expit, ndtr, ndtri
from scipy.stats import binom

from quell._types import Array
from quell.errors import QuellError, require_finite
from quell.privacy import gaussian_sigma

_NUMBERS = 12  # of guesses that are tried
_FEWEST = 8
_LARGEST = 60.0  # no number of guesses that fits into memory proves more
_RESERVED = 0.1  # of the failure probability, that more canaries than assumed are given away
_ROUNDING = 1e-9

Test = Callable[[float], float]  # from a share of true positives to the fewest false positives that it must cost


@dataclass(frozen=True)
class LowerBound:
    """ε is at least `epsilon`, unless something has happened whose probability is below 1 − `confidence`."""

    epsilon: float
    confidence: float
    canaries: int
    guesses: int
    correct: int


def lower_bound(
    scores: Array, included: NDArray[np.bool_], delta: float, confidence: float = 0.95, *, gaussian: bool = False
) -> LowerBound:
    """The largest ε that the scores refute, however canaries influence one another.

    The same number of coins is guessed from both ends of the scores. Several such numbers are tried, each with its
    share of the failure probability.

    Args:
        scores: One per canary: the larger, the more the attacker believes that it was included. They must depend on
            what the run released, and not on the coins in any other way.
        included: How the coins fell: fair, and independent of one another.
        delta: The δ of the promise.
        confidence: Probability that the bound is true.
        gaussian: Take for granted that the privacy curve of the run is that of a Gaussian mechanism, as it is with
            `cyclic` sampling. Then μ-GDP is refuted, and the ε of that μ is returned.

    Returns:
        The bound; its ε is 0 if nothing is refuted.

    >>> coins = np.arange(2000) % 2 == 0
    >>> round(lower_bound(np.where(coins, 1.0, -1.0), coins, delta=1e-5).epsilon, 2)  # every guess is right
    5.9
    >>> lower_bound(np.arange(2000.0), coins, delta=1e-5).epsilon  # the scores know nothing
    0.0
    """
    values, coins = _checked(scores, included, confidence)
    ranked, count = coins[np.argsort(-values, kind="stable")], len(coins)
    sides = sorted({int(side) for side in np.geomspace(_FEWEST, count // 2, _NUMBERS)})
    family = _gaussian_test if gaussian else _promise_test
    best = LowerBound(0.0, confidence, count, 0, 0)
    for side in sides:
        correct = int(ranked[:side].sum() + (~ranked[-side:]).sum())

        def refuted(epsilon: float, guesses: int = 2 * side, correct: int = correct) -> bool:
            failure = (1 - confidence) / len(sides)
            return too_many(count, guesses, correct, failure, family(epsilon, delta))

        if refuted(best.epsilon):
            best = LowerBound(_largest(refuted, best.epsilon), confidence, count, 2 * side, correct)
    return best


def independent_bound(scores: Array, included: NDArray[np.bool_], delta: float, confidence: float = 0.95) -> LowerBound:
    """The ε that scores prove if no canary's score depends on another canary's coin.

    As many coins are guessed as promise the largest bound, the surest first, if scores are what they should be.

    Args:
        scores: One per canary: the logarithm of how much likelier what was released is with the canary than without
            it. The bound is true for other scores too, but low.
        included: How the coins fell: fair, and independent of one another.
        delta: The δ of the promise.
        confidence: Probability that the bound is true.

    Returns:
        The bound.

    >>> random = np.random.default_rng(0)
    >>> coins = random.random(40_000) < 0.5
    >>> scores = random.normal(size=40_000) + coins - 0.5  # of a shift by 1: already the logarithm of the ratio
    >>> 1.6 < independent_bound(scores, coins, delta=1e-2).epsilon < 2.4  # 2.3 is true
    True
    """
    values, coins = _checked(scores, included, confidence)
    count, failure = len(values), 1 - confidence
    given_away = int(binom.isf(_RESERVED * failure, count, delta)) if delta else 0
    order = np.argsort(-np.abs(values), kind="stable")
    right = ((values > 0) == coins)[order]
    guesses = np.arange(1, count + 1)
    wrong = np.cumsum(expit(-np.abs(values[order])))  # so many are to be expected
    proven = _log_odds(guesses - wrong - given_away, wrong, (1 - _RESERVED) * failure)
    number = int(np.argmax(proven)) + 1
    correct = int(right[:number].sum())
    epsilon = float(_log_odds(correct - given_away, number - correct, (1 - _RESERVED) * failure))
    return LowerBound(max(0.0, epsilon), confidence, count, number, correct)


def too_many(canaries: int, guesses: int, correct: int, failure: float, test: Test) -> bool:
    """Whether so many correct guesses, or more, have a probability below `failure` (Proof 20).

    Args:
        canaries: How many there are.
        guesses: How many of their coins are guessed.
        correct: How many guesses were right.
        failure: The probability.
        test: The promise about each canary.
    """
    tail, above = failure, 0.0  # P[at least i guesses are right], at least; and the sum of these for larger i
    for i in range(correct, 0, -1):
        hits = (i * tail + above) / canaries
        above += tail
        tail = max(tail, (canaries * test(min(hits, 1.0)) + above) / (guesses - i + 1))
        if tail > 1 + _ROUNDING:
            return True
    return False


def _promise_test(epsilon: float, delta: float) -> Test:
    """That of (ε, δ)."""
    growth = math.exp(epsilon)
    return lambda hits: max(0.0, (hits - delta) / growth, 1 - delta - growth * (1 - hits))


def _gaussian_test(epsilon: float, delta: float) -> Test:
    """That of the Gaussian mechanism with this ε at δ."""
    if not epsilon:
        return _promise_test(epsilon, delta)
    mu = 1.0 / gaussian_sigma(epsilon, delta)
    return lambda hits: float(ndtr(ndtri(hits) - mu))


def _largest(refuted: Callable[[float], bool], low: float) -> float:
    """The largest ε that is refuted, from one that is, by bisection."""
    high = _LARGEST
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _log_odds(right: Array | float, wrong: Array | float, failure: float) -> Array:
    """ln(p/(1 − p)) of a probability p to be right, bounded from below (Clopper, Pearson); −∞ where none was right."""
    known = np.asarray(right) > 0
    share = betaincinv(np.where(known, right, 1.0), np.asarray(wrong) + 1.0, failure)
    return np.asarray(np.where(known, np.log(share) - np.log1p(-share), -np.inf))


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
