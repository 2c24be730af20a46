"""Betting bounds: they cover, they are tight, and a weight beyond its proven bound is never swallowed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell.privacy.confidence import best_bet, draws_needed, expected_excess, lower_mean, upper_mean


@pytest.mark.slow
def test_the_bounds_cover_and_fail_no_more_often_than_stated(random):
    failures = {"upper": 0, "lower": 0}
    for _ in range(2000):
        values = np.where(random.random(400) < 0.02, random.random(400), 0.0)  # mean 0.01
        bet = best_bet(400, 0.0066, 1.0, 0.05)
        failures["upper"] += upper_mean(values, 1.0, 0.05, bet) < 0.01
        failures["lower"] += lower_mean(values, 0.05, bet) > 0.01
    assert 0 < failures["upper"] < 2000 * 0.05
    assert 0 < failures["lower"] < 2000 * 0.05


def test_strata_with_different_means_are_covered(random):
    """Proposals get fixed numbers of draws, so the draws are independent but not alike."""
    failures = 0
    for _ in range(2000):
        values = np.concatenate([random.random(200) < 0.004, 0.2 * (random.random(200) < 0.5)])  # means .004 and .1
        failures += upper_mean(values.astype(float), 1.0, 0.05, 2.0) < 0.052
    assert failures < 2000 * 0.05


def test_tighter_than_empirical_bernstein(random):
    values = 1e-3 * random.random(20_000) * (random.random(20_000) < 0.1)
    failure, most = 1e-7, 0.01
    log = math.log(2 / failure)
    variance, n = float(values.var(ddof=1)), len(values)
    bernstein = values.mean() + math.sqrt(2 * variance * log / n) + 7 * most * log / (3 * (n - 1))
    bound = upper_mean(values, most, failure, best_bet(n, variance, most, failure))
    assert values.mean() < bound < bernstein


@given(st.floats(1e-4, 1), st.floats(1e-3, 0.3), st.integers(500, 10**6))
def test_forecasts_agree_with_each_other(variance, failure, draws):
    excess = expected_excess(draws, variance, 1.0, failure)
    assert draws_needed(excess, variance, 1.0, failure) == pytest.approx(draws, rel=1e-6)


def test_a_weight_beyond_its_bound_is_a_bug():
    with pytest.raises(AssertionError, match="exceeds its proven bound"):
        upper_mean(np.array([0.1, 1.2]), 1.0, 0.05, 1.0)


def test_no_events_still_cost_what_was_not_seen():
    assert upper_mean(np.zeros(1000), 1.0, 1e-7, 1.0) == pytest.approx(math.expm1(math.log(1e7) / 1000), rel=1e-6)
    assert lower_mean(np.zeros(1000), 1e-7, 1.0) == 0.0
