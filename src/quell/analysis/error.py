"""The error that noise causes in the model's weights after each step: variance, RMSE and MaxSE.

With B = A·C⁻¹ and noise of standard deviation σ in every coordinate, query t (the iterate after step t) has variance
σ²·‖B_t‖². `query_variances` returns ‖B_t‖² for every t by the cheapest exact route:

* A and C both Toeplitz: B is the Toeplitz matrix of w = a/c, so ‖B_t‖² is a running sum of w². O(n log n) or O(n·p).
* A⁻¹ banded (every SGD workload) and C or C⁻¹ banded, scaled or not: a covariance recursion inside the band,
  O(n·p²) or O(n·p) (`quell.algebra.banded`).
* anything else: dense algebra, for small n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from quell._types import Array
from quell.algebra import series
from quell.errors import QuellError, require_same_steps
from quell.strategy.structure import BandedStrategy, Strategy, ToeplitzStrategy, TreeStrategy
from quell.workload import Workload

_MOST_BANDS = 512  # of C: beyond, the recursion inside the band is no longer cheaper than dense algebra
_MOST_NOISING_BANDS = 4096  # of C⁻¹
_DENSE = 4096  # steps up to which an n×n matrix product takes seconds


@dataclass(frozen=True)
class Error:
    """Root-mean-square and largest standard deviation over the queries, per unit of σ."""

    rmse: float
    maxse: float


def error(strategy: Strategy, workload: Workload) -> Error:
    """RMSE = ‖B‖_F/√n and MaxSE = the largest row norm of B, per unit of noise.

    >>> from quell import strategy, workload
    >>> from quell.participation import Participation
    >>> sums = workload.prefix(3)
    >>> error(strategy.build("identity", sums, Participation.single(3)), sums)
    Error(rmse=1.4142135623730951, maxse=1.7320508075688772)
    """
    variances = query_variances(strategy, workload)
    return Error(math.sqrt(float(np.mean(variances))), math.sqrt(float(np.max(variances))))


def query_variances(strategy: Strategy, workload: Workload) -> Array:
    """(n,) squared row norms of B = A·C⁻¹."""
    require_same_steps(strategy=strategy.steps, workload=workload.steps)
    with np.errstate(over="ignore", invalid="ignore"):
        variances = _exact_variances(strategy, workload)
    if not np.all(np.isfinite(variances)) or not np.all(variances > 0):
        raise QuellError(f"{strategy!r} has an error that overflows: its noise grows without bound")
    return variances


def noise_variances(strategy: Strategy) -> Array:
    """(n,) squared row norms of C⁻¹: the variance of each step's noise, in every element, per unit of σ²."""
    newest = Workload(strategy.steps, decay=0.0)  # which keeps only the newest gradient
    if isinstance(strategy, ToeplitzStrategy) and strategy.column_scale is not None:
        plain = replace(strategy, column_scale=None)
        return query_variances(plain, newest) / np.square(strategy.column_scale)
    return query_variances(strategy, newest)


def _exact_variances(strategy: Strategy, workload: Workload) -> Array:
    if isinstance(strategy, TreeStrategy):
        if workload.given is None and workload.rates is None and workload.momentum == 0 and workload.ema == 0:
            return _tree_variances(strategy, workload.decay)
        return _dense_variances(strategy, workload)
    if isinstance(strategy, BandedStrategy):
        return _banded_variances(strategy, workload)
    if workload.is_toeplitz and strategy.column_scale is None:
        return np.cumsum(np.square(_decoder_series(strategy, workload)))
    if strategy.bands < strategy.noising_bands:
        return _banded_variances(strategy, workload)
    bands = workload.inverse_bands
    if bands is None or workload.jumps or strategy.noising_bands > _MOST_NOISING_BANDS:
        return _dense_variances(strategy, workload)
    from quell.algebra import banded  # compiled code, loaded when first needed

    # A⁻¹θ = diag(1/scale)·T(noising)·z: scale the rows of A⁻¹ instead of the noise.
    rows = bands if strategy.column_scale is None else bands * strategy.column_scale[:, None]
    return banded.query_variances(rows, strategy.noising[: workload.steps])


def _tree_variances(strategy: TreeStrategy, decay: float) -> Array:
    """In O(n): node u, of length L, enters at step u with weight 1 that decays, and is taken out again at step u + L.

    So its weight is α^L there without, and α^L − 1 with the correction, and both decay: the sum of squares follows a
    first-order recursion. Without decay it counts the one bits of the step number.
    """
    from quell.algebra.recursion import recursion

    starts, stops = strategy.intervals()
    length = stops - starts
    change = np.ones(strategy.steps)
    out = stops + length - 1  # of the array: steps count from 1
    kept = out < strategy.steps
    np.add.at(change, out[kept], 1.0 - 2.0 * decay ** length[kept].astype(np.float64))
    return recursion(np.array([1.0, -decay * decay]), change)


def _banded_variances(strategy: ToeplitzStrategy | BandedStrategy, workload: Workload) -> Array:
    """C banded: C·A⁻¹ is banded too, and its inverse's row norms follow inside the band."""
    bands = workload.inverse_bands
    if bands is None or workload.jumps or strategy.bands > max(_MOST_BANDS, workload.steps // 8):
        return _dense_variances(strategy, workload)
    from quell.algebra import banded

    return banded.query_variances(banded.multiply(strategy.row_bands, bands), np.ones(1))


def _decoder_series(strategy: ToeplitzStrategy, workload: Workload) -> Array:
    """w = a/c by the shorter of the two ways."""
    n = workload.steps
    if strategy.noising_bands <= strategy.bands:
        if workload.inverse_series is not None:
            return series.divide(strategy.noising, workload.inverse_series, n)
        return series.multiply(workload.coefficients, strategy.noising, n)
    return series.divide(workload.coefficients, strategy.coefficients, n)


def _dense_variances(strategy: Strategy, workload: Workload) -> Array:
    if workload.steps > _DENSE:
        raise QuellError(
            f"{strategy!r} has no fast error formula for this workload: use at most {_DENSE:,} steps, fewer bands, "
            "no column normalisation, or a learning rate that does not jump"
        )
    return np.asarray(np.sum(np.square(workload.apply(strategy.noising_matrix())), axis=1))
