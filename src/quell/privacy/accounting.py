"""From (strategy, sampling scheme, σ) to a guarantee, and back.

The sampling scheme decides which accountant is valid, so the accountant is looked up by the scheme's type and
nothing else: a scheme without an entry cannot be priced. A `Guarantee` is the only thing that may be called (ε,
δ); it carries how it was obtained.
"""

from __future__ import annotations

from dataclasses import dataclass

from quell.errors import QuellError, require_finite, require_privacy
from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from quell.sampling import Cyclic
from quell.sensitivity import Sensitivity, sensitivity
from quell.strategy.structure import Strategy

SCHEMES = {Cyclic.name: Cyclic}


@dataclass(frozen=True)
class Guarantee:
    """Training with noise `noise_multiplier` (σ, per unit of clip norm, sensitivity included) is (epsilon, delta)-DP.

    The unit of privacy is one example; neighbours differ by removing it from (or zeroing it in) every batch it
    would be in.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sampling: str
    sensitivity: Sensitivity
    adjacency: str = "zero-out"
    method: str = "analytic Gaussian mechanism"

    def __str__(self) -> str:
        return (
            f"({self.epsilon:g}, {self.delta:g})-DP per example ({self.adjacency} neighbours) "
            f"under {self.sampling} sampling, by the {self.method} with {self.sensitivity.kind} sensitivity"
        )


def calibrate(strategy: Strategy, sampling: Cyclic, epsilon: float, delta: float) -> Guarantee:
    """The least noise with which the strategy is (epsilon, delta)-DP under the sampling scheme.

    >>> from quell import strategy, workload
    >>> scheme = Cyclic(steps=100, separation=10)
    >>> dpsgd = strategy.build("identity", workload.prefix(100), scheme.participation)
    >>> round(calibrate(dpsgd, scheme, epsilon=8, delta=1e-5).noise_multiplier, 4)
    1.8981
    """
    epsilon, delta = require_privacy(epsilon, delta)
    moved = _checked_sensitivity(strategy, sampling)
    return Guarantee(epsilon, delta, moved.value * gaussian_sigma(epsilon, delta), sampling.name, moved)


def epsilon(strategy: Strategy, sampling: Cyclic, noise_multiplier: float, delta: float) -> Guarantee:
    """The smallest ε that noise `noise_multiplier` buys at this delta."""
    moved = _checked_sensitivity(strategy, sampling)
    sigma = _checked_noise(noise_multiplier) / moved.value
    return Guarantee(gaussian_epsilon(sigma, delta), delta, noise_multiplier, sampling.name, moved)


def delta(strategy: Strategy, sampling: Cyclic, noise_multiplier: float, epsilon: float) -> Guarantee:
    """The smallest δ that noise `noise_multiplier` buys at this epsilon."""
    moved = _checked_sensitivity(strategy, sampling)
    sigma = _checked_noise(noise_multiplier) / moved.value
    return Guarantee(epsilon, gaussian_delta(sigma, epsilon), noise_multiplier, sampling.name, moved)


def _checked_sensitivity(strategy: Strategy, sampling: Cyclic) -> Sensitivity:
    if type(sampling) not in SCHEMES.values():
        raise QuellError(f"no accountant prices {type(sampling).__name__}: use one of {', '.join(SCHEMES)}")
    return sensitivity(strategy, sampling.participation)


def _checked_noise(noise_multiplier: float) -> float:
    if require_finite("noise_multiplier", noise_multiplier) <= 0:
        raise QuellError(f"noise_multiplier={noise_multiplier:g} must be positive: without noise there is no privacy")
    return noise_multiplier
