"""Counts with noise: against their definition, and the promise by a test that breaks without noise."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from quell.train import counting


@pytest.mark.parametrize("epsilon", [0.05, 0.7, 2.6])
def test_noise_is_discrete_laplace(epsilon):
    """P(k) = (1 − q)/(1 + q)·q^|k| with q = e^−ε; every frequency within five standard errors."""
    random, draws, q = Random(7), 4000, math.exp(-epsilon)
    found = Counter(counting.noisy(5000, 10_000, epsilon, random) - 5000 for _ in range(draws))
    for k in range(-6, 7):
        expected = (1 - q) / (1 + q) * q ** abs(k)
        assert abs(found[k] / draws - expected) < 5 * math.sqrt(expected / draws) + 1e-3
    mean_square = sum(k * k * times for k, times in found.items()) / draws
    assert mean_square == pytest.approx(counting.deviation(epsilon) ** 2, rel=0.2)


def test_counts_stay_between_nothing_and_all():
    assert {counting.noisy(0, 3, 0.2, Random(seed)) for seed in range(60)} == {0, 1, 2, 3}
