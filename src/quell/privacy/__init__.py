"""Accountants: from noise to (epsilon, delta) and back, one sampling scheme at a time."""

from quell.privacy.accounting import SCHEMES, Guarantee, calibrate, delta, epsilon
from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma

__all__ = [
    "SCHEMES",
    "Guarantee",
    "calibrate",
    "delta",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
]
