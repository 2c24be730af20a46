"""The Gaussian mechanism, tight: (ε, δ) ↔ σ for sensitivity 1 (Balle & Wang 2018, arXiv:1805.06530).

    δ(ε, σ) = Φ(a) − e^ε·Φ(b),   a = 1/(2σ) − εσ,   b = −1/(2σ) − εσ.

Both terms can be tiny and nearly equal, and e^ε overflows, so the formula is never evaluated as it stands.
Because e^ε·φ(b) = φ(a), it equals φ(a)·(M(−a) − M(−b)) with the Mills ratio M(x) = Φ(−x)/φ(x) =
√(π/2)·erfcx(x/√2), which neither under- nor overflows. Results that go into a claim are rounded to the private
side: σ and ε up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import special

from quell.errors import QuellError, require_finite, require_privacy

_SAFETY = 1e-12  # relative step by which a root is moved to the private side


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
    if a > 0:  # the first term is at least one half: nothing cancels that matters
        return float(special.ndtr(a)) - density * _mills(-b)
    return density * (_mills(-a) - _mills(-b))


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


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * float(special.erfcx(x / math.sqrt(2)))


def _bisect(private: Callable[[float], bool], low: float, high: float) -> float:
    """The end of [low, high] nearest the boundary on which `private` holds, to the last bits of float64."""
    while high - low > 1e-15 * high:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (low, middle) if private(middle) else (middle, high)
    return high
