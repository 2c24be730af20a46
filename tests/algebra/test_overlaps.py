"""The energy under amplification is what dense matrices say, and its gradient what differences say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell import strategy, workload
from quell.algebra.overlaps import amplified_energy
from quell.analysis.error import error
from quell.errors import QuellError
from quell.privacy import estimate, gaussian_sigma
from quell.schemes import BallsInBins

coefficients = st.lists(st.floats(0.01, 1.0), min_size=0, max_size=30).map(lambda tail: np.array([1.0, *tail]))


@given(coefficients, st.integers(1, 12), st.integers(1, 5), st.floats(0.01, 20.0))
def test_at_the_energy_the_divergence_of_all_pairs_of_patterns_is_reached(c, separation, count, divergence):
    energy, _ = amplified_energy(c, separation, count, divergence)
    rows = separation * count + len(c)  # no column is cut off
    moved = np.zeros((rows, separation))
    for column in range(separation * count):
        moved[column : column + len(c), column % separation] += c
    reached = np.log(np.mean(np.exp(moved.T @ moved / energy)))
    assert reached == pytest.approx(divergence, rel=1e-9)


@given(coefficients, st.integers(1, 12), st.integers(1, 5), st.floats(0.01, 20.0))
def test_the_gradient_is_that_of_differences(c, separation, count, divergence):
    _, gradient = amplified_energy(c, separation, count, divergence)
    for at in range(len(c)):
        step = np.eye(1, len(c), at)[0] * 1e-5
        more, less = (amplified_energy(c + way * step, separation, count, divergence)[0] for way in (1, -1))
        assert gradient[at] == pytest.approx((more - less) / 2e-5, rel=1e-4, abs=1e-6 * abs(gradient).max())


@pytest.mark.parametrize(("family", "bands"), [("band_toeplitz", 20), ("band_inv", 4)])
def test_a_large_divergence_asks_for_the_optimum_without_amplification(family, bands):
    prefix, pattern = workload.prefix(200), BallsInBins(200, 20).participation
    plain, shaped = (
        strategy.build(family, prefix, pattern, None, bands=bands, column_normalise=False, **options)
        for options in ({}, {"divergence": 100.0})
    )
    np.testing.assert_allclose(shaped.coefficients[:20], plain.coefficients[:20], rtol=0.05)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize(("family", "bands"), [("band_toeplitz", 40), ("band_inv", 8)])
def test_strategies_shaped_for_amplification_have_less_error_under_it(family, bands, epsilon):
    prefix, scheme, delta = workload.prefix(400), BallsInBins(400, 40), 1e-5
    about = 1.4 / gaussian_sigma(epsilon, delta) ** 2
    plain, shaped = (
        strategy.build(family, prefix, scheme.participation, None, bands=bands, column_normalise=False, **options)
        for options in ({}, {"divergence": about})
    )
    errors = [
        estimate(each, scheme, epsilon, delta).noise_multiplier * error(each, prefix).rmse for each in (plain, shaped)
    ]
    assert errors[1] < 0.98 * errors[0]
    assert np.all(shaped.coefficients >= 0)
    assert shaped.parameters["divergence"] == about


@pytest.mark.parametrize("value", [0.0, -1.0, 101.0, float("nan"), "much"])
def test_divergences_that_make_no_sense_are_refused(value):
    with pytest.raises(QuellError, match="divergence="):
        strategy.build(
            "band_inv", workload.prefix(20), BallsInBins(20, 5).participation, None, bands=2, divergence=value
        )
