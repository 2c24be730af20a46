"""Confidence bounds for the mean of bounded numbers, by betting (Proof 7 in docs/proofs.md).

After Waudby-Smith & Ramdas, arXiv:2010.09686. The bound is where the capital K(m) = Π (1 + s·(m − X_i)) reaches
1/failure. The bet s must be fixed before the draws are seen.
"""

from __future__ import annotations

import math

import numpy as np

from quell._types import Array

_ROUNDING = 1e-9  # relative step to the private side: weights are exponentials of sums and carry up to 1e-12


def upper_mean(values: Array, most: float, failure: float, bet: float) -> float:
    """An upper bound for the mean of values in [0, most], given a bet fixed beforehand; fails with prob. `failure`.

    >>> upper_mean(np.zeros(1000), most=1.0, failure=0.05, bet=1.0) < 0.004
    True
    """
    if len(values) and not float(values.max()) <= most * (1 + 1e-6):  # nor may it be nan
        raise AssertionError(
            f"a weight of {values.max():.6g} exceeds its proven bound {most:.6g}: this is a bug in Quell"
        )
    bet = min(bet, (1 - 1e-12) / most)
    goal = -math.log(failure)
    occupied, empty = values[values > 0], len(values) - int(np.count_nonzero(values > 0))

    def capital(mean: float) -> float:
        return empty * math.log1p(bet * mean) + float(np.sum(np.log1p(bet * (mean - occupied))))

    low, high = 0.0, most
    while (
        capital(high) < goal
    ):  # the mean of few draws in [0, W] can be claimed up to any size; stop where it says nothing
        high *= 2.0
        if high > 1e6 * most:
            return math.inf
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if capital(middle) >= goal else (middle, high)
        if high - low <= 1e-10 * high:
            break
    return high * (1 + _ROUNDING)


def lower_mean(values: Array, failure: float, bet: float) -> float:
    """A lower bound for the mean of non-negative values, given a bet fixed beforehand; fails with prob. `failure`."""
    goal, average = -math.log(failure), float(np.mean(values))
    if average <= 0.0:
        return 0.0
    low, high = 0.0, average
    for _ in range(60):
        middle = 0.5 * (low + high)
        stake = min(bet, (1 - 1e-9) / middle)
        grown = float(np.sum(np.log1p(stake * (values - middle)))) >= goal
        low, high = (middle, high) if grown else (low, middle)
    return low * (1 - _ROUNDING)


def best_bet(draws: float, variance: float, most: float, failure: float) -> float:
    """The bet that makes the upper bound smallest for this variance."""
    wish = math.sqrt(-2.0 * math.log(failure) / (draws * variance)) if variance > 0 else math.inf
    return min(wish, (1 - 1e-12) / most)


def expected_excess(draws: float, variance: float, most: float, failure: float) -> float:
    """By how much the upper bound will exceed the mean, with the best bet."""
    bet = best_bet(draws, variance, most, failure)
    return -math.log(failure) / (draws * bet) + 0.5 * bet * variance


def draws_needed(excess: float, variance: float, most: float, failure: float) -> float:
    """How many draws bring the upper bound to within `excess` of the mean."""
    goal = -math.log(failure)
    if excess**2 == 0.0:
        return math.inf
    free = 2.0 * goal * variance / excess**2
    if free * (variance / most) >= 2.0 * goal * most:  # the best bet is below 1/W
        return free
    left = excess - variance / (2.0 * most)
    return goal * most / left if left > 0 else math.inf
