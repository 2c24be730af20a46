"""The accountant of balls-in-bins sampling, for any strategy with C ≥ 0.

P is a mixture of b Gaussians and Q the Gaussian without the example; for C ≥ 0 this pair dominates every adaptive run
(arXiv:2410.06266, Proof 4 in docs/proofs.md). Independent noise is computed exactly (`orthogonal`), one bin is the
Gaussian mechanism. Everything else has two certificates: importance sampling (`importance`), and bounds without draws
(`shared`), which are the better ones where bins share most of what they move. Each checks the other. δ never exceeds
that of the Gaussian mechanism at max_j ‖m_j‖, because a mixture is no easier to tell from Q than its worst component.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from quell.analysis.sensitivity import Sensitivity
from quell.privacy import importance, orthogonal
from quell.privacy.accountant import Accountant, round_up
from quell.privacy.bin_pair import BinPair
from quell.privacy.bins import Binned, Bins, bins_of
from quell.privacy.gaussian import gaussian_delta, gaussian_sigma
from quell.privacy.guarantee import Certificate
from quell.privacy.profile import GaussianProfile, Profile
from quell.privacy.shared import Shared
from quell.privacy.tilting import sampling_free
from quell.strategy.structure import Strategy

_FEW = 4  # different bin sizes up to which independent noise is convolved exactly
_ROUGH, _CAREFUL, _WIDE = 384, 1536, 1 << 22  # pilot draws per proposal, and the most numbers they may take
_WORTHWHILE = 0.5  # of δ, made by what all bins share: from there on a bound without draws may be the better one
_RANKING, _RANKING_WIDE, _RANKING_ERROR = 96, 1 << 19, 0.1  # the same for ranking, and the error of δ with so few


@dataclass(frozen=True, eq=False)
class BinAccountant(Accountant):
    """Balls-in-bins accounting for one strategy."""

    bins: Bins

    @classmethod
    def of(cls, strategy: Strategy, sampling: Binned) -> BinAccountant:
        return cls(bins_of(strategy, sampling))

    @property
    def reach(self) -> float:
        """max_j ‖m_j‖, and what negative rounding errors in C could add."""
        return math.sqrt(float(self.bins.energies.max())) + self.bins.slack

    @property
    def sensitivity(self) -> Sensitivity:
        lower = self.reach if self.bins.exact else math.sqrt(float(self.bins.energies.min()))
        return Sensitivity(self.reach, lower, "the heaviest bin")

    @property
    def statistical(self) -> bool:
        return self.bins.count > 1 and self._levels is None

    def guess(self, epsilon: float, delta: float) -> float:
        """The noise at which the bound without draws is 30·δ, for the bins of the first row."""
        row = self.bins.table[0] if self.bins.exact else self.bins.table
        circle = Bins(np.maximum(row, np.concatenate([row[:1], row[:0:-1]])))
        low, high = math.log(0.02 * self.reach), math.log(self.safe_sigma(epsilon, delta))
        for _ in range(18):
            middle = 0.5 * (low + high)
            free = sampling_free(BinPair(circle, math.exp(middle)), "remove", epsilon)
            low, high = (middle, high) if free > min(0.5, 30 * delta) else (low, middle)
        return math.exp(high)

    def estimate(self, sigma: float, epsilon: float, careful: bool) -> tuple[float, float]:
        if not self.statistical:
            exact = self._exact(sigma, epsilon, orthogonal.FINE if careful else orthogonal.COARSE)
            return exact[1], 0.0
        pair = BinPair(self.bins, sigma)
        size = self._size(careful)
        remove = importance.pilot(pair, "remove", epsilon, size)
        if sampling_free(pair, "add", epsilon) < 0.1 * remove.estimate:
            return remove.estimate, remove.error / max(remove.estimate, 1e-300)
        add = importance.pilot(pair, "add", epsilon, size)
        worst = max(remove, add, key=lambda each: each.estimate)
        return worst.estimate, worst.error / max(worst.estimate, 1e-300)

    def rough(self, sigma: float, epsilon: float, effort: int) -> tuple[float, float]:
        if not self.statistical:
            return self.estimate(sigma, epsilon, False)
        pair = BinPair(self.bins, sigma)
        size = effort * max(16, min(_RANKING, _RANKING_WIDE // self.bins.count))
        found, error = importance.pilot(pair, "remove", epsilon, size).estimate, _RANKING_ERROR / math.sqrt(effort)
        if sampling_free(pair, "add", epsilon) < 0.1 * found:
            return found, error
        return max(found, importance.pilot(pair, "add", epsilon, size).estimate), error

    def at_least(self, epsilon: float, delta: float) -> float:
        """The larger of two lower bounds: for what all bins share, and for independent bins (Proof 13)."""
        shared = math.sqrt(self._shared.energy) * gaussian_sigma(epsilon, delta)
        return max(shared, math.sqrt(float(self.bins.energies.min())) * _apart(self.bins.count, epsilon, delta))

    def forecast(self, sigma: float, epsilon: float, failure: float) -> float:
        if not self.statistical:
            return 0.0
        scouted = self._scouted(sigma, epsilon, failure)
        return min(scouted.expected_upper, self._proven(sigma, epsilon, scouted))

    def certify(self, sigma: float, epsilon: float, failure: float) -> Certificate:
        slack = (1 + math.exp(epsilon)) * self.bins.slack / (2 * sigma)  # Pinsker, on both neighbours
        if not self.statistical:
            lower, upper = self._exact(sigma, epsilon, orthogonal.FINE)
            gauss = upper == gaussian_delta(sigma / self.reach, epsilon)
            method = "analytic Gaussian mechanism" if gauss else "exact convolution of independent bins"
            return Certificate(lower, upper + slack, method)
        scouted = self._scouted(sigma, epsilon, failure)
        lower, upper = self._at_least(sigma, epsilon), self._proven(sigma, epsilon, scouted)
        found = Certificate(lower, upper, "Gaussian mechanism and bounds on moments, no draws")
        if scouted.expected_upper < upper:
            drawn = importance.certify(BinPair(self.bins, sigma), epsilon, failure, scouted)
            if not (lower <= drawn.upper and drawn.lower <= upper):
                raise AssertionError("draws contradict the bounds without draws: this is a bug in Quell")
            if drawn.upper < upper:
                found = replace(drawn, lower=max(lower, drawn.lower))
        lower = found.lower if self.bins.exact else 0.0  # a dominating pair says nothing from below
        return replace(found, lower=lower, upper=found.upper + slack)

    def profile(self, sigma: float, at: Sequence[float], failure: float) -> Profile:
        if self.bins.count == 1 and not self.bins.slack:
            return GaussianProfile(self.reach / sigma * (1 + 1e-12))
        return super().profile(sigma, at, failure)

    def _size(self, careful: bool) -> int:
        return max(128, min(_CAREFUL if careful else _ROUGH, _WIDE // self.bins.count))

    @cached_property
    def _shared(self) -> Shared:
        return Shared(self.bins)

    def _at_least(self, sigma: float, epsilon: float) -> float:
        """A lower bound on δ without draws: what all bins share, or independent bins (Proof 13)."""
        lightest = [(float(self.bins.energies.min()) / (2 * sigma**2), self.bins.count)]
        apart, _ = orthogonal.orthogonal_delta(lightest, "remove", epsilon, orthogonal.COARSE)
        return max(apart * (1 - 1e-6), self._shared.lower(sigma, epsilon))

    def _proven(self, sigma: float, epsilon: float, scouted: importance.Scouted) -> float:
        """An upper bound on δ without draws."""
        if (sigma, epsilon) not in self._proofs:
            proven = min(gaussian_delta(sigma / self.reach, epsilon), scouted.free)
            if self._shared.lower(sigma, epsilon) > _WORTHWHILE * scouted.estimate:
                proven = min(proven, self._shared.upper(sigma, epsilon, scouted.estimate or proven))
            self._proofs.clear()
            self._proofs[sigma, epsilon] = proven
        return self._proofs[sigma, epsilon]

    @cached_property
    def _proofs(self) -> dict[tuple[float, float], float]:
        return {}

    def _scouted(self, sigma: float, epsilon: float, failure: float) -> importance.Scouted:
        key = sigma, epsilon, failure
        if key not in self._scouts:
            self._scouts.clear()
            self._scouts[key] = importance.scout(BinPair(self.bins, sigma), epsilon, failure, self._size(careful=True))
        return self._scouts[key]

    @cached_property
    def _scouts(self) -> dict[tuple[float, float, float], importance.Scouted]:
        return {}

    @cached_property
    def _levels(self) -> list[tuple[float, int]] | None:
        """(‖m_j‖², number of bins) where no two bins overlap and few sizes occur; sizes rounded up to nine digits."""
        if not self.bins.is_orthogonal:
            return None
        sizes = Counter(round_up(float(energy), 9) for energy in self.bins.energies)
        return sorted(sizes.items()) if len(sizes) <= _FEW else None

    def _exact(self, sigma: float, epsilon: float, grid: int) -> tuple[float, float]:
        """[lower, upper]; at large ε the convolution has few digits left and the Gaussian bound is the smaller."""
        plain = gaussian_delta(sigma / self.reach, epsilon)
        if self.bins.count == 1:
            return plain, plain
        levels = [(energy / (2 * sigma**2), count) for energy, count in self._levels or []]
        both = [orthogonal.orthogonal_delta(levels, way, epsilon, grid) for way in importance.DIRECTIONS]
        return max(low for low, _ in both) * (1 - 1e-6), min(max(high for _, high in both), plain)


@lru_cache(maxsize=64)
def _apart(bins: int, epsilon: float, delta: float) -> float:
    """Noise for `bins` bins of norm 1 that do not overlap, rounded down a little."""
    return 0.995 * BinAccountant(Bins(np.eye(1, bins)[0])).estimate_sigma(epsilon, delta, effort=1)[0]
