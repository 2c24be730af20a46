"""The accountant of b-min-sep sampling (Dong & Ganesh 2026, arXiv:2602.09338), for C ≥ 0 with at most b bands.

An example that is ready takes part with probability p and then waits for b steps: its pattern is a run of a Markov
chain. With at most b bands the columns of one pattern do not overlap, and S follows from the recursion

    V_t = p·a_t·V_{t+b} + (1 − p)·V_{t+1},   V_t = 1 for t ≥ n,   S = Σ_r P(first ready at step r)·V_r

with a_t = exp(u_t − α_t) (Proof 12 in docs/proofs.md). Within a block of b steps this is a first-order filter.
Proposals and certificates are those of `quell.privacy.importance` without extras, for whose weights no useful bound is
known here: where δ is small, certificates ask for more noise than those of balls in bins (`benchmarks/tightness.py`
measures how much).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from quell._types import Array
from quell.analysis.sensitivity import Sensitivity, sensitivity
from quell.participation import Participation
from quell.privacy import importance
from quell.privacy.accountant import Accountant
from quell.privacy.bins import convolve, correlate, negative_slack
from quell.privacy.gaussian import gaussian_delta
from quell.privacy.guarantee import Certificate
from quell.privacy.tilting import Draws, Key, Proposal, Tilt, sampling_free
from quell.strategy.structure import BandedStrategy, ToeplitzStrategy

_ROUGH, _CAREFUL = 256, 1024  # pilot draws per proposal


class Resting(Protocol):
    """What the chain needs to know of a scheme: an example that is ready joins with probability `rate`."""

    @property
    def steps(self) -> int: ...

    @property
    def separation(self) -> int: ...

    @property
    def rate(self) -> float: ...

    @property
    def fraction(self) -> float: ...

    @property
    def participation(self) -> Participation: ...


@dataclass(frozen=True, eq=False)
class ChainPair:
    """P over the patterns of the chain against Q, at one σ; see `quell.privacy.tilting.Pair`."""

    strategy: ToeplitzStrategy | BandedStrategy
    sampling: Resting
    sigma: float

    @property
    def width(self) -> int:
        return self.sampling.steps

    @property
    def rarest(self) -> float:
        return math.log(1.0 / self.sampling.fraction)

    @cached_property
    def alpha(self) -> Array:
        return np.square(self.strategy.column_norms) / (2 * self.sigma**2)

    @cached_property
    def heaviest(self) -> float:
        return sensitivity(self.strategy, self.sampling.participation).value ** 2 / (2 * self.sigma**2)

    @property
    def average(self) -> float:
        return self.sampling.fraction * float(self.alpha.sum())

    def log_moment(self, theta: float) -> float:
        return float(self._log_likelihood(theta * self.alpha[None])[0])  # columns of one pattern do not overlap

    @cached_property
    def centre(self) -> float:
        return float(np.sum(np.square(self._mean))) / (2 * self.sigma**2)

    @cached_property
    def _mean(self) -> Array:
        """(1, n) the average pattern, moved: m̄."""
        return self._moved(np.full((1, self.width), self.sampling.fraction))

    @cached_property
    def _pull(self) -> Array:
        """(n,) ⟨C_t, m̄⟩/σ²."""
        return np.asarray(self._inner(self._mean)[0] / self.sigma**2)

    def log_most(self, tilt: Tilt) -> float:
        return math.inf if tilt.extra else 0.0

    def log_weights(self, tilt: Tilt, count: int, random: np.random.Generator) -> Array:
        assert not tilt.extra, "nothing is proven about extras here, so no candidate has them"
        return np.zeros(count)

    def draw(
        self, proposal: Proposal, keys: tuple[Key, ...], count: int, random: np.random.Generator, exact: bool
    ) -> Draws:
        taking_part = np.full((count, self.width), proposal.shift * self.sampling.fraction)
        if isinstance(proposal, Tilt):
            taking_part += proposal.theta * self._patterns(count, random)
        output = self._moved(taking_part) + self.sigma * random.standard_normal((count, self.width))
        u = self._inner(output) / self.sigma**2
        loss = self._log_likelihood(u - self.alpha)
        powers = [
            self._log_likelihood(theta * u - theta * (theta * self.alpha + shift * self._pull)) for theta, shift in keys
        ]
        drift = self.sampling.fraction * u.sum(axis=1)
        return Draws(loss, drift, np.array(powers).reshape(len(keys), count), np.zeros(count))

    def _patterns(self, count: int, random: np.random.Generator) -> Array:
        """(count, n) with ones where an example takes part."""
        n, b, rate = self.sampling.steps, self.sampling.separation, self.sampling.rate
        place = random.random(count) * (1.0 + (b - 1) * rate)
        ready = np.where(place < 1.0, 0, np.minimum((place - 1.0) // rate + 1, b - 1)).astype(np.int64)
        pattern = np.zeros((count, n))
        for _ in range(self.sampling.participation.count):
            step = ready + random.geometric(rate, count) - 1
            inside = np.flatnonzero(step < n)
            pattern[inside, step[inside]] = 1.0
            ready = np.minimum(step, n) + b
        return pattern

    def _log_likelihood(self, factors: Array) -> Array:
        """ln S from (m, n) logarithms of the factors."""
        from scipy.signal import lfilter

        n, b, rate = self.sampling.steps, self.sampling.separation, self.sampling.rate
        stay = 1.0 - rate
        later = np.zeros((len(factors), b))  # ln V of the block after the present one
        for start in range(((n - 1) // b) * b, -1, -b):
            stop = min(start + b, n)
            block = factors[:, start:stop] + later[:, : stop - start] + math.log(rate)
            entry = later[:, 0] if stop == start + b else np.zeros(len(factors))  # ln V right after the block
            top = np.maximum(block.max(axis=1), entry)
            values, _ = lfilter(
                [1.0],
                [1.0, -stay],
                np.exp(block - top[:, None])[:, ::-1],
                axis=1,
                zi=stay * np.exp(entry - top)[:, None],
            )
            fresh = np.zeros_like(later)
            with np.errstate(divide="ignore"):
                fresh[:, : stop - start] = np.log(values[:, ::-1]) + top[:, None]
            later = fresh
        weights = np.full(b, rate / (1.0 + (b - 1) * rate))
        weights[0] = 1.0 / (1.0 + (b - 1) * rate)
        top = later.max(axis=1)
        return np.asarray(top + np.log(np.exp(later - top[:, None]) @ weights))

    def _moved(self, taking_part: Array) -> Array:
        """C·x for every row x."""
        if isinstance(self.strategy, ToeplitzStrategy):
            scale = 1.0 if self.strategy.column_scale is None else self.strategy.column_scale
            return convolve(self._coefficients, taking_part * scale)
        result = np.zeros_like(taking_part)
        for d in range(self.strategy.bands):
            result[:, d:] += self.strategy.row_bands[d:, d] * taking_part[:, : self.width - d]
        return result

    def _inner(self, output: Array) -> Array:
        """Cᵀ·y for every row y."""
        if isinstance(self.strategy, ToeplitzStrategy):
            scale = 1.0 if self.strategy.column_scale is None else self.strategy.column_scale
            return np.asarray(correlate(self._coefficients, output) * scale)
        result = np.zeros_like(output)
        for d in range(self.strategy.bands):
            result[:, : self.width - d] += self.strategy.row_bands[d:, d] * output[:, d:]
        return result

    @cached_property
    def _coefficients(self) -> Array:
        assert isinstance(self.strategy, ToeplitzStrategy)
        full = np.zeros(self.width)
        full[: self.strategy.bands] = self.strategy.coefficients[: self.strategy.bands]
        return full


@dataclass(frozen=True, eq=False)
class ChainAccountant(Accountant):
    """b-min-sep accounting for one strategy."""

    strategy: ToeplitzStrategy | BandedStrategy
    sampling: Resting
    slack: float

    @classmethod
    def of(cls, strategy: ToeplitzStrategy | BandedStrategy, sampling: Resting) -> ChainAccountant:
        """For a strategy with no more bands than the separation, which is for the scheme to check."""
        slack = negative_slack(strategy, sampling.participation.count)
        return cls(_without_rounding(strategy) if slack else strategy, sampling, slack)

    @cached_property
    def sensitivity(self) -> Sensitivity:
        return sensitivity(self.strategy, self.sampling.participation)

    @property
    def reach(self) -> float:
        return self.sensitivity.value

    @property
    def statistical(self) -> bool:
        return True

    def guess(self, epsilon: float, delta: float) -> float:
        return 0.6 * self.safe_sigma(epsilon, delta)

    def estimate(self, sigma: float, epsilon: float, careful: bool) -> tuple[float, float]:
        pair = self._pair(sigma)
        size = _CAREFUL if careful else _ROUGH
        both = [importance.pilot(pair, way, epsilon, size) for way in importance.DIRECTIONS]
        worst = max(both, key=lambda each: each.estimate)
        return worst.estimate, worst.error / max(worst.estimate, 1e-300)

    def forecast(self, sigma: float, epsilon: float, failure: float) -> float:
        return self._scouted(sigma, epsilon, failure).expected_upper

    def certify(self, sigma: float, epsilon: float, failure: float) -> Certificate:
        pair = self._pair(sigma)
        plain = gaussian_delta(sigma / self.sensitivity.value, epsilon)
        free = min(plain, max(sampling_free(pair, way, epsilon) for way in importance.DIRECTIONS))
        slack = (1 + math.exp(epsilon)) * self.slack / (2 * sigma)
        found = importance.certify(pair, epsilon, failure, self._scouted(sigma, epsilon, failure))
        if free <= found.upper:
            return Certificate(found.lower, free + slack, "Rényi and Gaussian bounds, no draws")
        return Certificate(found.lower, found.upper + slack, found.method, failure, found.draws)

    def _scouted(self, sigma: float, epsilon: float, failure: float) -> importance.Scouted:
        key = sigma, epsilon, failure
        if key not in self._scouts:
            self._scouts.clear()
            self._scouts[key] = importance.scout(self._pair(sigma), epsilon, failure, _CAREFUL)
        return self._scouts[key]

    @cached_property
    def _scouts(self) -> dict[tuple[float, float, float], importance.Scouted]:
        return {}

    def _pair(self, sigma: float) -> ChainPair:
        return ChainPair(self.strategy, self.sampling, sigma)


def _without_rounding(strategy: ToeplitzStrategy | BandedStrategy) -> ToeplitzStrategy | BandedStrategy:
    """The strategy with the entries of C that are negative by rounding set to 0; `slack` accounts for it (Proof 5)."""
    if isinstance(strategy, BandedStrategy):
        return replace(strategy, row_bands=np.maximum(strategy.row_bands, 0.0))
    return replace(
        strategy, given_coefficients=np.maximum(strategy.coefficients, 0.0), given_noising=None, exponentials=None
    )
