"""What an accountant may say: a `Guarantee` that holds, or an `Estimate` that only helps to search.

The two share no base, so that a point estimate cannot be passed where a guarantee is expected; only a `Guarantee` can
enter a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from quell.sensitivity import Sensitivity


@dataclass(frozen=True)
class Guarantee:
    """Training with noise `noise_multiplier` (σ, per unit of clip norm, sensitivity included) is (epsilon, delta)-DP.

    The unit of privacy is one example; neighbours differ by removing it from (or zeroing it in) every batch it
    would be in. `bracket` encloses the exact δ of this noise at this ε; `delta` is never below its upper end. Where
    the upper end is a confidence bound, it fails with at most `failure_probability` over the accountant's draws, and
    that probability is already part of `delta`: the statement needs no "with high probability". `sampling_free_delta`
    is what can be said at this ε without any draws, usually far looser.
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
    sampling_free_delta: float | None = None

    @property
    def certified(self) -> bool:
        """Always true: what is not certified is an `Estimate`."""
        return True

    def __str__(self) -> str:
        text = (
            f"({self.epsilon:g}, {self.delta:g})-DP per example ({self.adjacency} neighbours) "
            f"under {self.sampling} sampling, by the {self.method} with {self.sensitivity.kind} sensitivity"
        )
        if self.failure_probability:
            text += f" (failure probability {self.failure_probability:.1g} included in delta)"
        return text


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

    def __str__(self) -> str:
        return (
            f"about ({self.epsilon:g}, {self.delta:g}) under {self.sampling} sampling: "
            f"an estimate (δ ± {self.relative_error:.0%}), not a guarantee"
        )


@dataclass(frozen=True)
class Certificate:
    """δ lies in [lower, upper]; `upper` fails with at most `failure` over the accountant's draws (0: never)."""

    lower: float
    upper: float
    method: str
    failure: float = 0.0
    sampling_free: float | None = None
