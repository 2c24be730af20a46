"""The accountant of fixed batches: the Gaussian mechanism at the strategy's sensitivity, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from quell.analysis.sensitivity import Sensitivity, sensitivity
from quell.participation import Participation
from quell.privacy.accountant import Accountant
from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from quell.privacy.guarantee import Certificate
from quell.privacy.profile import GaussianProfile
from quell.strategy.structure import Strategy


@dataclass(frozen=True)
class GaussianAccountant(Accountant):
    """C·G plus Gaussian noise is the Gaussian mechanism (arXiv:1805.06530), whatever the batches are."""

    moved: Sensitivity
    tolerance: ClassVar[float] = 1e-9

    @classmethod
    def of(cls, strategy: Strategy, participation: Participation) -> GaussianAccountant:
        return cls(sensitivity(strategy, participation))

    @property
    def sensitivity(self) -> Sensitivity:
        return self.moved

    @property
    def reach(self) -> float:
        return self.moved.value

    def guess(self, epsilon: float, delta: float) -> float:
        return self.reach * gaussian_sigma(epsilon, delta)

    def estimate(self, sigma: float, epsilon: float, careful: bool) -> tuple[float, float]:
        return gaussian_delta(sigma / self.reach, epsilon), 0.0

    def certify(self, sigma: float, epsilon: float, failure: float) -> Certificate:
        lower, upper = (gaussian_delta(sigma / end, epsilon) for end in (self.moved.lower, self.reach))
        return Certificate(lower, upper, "analytic Gaussian mechanism")

    def profile(self, sigma: float, at: Sequence[float], failure: float) -> GaussianProfile:
        return GaussianProfile(self.reach / sigma * (1 + 1e-12))

    def at_least(self, epsilon: float, delta: float) -> float:
        return self.guess(epsilon, delta)

    def check_range(self, epsilon: float, delta: float) -> None:
        """Closed forms hold everywhere."""

    def estimate_sigma(
        self, epsilon: float, delta: float, near: float | None = None, effort: int | None = None
    ) -> tuple[float, float]:
        return self.guess(epsilon, delta), 0.0

    def estimate_epsilon(self, sigma: float, delta: float) -> float:
        return self.safe_epsilon(sigma, delta)

    def certified_sigma(
        self, epsilon: float, delta: float, comparisons: int = 1, near: float | None = None
    ) -> tuple[float, Certificate]:
        sigma = self.guess(epsilon, delta)
        return sigma, self.certify(sigma, epsilon, 0.0)

    def certified_epsilon(self, sigma: float, delta: float, comparisons: int = 1) -> tuple[float, Certificate]:
        epsilon = gaussian_epsilon(sigma / self.reach, delta)
        return epsilon, self.certify(sigma, epsilon, 0.0)
