"""The Gaussian mechanism, tight: (ε, δ) ↔ σ for sensitivity 1 (Balle & Wang 2018, arXiv:1805.06530).

    δ(ε, σ) = Φ(a) − e^ε·Φ(b),   a = 1/(2σ) − εσ,   b = −1/(2σ) − εσ.

Both terms can be tiny and nearly equal, and e^ε overflows, so the formula is never evaluated as it stands.
Because e^ε·φ(b) = φ(a), it equals φ(a)·(M(−a) − M(−b)) with the Mills ratio M(x) = Φ(−x)/φ(x) =
√(π/2)·erfcx(x/√2), which neither under- nor overflows. When σ is large the two ratios nearly agree, and
their difference is taken as the integral of −M'(x) = 1 − x·M(x). Results are rounded to the private side: up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from quell._types import Array
from quell.errors import QuellError, require_finite, require_privacy

_SAFETY = 1e-11  # relative step by which results are moved to the private side, above their rounding
_LEAST = 1e-300  # Gaussian noise never has δ = 0, even where exp underflows
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """The smallest δ for which noise `sigma` at sensitivity 1 is (epsilon, δ)-DP.

    >>> round(gaussian_delta(sigma=1.0, epsilon=1.0), 6)
    0.126937
    """
    sigma, epsilon = require_finite("sigma", sigma), require_finite("epsilon", epsilon)
    if sigma <= 0 or epsilon < 0:
        raise QuellError(f"sigma={sigma:g} must be positive and epsilon={epsilon:g} must not be negative")
    a, b = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
    density = math.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    if sigma >= 1:  # the two Mills ratios are close: integrate the derivative, 1 − x·M(x) > 0, between them
        points = -a + (0.5 / sigma) * (_NODES + 1.0)
        delta = density * (0.5 / sigma) * float(np.sum(_WEIGHTS * (1.0 - points * _mills(points))))
    elif a > 0:  # the first term is at least one half, and the second well below it
        delta = float(special.ndtr(a)) - density * float(_mills(-b))
    else:
        delta = density * float(_mills(-a) - _mills(-b))
    return max(delta * (1 + _SAFETY), _LEAST)


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The smallest noise at sensitivity 1 that is (epsilon, delta)-DP.

    >>> round(gaussian_sigma(epsilon=8, delta=1e-5), 5)
    0.60023
    """
    epsilon, delta = require_privacy(epsilon, delta)
    low, high = 1e-3, 1.0
    while gaussian_delta(high, epsilon) > delta:
        low, high = high, 2 * high
    while gaussian_delta(low, epsilon) <= delta:
        low, high = low / 2, low
    sigma = _bisect(lambda s: gaussian_delta(s, epsilon) <= delta, low, high)
    return sigma * (1 + _SAFETY)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """The smallest ε ≥ 0 for which noise `sigma` at sensitivity 1 is (ε, delta)-DP.

    >>> round(gaussian_epsilon(sigma=0.60023, delta=1e-5), 3)
    8.0
    """
    _, delta = require_privacy(1.0, delta)
    if gaussian_delta(sigma, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(sigma, high) > delta:
        low, high = high, 2 * high
    return _bisect(lambda e: gaussian_delta(sigma, e) <= delta, low, high) * (1 + _SAFETY)


def _mills(x: float | Array) -> Array:
    return np.asarray(math.sqrt(math.pi / 2) * special.erfcx(np.asarray(x) / math.sqrt(2)))


def _bisect(private: Callable[[float], bool], low: float, high: float) -> float:
    """The end of [low, high] nearest the boundary on which `private` holds, to the last bits of float64."""
    while high - low > 1e-15 * high:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (low, middle) if private(middle) else (middle, high)
    return high
