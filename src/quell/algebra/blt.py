"""Buffered linear Toeplitz (BLT) strategies: sums of exponentials, their inverse, and what they cost.

A BLT is the lower-triangular Toeplitz matrix C with the first column c_0 = 1, c_t = Σ_i α_i λ_i^{t−1}. Its inverse
has the same form, so correlated noise needs d model-sized buffers however long the run (McMahan & Pillutla,
arXiv:2504.21413). As a function of z = 1/x the series of C is

    C(z) = 1 + Σ α_i/(z − λ_i) = Π(z − λ̂_i)/Π(z − λ_i),      1/C(z) = 1 + Σ α̂_i/(z − λ̂_i).

The two sets of decays (λ, λ̂) give the scales as products (`from_gaps`, Theorem 2; its Eq. (6) has a misprint, the last
product runs over λ̂_i − λ̂_j). For α > 0 they interlace: λ_1 > λ̂_1 > λ_2 > λ̂_2 > … > λ̂_d.

Two devices keep full accuracy from n = 1 to 10⁷ steps, where the slowest buffer has 1 − λ ≈ 1e-8:

* gaps 1 − λ are stored, not λ, and only ever enter through differences of gaps;
* without its slowest zero, 1/C is Π_{i>1}(1−λ_i x)/Π(1−λ̂_i x) = Σ u_i/(1−λ̂_i x) with *positive* weights u, because
  zeros and poles interlace. That zero joins a pole of the workload, (1−λ_1 x)/(1−ρ_1 x) = (1−e) + e/(1−ρ_1 x) with
  e = 1 − λ_1/ρ_1, and products 1/((1−ρx)(1−μx)) have the coefficients h_t = Σ_s ρ^{t−s} μ^s, positive as well. So
  nothing cancels, however close the poles.

What is left are sums of smooth positive functions over the steps: `exponential_sums.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quell._types import Array
from quell.errors import QuellError, require_count


@dataclass(frozen=True)
class BLT:
    """A BLT C and its inverse, each with d buffers; decays from slow to fast. No buffers at all is the identity.

    Build one with `from_gaps` or `blt_optimise.optimise_blt`.

    Attributes:
        scales: α, so that c_t = Σ α_i λ_i^{t−1} for t ≥ 1.
        gaps: 1 − λ.
        noising_scales: α̂, the scales of C⁻¹.
        noising_gaps: 1 − λ̂; above 1 when λ̂ < 0.
    """

    scales: tuple[float, ...]
    gaps: tuple[float, ...]
    noising_scales: tuple[float, ...]
    noising_gaps: tuple[float, ...]

    @property
    def buffers(self) -> int:
        return len(self.gaps)

    @property
    def decays(self) -> tuple[float, ...]:
        """λ."""
        return tuple(1.0 - gap for gap in self.gaps)

    @property
    def noising_decays(self) -> tuple[float, ...]:
        """λ̂."""
        return tuple(1.0 - gap for gap in self.noising_gaps)


def from_gaps(gaps: Sequence[float], noising_gaps: Sequence[float]) -> BLT:
    """The BLT whose decays are 1 − gaps and whose inverse's are 1 − noising_gaps (Theorem 2).

    >>> blt = from_gaps([0.2, 0.6], [0.4, 1.0])
    >>> [round(scale, 12) for scale in blt.scales]
    [0.4, 0.2]
    """
    if len(gaps) != len(noising_gaps):
        raise QuellError(f"{len(gaps)} gaps but {len(noising_gaps)} noising gaps: give as many of one as of the other")
    ours, theirs = np.sort(np.asarray(gaps, np.float64)), np.sort(np.asarray(noising_gaps, np.float64))
    if not np.all(np.diff(np.sort(np.concatenate([ours, theirs]))) > 0):
        raise QuellError(f"gaps={list(gaps)}, noising_gaps={list(noising_gaps)} must all differ: merge equal ones")
    return BLT(_floats(-_residues(ours, theirs)), _floats(ours), _floats(-_residues(theirs, ours)), _floats(theirs))


def coefficients(blt: BLT, n: int) -> Array:
    """(n,) first column of C.

    >>> coefficients(from_gaps([0.2, 0.6], [0.4, 1.0]), 3).round(12).tolist()
    [1.0, 0.6, 0.4]
    """
    return _column(blt.scales, blt.gaps, require_count("n", n))


def noising_coefficients(blt: BLT, n: int) -> Array:
    """(n,) first column of C⁻¹.

    >>> noising_coefficients(from_gaps([0.2, 0.6], [0.4, 1.0]), 3).round(12).tolist()
    [1.0, -0.6, -0.04]
    """
    return _column(blt.noising_scales, blt.noising_gaps, require_count("n", n))


def _residues(poles: Array, zeros: Array) -> Array:
    """Π_j(p_i − z_j)/Π_{j≠i}(p_i − p_j), the weight of each pole in the partial fractions of Π(p−z)/Π(p−p_i)."""
    between = poles[:, None] - poles
    np.fill_diagonal(between, 1.0)
    result: Array = np.prod(poles[:, None] - zeros, axis=1) / np.prod(between, axis=1)
    return result


def _column(scales: Sequence[float], gaps: Sequence[float], n: int) -> Array:
    column = np.zeros(n)
    column[0] = 1.0
    times = np.arange(n - 1, dtype=np.float64)
    for scale, gap in zip(scales, gaps, strict=True):
        # 0^0 = 1: a decay of zero contributes to c_1 only.
        log = math.log1p(-gap) if gap < 1.0 else math.log(gap - 1.0) if gap > 1.0 else -math.inf
        powers = np.exp(times * log) if math.isfinite(log) else (times == 0.0).astype(np.float64)
        if gap > 1.0:
            powers[1::2] *= -1.0
        column[1:] += scale * powers
    return column


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
