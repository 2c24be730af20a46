"""The accountant of Poisson and cyclic Poisson sampling, by dp-accounting's privacy loss distributions.

With g groups and C of at most g bands, the columns of C that one example can touch do not overlap, so its
participations are ⌈n/g⌉ adaptively composed Gaussian mechanisms of noise σ/‖column‖, each entered with probability rate
(arXiv:2306.08153, Theorem 2; g = 1 is DP-SGD, arXiv:1607.00133). Signs of C do not matter here. The library composes
pessimistic discretisations for the upper end and optimistic ones for the lower; it does so by raising Fourier
coefficients to a power, which multiplies their rounding errors by the number of rounds, so both ends are moved outwards
by that (`_ROUNDING`). Below it, no amplification can be certified. The library takes seconds for each composition, and
without end where little noise makes losses large. So `coins` answers for it in searches, where losses are too many
(`_MOST_CELLS`), and where columns differ in their norms, as those of `diagonal` do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from quell._types import Array
from quell.errors import QuellError
from quell.privacy.coins import coin_bound, reach
from quell.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from quell.privacy.guarantee import Certificate
from quell.sampling import CyclicPoisson, Poisson
from quell.sensitivity import Sensitivity
from quell.strategy.structure import Strategy, TreeStrategy

_SPACING = 1e-4  # of the library's losses, finer where ε is below 1
_MOST_CELLS = 1 << 22  # of the library's losses: about ten seconds
_NO_LOSS = 1e-13  # what truncation in the library adds to a δ that is 0
# One coefficient has a relative error of about log2(grid)·2⁻⁵³ ≈ 2e-15, its r-th power r times that. By Parseval the
# errors of all cells together are at most √(cells·largest mass) ≈ 3 times as large: grids end a few deviations out.
_ROUNDING = 1e-14  # absolute, of δ, per round
_LIKE = 0.99  # share of the squared norms that all columns have together if they count as equal, from which they do
_LEVELS = 24  # of norms that differ


@dataclass(frozen=True)
class PoissonAccountant:
    """Compositions at `rate`; `columns` says how many of them have a column of which norm (an `Accountant`)."""

    columns: tuple[tuple[int, float], ...]
    rate: float

    @property
    def rounds(self) -> int:
        return sum(count for count, _ in self.columns)

    @property
    def largest(self) -> float:
        return max(norm for _, norm in self.columns)

    @property
    def energy(self) -> float:
        """The norm of all columns together: what an example moves that always takes part."""
        return math.sqrt(math.fsum(count * norm**2 for count, norm in self.columns))

    @property
    def sensitivity(self) -> Sensitivity:
        return Sensitivity(self.largest, self.largest, "one participation: the largest column norm")

    @property
    def statistical(self) -> bool:
        return False

    def guess(self, epsilon: float, delta: float) -> float:
        often, typical = max(self.rate * math.sqrt(self.rounds), 1e-3), self.energy / math.sqrt(self.rounds)
        return min(typical * gaussian_sigma(epsilon, delta) * max(often, 0.3), self.safe_sigma(epsilon, delta))

    def estimate(self, sigma: float, epsilon: float, careful: bool) -> tuple[float, float]:
        return min(1.0, coin_bound(self.relative(sigma), self.rate, epsilon), self._plain(sigma, epsilon)), 0.0

    def forecast(self, sigma: float, epsilon: float, failure: float) -> float:
        return 0.0

    def certify(self, sigma: float, epsilon: float, failure: float) -> Certificate:
        spacing = _SPACING * min(1.0, max(epsilon, 0.2))
        method = f"privacy loss distribution of {self.rounds:,} subsampled Gaussians"
        if len(self.columns) > 1 or reach(self.relative(sigma), self.rate) > _MOST_CELLS * spacing:
            upper, _ = self.estimate(sigma, epsilon, True)
            return Certificate(0.0, upper, method, 0.0, upper)
        lower, upper = (
            float(self._composed(sigma, spacing, pessimistic).get_delta_for_epsilon(epsilon))
            for pessimistic in (False, True)
        )
        upper = min(upper + _ROUNDING * self.rounds, self._plain(sigma, epsilon))
        lower = max(0.0, lower - _NO_LOSS - _ROUNDING * self.rounds)
        return Certificate(lower, upper, f"{method} (dp-accounting)", 0.0, upper)

    def safe_sigma(self, epsilon: float, delta: float) -> float:
        return self.energy * gaussian_sigma(epsilon, delta) * (1 + 1e-9)

    def safe_epsilon(self, sigma: float, delta: float) -> float:
        return gaussian_epsilon(sigma / self.energy, delta)

    def relative(self, sigma: float) -> tuple[tuple[int, float], ...]:
        """How many rounds have noise of which size in units of what an example adds to them."""
        return tuple((count, sigma / norm) for count, norm in self.columns)

    def _plain(self, sigma: float, epsilon: float) -> float:
        """δ of one who always takes part."""
        return gaussian_delta(sigma / self.energy * (1 - 1e-9), epsilon)

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


def accountant_of(strategy: Strategy, sampling: Poisson | CyclicPoisson) -> PoissonAccountant:
    """The accountant, refused where the strategy has more bands than the scheme has groups."""
    if strategy.steps != sampling.steps:
        raise QuellError(f"the strategy has {strategy.steps:,} steps but the sampling {sampling.steps:,}")
    bands = strategy.steps if isinstance(strategy, TreeStrategy) else strategy.bands
    if bands > sampling.groups:
        raise QuellError(f"{strategy!r} has {bands:,} bands in C, but {_valid(sampling, bands, strategy.steps)}")
    return PoissonAccountant(_columns(strategy.column_norms * (1 + 1e-12), sampling.groups), sampling.rate)


def _columns(norms: Array, groups: int) -> tuple[tuple[int, float], ...]:
    """How many columns of which norm are at least those of any group.

    The largest of every group's columns are at most the largest of these, the second largest at most the second, and so
    on, and noise composes in any order. Norms are rounded up to `_LEVELS` of them, or to one where that costs little.
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


def _valid(sampling: Poisson | CyclicPoisson, bands: int, steps: int) -> str:
    """Which combinations can be priced instead."""
    instead = "use balls_in_bins, which takes any C >= 0"
    if bands < steps:
        instead += f", or cyclic_poisson with at least {bands:,} groups"
    if isinstance(sampling, Poisson):
        return f"poisson sampling is priced for independent noise (1 band) only: {instead}"
    return f"cyclic_poisson with {sampling.groups} groups is priced for at most {sampling.groups} bands: {instead}"
