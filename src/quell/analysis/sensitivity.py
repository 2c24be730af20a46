"""How far one example can move C·G: the number that the noise of the Gaussian mechanism is multiplied by.

An example that takes part in the steps of a pattern π (at most k steps, any two at least b apart) has

    sens² ≤ max over π of Σ_{i,j∈π} |(CᵀC)_ij|,   with equality if CᵀC ≥ 0.

Every function here gives an interval for that maximum. The lower end comes from a pattern that is certainly allowed,
the upper end from a theorem whose conditions were checked on this very C: mostly the rank argument (Proof 1 in
docs/proofs.md). The *upper* end is always what is used; the sensitivity is called exact where the two meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import fft

from quell._types import Array
from quell.algebra import series
from quell.errors import QuellError, require_same_steps
from quell.participation import Participation
from quell.strategy.structure import BandedStrategy, Strategy, ToeplitzStrategy, TreeStrategy

_MEETS = 1e-9  # relative gap, rounding aside, below which a bracket counts as closed
_ROUNDING = 1e-12  # added to squared upper ends: far above accumulated float64 error, far below anything of interest
_MOST_RANKS = 4096  # participations up to which ranks are bounded one by one
_DENSE = 2048  # steps up to which an n×n Gram matrix is affordable


@dataclass(frozen=True)
class Sensitivity:
    """An interval for the sensitivity: `value` is never below the true one, `lower` never above it."""

    value: float
    lower: float
    method: str
    slack: float = _MEETS

    @property
    def exact(self) -> bool:
        return self.value <= self.lower * (1 + self.slack)

    @property
    def kind(self) -> str:
        return "exact" if self.exact else "upper bound"


def sensitivity(strategy: Strategy, participation: Participation) -> Sensitivity:
    """The sensitivity of a strategy under a participation pattern.

    >>> from quell import strategy, workload
    >>> pattern = Participation(steps=6, separation=2)
    >>> cgd = strategy.build("lambda_cgd", workload.prefix(6), pattern, **{"lambda": 0.5})
    >>> sensitivity(cgd, pattern).kind
    'exact'
    """
    require_same_steps(strategy=strategy.steps, participation=participation.steps)
    with np.errstate(over="ignore", invalid="ignore"):
        found = _bracket(strategy, participation)
    if not (math.isfinite(found.value) and found.value > 0):
        raise QuellError(f"the sensitivity of {strategy!r} overflows: its noise would be infinite")
    # The sums behind a bracket have up to n terms; move the end that counts outwards by more than they can have lost.
    lost = _ROUNDING + 2e-16 * participation.steps
    if isinstance(strategy, ToeplitzStrategy):
        lost += 2 * strategy.inversion_error
    return Sensitivity(found.value * (1 + lost), found.lower, found.method, _MEETS + lost)


def _bracket(strategy: Strategy, participation: Participation) -> Sensitivity:
    if isinstance(strategy, TreeStrategy):
        return _tree(strategy, participation)
    if strategy.bands <= participation.separation:
        return _separated_columns(strategy.column_norms, participation)
    if isinstance(strategy, BandedStrategy):
        return _overlapping_columns(strategy, participation)
    if strategy.column_scale is None:
        return _toeplitz(strategy, participation)
    return _scaled_toeplitz(strategy, strategy.column_scale, participation)


def row_wise_bound(matrix: Array, participation: Participation) -> float:
    """Upper bound for any C: give each step the most it can share with any pattern through it, then the best pattern.

    This is the bound of arXiv:2306.08153, O(n²·k) time and n² memory.
    """
    gram = np.abs(matrix.T @ matrix)
    n, b = participation.steps, participation.separation
    step = np.arange(n)
    others = np.where(np.abs(step[:, None] - step) >= b, gram, 0.0)
    share = np.diag(gram).copy()
    if participation.count > 1:
        rest = Participation(n, b, participation.count - 1)
        share += heaviest_pattern(others, rest)
    return math.sqrt(float(heaviest_pattern(share, participation)) * (1 + _ROUNDING))


def heaviest_pattern(weights: Array, participation: Participation) -> Array:
    """Largest total weight of a pattern, over the last axis of non-negative `weights` (…, n), by dynamic
    programming."""
    n, b, k = participation.steps, participation.separation, participation.count
    if participation.unlimited or k > _MOST_RANKS:  # dropping the limit on the count can only enlarge the maximum
        best = np.zeros((*weights.shape[:-1], n + b))  # best[b + i] covers the steps up to i
        for start in range(0, n, b):
            stop = min(start + b, n)
            taken = weights[..., start:stop] + best[..., start:stop]
            taken[..., 0] = np.maximum(taken[..., 0], best[..., b + start - 1])
            best[..., b + start : b + stop] = np.maximum.accumulate(taken, axis=-1)
        total = best[..., b + n - 1]
        return np.asarray(np.minimum(total, k * weights.max(axis=-1)))
    best = np.zeros_like(weights)
    for _ in range(k):
        taken = weights.copy()
        taken[..., b:] += best[..., : n - b]
        best = np.maximum.accumulate(taken, axis=-1)
    return np.asarray(best[..., -1])


def _separated_columns(norms: Array, participation: Participation) -> Sensitivity:
    """C with at most b bands: the columns of a pattern do not overlap, so their squared norms just add up."""
    upper = math.sqrt(float(heaviest_pattern(np.square(norms), participation)))
    exact = participation.unlimited or participation.count <= _MOST_RANKS
    lower = upper if exact else math.sqrt(float(np.sum(np.square(norms[participation.first_steps()]))))
    return Sensitivity(upper, lower, "column norms: no more bands than the separation")


def _overlapping_columns(strategy: BandedStrategy, participation: Participation) -> Sensitivity:
    """C with more bands than the separation: each participation overlaps with a bounded number of others."""
    squared = np.square(strategy.column_norms)
    lower = math.sqrt(float(squared[participation.first_steps()].sum()))  # some choice of signs does at least this
    overlaps = min((strategy.bands - 1) // participation.separation, participation.count - 1)
    method, upper = (
        "column norms, times how many columns overlap",
        math.sqrt((1 + 2 * overlaps) * float(heaviest_pattern(squared, participation)) * (1 + _ROUNDING)),
    )
    if participation.steps <= _DENSE:
        matrix = strategy.matrix()
        lower = max(lower, float(np.linalg.norm(matrix[:, participation.first_steps()].sum(axis=1))))
        method, upper = "row by row, from the Gram matrix", min(upper, row_wise_bound(matrix, participation))
    return Sensitivity(max(upper, lower), lower, method)


def _toeplitz(strategy: ToeplitzStrategy, participation: Participation) -> Sensitivity:
    c = series.pad(strategy.coefficients, participation.steps)
    lower = _leftmost(c, participation)
    if np.all(c >= 0) and np.all(np.diff(c) <= 0):
        return Sensitivity(lower, lower, "leftmost columns: C is non-negative and non-increasing")
    bounds = {"monotone majorant of |C|": _leftmost(_majorant(c), participation)}
    if bounds["monotone majorant of |C|"] <= lower * (1 + _MEETS):
        return Sensitivity(
            max(*bounds.values(), lower), lower, "leftmost columns: |C| is non-increasing up to rounding"
        )
    if participation.count <= _MOST_RANKS and participation.count * participation.steps <= 2e8:
        bounds["rank by rank, from the correlations of |C|"] = _correlation_bound(np.abs(c), participation)
    if np.any(c < 0) and participation.steps <= _DENSE:
        bounds["row by row, from the Gram matrix"] = row_wise_bound(strategy.matrix(), participation)
    method = min(bounds, key=bounds.__getitem__)
    return Sensitivity(max(bounds[method], lower), lower, method)


def _correlation_bound(c: Array, participation: Participation) -> float:
    """Proof 1 for c ≥ 0 of any shape; the q-th column has at most n − q·b entries."""
    n, b = participation.steps, participation.separation
    size = fft.next_fast_len(2 * n, real=True)
    whole = fft.rfft(c, size)
    squared = 0.0
    for rank, start in enumerate(participation.first_steps()):
        head = fft.rfft(c[: n - start], size)
        correlation = fft.irfft(whole * np.conj(head), size)[:n]  # Σ_t c_t·c_{t+m} over t < n − start, for each lag m
        worst_from = np.maximum.accumulate(correlation[::-1])[::-1]
        squared += float(np.sum(np.square(c[: n - start]))) + 2.0 * float(worst_from[b : rank * b + 1 : b].sum())
    return math.sqrt(squared * (1 + _ROUNDING))


def _scaled_toeplitz(strategy: ToeplitzStrategy, scale: Array, participation: Participation) -> Sensitivity:
    n, b, k = participation.steps, participation.separation, participation.count
    c, scale = series.pad(strategy.coefficients, n), np.abs(scale)
    total = np.zeros(n)
    for start in participation.first_steps():
        total[start:] += c[: n - start] * scale[start]
    lower = math.sqrt(float(np.sum(np.square(total))))
    envelope = _majorant(c)
    bounds = {"monotone majorant of |C|": _leftmost(envelope, participation) * float(scale.max())}
    if k <= _MOST_RANKS and k * n <= 4e9:
        # For a fixed later step the overlap falls with the lag; the earlier step's scale is at most its running
        # maximum.
        earlier = np.maximum.accumulate(scale)
        own = _worst_from(np.square(strategy.column_norms))
        squared = float(own[participation.first_steps()].sum())
        for lag in participation.first_steps()[1:]:
            overlap = np.cumsum(envelope[: n - lag] * envelope[lag:])[::-1]  # for later steps lag … n−1
            worst = _worst_from(overlap * scale[lag:] * earlier[: n - lag])
            squared += 2.0 * float(worst[: (k - lag // b) * b : b].sum())
        bounds["rank by rank, from overlaps of scaled columns"] = math.sqrt(squared * (1 + _ROUNDING))
    if n <= _DENSE and np.any(c < 0):
        bounds["row by row, from the Gram matrix"] = row_wise_bound(strategy.matrix(), participation)
    method = min(bounds, key=bounds.__getitem__)
    return Sensitivity(max(bounds[method], lower), lower, method)


def _tree(strategy: TreeStrategy, participation: Participation) -> Sensitivity:
    n, b, k = participation.steps, participation.separation, participation.count
    chosen = np.zeros(n + 1)
    chosen[1:][participation.first_steps()] = 1.0
    covered = np.cumsum(chosen)
    starts, stops = strategy.intervals()
    lower = math.sqrt(float(np.sum(np.square(covered[stops] - covered[starts]))))
    squared = 0.0
    for level in range(strategy.levels):
        length = 1 << level
        full, left = min(-(-length // b), k), k  # participations in one interval, and still to be placed
        intervals = -(-(n // length) // 2)
        whole = min(left // full, intervals)
        squared += whole * full**2 + (min(left - whole * full, full) ** 2 if whole < intervals else 0)
    return Sensitivity(math.sqrt(squared), lower, "level by level: the fullest intervals of each tree level")


def _leftmost(c: Array, participation: Participation) -> float:
    """‖Σ_j C[:, j·b]‖ over the first `count` participations, in O(n)."""
    n, b, k = participation.steps, participation.separation, participation.count
    blocks = -(-n // b)
    stacked = np.zeros((blocks, b))
    stacked.reshape(-1)[:n] = c
    running = np.cumsum(stacked, axis=0)
    running[k:] -= np.cumsum(stacked, axis=0)[: blocks - k]
    total = running.reshape(-1)[:n]
    return math.sqrt(float(np.sum(np.square(total))))


def _majorant(c: Array) -> Array:
    """The smallest non-increasing sequence that is at least |c|."""
    return _worst_from(np.abs(c))


def _worst_from(values: Array) -> Array:
    return np.asarray(np.maximum.accumulate(values[::-1])[::-1])
