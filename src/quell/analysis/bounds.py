"""Lower bounds on RMSE/σ_{ε,δ} over *all* factorisations A = B·C, without amplification.

The participation bound ‖Aπ‖/√n (Theorem 3 of arXiv:2505.12128, Theorem 4 of arXiv:2601.22334) and the nuclear-norm
bound √(q/n)·‖A‖_* (Lemma 6 of arXiv:2505.12128, sharpened by a factor 2) are Proof 2 in docs/proofs.md. Where ‖A‖_* is
not known exactly it is bounded from below, so the result stays a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy import linalg

from quell._types import Array
from quell.errors import require_same_steps
from quell.participation import Participation
from quell.workload import Workload

_SMALL = 1024  # steps up to which singular values are computed outright


def lower_bound(workload: Workload, participation: Participation) -> float:
    """No factorisation of the workload has RMSE/σ_{ε,δ} below this: the best of the known bounds.

    >>> from quell.workload import prefix
    >>> lower_bound(prefix(4), Participation(4, separation=1))
    2.7386127875258306
    """
    require_same_steps(workload=workload.steps, participation=participation.steps)
    return max(participation_bound(workload, participation), nuclear_bound(workload, participation))


def participation_bound(workload: Workload, participation: Participation) -> float:
    """‖Aπ‖/√n for the leftmost pattern, the heaviest one when A is non-negative and non-increasing down its
    columns."""
    pattern = np.zeros(workload.steps)
    pattern[participation.first_steps()] = 1.0
    moved = workload.apply(pattern)
    return math.sqrt(float(np.mean(np.square(moved))))


def nuclear_bound(workload: Workload, participation: Participation) -> float:
    """√(q/n)·‖A‖_* with q the share of patterns that cover a step."""
    n, b, k = participation.steps, participation.separation, participation.count
    coverage = min(1.0, k / -(-n // b)) / b
    return math.sqrt(coverage / n) * nuclear_norm(workload)


def nuclear_norm(workload: Workload) -> float:
    """‖A‖_*, or a lower bound on it when n is large and A is not the prefix workload.

    >>> from quell.workload import prefix
    >>> round(nuclear_norm(prefix(2)), 6)  # singular values: the golden ratio and its reciprocal
    2.236068
    """
    n = workload.steps
    if workload.is_prefix:
        return float(np.sum(0.5 / np.sin((2 * np.arange(n) + 1) * (math.pi / (4 * n + 2)))))
    if n <= _SMALL:
        return float(np.sum(linalg.svdvals(workload.matrix())))
    if workload.is_toeplitz:
        return _toeplitz_nuclear_norm(workload)
    return _block_nuclear_norm(workload)


def _toeplitz_nuclear_norm(workload: Workload) -> float:
    """Lower bound in O(n log n).

    For SGD, A⁻¹ = T(g) with m + 1 coefficients (m = 2, or 3 for averaged weights), and T(g)T(g)ᵀ = T(|g|²) − HHᵀ (H a
    Hankel corner), so its eigenvalues are at most those of T(|g|²), which is a principal submatrix of a circulant of
    size n + m: by interlacing they are at most the n largest values of |g|² at the roots of unity. Singular values of A
    are the inverse roots. Those at the top, where interlacing drops m values, are replaced by Ritz values, which are
    never above the true ones.
    """
    n = workload.steps
    ritz = _ritz_values(workload)
    if workload.inverse_series is None:
        # |a_0| is the geometric mean of the singular values, which is at most their arithmetic mean.
        return max(n * abs(float(workload.coefficients[0])), float(ritz.sum()))
    more = len(workload.inverse_series) - 1
    symbol = np.sort(np.abs(np.fft.fft(workload.inverse_series, n + more)))
    singular = 1.0 / symbol[more:]
    singular[: len(ritz)] = np.maximum(singular[: len(ritz)], ritz)
    return float(singular.sum())


def _ritz_values(workload: Workload) -> Array:
    """Singular values of A on the span of the prefix workload's first right singular vectors, largest first."""
    n = workload.steps
    count = min(48, max(12, 4_000_000 // n))  # more of them gain a percent and cost n·count memory
    frequency = (2 * np.arange(count) + 1) * (math.pi / (2 * n + 1))
    orthonormal = np.cos(np.outer(np.arange(n) + 0.5, frequency)) * (2 / math.sqrt(2 * n + 1))
    return np.asarray(linalg.svdvals(workload.apply(orthonormal)))


def _block_nuclear_norm(workload: Workload) -> float:
    """Pinching: the nuclear norm is at least the sum over diagonal blocks, each of them a shorter run of the
    same kind."""
    blocks = 0.0
    size = 256
    for start in range(0, workload.steps, size):
        rates = None if workload.rates is None else workload.rates[start : start + size]
        length = min(size, workload.steps - start)
        block = replace(workload, steps=length, rates=rates)
        blocks += float(np.sum(linalg.svdvals(block.matrix())))
    return blocks
