"""What float32 does to a recurrence: how much of each step's fresh draw is left, and whether the noise is as large.

Noise is made in float32, where a sum keeps 24 bits. Row t is the fresh draw, times |C⁻¹_tt|, plus a part that the
earlier draws decide. If that part, or any partial sum on the way, is 2²⁴ times larger than the fresh draw, the draw is
rounded away, and the row hides nothing that the rows before it did not. `measure` bounds every partial sum of a row by
its standard deviation and `require_fresh_draws` refuses a strategy where one exceeds the fresh draw by more than
`MOST_GROWTH`. At that limit the draw still has 12 of its 24 bits; strategies that Quell finds by itself have 17 or more
(docs/noise.md has the numbers and the argument).

The coefficients are rounded to float32 as well, so the noise that runs belongs to another strategy nearby.
`shortfall` bounds how much smaller it can be than the promised noise, in any direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quell._types import Array
from quell.algebra import series
from quell.errors import QuellError
from quell.strategy.recurrence import Exponentials, Fenwick, Recurrence, Regenerate, Ring

MOST_GROWTH = 2.0**12
_FEW_BANDS, _HOPELESS = 512, 2.0**24  # up to so many bands, and so large a bound, partial sums are added up one by one
_DENSE = 4096  # up to so many steps a C with many diagonals is inverted as a dense matrix


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Standard deviations before row scales: of the fresh draw, and a bound for all sums in a row. (1,) or (n,)."""

    fresh: Array
    sums: Array

    @property
    def growth(self) -> float:
        """The largest sum in units of the fresh draw, at the worst step; NaN or infinite where it overflows."""
        return float(np.max(self.sums / self.fresh))


def measure(recurrence: Recurrence, steps: int) -> Magnitudes:
    """The magnitudes of the recurrence as it runs, with float32 coefficients.

    >>> measure(Regenerate(np.array([1.0, -0.75])), 100).growth
    1.25
    >>> bool(measure(Ring(np.array([1.0, 2.0])), 40).growth > 2**40)  # C⁻¹ grows like 2^t
    True
    """
    with np.errstate(all="ignore"):  # what overflows is refused, not warned about
        match recurrence:
            case Regenerate():
                noising = _single(recurrence.noising[:steps])
                return Magnitudes(np.abs(noising[:1]), np.array([np.linalg.norm(noising)]))
            case Ring():
                bands = np.asarray(recurrence.bands, np.float64)
                return _toeplitz_ring(bands[:steps], steps) if bands.ndim == 1 else _banded_ring(bands)
            case Exponentials():
                buffers = np.array([_geometric_norm(decay, steps) for decay in _single(recurrence.decays)])
                # s is the largest number kept; the row takes scales·s.
                weights = np.abs(_single(recurrence.scales))
                largest = max(1.0 + float(weights @ buffers), float(np.max(buffers, initial=0.0)))
                return Magnitudes(np.ones(1), np.full(1, largest))
            case Fenwick():
                # A node is a sum of at most one draw per bit, and a row the difference of two.
                return Magnitudes(np.ones(1), np.full(1, 2.0 * recurrence.buffers**0.5))


def require_fresh_draws(name: str, recurrence: Recurrence, steps: int) -> Magnitudes:
    """The magnitudes, refused where rounding could take too much of a fresh draw."""
    found = measure(recurrence, steps)
    if not found.growth <= MOST_GROWTH:  # NaN is refused too
        raise QuellError(
            f"{name}: the noise of earlier steps grows to {found.growth:.2g} times a step's fresh noise, which float32 "
            f"would round away: at most {MOST_GROWTH:,.0f} is allowed, so choose a strategy whose C^-1 does not grow"
        )
    return found


def shortfall(recurrence: Recurrence, steps: int) -> float:
    """ρ such that the noise with float32 coefficients, scaled by 1/(1 − ρ), is at least the promised one.

    The release with rounded coefficients is C·G + (I + R)·Z. If ‖R‖ ≤ ρ, the covariance of (I + R)Z/(1 − ρ) is at least
    the identity: that is the promised mechanism with independent noise on top, whatever C, G and the sampling are. R is
    C·(Θ̃ − Θ) where Θ = C⁻¹ is rounded to Θ̃, and −(C̃ − C)·C̃⁻¹ where C is. A Toeplitz matrix has at most the norm of
    the sum of its series' absolute values.

    >>> shortfall(Regenerate(np.array([1.0, -0.75])), 100)  # both are float32 numbers
    0.0
    """
    with np.errstate(all="ignore"):
        match recurrence:
            case Regenerate():
                noising = np.asarray(recurrence.noising[:steps], np.float64)
                return _quotient_sum(_single(noising) - noising, noising, steps)
            case Ring():
                bands = np.atleast_2d(np.asarray(recurrence.bands, np.float64))
                running = _running(bands)
                if np.ndim(recurrence.bands) == 1:
                    return _quotient_sum((running - bands)[0, :steps], running[0, :steps], steps)
                return float(np.linalg.norm(_weighted(np.abs(running - bands), _row_norms(running))))
            case Exponentials():
                promised = _exponential_series(recurrence.scales, recurrence.decays, steps)
                made = _exponential_series(_single(recurrence.scales), _single(recurrence.decays), steps)
                return _quotient_sum(made - promised, promised, steps)
            case Fenwick():
                return 0.0


def _toeplitz_ring(bands: Array, steps: int) -> Magnitudes:
    taps = _single(bands[1:] / bands[0])
    return Magnitudes(np.abs(1.0 / bands[:1]), np.full(1, _ring_growth(taps.tobytes(), steps) / abs(bands[0])))


@lru_cache(maxsize=8)
def _ring_growth(taps: bytes, steps: int) -> float:
    """The largest partial sum of z_t − Σ_d taps_d·y_{t−d}: a quick bound, or where that is too large the exact value.

    With h the series of C⁻¹, ‖taps‖₁·‖h‖₂ and ‖taps‖₂·‖h‖₁ are bounds for Σ_d. Rows only grow, so the last one counts.
    """
    given = np.frombuffer(taps)
    if not given.size:
        return 1.0
    h = series.reciprocal(np.concatenate([[1.0], given]), steps)
    size, length = np.abs(given), np.linalg.norm(h)
    bound = 1.0 + float(min(size.sum() * length, np.linalg.norm(size) * np.abs(h).sum()))
    if not MOST_GROWTH < bound < _HOPELESS or len(given) > _FEW_BANDS:
        return bound
    partial, largest = np.zeros(steps), 1.0
    partial[0] = 1.0
    for lag, tap in enumerate(given[: steps - 1], start=1):
        partial[lag:] -= tap * h[: steps - lag]
        largest = max(largest, float(np.linalg.norm(partial)))
    return largest


def _banded_ring(bands: Array) -> Magnitudes:
    running, fresh = _running(bands), np.abs(1.0 / bands[:, 0])
    taps = np.abs(running)
    taps[:, 0] = 0.0
    return Magnitudes(fresh, fresh * (1.0 + _weighted(taps, _row_norms(running))))


def _running(bands: Array) -> Array:
    """The bands of C that the noise is made with: their quotients by the diagonal are float32 numbers."""
    return np.asarray(_single(bands / bands[:, :1]) * bands[:, :1])


def _row_norms(bands: Array) -> Array:
    """(n,) norms of the rows of C⁻¹."""
    from quell.algebra import banded  # compiled code, loaded when first needed

    n, width = bands.shape
    if n <= _DENSE and width > max(64, n // 8):
        from scipy.linalg import solve_triangular

        inverse = solve_triangular(banded.to_dense(bands), np.eye(n), lower=True, check_finite=False)
        return np.asarray(np.linalg.norm(inverse, axis=1))
    return np.sqrt(banded.query_variances(bands, np.ones(1)))


def _weighted(weights: Array, norms: Array) -> Array:
    """(n,) Σ_d weights[t, d]·norms[t−d]: a bound for the norms of sums of rows."""
    out = np.zeros(len(weights))
    for d in range(weights.shape[1]):
        out[d:] += weights[d:, d] * norms[: len(norms) - d]
    return out


def _quotient_sum(numerator: Array, denominator: Array, steps: int) -> float:
    """Σ|numerator/denominator| over the first `steps` coefficients of the quotient."""
    if not np.any(numerator):
        return 0.0
    return float(np.sum(np.abs(series.multiply(numerator, series.reciprocal(denominator, steps), steps))))


def _exponential_series(scales: Array, decays: Array, steps: int) -> Array:
    tail = np.zeros(max(steps - 1, 0))
    for scale, decay in zip(scales, decays, strict=True):
        tail += scale * decay ** np.arange(steps - 1.0)
    return np.concatenate([[1.0], tail])


def _geometric_norm(decay: float, steps: int) -> float:
    """(1 + decay² + … + decay^{2(n−1)})^{1/2}."""
    square = decay * decay
    return float(np.sqrt(steps if square == 1.0 else -np.expm1(steps * np.log(square)) / (1.0 - square)))


def _single(values: Array) -> Array:
    """Rounded to float32."""
    return np.asarray(values, np.float32).astype(np.float64)
