"""Accountants: from noise to (epsilon, delta) and back, one sampling scheme at a time."""

from quell.privacy.accounting import calibrate, certify, delta, epsilon, estimate
from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from quell.privacy.guarantee import Estimate, Guarantee

__all__ = [
    "Estimate",
    "Guarantee",
    "calibrate",
    "certify",
    "delta",
    "epsilon",
    "estimate",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
]
