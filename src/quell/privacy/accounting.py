"""From (strategy, sampling scheme, σ) to a guarantee, and back.

The sampling scheme decides which accountant is valid, so the accountant is looked up by the scheme's type and
nothing else: a scheme without an entry cannot be priced. A `Guarantee` is the only thing that may be called (ε,
δ); it carries how it was obtained.

| to get | call |
|---|---|
| the noise for (ε, δ) | `calibrate(strategy, sampling, epsilon, delta)` |
| ε or δ of given noise | `epsilon(strategy, sampling, sigma, delta)`, `delta(strategy, sampling, sigma, epsilon)` |
| a claim checked again | `certify(strategy, sampling, sigma, epsilon, delta)` |
| about the noise for (ε, δ), fast, for a search | `estimate(strategy, sampling, epsilon, delta)` |

A search over many strategies should use `estimate` and certify only what it keeps; where several certificates are
compared and the best is taken, tell each of them between how many (`comparisons`), and they share the failure
probability.
"""

from __future__ import annotations

from functools import lru_cache

from quell.errors import QuellError, require_count, require_finite, require_privacy
from quell.privacy import b_min_sep, balls_in_bins, poisson
from quell.privacy.accountant import (
    Accountant,
    certificate_for,
    certified_delta,
    certified_epsilon,
    certified_sigma,
    estimate_sigma,
)
from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from quell.privacy.guarantee import Certificate, Estimate, Guarantee
from quell.sampling import BallsInBins, BMinSep, Cyclic, CyclicPoisson, Poisson, Scheme
from quell.sensitivity import Sensitivity, sensitivity
from quell.strategy.structure import Strategy


def calibrate(
    strategy: Strategy,
    sampling: Scheme,
    epsilon: float,
    delta: float,
    comparisons: int = 1,
    near: float | None = None,
) -> Guarantee:
    """The least noise with which the strategy is (epsilon, delta)-DP under the sampling scheme.

    A search that knows about how much that is (`near`) saves half the time.

    >>> from quell import strategy, workload
    >>> scheme = Cyclic(steps=100, separation=10)
    >>> dpsgd = strategy.build("identity", workload.prefix(100), scheme.participation)
    >>> round(calibrate(dpsgd, scheme, epsilon=8, delta=1e-5).noise_multiplier, 4)
    1.8981
    >>> amplified = BallsInBins(steps=100, separation=10)
    >>> round(calibrate(dpsgd, amplified, epsilon=8, delta=1e-5).noise_multiplier, 2)
    1.54
    """
    epsilon, delta = require_privacy(epsilon, delta)
    if isinstance(sampling, Cyclic):
        moved = sensitivity(strategy, sampling.participation)
        return _gaussian(epsilon, delta, moved.value * gaussian_sigma(epsilon, delta), moved)
    _require_amplifiable(epsilon, delta)
    accountant = _accountant(strategy, sampling)
    sigma, certificate = certified_sigma(accountant, epsilon, delta, require_count("comparisons", comparisons), near)
    return _guarantee(epsilon, delta, sigma, sampling, accountant, certificate)


def epsilon(
    strategy: Strategy, sampling: Scheme, noise_multiplier: float, delta: float, comparisons: int = 1
) -> Guarantee:
    """The smallest ε that noise `noise_multiplier` buys at this delta."""
    sigma = _checked_noise(noise_multiplier)
    _, delta = require_privacy(1.0, delta)
    if isinstance(sampling, Cyclic):
        moved = sensitivity(strategy, sampling.participation)
        return _gaussian(gaussian_epsilon(sigma / moved.value, delta), delta, sigma, moved)
    _require_amplifiable(1.0, delta)
    accountant = _accountant(strategy, sampling)
    found, certificate = certified_epsilon(accountant, sigma, delta, require_count("comparisons", comparisons))
    return _guarantee(found, delta, sigma, sampling, accountant, certificate)


def delta(
    strategy: Strategy, sampling: Scheme, noise_multiplier: float, epsilon: float, comparisons: int = 1
) -> Guarantee:
    """The smallest δ that noise `noise_multiplier` buys at this epsilon."""
    sigma, epsilon = _checked_noise(noise_multiplier), require_finite("epsilon", epsilon)
    if epsilon < 0:
        raise QuellError(f"epsilon={epsilon:g} must not be negative")
    if isinstance(sampling, Cyclic):
        moved = sensitivity(strategy, sampling.participation)
        return _gaussian(epsilon, gaussian_delta(sigma / moved.value, epsilon), sigma, moved)
    _require_amplifiable(epsilon, 0.5)
    accountant = _accountant(strategy, sampling)
    found, certificate = certified_delta(accountant, sigma, epsilon, require_count("comparisons", comparisons))
    return _guarantee(epsilon, found, sigma, sampling, accountant, certificate)


def certify(
    strategy: Strategy,
    sampling: Scheme,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    comparisons: int = 1,
) -> Guarantee:
    """The guarantee that noise `noise_multiplier` is (epsilon, delta)-DP, computed anew; refused where it is not.

    >>> from quell import strategy, workload
    >>> scheme = Cyclic(steps=100, separation=10)
    >>> dpsgd = strategy.build("identity", workload.prefix(100), scheme.participation)
    >>> certify(dpsgd, scheme, 1.9, epsilon=8, delta=1e-5).certified
    True
    """
    sigma = _checked_noise(noise_multiplier)
    epsilon, delta = require_privacy(epsilon, delta)
    if isinstance(sampling, Cyclic):
        moved = sensitivity(strategy, sampling.participation)
        bought = gaussian_delta(sigma / moved.value, epsilon)
        if bought > delta * (1 + 1e-9):
            raise QuellError(
                f"noise {sigma:g} is not ({epsilon:g}, {delta:g})-DP: delta is {bought:.3g}; calibrate again"
            )
        return _gaussian(epsilon, delta, sigma, moved)
    _require_amplifiable(epsilon, delta)
    accountant = _accountant(strategy, sampling)
    certificate = certificate_for(accountant, sigma, epsilon, delta, require_count("comparisons", comparisons))
    return _guarantee(epsilon, delta, sigma, sampling, accountant, certificate)


def estimate(strategy: Strategy, sampling: Scheme, epsilon: float, delta: float) -> Estimate:
    """About the noise that `calibrate` would return, in a fraction of its time; no claim can rest on it."""
    epsilon, delta = require_privacy(epsilon, delta)
    if isinstance(sampling, Cyclic):
        sigma, error = calibrate(strategy, sampling, epsilon, delta).noise_multiplier, 0.0
    else:
        _require_amplifiable(epsilon, delta)
        sigma, error = estimate_sigma(_accountant(strategy, sampling), epsilon, delta)
    return Estimate(epsilon, delta, sigma, sampling.name, error)


@lru_cache(maxsize=4)
def _accountant(strategy: Strategy, sampling: Scheme) -> Accountant:
    match sampling:
        case BallsInBins():
            return balls_in_bins.accountant_of(strategy, sampling)
        case Poisson() | CyclicPoisson():
            return poisson.accountant_of(strategy, sampling)
        case BMinSep():
            return b_min_sep.accountant_of(strategy, sampling)
    raise QuellError(f"no accountant prices {type(sampling).__name__}: use one of the schemes of quell.sampling")


def _gaussian(epsilon: float, delta: float, sigma: float, moved: Sensitivity) -> Guarantee:
    bracket = (gaussian_delta(sigma / moved.lower, epsilon), gaussian_delta(sigma / moved.value, epsilon))
    return Guarantee(epsilon, delta, sigma, Cyclic.name, moved, Cyclic.adjacency, bracket=bracket)


def _guarantee(
    epsilon: float, delta: float, sigma: float, sampling: Scheme, accountant: Accountant, certificate: Certificate
) -> Guarantee:
    return Guarantee(
        epsilon,
        delta,
        sigma,
        sampling.name,
        accountant.sensitivity,
        sampling.adjacency,
        certificate.method,
        (certificate.lower, certificate.upper),
        certificate.failure,
        certificate.draws,
    )


def _require_amplifiable(epsilon: float, delta: float) -> None:
    """Beyond these the numbers of amplified accounting leave float64, and nothing is gained there anyway."""
    if epsilon > 300 or delta < 1e-100:
        raise QuellError(
            f"epsilon={epsilon:g}, delta={delta:g} is out of reach of amplified accounting (epsilon up to 300, delta "
            "from 1e-100): use cyclic sampling"
        )


def _checked_noise(noise_multiplier: float) -> float:
    if require_finite("noise_multiplier", noise_multiplier) <= 0:
        raise QuellError(f"noise_multiplier={noise_multiplier:g} must be positive: without noise there is no privacy")
    return noise_multiplier
