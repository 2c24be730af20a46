"""Accountants: from noise to (epsilon, delta) and back, for every sampling scheme."""

from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from quell.privacy.guarantee import Estimate, Guarantee
from quell.privacy.meaning import Meaning
from quell.privacy.pricing import calibrate, certify, delta, epsilon, estimate, meaning, profile
from quell.privacy.profile import Profile

__all__ = [
    "Estimate",
    "Guarantee",
    "Meaning",
    "Profile",
    "calibrate",
    "certify",
    "delta",
    "epsilon",
    "estimate",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
    "meaning",
    "profile",
]
