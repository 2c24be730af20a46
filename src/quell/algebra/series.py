"""Truncated power series in float64: the arithmetic of lower-triangular Toeplitz matrices.

A lower-triangular Toeplitz matrix is its first column, and that column is the head of a power series: products of
matrices are products of series, inverses are reciprocals, and the matrix square root is the series with that square.
Every function takes coefficient arrays (lowest order first, implicitly continued by zeros) and returns the first `n`
coefficients of the result.

Short divisors run as a recursive filter, which is backward stable and costs O(n·p). Long ones run as a Newton
iteration on FFT products, whose error is about 1e-16 *of the largest coefficient* as long as neither series grows:
fine for norms, not for the relative accuracy of a far tail, and worthless where the reciprocal explodes. Nothing
downstream may therefore branch on the sign of a tiny coefficient (`sensitivity` closes that gap with a bracket), and a
reciprocal that decides a promise is multiplied back first (`ToeplitzStrategy.inversion_error`).
"""

from __future__ import annotations

import numpy as np
from scipy import fft

from quell._types import Array
from quell.errors import QuellError

_SHORT_FACTOR = 64  # up to here a direct convolution beats FFTs and keeps relative accuracy
_SHORT_DIVISOR = 512  # up to here the recursive filter is as fast as Newton's FFTs


def multiply(left: Array, right: Array, n: int) -> Array:
    """First `n` coefficients of the product.

    >>> multiply(np.array([1.0, 1.0]), np.array([1.0, -1.0]), 3)
    array([ 1.,  0., -1.])
    """
    left, right = _trim(left[:n]), _trim(right[:n])
    if min(len(left), len(right)) <= _SHORT_FACTOR:
        product = np.convolve(left, right)[:n]
    else:
        size = fft.next_fast_len(len(left) + len(right) - 1, real=True)
        product = fft.irfft(fft.rfft(left, size) * fft.rfft(right, size), size)[: len(left) + len(right) - 1][:n]
    return pad(product, n)


def divide(numerator: Array, denominator: Array, n: int) -> Array:
    """First `n` coefficients of numerator / denominator.

    >>> divide(np.array([1.0]), np.array([1.0, -0.5]), 4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """
    denominator = _trim(denominator[:n])
    _require_invertible(denominator)
    if len(denominator) <= _SHORT_DIVISOR:
        from quell.algebra.recursion import recursion  # compiled code, loaded when first needed

        return recursion(denominator, pad(numerator, n))
    return multiply(numerator, reciprocal(denominator, n), n)


def reciprocal(series: Array, n: int) -> Array:
    """First `n` coefficients of 1 / series.

    >>> reciprocal(np.array([1.0, -1.0]), 3)
    array([1., 1., 1.])
    """
    series = _trim(series[:n])
    _require_invertible(series)
    if len(series) <= _SHORT_DIVISOR:
        return divide(np.array([1.0]), series, n)
    inverse, known = np.array([1.0 / series[0]]), 1
    while known < n:
        known = min(2 * known, n)
        residual = -multiply(series, inverse, known)
        residual[0] += 2.0
        inverse = multiply(inverse, residual, known)
    return inverse


def filtered(series: Array) -> bool:
    """Whether the reciprocal of this series comes from the recursive filter, which is backward stable."""
    return len(_trim(series)) <= _SHORT_DIVISOR


def power(series: Array, exponent: float, n: int) -> Array:
    """First `n` coefficients of series ** exponent, for a series with a positive leading coefficient.

    >>> power(np.array([1.0, -1.0]), -1.0, 3)
    array([1., 1., 1.])
    """
    series = _trim(series[:n])
    if not series[0] > 0:
        raise QuellError(f"a real power needs a positive leading coefficient, not {series[0]:g}")
    head = float(series[0]) ** exponent
    if len(series) == 1:
        return pad(np.array([head]), n)
    if len(series) == 2:
        return np.asarray(head * binomial(exponent, float(-series[1] / series[0]), n))
    if len(series) == 3:
        # A quadratic with real roots is a product of two binomials, whose coefficients have closed forms.
        middle, last = -series[1] / series[0], series[2] / series[0]
        discriminant = middle * middle / 4 - last
        if discriminant >= 0:
            larger = middle / 2 + np.copysign(np.sqrt(discriminant), middle)
            factors = binomial(exponent, float(larger), n), binomial(exponent, float(last / larger), n)
            return np.asarray(head * multiply(*factors, n))
    # exp(exponent · log series): the logarithm is the integral of series'/series.
    scaled = series / series[0]
    order = np.arange(1, n)
    derivative = divide(scaled[1:] * np.arange(1, len(scaled)), scaled, n)
    return np.asarray(head * _exponential(np.concatenate([[0.0], exponent * derivative[: n - 1] / order])))


def binomial(exponent: float, rate: float, n: int) -> Array:
    """First `n` coefficients of (1 - rate·x) ** exponent, each to full relative accuracy.

    >>> binomial(-0.5, 1.0, 3)
    array([1.   , 0.5  , 0.375])
    """
    order = np.arange(1, n)
    return np.concatenate([[1.0], np.cumprod(rate * (order - 1 - exponent) / order)])


def _exponential(logarithm: Array) -> Array:
    """exp of a series without constant term, by Newton's iteration e ← e·(1 + logarithm − log e)."""
    n = len(logarithm)
    result, known = np.array([1.0]), 1
    while known < n:
        known = min(2 * known, n)
        result = pad(result, known)
        order = np.arange(1, known)
        slope = divide(result[1:] * order, result, known)
        correction = logarithm[:known].copy()
        correction[1:] -= slope[: known - 1] / order
        correction[0] = 1.0
        result = multiply(result, correction, known)
    return result


def _require_invertible(series: Array) -> None:
    if series[0] == 0:
        raise QuellError("a series with leading coefficient 0 has no inverse: its matrix has a zero diagonal")


def _trim(series: Array) -> Array:
    """Without trailing zeros (and far-below-rounding tails), which would cost time and change nothing."""
    significant = np.flatnonzero(np.abs(series) > 1e-22 * np.max(np.abs(series), initial=0.0))
    return series[: significant[-1] + 1] if len(significant) else series[:1]


def pad(series: Array, n: int) -> Array:
    """The first `n` coefficients, continued by zeros."""
    return np.concatenate([series[:n], np.zeros(n - len(series))]) if len(series) < n else np.asarray(series[:n])
