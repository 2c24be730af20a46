"""The analytic Gaussian mechanism against 60-digit arithmetic."""

from __future__ import annotations

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell.errors import QuellError
from quell.privacy import gaussian_delta, gaussian_epsilon, gaussian_sigma

EPSILONS = [1e-15, 1e-9, 1e-6, 1e-3, 0.01, 0.1, 1, 4, 8, 20, 50]
DELTAS = [0.3, 1e-2, 1e-5, 1e-8, 1e-12, 1e-15, 1e-20]


def precise_delta(sigma: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        sigma, epsilon = mpmath.mpf(sigma), mpmath.mpf(epsilon)
        a, b = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        return mpmath.ncdf(a) - mpmath.exp(epsilon) * mpmath.ncdf(b)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_calibration_is_sound_and_tight(epsilon, delta):
    sigma = gaussian_sigma(epsilon, delta)
    assert precise_delta(sigma, epsilon) <= delta
    assert precise_delta(sigma * (1 - 1e-9), epsilon) > delta
    found = gaussian_epsilon(sigma, delta)
    assert precise_delta(sigma, found) <= delta
    if epsilon >= 1e-3:  # below, delta hardly depends on epsilon
        assert found == pytest.approx(epsilon, rel=1e-6)


@given(st.floats(-1.3, 16).map(lambda e: 10.0**e), st.floats(0, 50))
def test_delta_is_accurate_and_never_below_the_truth(sigma, epsilon):
    truth = precise_delta(sigma, epsilon)
    stated = gaussian_delta(sigma, epsilon)
    assert truth <= stated
    if truth > 1e-290:
        assert float(stated / truth - 1) < 1e-9


def test_published_value():
    assert gaussian_sigma(8, 1e-5) == pytest.approx(0.60023, abs=5e-6)


@given(st.floats(0.1, 20), st.floats(0.1, 20))
def test_more_noise_is_more_private(first, second):
    low, high = sorted((first, second))
    assert gaussian_epsilon(high, 1e-5) <= gaussian_epsilon(low, 1e-5)


def test_enough_noise_is_private_at_epsilon_zero():
    assert gaussian_epsilon(1e6, 1e-3) == 0.0


@pytest.mark.parametrize(
    ("epsilon", "delta", "message"),
    [
        (0, 1e-5, "epsilon=0"),
        (-1, 1e-5, "epsilon=-1"),
        (1, 0, "delta=0"),
        (1, 1, "delta=1"),
        (float("nan"), 0.1, "finite"),
        ("8", 0.1, "finite"),
    ],
)
def test_bad_budgets_are_refused(epsilon, delta, message):
    with pytest.raises(QuellError, match=message):
        gaussian_sigma(epsilon, delta)


def test_no_noise_is_refused():
    with pytest.raises(QuellError, match="sigma=0"):
        gaussian_delta(0.0, 1.0)
