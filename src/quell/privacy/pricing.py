"""From (strategy, sampling scheme, σ) to a guarantee, and back.

| to get | call |
|---|---|
| about the noise for (ε, δ), fast, for a search | `estimate(strategy, sampling, epsilon, delta)` |
| a claim checked | `certify(strategy, sampling, sigma, epsilon, delta)` |
| the least noise that can be certified for (ε, δ) | `calibrate(strategy, sampling, epsilon, delta)` |
| ε or δ that can be certified for noise | `epsilon(strategy, sampling, sigma, delta)`, `delta(…, sigma, epsilon)` |
| δ at every ε of what was guaranteed | `profile(strategy, sampling, guarantee)` |
| what the best attacker finds out | `meaning(strategy, sampling, guarantee)` |

The scheme names its accountant, so there is no way to price batches of one kind by the accountant of another. A
`Guarantee` is the only thing that may be called (ε, δ); it carries how it was obtained. A search over many strategies
should use `estimate` and certify only what it keeps; where several certificates are compared and the best is taken,
tell each of them between how many (`comparisons`), and they share the failure probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from scipy.special import ndtri

from quell.errors import QuellError, require_count, require_finite, require_privacy
from quell.participation import Participation
from quell.privacy.accountant import FAILURE_SHARE, Accountant
from quell.privacy.gaussian import gaussian_sigma
from quell.privacy.guarantee import Certificate, Estimate, Guarantee
from quell.privacy.meaning import FALSE_POSITIVES, Meaning
from quell.privacy.meaning import meaning as meaning_of
from quell.privacy.profile import PointProfile, Profile
from quell.strategy.structure import Strategy

_DRAWN, _EXACT = 22, 64  # points of a profile that is certified point by point, by draws or without
_CHOSEN_FROM = 8  # profiles of which a search may keep the one that came out best (Proof 8)
_FAR_BELOW = 1e-3  # of the promised δ, where such points end: so much less than δ does not matter to a few hundred runs


class Sampling(Protocol):
    """What pricing needs to know of a scheme (`quell.schemes`)."""

    @property
    def name(self) -> str: ...

    @property
    def adjacency(self) -> str: ...

    @property
    def participation(self) -> Participation: ...

    def accountant(self, strategy: Strategy) -> Accountant: ...


def estimate(
    strategy: Strategy,
    sampling: Sampling,
    epsilon: float,
    delta: float,
    near: float | None = None,
    effort: int | None = None,
) -> Estimate:
    """About the noise that `calibrate` would return, in a fraction of its time; no claim can rest on it.

    With an `effort` (1: the least) it takes tens of milliseconds and is a percent off, which is enough to rank by:
    every strategy is drawn with the same random numbers, so that much of the error is common to all. `near` is the
    noise of a neighbour, to start from.

    >>> from quell import strategy, workload
    >>> from quell.schemes import BallsInBins
    >>> scheme = BallsInBins(steps=100, separation=10)
    >>> cgd = strategy.build("lambda_cgd", workload.prefix(100), scheme.participation)
    >>> quick, careful = (estimate(cgd, scheme, 8, 1e-5, effort=effort).noise_multiplier for effort in (1, None))
    >>> abs(quick / careful - 1) < 0.02
    True
    """
    epsilon, delta = require_privacy(epsilon, delta)
    sigma, error = _accountant(strategy, sampling, epsilon, delta).estimate_sigma(epsilon, delta, near, effort)
    return Estimate(epsilon, delta, sigma, sampling.name, error)


def certify(
    strategy: Strategy,
    sampling: Sampling,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    comparisons: int = 1,
) -> Guarantee:
    """The guarantee that noise `noise_multiplier` is (epsilon, delta)-DP, computed anew; refused where it is not.

    >>> from quell import strategy, workload
    >>> from quell.schemes import Cyclic
    >>> scheme = Cyclic(steps=100, separation=10)
    >>> dpsgd = strategy.build("identity", workload.prefix(100), scheme.participation)
    >>> certify(dpsgd, scheme, 1.9, epsilon=8, delta=1e-5).certified
    True
    """
    sigma = _checked_noise(noise_multiplier)
    epsilon, delta = require_privacy(epsilon, delta)
    accountant = _accountant(strategy, sampling, epsilon, delta)
    certificate = accountant.certificate_for(sigma, epsilon, delta, require_count("comparisons", comparisons))
    return _guarantee(epsilon, delta, sigma, sampling, accountant, certificate)


def calibrate(
    strategy: Strategy,
    sampling: Sampling,
    epsilon: float,
    delta: float,
    comparisons: int = 1,
    near: float | None = None,
) -> Guarantee:
    """The least noise with which the strategy is (epsilon, delta)-DP under the sampling scheme.

    A search that knows about how much that is (`near`) saves half the time.

    >>> from quell import strategy, workload
    >>> from quell.schemes import BallsInBins, Cyclic
    >>> scheme = Cyclic(steps=100, separation=10)
    >>> dpsgd = strategy.build("identity", workload.prefix(100), scheme.participation)
    >>> round(calibrate(dpsgd, scheme, epsilon=8, delta=1e-5).noise_multiplier, 4)
    1.8981
    >>> amplified = BallsInBins(steps=100, separation=10)
    >>> round(calibrate(dpsgd, amplified, epsilon=8, delta=1e-5).noise_multiplier, 2)
    1.54
    """
    epsilon, delta = require_privacy(epsilon, delta)
    accountant = _accountant(strategy, sampling, epsilon, delta)
    sigma, certificate = accountant.certified_sigma(epsilon, delta, require_count("comparisons", comparisons), near)
    return _guarantee(epsilon, delta, sigma, sampling, accountant, certificate)


def epsilon(
    strategy: Strategy, sampling: Sampling, noise_multiplier: float, delta: float, comparisons: int = 1
) -> Guarantee:
    """The smallest ε that can be certified for noise `noise_multiplier` at this delta."""
    sigma = _checked_noise(noise_multiplier)
    _, delta = require_privacy(1.0, delta)
    accountant = _accountant(strategy, sampling, 1.0, delta)
    found, certificate = accountant.certified_epsilon(sigma, delta, require_count("comparisons", comparisons))
    return _guarantee(found, delta, sigma, sampling, accountant, certificate)


def delta(
    strategy: Strategy, sampling: Sampling, noise_multiplier: float, epsilon: float, comparisons: int = 1
) -> Guarantee:
    """The smallest δ that can be certified for noise `noise_multiplier` at this epsilon."""
    sigma, epsilon = _checked_noise(noise_multiplier), require_finite("epsilon", epsilon)
    if epsilon < 0:
        raise QuellError(f"epsilon={epsilon:g} must not be negative")
    accountant = _accountant(strategy, sampling, epsilon, 0.5)
    found, certificate = accountant.certified_delta(sigma, epsilon, require_count("comparisons", comparisons))
    return _guarantee(epsilon, found, sigma, sampling, accountant, certificate)


def profile(strategy: Strategy, sampling: Sampling, guarantee: Guarantee) -> Profile:
    """What is known of a guaranteed run's δ at every ε, for composing it with others; takes certificates where needed.

    Certificates by draws share a failure probability of 1% of the guarantee's δ.
    """
    accountant = _accountant(strategy, sampling, guarantee.epsilon, guarantee.delta)
    count, least = _DRAWN if accountant.statistical else _EXACT, guarantee.delta * _FAR_BELOW
    top = accountant.estimate_epsilon(guarantee.noise_multiplier, least)
    return _with_promise(accountant, guarantee, [top * i / count for i in range(count + 1)])


@lru_cache(maxsize=64)
def meaning(strategy: Strategy, sampling: Sampling, guarantee: Guarantee) -> Meaning:
    """What a guaranteed run lets the best attacker find out; where certificates are drawn, from a few of them.

    >>> from quell import strategy, workload
    >>> from quell.schemes import Cyclic
    >>> scheme = Cyclic(steps=100, separation=10)
    >>> dpsgd = strategy.build("identity", workload.prefix(100), scheme.participation)
    >>> found = meaning(dpsgd, scheme, calibrate(dpsgd, scheme, epsilon=2, delta=1e-5))
    >>> round(found.mu, 3), round(found.true_positives[1][0.01], 3)
    (0.502, 0.034)
    """
    accountant = _accountant(strategy, sampling, guarantee.epsilon, guarantee.delta)
    mu = 1.0 / gaussian_sigma(guarantee.epsilon, guarantee.delta)  # what it would be, if it were Gaussian
    wanted = {max(0.0, mu * (-float(ndtri(rate)) - 0.5 * mu)) for rate in FALSE_POSITIVES}
    return meaning_of(_with_promise(accountant, guarantee, sorted(wanted)))


def _with_promise(accountant: Accountant, guarantee: Guarantee, at: Sequence[float]) -> Profile:
    """A profile; where it consists of points, the promise is one of them, with its own failure probability."""
    found = accountant.profile(guarantee.noise_multiplier, at, guarantee.delta * FAILURE_SHARE / _CHOSEN_FROM)
    if not isinstance(found, PointProfile):
        return found
    promised, failure = (guarantee.epsilon, guarantee.delta), _CHOSEN_FROM * found.failure
    return PointProfile(tuple(sorted((*found.points, promised))), failure + guarantee.failure_probability)


def _accountant(strategy: Strategy, sampling: Sampling, epsilon: float, delta: float) -> Accountant:
    if not hasattr(sampling, "accountant"):
        raise QuellError(f"no accountant prices {type(sampling).__name__}: use one of the schemes of quell.schemes")
    accountant = sampling.accountant(strategy)
    accountant.check_range(epsilon, delta)
    return accountant


def _guarantee(
    epsilon: float, delta: float, sigma: float, sampling: Sampling, accountant: Accountant, certificate: Certificate
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
        sampling,
    )


def _checked_noise(noise_multiplier: float) -> float:
    if require_finite("noise_multiplier", noise_multiplier) <= 0:
        raise QuellError(f"noise_multiplier={noise_multiplier:g} must be positive: without noise there is no privacy")
    return noise_multiplier
