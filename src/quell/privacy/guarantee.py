"""What an accountant may say: a `Guarantee` that holds, or an `Estimate` that only helps to search.

The two share no base, so that a point estimate cannot be passed where a guarantee is expected; only a `Guarantee` can
enter a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quell.analysis.sensitivity import Sensitivity


@dataclass(frozen=True)
class Guarantee:
    """Training with noise `noise_multiplier` (σ, per unit of clip norm, sensitivity included) is (epsilon, delta)-DP.

    The unit of privacy is one example, or one user where batches are drawn of users; neighbours differ by removing it
    from (or zeroing it in) every batch it would be in. `bracket` encloses the exact δ of this noise at this ε; `delta`
    is never below its upper end. Where the upper end is a confidence bound, it fails with at most `failure_probability`
    over the accountant's draws, and that probability is already part of `delta`: the statement needs no "with high
    probability". `scheme` is the way of forming batches that it holds for, with its numbers; it says nothing about any
    other.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sampling: str
    sensitivity: Sensitivity
    adjacency: str = "zero-out"
    method: str = "analytic Gaussian mechanism"
    bracket: tuple[float, float] | None = None
    failure_probability: float = 0.0
    draws: int = 0
    scheme: object = field(default=None, repr=False)

    @property
    def certified(self) -> bool:
        """Always true: what is not certified is an `Estimate`."""
        return True


@dataclass(frozen=True)
class Estimate:
    """About how private noise `noise_multiplier` is: for searches and plots, never for a claim.

    `relative_error` is one standard error of δ relative to δ, 0 where the number is deterministic.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sampling: str
    relative_error: float

    @property
    def certified(self) -> bool:
        """Always false."""
        return False


@dataclass(frozen=True)
class Certificate:
    """δ lies in [lower, upper]; `upper` fails with at most `failure` over the accountant's draws (0: never)."""

    lower: float
    upper: float
    method: str
    failure: float = 0.0
    draws: int = 0
