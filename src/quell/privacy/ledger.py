"""What an accountant must be able to do for one strategy under one sampling scheme, and the searches over it.

A `Ledger` gives δ at (σ, ε) twice: an estimate, cheap enough to search with, and a certificate. Searching with
certificates would void them: among many tries one succeeds by luck. So the search runs on estimates, and only then a
short ladder of noise levels, fixed before the certificate's draws are looked at, is certified from the bottom; every
rung has its share of the failure probability, so that all of them together fail no more often than is stated. Choosing
between several strategies by their certificates is luck of the same kind: `comparisons` says between how many.

The failure probability is 1% of δ by default and part of the δ that is reported. Noise levels are rounded up to five
digits, so that they do not depend on the last bits of anybody's arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from quell.errors import QuellError
from quell.privacy.guarantee import Certificate
from quell.sensitivity import Sensitivity

FAILURE_SHARE = 0.01  # of δ
_RUNGS = (0.0, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.12)
_STEEPNESS = 20.0  # about −d ln δ/d ln σ, where nothing better is known


class Ledger(Protocol):
    """One strategy under one sampling scheme."""

    @property
    def sensitivity(self) -> Sensitivity:
        """How far one example can move C·G."""

    @property
    def statistical(self) -> bool:
        """Whether certificates come from draws."""

    def guess(self, epsilon: float, delta: float) -> float:
        """A noise level near the right one."""

    def estimate(self, sigma: float, epsilon: float, careful: bool) -> tuple[float, float]:
        """δ, about, and its relative error."""

    def forecast(self, sigma: float, epsilon: float, failure: float) -> float:
        """About the upper end that `certify` will give; 0 where asking costs as much as certifying."""

    def certify(self, sigma: float, epsilon: float, failure: float) -> Certificate:
        """δ in a bracket; `failure` is ignored where nothing is drawn."""

    def safe_sigma(self, epsilon: float, delta: float) -> float:
        """Noise that is enough without amplification."""

    def safe_epsilon(self, sigma: float, delta: float) -> float:
        """The ε that holds without amplification."""


def estimate_sigma(ledger: Ledger, epsilon: float, delta: float) -> tuple[float, float]:
    """About the least noise that is (epsilon, delta)-DP, and the relative error of δ there."""
    return _crossing(
        lambda sigma, careful: ledger.estimate(sigma, epsilon, careful),
        ledger.guess(epsilon, delta),
        delta,
        -_STEEPNESS,
        ledger.safe_sigma(epsilon, delta),
    )


def certified_sigma(ledger: Ledger, epsilon: float, delta: float, comparisons: int) -> tuple[float, Certificate]:
    """The least noise that can be certified to be (epsilon, delta)-DP, to within the ladder's steps."""
    most = ledger.safe_sigma(epsilon, delta)
    allowed, failure = _budget(ledger, delta, comparisons)
    start = 1.0003  # beyond the tolerance of the search
    if ledger.statistical:
        about, error = estimate_sigma(ledger, epsilon, allowed)
        start = (1.06 + min(error, 0.06)) ** (1.0 / _STEEPNESS)  # the width of a certificate, turned into noise
    else:
        about, _ = estimate_sigma(ledger, epsilon, delta)

    found = _climb(
        [round_up(about * start * (1 + rung)) for rung in _RUNGS],
        lambda sigma: ledger.forecast(sigma, epsilon, failure),
        lambda sigma: ledger.certify(sigma, epsilon, failure),
        allowed,
        _STEEPNESS,
        most,
    )
    return (most, _plain(delta)) if found is None else (found[0], _total(found[1], delta))


def certified_epsilon(ledger: Ledger, sigma: float, delta: float, comparisons: int) -> tuple[float, Certificate]:
    """The least ε that can be certified for this noise and delta, to within the ladder's steps."""
    most = ledger.safe_epsilon(sigma, delta)
    allowed, failure = _budget(ledger, delta, comparisons)
    about, error = _crossing(
        lambda epsilon, careful: ledger.estimate(sigma, epsilon, careful), max(0.02, 0.5 * most), allowed, -8.0, most
    )
    start = (1.06 + min(error, 0.06)) ** (1.0 / 8.0) if ledger.statistical else 1.0

    found = _climb(
        [round_up(about * start * (1 + 2 * rung)) for rung in _RUNGS],
        lambda epsilon: ledger.forecast(sigma, epsilon, failure),
        lambda epsilon: ledger.certify(sigma, epsilon, failure),
        allowed,
        8.0,
        most,
    )
    return (most, _plain(delta)) if found is None else (found[0], _total(found[1], delta))


def certified_delta(ledger: Ledger, sigma: float, epsilon: float, comparisons: int) -> tuple[float, Certificate]:
    """The least δ that can be certified for this noise and epsilon, failure probability included."""
    if not ledger.statistical:
        certificate = ledger.certify(sigma, epsilon, 0.0)
        return certificate.upper, certificate
    about, _ = ledger.estimate(sigma, epsilon, True)
    failure = max(about, 1e-200) * FAILURE_SHARE
    certificate = ledger.certify(sigma, epsilon, failure / comparisons)
    if not certificate.failure:
        return min(1.0, certificate.upper), certificate
    return min(1.0, certificate.upper + failure), replace(certificate, failure=failure)


def certificate_for(ledger: Ledger, sigma: float, epsilon: float, delta: float, comparisons: int) -> Certificate:
    """The certificate that noise `sigma` is (epsilon, delta)-DP, refused where there is none.

    It asks for less confidence than a rung of `certified_sigma`'s ladder, so what that returns passes here.
    """
    failure = delta * FAILURE_SHARE / comparisons if ledger.statistical else 0.0
    certificate = ledger.certify(sigma, epsilon, failure)
    allowed = delta * (1 - FAILURE_SHARE) if ledger.statistical else delta
    if certificate.upper <= allowed:
        return _total(certificate, delta)
    if sigma >= ledger.safe_sigma(epsilon, delta) * (1 - 1e-12):
        return _plain(delta)
    raise QuellError(
        f"noise {sigma:g} is not certified to be ({epsilon:g}, {delta:g})-DP: the bound on delta is "
        f"{certificate.upper + certificate.failure:.3g}; calibrate again"
    )


def round_up(value: float, digits: int = 5) -> float:
    """The next number with few decimal digits.

    >>> round_up(4.293812)
    4.2939
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.{digits}g}")


def _budget(ledger: Ledger, delta: float, comparisons: int) -> tuple[float, float]:
    if not ledger.statistical:
        return delta, 0.0
    return delta * (1 - FAILURE_SHARE), delta * FAILURE_SHARE / (comparisons * len(_RUNGS))


def _total(certificate: Certificate, delta: float) -> Certificate:
    """The certificate with the failure probability of all rungs and comparisons together."""
    return replace(certificate, failure=delta * FAILURE_SHARE) if certificate.failure else certificate


def _plain(delta: float) -> Certificate:
    return Certificate(0.0, delta, "analytic Gaussian mechanism, no amplification certified")


def _climb(
    ladder: list[float],
    forecast: Callable[[float], float],
    attempt: Callable[[float], Certificate],
    allowed: float,
    steepness: float,
    most: float,
) -> tuple[float, Certificate] | None:
    """The lowest rung that is certified, skipping those that a forecast or the last certificate makes hopeless."""
    hopeless = 0.0
    for rung in ladder:
        if rung >= most:
            return None
        if rung < hopeless:
            continue
        upper = forecast(rung)
        if upper <= allowed * 1.02:
            certificate = attempt(rung)
            if certificate.upper <= allowed:
                return rung, certificate
            upper = certificate.upper
        hopeless = rung * min(1.05, (upper / allowed) ** (0.7 / steepness))
    return None


def _crossing(
    function: Callable[[float, bool], tuple[float, float]], start: float, goal: float, slope: float, most: float
) -> tuple[float, float]:
    """Where a falling function reaches `goal`, by secants between logarithms; a rough pass, then a careful one."""
    x, error = math.log(min(start, most)), 1.0
    low, high = -math.inf, math.log(most)
    for careful, rounds, close in ((False, 9, 0.15), (True, 4, 0.01)):
        last: tuple[float, float] | None = None
        for _ in range(rounds):
            value, error = function(math.exp(x), careful)
            gap = math.log(max(value, 1e-290) / goal)
            if gap > 0:
                low = max(low, x)
            else:
                high = min(high, x)
            if last is not None and abs(x - last[0]) > 1e-9:
                measured = (gap - last[1]) / (x - last[0])
                slope = measured if measured < -0.5 else slope
            last = x, gap
            step = min(max(-gap / slope, -1.5), 1.5)
            if abs(gap) < close or (high - low) < 1e-5:
                x = min(x + step, math.log(most))
                break
            wanted = x + step
            x = wanted if low < wanted < high else (0.5 * (low + high) if math.isfinite(low) else wanted)
            x = min(x, math.log(most))
        low, high = x - 0.2, math.log(most)  # the careful estimate may disagree with the rough one's bracket
    return math.exp(x), error
