"""What an accountant is: one strategy under one sampling scheme, and everything that can be asked of it.

An `Accountant` gives δ at (σ, ε) twice: an estimate, cheap enough to search with, and a certificate. The search for σ
uses estimates and forecasts only. Then a short ladder of noise levels, fixed in advance, is certified from the bottom.
All rungs, and all strategies that are compared (`comparisons`), share a failure probability of 1% of δ, which is
included in the reported δ (Proof 8 in docs/proofs.md). Noise levels are rounded up to five digits, so that they do not
depend on the last bits of the arithmetic.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from quell.analysis.sensitivity import Sensitivity
from quell.errors import QuellError, at_least
from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from quell.privacy.guarantee import Certificate
from quell.privacy.profile import PointProfile, Profile

FAILURE_SHARE = 0.01  # of δ
_RUNGS = (0.0, 0.0015, 0.003, 0.006, 0.012, 0.025, 0.06, 0.15)
_HOPELESS = 1.05  # a forecast this far above what is allowed is hardly ever wrong
_SIGMA_SLOPE, _EPSILON_SLOPE = -20.0, -8.0  # about d ln δ/d ln σ and d ln δ/d ln ε, where nothing better is known
_ABOVE_ESTIMATES = (1.0005, 1.002, 1.008)  # noise that mostly suffices where an estimate without draws is known
_FORECAST = 0.03  # of ln δ, from where one more secant step is as exact as forecasts are
_OUTSKIRTS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # in deviations of the loss beyond its mean
_CLOSE = 0.25  # of ln δ, from where one more secant step is exact enough to rank by: a third wrong, it is 0.4% of σ


def require_reach(epsilon: float, delta: float) -> None:
    """Refuse promises at which amplified accounting leaves the range of float64; it would gain nothing there."""
    if epsilon > 300 or delta < 1e-100:
        raise QuellError(
            f"epsilon={epsilon:g}, delta={delta:g} is beyond what random batches are priced for (epsilon up to 300, "
            "delta from 1e-100): use cyclic sampling, or a smaller epsilon (1 to 10 is common)"
        )


class Accountant(ABC):
    """One strategy under one sampling scheme. Schemes differ in δ; noise and ε are found in the same way for all."""

    tolerance: ClassVar[float] = 0.0  # relative, of δ, for rounding between machines where δ is a closed form

    @property
    @abstractmethod
    def sensitivity(self) -> Sensitivity:
        """How far one example can move C·G."""

    @property
    @abstractmethod
    def reach(self) -> float:
        """How far an example can move C·G that takes part in every batch: noise for that needs no random batches."""

    @property
    def statistical(self) -> bool:
        """Whether certificates come from draws."""
        return False

    @abstractmethod
    def guess(self, epsilon: float, delta: float) -> float:
        """A noise level near the right one, to start from."""

    @abstractmethod
    def estimate(self, sigma: float, epsilon: float, careful: bool) -> tuple[float, float]:
        """An estimate of δ, and its relative error."""

    def rough(self, sigma: float, epsilon: float, effort: int) -> tuple[float, float]:
        """The same in tens of milliseconds, for ranking. (A percent of σ is five to twenty percent of δ.)"""
        return self.estimate(sigma, epsilon, False)

    def forecast(self, sigma: float, epsilon: float, failure: float) -> float:
        """A prediction of `certify`'s upper end; only for accountants that draw."""
        return 0.0

    @abstractmethod
    def certify(self, sigma: float, epsilon: float, failure: float) -> Certificate:
        """An interval for δ that fails with probability at most `failure` (0 for accountants that do not draw)."""

    def at_least(self, epsilon: float, delta: float) -> float:
        """A lower bound on the noise, in milliseconds, by which a search may rule candidates out."""
        return 0.0

    def check_range(self, epsilon: float, delta: float) -> None:
        """Refuse what `require_reach` refuses."""
        require_reach(epsilon, delta)

    def safe_sigma(self, epsilon: float, delta: float) -> float:
        """Noise that is enough without random batches."""
        return self.reach * gaussian_sigma(epsilon, delta) * (1 + 1e-9)

    def safe_epsilon(self, sigma: float, delta: float) -> float:
        """The ε that holds without random batches."""
        return gaussian_epsilon(sigma / self.reach, delta)

    def estimate_sigma(
        self, epsilon: float, delta: float, near: float | None = None, effort: int | None = None
    ) -> tuple[float, float]:
        """About the least noise that is (epsilon, delta)-DP, and the relative error of δ there.

        With `effort`, quickly, for a search that ranks: from so many times the least number of draws, starting at the
        noise of a neighbour (`near`) where one is known.
        """
        most = self.safe_sigma(epsilon, delta)
        if effort is None:
            return _crossing(
                lambda sigma, careful: self.estimate(sigma, epsilon, careful),
                self.guess(epsilon, delta),
                delta,
                _SIGMA_SLOPE,
                most,
            )
        start, slope = near or self.guess(epsilon, delta), gaussian_slope(epsilon, delta)
        sigma, _, error = secants(lambda x: self.rough(x, epsilon, effort), start, delta, slope, most, 12, _CLOSE)
        return round_up(sigma), error

    def estimate_epsilon(self, sigma: float, delta: float) -> float:
        """An estimate of the ε of noise `sigma`, also of noise far too small for any promise: for comparisons."""
        low, high = 1e-3, self.safe_epsilon(sigma, delta)
        for _ in range(24):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.rough(sigma, middle, 1)[0] > delta else (low, middle)
        return high

    def certified_sigma(
        self, epsilon: float, delta: float, comparisons: int = 1, near: float | None = None
    ) -> tuple[float, Certificate]:
        """The least noise that can be certified to be (epsilon, delta)-DP, to within the ladder's steps.

        `near` is about that noise, where it is known, which saves half the time. Where certificates come from draws, a
        search over forecasts follows; where they do not, a little more than an estimate is tried first.
        """
        allowed, failure = _budget(self, delta, comparisons)
        if near is not None and not self.statistical:
            for more in _ABOVE_ESTIMATES:
                with suppress(QuellError):
                    enough = round_up(near * more)
                    return enough, self.certificate_for(enough, epsilon, delta)
        about = near if near is not None and self.statistical else self.estimate_sigma(epsilon, allowed)[0]
        return _certified(
            self,
            lambda sigma: self.forecast(sigma, epsilon, failure),
            lambda sigma: self.certify(sigma, epsilon, failure),
            about,
            self.safe_sigma(epsilon, delta),
            _SIGMA_SLOPE,
            delta,
        )

    def certified_epsilon(self, sigma: float, delta: float, comparisons: int = 1) -> tuple[float, Certificate]:
        """The least ε that can be certified for this noise and delta, to within the ladder's steps."""
        allowed, failure = _budget(self, delta, comparisons)
        most = self.safe_epsilon(sigma, delta)
        if most == 0.0:
            return 0.0, _plain(delta)
        about, _ = _crossing(
            lambda epsilon, careful: self.estimate(sigma, epsilon, careful),
            max(0.02, 0.5 * most),
            allowed,
            _EPSILON_SLOPE,
            max(most, 0.02),
        )
        return _certified(
            self,
            lambda epsilon: self.forecast(sigma, epsilon, failure),
            lambda epsilon: self.certify(sigma, epsilon, failure),
            about,
            most,
            _EPSILON_SLOPE,
            delta,
        )

    def certified_delta(self, sigma: float, epsilon: float, comparisons: int = 1) -> tuple[float, Certificate]:
        """The least δ that can be certified for this noise and epsilon, failure probability included."""
        if not self.statistical:
            certificate = self.certify(sigma, epsilon, 0.0)
            return certificate.upper, certificate
        about, _ = self.estimate(sigma, epsilon, True)
        failure = max(about, 1e-200) * FAILURE_SHARE
        certificate = self.certify(sigma, epsilon, failure / comparisons)
        if not certificate.failure:
            return min(1.0, certificate.upper), certificate
        return min(1.0, certificate.upper + failure), replace(certificate, failure=failure)

    def profile(self, sigma: float, at: Sequence[float], failure: float) -> Profile:
        """What is known of δ at every ε: where nothing better is, certificates at the ε of `at` and their chords.

        Beyond them δ is that of an example that takes part in every batch. All certificates together fail with
        probability at most `failure`.
        """
        certificates = [(epsilon, self.certify(sigma, epsilon, failure / len(at))) for epsilon in at]
        mu = self.reach / sigma
        plain = [mu * (0.5 * mu + deviations) for deviations in _OUTSKIRTS]
        points = [(epsilon, min(1.0, found.upper)) for epsilon, found in certificates]
        points += [(epsilon, min(1.0, gaussian_delta(1.0 / mu, epsilon))) for epsilon in plain]
        drawn = any(found.failure for _, found in certificates)
        return PointProfile(tuple(sorted(points)), failure if drawn else 0.0)

    def certificate_for(self, sigma: float, epsilon: float, delta: float, comparisons: int = 1) -> Certificate:
        """Certify that noise `sigma` is (epsilon, delta)-DP, or raise `QuellError`.

        It asks for the confidence of one rung of `certified_sigma`'s ladder, so what that returns passes here, and
        little is left to gain by trying several levels of noise by hand.
        """
        allowed, failure = _budget(self, delta, comparisons)
        certificate = self.certify(sigma, epsilon, failure)
        if certificate.upper <= (allowed if certificate.failure else delta) * (1 + self.tolerance):
            return _total(certificate, delta)
        if sigma >= self.safe_sigma(epsilon, delta) * (1 - 1e-12):
            return _plain(delta)
        raise QuellError(
            f"noise {sigma:g} is not certified to be ({epsilon:g}, {delta:g})-DP: the bound on delta is "
            f"{at_least(certificate.upper + certificate.failure)}; calibrate again"
        )


@lru_cache(maxsize=64)
def gaussian_slope(epsilon: float, delta: float) -> float:
    """d ln δ/d ln σ of the Gaussian mechanism: about right for all, until it is measured."""
    sigma = gaussian_sigma(epsilon, delta)
    return math.log(gaussian_delta(1.02 * sigma, epsilon) / gaussian_delta(sigma, epsilon)) / math.log(1.02)


def round_up(value: float, digits: int = 5) -> float:
    """The next number with few decimal digits.

    >>> round_up(4.293812)
    4.2939
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.{digits}g}")


def _budget(accountant: Accountant, delta: float, comparisons: int) -> tuple[float, float]:
    if not accountant.statistical:
        return delta, 0.0
    return delta * (1 - FAILURE_SHARE), delta * FAILURE_SHARE / (comparisons * len(_RUNGS))


def _total(certificate: Certificate, delta: float) -> Certificate:
    """The certificate with the failure probability of all rungs and comparisons together."""
    return replace(certificate, failure=delta * FAILURE_SHARE) if certificate.failure else certificate


def _plain(delta: float) -> Certificate:
    return Certificate(0.0, delta, "analytic Gaussian mechanism, no amplification certified")


def _certified(
    accountant: Accountant,
    forecast: Callable[[float], float],
    certify: Callable[[float], Certificate],
    about: float,
    most: float,
    slope: float,
    delta: float,
) -> tuple[float, Certificate]:
    """The smallest value on a ladder above `about` that can be certified, with its certificate.

    Certificates are expensive, so values are skipped where the last certificate or a forecast says that they would
    fail. A forecast uses draws of its own: it decides which values are tried, never what is certified. Where no value
    on the ladder is certified, the result is `most`, which is safe without draws.
    """
    allowed, _ = _budget(accountant, delta, 1)
    about *= 1.0003  # beyond the tolerance of the search
    if accountant.statistical:
        start = about * 1.06 ** (-1 / slope)
        about, _, _ = secants(lambda x: (forecast(x), 0.0), start, allowed, slope, most, 12, _FORECAST)
    hopeless = 0.0
    for rung in [round_up(about * (1 + step)) for step in _RUNGS]:
        if rung >= most:
            break
        if rung < hopeless or (accountant.statistical and forecast(rung) > _HOPELESS * allowed):
            continue
        certificate = certify(rung)
        if certificate.upper <= (allowed if certificate.failure else delta):
            return rung, _total(certificate, delta)
        hopeless = rung * min(1.05, (certificate.upper / allowed) ** (-0.7 / slope))
    return most, _plain(delta)


def _crossing(
    function: Callable[[float, bool], tuple[float, float]], start: float, goal: float, slope: float, most: float
) -> tuple[float, float]:
    """Where a falling function reaches `goal`, and its relative error there: a rough pass, then a careful one."""
    x, slope, _ = secants(lambda x: function(x, False), start, goal, slope, most, 12, 0.15)
    x, _, error = secants(lambda x: function(x, True), x, goal, slope, most, 6, 0.01)
    return x, error


def secants(
    function: Callable[[float], tuple[float, float]],
    start: float,
    goal: float,
    slope: float,
    most: float,
    rounds: int,
    close: float,
) -> tuple[float, float, float]:
    """Where a falling function, given with its error, reaches `goal`: by secants between logarithms, up to `most`.

    A value within `close` of the goal, in logarithms, is the last; one more secant step follows it. Where secants
    creep, as at the edge of a plateau, the bracket is halved instead. Returns the place, the slope and the error there.
    """
    x, error, top = math.log(min(start, most)), 1.0, math.log(most)
    low, high = -math.inf, math.inf
    last: tuple[float, float] | None = None
    for turn in range(rounds):
        value, error = function(math.exp(x))
        gap = math.log(max(value, 1e-290) / goal)
        low, high = (x, high) if gap > 0 else (low, x)
        if last is not None and abs(x - last[0]) > 1e-9:
            slope = min((gap - last[1]) / (x - last[0]), -2.0)  # flatter is a plateau, or noise
        last = x, gap
        wanted = min(x + min(max(-gap / slope, -1.5), 1.5), top)
        if abs(gap) < close or high - low < 1e-4 or x == wanted == top:
            x = wanted
            break
        halve = math.isfinite(high - low) and (turn > 5 or not low < wanted < high)
        x = 0.5 * (low + high) if halve else wanted
    return math.exp(x), slope, error
