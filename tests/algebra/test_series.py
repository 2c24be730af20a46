"""Series arithmetic against dense Toeplitz algebra, and its stability at a million terms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm, toeplitz

from quell.algebra import series
from quell.errors import QuellError

heads = st.floats(0.5, 2.0)
tails = st.lists(st.floats(-0.4, 0.4), min_size=0, max_size=11)


def dense(coefficients: np.ndarray, n: int) -> np.ndarray:
    column = np.concatenate([coefficients, np.zeros(n)])[:n]
    return toeplitz(column, np.concatenate([column[:1], np.zeros(n - 1)]))


@given(heads, tails, heads, tails)
def test_products_and_quotients_are_those_of_matrices(a0, a, b0, b):
    left, right, n = np.array([a0, *a]), np.array([b0, *b]), 12
    np.testing.assert_allclose(series.multiply(left, right, n), (dense(left, n) @ dense(right, n))[:, 0], atol=1e-12)
    expected = np.linalg.solve(dense(right, n), dense(left, n))[:, 0]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(series.divide(left, right, n), expected, atol=1e-9 * scale)


@given(heads, tails)
def test_square_root_is_the_matrix_square_root(a0, a):
    n = 8
    root = series.power(np.array([a0, *a]), 0.5, n)
    np.testing.assert_allclose(dense(root, n) @ dense(root, n), dense(np.array([a0, *a]), n), atol=1e-9)
    assert root[0] > 0


@given(st.floats(-1.5, 1.5), st.floats(-1.5, 1.5), st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=4))
def test_powers_add_up(first, second, tail):
    base, n = np.array([1.0, *tail]), 10
    together = series.multiply(series.power(base, first, n), series.power(base, second, n), n)
    np.testing.assert_allclose(together, series.power(base, first + second, n), atol=1e-9)


def test_power_of_a_quadratic_with_complex_roots():
    base = np.array([1.0, -1.0, 0.9])
    cubed = series.power(base, 3.0, 7)
    np.testing.assert_allclose(cubed, np.convolve(np.convolve(base, base), base), atol=1e-13)


def test_square_root_of_dense_matrix_agrees_with_scipy():
    coefficients = 1.0 / np.arange(1, 9)
    np.testing.assert_allclose(series.power(coefficients, 0.5, 8), sqrtm(dense(coefficients, 8))[:, 0].real, atol=1e-10)


@pytest.mark.parametrize("terms", [3, 2000])
def test_reciprocal_by_filter_and_by_newton_undo_multiplication(terms):
    divisor = series.binomial(0.5, 1.0, terms)
    n = 5000
    unit = series.multiply(divisor, series.reciprocal(divisor, n), n)
    np.testing.assert_allclose(unit, np.eye(1, n)[0], atol=1e-12)


@pytest.mark.slow
def test_a_million_terms_stay_accurate():
    n = 10**6
    root, inverse = series.binomial(-0.5, 1.0, n), series.binomial(0.5, 1.0, n)
    assert np.abs(series.multiply(root, root, n) - 1).max() < 1e-11  # the prefix workload
    np.testing.assert_allclose(series.reciprocal(inverse, n), root, atol=1e-12)
    np.testing.assert_allclose(series.power(np.ones(n), 0.5, n), root, atol=1e-11)
    # Stirling: the coefficient of order t is 1/√(πt) to relative order 1/(8t).
    assert root[-1] * np.sqrt(np.pi * (n - 1)) == pytest.approx(1.0, abs=2e-7)


def test_momentum_square_root_equals_the_papers_convolution():
    alpha, beta, n = 0.999, 0.9, 50
    order = np.arange(1, n)
    r = np.concatenate([[1.0], np.cumprod((order - 0.5) / order)])  # |binom(-1/2, k)|
    expected = [sum(alpha**j * beta ** (k - j) * r[j] * r[k - j] for j in range(k + 1)) for k in range(n)]
    ours = series.power(np.array([1.0, -(alpha + beta), alpha * beta]), -0.5, n)
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_what_has_no_inverse_or_root_is_refused():
    with pytest.raises(QuellError, match="leading coefficient 0"):
        series.reciprocal(np.array([0.0, 1.0]), 4)
    with pytest.raises(QuellError, match="positive leading"):
        series.power(np.array([-1.0, 1.0]), 0.5, 4)
