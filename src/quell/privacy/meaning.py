"""What a promise means: the most that any attacker can find out, in numbers that people know.

The attacker sees everything that a run releases, knows all other data, and guesses whether one example (or user, or a
whole group of them) was in the training data. Such a test is judged by the share of absent ones that it accuses (false
positives) and the share of present ones that it finds (true positives). A privacy profile says how many it can find:

    T(α) = min over ε of e^ε·α + δ(ε),

the trade-off function of f-DP (arXiv:1905.02383) read from below: 1 − T(α) is its f. It is attained, by the
Neyman-Pearson test, where the profile is exact. For the Gaussian mechanism T(α) = Φ(Φ⁻¹(α) + μ). A group of k is found
at most as often as T applied k times says, one member after the other (Theorem 2.14 there).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quell.privacy.profile import GaussianProfile, Profile, both_ways, curve

FALSE_POSITIVES = (0.01, 0.001)
GROUPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Meaning:
    """The best that any attacker can do.

    Args:
        mu: The run is μ-GDP; None where the mechanism is not the Gaussian one.
        true_positives: The largest share of present ones found, by size of the group and share of absent ones accused.
    """

    mu: float | None
    true_positives: dict[int, dict[float, float]]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with numbers as keys in words: `true_positives["1"]["0.01"]` (documented in docs/json.md)."""
        rows = {
            f"{size}": {f"{rate:g}": found for rate, found in row.items()} for size, row in self.true_positives.items()
        }
        return {"mu": self.mu, "true_positives": rows}


def meaning(profile: Profile) -> Meaning:
    """What a run with this profile lets anyone find out.

    >>> found = meaning(GaussianProfile(1.0))
    >>> round(found.true_positives[1][0.01], 4), round(found.true_positives[2][0.01], 4)
    (0.0924, 0.3721)
    """
    test = strongest_test(profile)
    table: dict[int, dict[float, float]] = {}
    for size in GROUPS:
        table[size] = {}
        for rate in FALSE_POSITIVES:
            found = rate
            for _ in range(size):
                found = test(found)
            table[size][rate] = found
    return Meaning(profile.mu if isinstance(profile, GaussianProfile) else None, table)


def strongest_test(profile: Profile) -> Callable[[float], float]:
    """T: from a share of false positives to the largest share of true positives."""
    from scipy.special import ndtr, ndtri

    if isinstance(profile, GaussianProfile):
        mu = profile.mu
        return lambda rate: min(1.0, float(ndtr(ndtri(rate) + mu)) * (1 + 1e-12) + profile.failure)
    epsilon, delta = curve(both_ways(profile)[0])
    growth = np.exp(epsilon)
    return lambda rate: min(1.0, float((growth * rate + delta).min()) * (1 + 1e-12) + profile.failure)
