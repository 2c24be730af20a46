"""Independent noise under balls in bins, exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from quell.privacy.gaussian import gaussian_delta
from quell.privacy.orthogonal import orthogonal_delta
from tests.privacy.simulation import Patterns, simulated_delta


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_one_bin_is_the_gaussian_mechanism(sigma, epsilon):
    truth = gaussian_delta(sigma, epsilon)
    for way in ("remove", "add"):
        lower, upper = orthogonal_delta([(0.5 / sigma**2, 1)], way, epsilon)
        assert lower * (1 - 1e-10) <= truth <= upper * (1 + 1e-10)
        assert upper - truth < 1e-6 * truth + 1e-10


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_two_bins_by_quadrature(epsilon):
    """E(S − K)₊ for S = (a + a')/2: given a, the rest is a Black–Scholes formula."""
    alpha, scale = 0.8, math.exp(epsilon)
    spread = math.sqrt(2 * alpha)

    def call(strike):  # E(a − strike)₊
        if strike <= 0:
            return 1.0 - strike
        d = (math.log(1 / strike) + alpha) / spread
        return stats.norm.cdf(d) - strike * stats.norm.cdf(d - spread)

    def integrand(z):
        return stats.norm.pdf(z) * 0.5 * call(2 * scale - math.exp(spread * z - alpha))

    exact = integrate.quad(integrand, -12, 14, limit=400, epsabs=1e-13)[0]
    lower, upper = orthogonal_delta([(alpha, 2)], "remove", epsilon)
    assert lower <= exact * (1 + 1e-7)
    assert exact <= upper * (1 + 1e-7)
    assert upper == pytest.approx(exact, rel=1e-5)


def test_epochs_are_a_smaller_sigma_and_left_over_steps_make_two_sizes():
    """Random-allocation identity, k = 4 epochs and 3 left-over steps, against simulation."""
    sigma, epsilon = 1.8, 1.0
    for steps, levels in ((20, [(4, 5)]), (23, [(5, 3), (4, 2)])):
        exact = [
            orthogonal_delta([(k / (2 * sigma**2), count) for k, count in levels], way, epsilon)
            for way in ("remove", "add")
        ]
        simulated = simulated_delta(np.eye(steps), Patterns.of_bins(steps, 5), sigma, epsilon)
        for (lower, upper), way in zip(exact, ("remove", "add"), strict=True):
            delta, error = simulated[way]
            assert lower - 4 * error < delta < upper + 4 * error
            assert upper - lower < 0.01 * upper


def test_the_bracket_closes_with_the_grid():
    widths = []
    for grid in (1 << 11, 1 << 13, 1 << 15):
        lower, upper = orthogonal_delta([(0.7, 40)], "remove", 0.5, grid)
        widths.append(upper - lower)
    assert widths[0] > widths[1] > widths[2]


def test_one_epoch_of_two_equals_two_of_one():
    one, two = orthogonal_delta([(0.7, 8)], "add", 0.3), orthogonal_delta([(0.7, 5), (0.7, 3)], "add", 0.3)
    assert one == pytest.approx(two, rel=1e-12)
