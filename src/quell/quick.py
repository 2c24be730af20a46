"""About how much noise a strategy needs, in tens of milliseconds: what a search ranks by, and never a promise.

The accountants' own estimates take seconds, because a certificate follows them. Ranking needs less: a percent of σ is
five to twenty percent of δ, which some hundreds of draws deliver, and every candidate is drawn with the same random
numbers, so that much of the error is common to all. Noise under `cyclic` sampling is exact anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from quell.privacy import (
    Estimate,
    balls_in_bins,
    calibrate,
    estimate,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_sigma,
    poisson,
)
from quell.privacy.accountant import Accountant, round_up, secants
from quell.privacy.bin_pair import BinPair
from quell.privacy.bins import Bins
from quell.privacy.coins import coin_delta, coin_epsilon
from quell.privacy.importance import pilot
from quell.privacy.tilting import sampling_free
from quell.sampling import BallsInBins, Cyclic, CyclicPoisson, Poisson, Scheme
from quell.sensitivity import sensitivity
from quell.strategy import Strategy

_DRAWS, _WIDE = 96, 1 << 19  # per proposal, and the most numbers they may take together
_CLOSE = 0.25  # of ln δ, from where one more secant step is exact enough: a third wrong, it is 0.4% of σ
_ERROR = 0.1  # of δ, with so few draws


def quick(
    strategy: Strategy,
    scheme: Scheme,
    epsilon: float,
    delta: float,
    near: float | None = None,
    effort: int = 1,
) -> Estimate:
    """About the noise for (epsilon, delta), starting from `near` where a neighbour's is known, by `effort` × the draws.

    >>> from quell import strategy, workload
    >>> scheme = BallsInBins(steps=100, separation=10)
    >>> cgd = strategy.build("lambda_cgd", workload.prefix(100), scheme.participation)
    >>> abs(quick(cgd, scheme, 8, 1e-5).noise_multiplier / estimate(cgd, scheme, 8, 1e-5).noise_multiplier - 1) < 0.02
    True
    """
    match scheme:
        case Cyclic():
            return Estimate(
                epsilon, delta, calibrate(strategy, scheme, epsilon, delta).noise_multiplier, scheme.name, 0.0
            )
        case BallsInBins():
            accountant = balls_in_bins.accountant_of(strategy, scheme)
            sigma = _least_noise(
                lambda sigma: _bins_delta(accountant, sigma, epsilon, effort), accountant, epsilon, delta, near
            )
            error = _ERROR / math.sqrt(effort) if accountant.statistical else 0.0
            return Estimate(epsilon, delta, sigma, scheme.name, error)
        case Poisson() | CyclicPoisson():
            coins = poisson.accountant_of(strategy, scheme)
            unit = tuple((count, norm / coins.largest) for count, norm in coins.columns)
            sigma = coins.largest * _coin_noise(unit, coins.rate, epsilon, delta)
            return Estimate(epsilon, delta, round_up(sigma), scheme.name, 0.0)
    return estimate(strategy, scheme, epsilon, delta)


def quick_epsilon(strategy: Strategy, scheme: Scheme, sigma: float, delta: float) -> float:
    """About the ε of noise `sigma`, which may be far too little for any promise: a yardstick for comparisons."""
    if isinstance(scheme, Poisson | CyclicPoisson):
        coins = poisson.accountant_of(strategy, scheme)
        return coin_epsilon(coins.relative(sigma), coins.rate, delta)
    if isinstance(scheme, Cyclic):
        return gaussian_epsilon(sigma / sensitivity(strategy, scheme.participation).value, delta)
    bins = BallsInBins(scheme.steps, scheme.separation)  # b_min_sep is close enough to that for a yardstick
    accountant = balls_in_bins.accountant_of(strategy, bins)
    low, high = 1e-3, accountant.safe_epsilon(sigma, delta)
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _bins_delta(accountant, sigma, middle) > delta else (low, middle)
    return high


def least(strategy: Strategy, scheme: Scheme, epsilon: float, delta: float) -> float:
    """Noise that is needed whatever the accountant says, in milliseconds: what a search may prune by.

    Two bounds under balls-in-bins sampling. Every pattern moves the output along the mean pattern m̄ by ⟨m_j, m̄⟩/‖m̄‖ at
    least, and seen along that line alone the mechanism is no harder to tell apart than a Gaussian one of the smallest
    of these. And by Kahane's inequality (`quell.privacy.bins`) δ only shrinks when overlaps are taken for 0 and all
    bins for the lightest: then noise is that of independent bins, which is known exactly.
    """
    match scheme:
        case Cyclic():
            return calibrate(strategy, scheme, epsilon, delta).noise_multiplier
        case BallsInBins():
            bins = balls_in_bins.accountant_of(strategy, scheme).bins
            pulled = float(bins.pull.min()) / math.sqrt(float(bins.pull.mean())) * gaussian_sigma(epsilon, delta)
            lightest = math.sqrt(float(bins.energies.min()))
            return max(pulled, lightest * _apart(bins.count, epsilon, delta))
    return 0.0


@lru_cache(maxsize=64)
def _apart(bins: int, epsilon: float, delta: float) -> float:
    """Noise for so many bins of norm 1 that do not overlap, a little rounded down."""
    accountant = balls_in_bins.BinAccountant(Bins(np.eye(1, bins)[0]))
    return 0.995 * _least_noise(lambda sigma: _bins_delta(accountant, sigma, epsilon), accountant, epsilon, delta)


@lru_cache(maxsize=256)
def _coin_noise(columns: tuple[tuple[int, float], ...], rate: float, epsilon: float, delta: float) -> float:
    """Noise under (cyclic) Poisson sampling where the largest column has norm 1: many strategies share the others."""
    coins = poisson.PoissonAccountant(columns, rate)
    return _least_noise(lambda sigma: coin_delta(coins.relative(sigma), rate, epsilon), coins, epsilon, delta)


def _bins_delta(accountant: balls_in_bins.BinAccountant, sigma: float, epsilon: float, effort: int = 1) -> float:
    if not accountant.statistical:
        return accountant.estimate(sigma, epsilon, False)[0]
    pair = BinPair(accountant.bins, sigma)
    size = effort * max(16, min(_DRAWS, _WIDE // accountant.bins.count))
    remove = pilot(pair, "remove", epsilon, size).estimate
    if sampling_free(pair, "add", epsilon) < 0.1 * remove:
        return remove
    return max(remove, pilot(pair, "add", epsilon, size).estimate)


def _least_noise(
    function: Callable[[float], float], accountant: Accountant, epsilon: float, delta: float, near: float | None = None
) -> float:
    """Where δ falls to `delta`, rounded up to five digits."""
    start, most = near or accountant.guess(epsilon, delta), accountant.safe_sigma(epsilon, delta)
    sigma, _, _ = secants(lambda x: (function(x), 0.0), start, delta, steepness(epsilon, delta), most, 12, _CLOSE)
    return round_up(sigma)


@lru_cache(maxsize=64)
def steepness(epsilon: float, delta: float) -> float:
    """d ln δ/d ln σ of the Gaussian mechanism: about right for all, until it is measured."""
    sigma = gaussian_sigma(epsilon, delta)
    return math.log(gaussian_delta(1.02 * sigma, epsilon) / gaussian_delta(sigma, epsilon)) / math.log(1.02)
