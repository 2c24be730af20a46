"""Buffered linear Toeplitz (BLT) strategies: sums of exponentials, their inverse, and what they cost.

A BLT is the lower-triangular Toeplitz matrix C with the first column c_0 = 1, c_t = Σ_i α_i λ_i^{t−1}. Its inverse
has the same form, so correlated noise needs d model-sized buffers however long the run (McMahan & Pillutla,
arXiv:2504.21413). As a function of z = 1/x the series of C is

    C(z) = 1 + Σ α_i/(z − λ_i) = Π(z − λ̂_i)/Π(z − λ_i),      1/C(z) = 1 + Σ α̂_i/(z − λ̂_i).

Two parameterisations: scales and decays (α, λ), whose inverse needs the roots λ̂ (`from_scales`, Theorem 1), or both
sets of decays (λ, λ̂), which give the scales as products (`from_gaps`, Theorem 2; its Eq. (6) has a misprint, the
last product runs over λ̂_i − λ̂_j). For α > 0 they interlace: λ_1 > λ̂_1 > λ_2 > λ̂_2 > … > λ̂_d.

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
from quell.algebra.exponential_sums import participation_sum, response_sum, separated, summation_rule
from quell.algebra.recursion import recursion
from quell.errors import QuellError, require_count


@dataclass(frozen=True)
class BLT:
    """A BLT C and its inverse, each with d buffers; decays from slow to fast. Build one with `from_scales`,
    `from_gaps` or `blt_optimise.optimise_blt`. No buffers at all is the identity.

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


def from_scales(scales: Sequence[float], decays: Sequence[float]) -> BLT:
    """The BLT with these scales α > 0 and distinct decays λ in (0, 1), and its inverse (Theorem 1).

    One λ̂ is 0 when Σ α/λ = 1 and negative when Σ α/λ > 1.

    >>> blt = from_scales([0.4, 0.2], [0.8, 0.4])  # the paper's example
    >>> [round(scale * 15, 12) for scale in blt.noising_scales]
    [-1.0, -8.0]
    >>> [abs(round(decay, 12)) for decay in blt.noising_decays]
    [0.6, 0.0]
    """
    order = sorted(zip((1.0 - decay for decay in decays), scales, strict=True))
    gaps, alphas = np.array([gap for gap, _ in order]), np.array([scale for _, scale in order])
    if not (np.all(alphas > 0) and np.all(gaps > 0) and np.all(gaps < 1) and np.all(np.diff(gaps) > 0)):
        raise QuellError(
            f"scales={list(scales)}, decays={list(decays)} do not make a BLT: scales must be positive, "
            "decays distinct and strictly between 0 and 1"
        )
    noising_gaps, noising_scales = [], []
    for i in range(len(gaps)):
        origin, offset = _secular_root(alphas, gaps, i)
        noising_gaps.append(float(gaps[origin] + offset))
        # α̂ = 1/C'(λ̂). Every term has the same sign, and gaps[origin] − gaps + offset keeps all digits of λ̂ − λ.
        noising_scales.append(float(-1.0 / np.sum(alphas / (gaps[origin] - gaps + offset) ** 2)))
    return BLT(_floats(alphas), _floats(gaps), tuple(noising_scales), tuple(noising_gaps))


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
    return BLT(_floats(-residues(ours, theirs)), _floats(ours), _floats(-residues(theirs, ours)), _floats(theirs))


def coefficients(blt: BLT, n: int) -> Array:
    """(n,) first column of C.

    >>> coefficients(from_scales([0.4, 0.2], [0.8, 0.4]), 3).round(12).tolist()
    [1.0, 0.6, 0.4]
    """
    return _column(blt.scales, blt.gaps, require_count("n", n))


def noising_coefficients(blt: BLT, n: int) -> Array:
    """(n,) first column of C⁻¹.

    >>> noising_coefficients(from_scales([0.4, 0.2], [0.8, 0.4]), 3).round(12).tolist()
    [1.0, -0.6, -0.04]
    """
    return _column(blt.noising_scales, blt.noising_gaps, require_count("n", n))


def is_monotone(blt: BLT) -> bool:
    """True if c is certainly non-negative and non-increasing: α ≥ 0, 0 ≤ λ ≤ 1 and c_1 = Σ α ≤ 1 = c_0.

    Interlaced decays in (0, 1) imply it: α > 0, and Σ α < Σ α/λ = 1 − Π λ̂/λ < 1.
    """
    inside = all(0.0 <= gap <= 1.0 for gap in blt.gaps)
    return inside and all(scale >= 0.0 for scale in blt.scales) and math.fsum(blt.scales) <= 1.0


def squared_sensitivity(blt: BLT, n: int, participations: int = 1, separation: int | None = None) -> float:
    """Exact sens² over n steps of an example that takes part at most `participations` times, `separation` apart.

    With one participation it is Σ c_t². With more, the first `participations` columns that are `separation` apart
    are the worst if c is non-negative and non-increasing; other BLTs are refused.

    >>> round(squared_sensitivity(from_scales([0.4, 0.2], [0.8, 0.4]), 3), 12)
    1.52
    """
    n, k, b = require_participation(n, participations, separation)
    if k > 1 and not is_monotone(blt):
        raise QuellError(
            f"the BLT with scales {blt.scales} is not certainly non-increasing, so its sensitivity for {k} "
            "participations has no closed form: bound it from its coefficients"
        )
    return participation_sum(_logs(blt.gaps), np.array(blt.scales), n, k, b)[0]


def max_squared_error(blt: BLT, n: int, poles: Sequence[float] = (1.0,)) -> float:
    """Largest row of ‖A C⁻¹‖², per unit noise variance; it is the last one: Σ_{t<n} w_t².

    The workload A has the series 1/Π(1 − ρ x) over at most two `poles` ρ in [0, 1]: (1,) for prefix sums,
    (weight decay factor, momentum) for SGD; zeros are dropped.

    >>> round(max_squared_error(from_scales([0.4, 0.2], [0.8, 0.4]), 3), 12)  # w = 1, 0.4, 0.36
    1.2896
    """
    return _squared_error(blt, require_count("n", n), poles, mean=False)


def mean_squared_error(blt: BLT, n: int, poles: Sequence[float] = (1.0,)) -> float:
    """Mean row of ‖A C⁻¹‖², per unit noise variance: Σ_{t<n} (n−t) w_t²/n. See `max_squared_error`.

    >>> round(3 * mean_squared_error(from_scales([0.4, 0.2], [0.8, 0.4]), 3), 12)  # 3·1 + 2·0.16 + 0.1296
    3.4496
    """
    return _squared_error(blt, require_count("n", n), poles, mean=True)


# ---- checks shared with blt_loss ----


def require_participation(n: int, participations: int, separation: int | None) -> tuple[int, int, int]:
    """(n, k, b), k cut to the ⌈n/b⌉ participations that fit."""
    n, k = require_count("n", n), require_count("participations", participations)
    b = n if separation is None else require_count("separation", separation)
    return n, min(k, -(-n // b)), b


def require_poles(poles: Sequence[float]) -> tuple[float, ...]:
    """The non-zero poles, largest first."""
    if not all(0.0 <= pole <= 1.0 for pole in poles) or sum(pole > 0.0 for pole in poles) > 2:
        raise QuellError(f"poles={tuple(poles)} must be at most two numbers between 0 and 1, such as (1.0, 0.9)")
    return tuple(sorted((float(pole) for pole in poles if pole > 0.0), reverse=True))


# ---- what they are made of ----


def residues(poles: Array, zeros: Array) -> Array:
    """Π_j(p_i − z_j)/Π_{j≠i}(p_i − p_j), the weight of each pole in the partial fractions of Π(p−z)/Π(p−p_i)."""
    between = poles[:, None] - poles
    np.fill_diagonal(between, 1.0)
    result: Array = np.prod(poles[:, None] - zeros, axis=1) / np.prod(between, axis=1)
    return result


def _squared_error(blt: BLT, n: int, poles: Sequence[float], mean: bool) -> float:
    poles = require_poles(poles)
    # The identity is the BLT whose one buffer forgets at once: λ = λ̂ = 0.
    gaps, noising_gaps = np.array(blt.gaps or (1.0,)), np.array(blt.noising_gaps or (1.0,))
    if poles and separated(poles, n) and _interlaced(gaps, noising_gaps):
        rule = summation_rule(n, by_parity=True)
        emphasis = (n - rule.times) / n if mean else np.ones_like(rule.times)
        weights = residues(noising_gaps, gaps[1:])
        excess = (gaps[0] - (1.0 - poles[0])) / poles[0]
        return response_sum(1.0 - noising_gaps, _logs(noising_gaps), weights, excess, poles, rule, emphasis)[0]
    series = noising_coefficients(blt, n)  # no particular order, or a double pole: sum all n terms
    for pole in poles:
        series = recursion(np.array([1.0, -pole]), series)
    return float(((n - np.arange(n)) / n) @ series**2 if mean else series @ series)


def _interlaced(gaps: Array, noising_gaps: Array) -> bool:
    """1 ≥ λ_1 ≥ λ̂_1 > λ_2 > … ≥ λ̂_d > −1, all but the last non-negative."""
    order = np.ravel(np.column_stack([gaps, noising_gaps]))
    return bool(order[0] >= 0.0 and np.all(np.diff(order) >= 0.0) and order[-2] <= 1.0 and order[-1] < 2.0) and bool(
        np.all(np.diff(noising_gaps) > 0.0)
    )


def _secular_root(alphas: Array, gaps: Array, i: int) -> tuple[int, float]:
    """Root i of Σ_j α_j/(ζ − gap_j) = 1 as (nearest gap's index, offset from it), the offset to full precision.

    One root lies in each interval between gaps, the last within Σ α above the largest.
    """

    def pole_free(offset: float, origin: int) -> float:
        # The equation times (ζ − gap_origin): smooth, and almost linear, where the root is close to that gap.
        away = np.delete(gaps[origin] - gaps, origin) + offset
        return float(offset * (1.0 - np.sum(np.delete(alphas, origin) / away)) - alphas[origin])

    if i + 1 == len(gaps):
        origin, low, high = i, 0.0, float(alphas.sum()) * (1.0 + 1e-14)
    else:
        half = 0.5 * float(gaps[i + 1] - gaps[i])
        origin, low, high = (i, 0.0, half) if pole_free(half, i) >= 0.0 else (i + 1, -half, 0.0)
    from scipy.optimize import brentq  # here, because its import takes a tenth of a second

    offset = brentq(pole_free, low, high, args=(origin,), xtol=1e-300, rtol=1e-15, maxiter=1000)
    return origin, float(offset)


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


def _logs(gaps: Sequence[float] | Array) -> Array:
    """log|1 − gap|; a decay of exactly 0 becomes 1e-300, which no sum can tell from 0."""
    values = np.asarray(gaps, dtype=np.float64)
    logs: Array = np.where(values < 1.0, np.log1p(-np.minimum(values, 0.5)), 0.0)
    far = values > 0.5
    logs[far] = np.log(np.maximum(np.abs(1.0 - values[far]), 1e-300))
    return logs


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
