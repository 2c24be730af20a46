"""The accountant of Poisson and cyclic Poisson sampling, by dp-accounting's privacy loss distributions.

With g groups and C of at most g bands, one example's participations are ⌈n/g⌉ composed Gaussian mechanisms of noise
σ/‖column‖, each entered with probability `rate` (arXiv:2306.08153, Theorem 2; g = 1 is DP-SGD, arXiv:1607.00133). How
columns of different norms are handled, and how rounding errors are counted, is Proof 11 in docs/proofs.md. The library
takes seconds for each composition, and far longer where little noise makes losses large. So `coins` takes its place in
searches, where losses are too many (`_MOST_CELLS`), and where columns have different norms, as those of `diagonal` do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from quell._types import Array
from quell.analysis.sensitivity import Sensitivity
from quell.privacy.accountant import Accountant, round_up
from quell.privacy.coins import coin_bound, coin_delta, coin_epsilon, reach
from quell.privacy.gaussian import gaussian_delta, gaussian_sigma
from quell.privacy.guarantee import Certificate
from quell.privacy.profile import CoinProfile
from quell.strategy.structure import Strategy

_SPACING = 1e-4  # of the library's losses, finer where ε is below 1
_MOST_CELLS = 1 << 22  # of the library's losses: about ten seconds
_NO_LOSS = 1e-13  # what truncation in the library adds to a δ that is 0
# One coefficient has a relative error of about log2(grid)·2⁻⁵³ ≈ 2e-15, its r-th power r times that. By Parseval the
# errors of all cells together are at most √(cells·largest mass) ≈ 3 times as large: grids end a few deviations out.
_ROUNDING = 1e-14  # absolute, of δ, per round
_LIKE = 0.99  # share of the squared norms that all columns have together if they count as equal, from which they do
_LEVELS = 24  # of norms that differ


@dataclass(frozen=True)
class CoinAccountant(Accountant):
    """Compositions at `rate`; `columns` lists (how many rounds, the norm of their columns)."""

    columns: tuple[tuple[int, float], ...]
    rate: float

    @classmethod
    def of(cls, strategy: Strategy, groups: int, rate: float) -> CoinAccountant:
        """For a strategy with no more bands than there are groups, which is for the scheme to check."""
        return cls(_columns(strategy.column_norms * (1 + 1e-12), groups), rate)

    @property
    def rounds(self) -> int:
        return sum(count for count, _ in self.columns)

    @property
    def largest(self) -> float:
        return max(norm for _, norm in self.columns)

    @property
    def reach(self) -> float:
        """The norm of all columns together: how far an example moves the output that takes part in every round."""
        return math.sqrt(math.fsum(count * norm**2 for count, norm in self.columns))

    @property
    def sensitivity(self) -> Sensitivity:
        return Sensitivity(self.largest, self.largest, "one participation: the largest column norm")

    def guess(self, epsilon: float, delta: float) -> float:
        """As if all rounds were one Gaussian of their average, or as if one round gave the example away."""
        together = self.rate * self.reach * gaussian_sigma(epsilon, delta)
        entered, share = math.log1p(math.expm1(min(epsilon, 300.0)) / self.rate), delta / (self.rounds * self.rate)
        alone = self.largest * gaussian_sigma(entered, min(0.5, share))
        return min(max(together, alone), self.safe_sigma(epsilon, delta))

    def estimate(self, sigma: float, epsilon: float, careful: bool) -> tuple[float, float]:
        return min(1.0, coin_delta(self.relative(sigma), self.rate, epsilon), self._plain(sigma, epsilon)), 0.0

    def rough(self, sigma: float, epsilon: float, effort: int) -> tuple[float, float]:
        return coin_delta(self.relative(sigma), self.rate, epsilon), 0.0

    def estimate_sigma(
        self, epsilon: float, delta: float, near: float | None = None, effort: int | None = None
    ) -> tuple[float, float]:
        if effort is None:
            return super().estimate_sigma(epsilon, delta)
        unit = tuple((count, norm / self.largest) for count, norm in self.columns)
        return round_up(self.largest * _unit_noise(unit, self.rate, epsilon, delta)), 0.0

    def estimate_epsilon(self, sigma: float, delta: float) -> float:
        return coin_epsilon(self.relative(sigma), self.rate, delta)

    def certify(self, sigma: float, epsilon: float, failure: float) -> Certificate:
        spacing = _SPACING * min(1.0, max(epsilon, 0.2))
        method = f"privacy loss distribution of {self.rounds:,} subsampled Gaussians"
        if len(self.columns) > 1 or reach(self.relative(sigma), self.rate) > _MOST_CELLS * spacing:
            upper = min(1.0, coin_bound(self.relative(sigma), self.rate, epsilon), self._plain(sigma, epsilon))
            return Certificate(0.0, upper, method)
        lower, upper = (
            float(self._composed(sigma, spacing, pessimistic).get_delta_for_epsilon(epsilon))
            for pessimistic in (False, True)
        )
        upper = min(upper + _ROUNDING * self.rounds, self._plain(sigma, epsilon))
        return Certificate(max(0.0, lower - _NO_LOSS - _ROUNDING * self.rounds), upper, method)

    def profile(self, sigma: float, at: Sequence[float], failure: float) -> CoinProfile:
        return CoinProfile(self.relative(sigma * (1 - 1e-12)), self.rate)

    def relative(self, sigma: float) -> tuple[tuple[int, float], ...]:
        """(rounds, noise) with noise in units of what an example adds to those rounds."""
        return tuple((count, sigma / norm) for count, norm in self.columns)

    def _plain(self, sigma: float, epsilon: float) -> float:
        """δ of an example that takes part in every round."""
        return gaussian_delta(sigma / self.reach * (1 - 1e-9), epsilon)

    def _composed(self, sigma: float, spacing: float, pessimistic: bool) -> Any:
        # Heavy, untyped, and only this accountant needs it.
        privacy_loss_distribution = import_module("dp_accounting.pld.privacy_loss_distribution")
        once = privacy_loss_distribution.from_gaussian_mechanism(
            sigma / self.largest,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=spacing,
            sampling_prob=self.rate,
            use_connect_dots=pessimistic,
        )
        return once.self_compose(self.rounds)


def _columns(norms: Array, groups: int) -> tuple[tuple[int, float], ...]:
    """(count, norm) of columns that are at least as large as those of every group (Proof 11).

    Norms are rounded up to `_LEVELS` different ones, or to a single one where that costs little.
    """
    rounds = -(-len(norms) // groups)
    padded = np.zeros(rounds * groups)
    padded[: len(norms)] = norms
    worst = np.sort(padded.reshape(rounds, groups), axis=0).max(axis=1)
    largest = float(worst[-1])
    if math.fsum(np.square(worst)) > _LIKE * rounds * largest**2:
        return ((rounds, largest),)
    level = np.ceil((largest - worst) / (largest - float(worst[0])) * (_LEVELS - 1)).astype(int)
    return tuple((int(np.sum(level == each)), float(worst[level == each].max())) for each in np.unique(level))


@lru_cache(maxsize=256)
def _unit_noise(columns: tuple[tuple[int, float], ...], rate: float, epsilon: float, delta: float) -> float:
    """A quick estimate of the noise for columns of which the largest has norm 1; many strategies share these."""
    return Accountant.estimate_sigma(CoinAccountant(columns, rate), epsilon, delta, effort=1)[0]
