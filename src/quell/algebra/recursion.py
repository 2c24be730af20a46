"""Recursive filters: y with a_0·y_t + a_1·y_{t−1} + … = x_t, which is the division of power series.

`scipy.signal.lfilter` does the same, but loading scipy.signal takes longer than most of what Quell is asked.
"""

from __future__ import annotations

import numpy as np

from quell._types import Array
from quell.algebra._compile import compiled


@compiled()
def _recursion(divisor, values):  # type: ignore[no-untyped-def]
    out = np.empty_like(values)
    lags = len(divisor) - 1
    shares = divisor[1:] / divisor[0]
    waiting = np.zeros(lags + 1)  # what the outputs so far take from the next ones: no sum has to wait for the last
    for t in range(len(values)):
        now = values[t] / divisor[0] + waiting[0]
        for lag in range(lags):
            waiting[lag] = waiting[lag + 1] - shares[lag] * now
        out[t] = now
    return out


def recursion(divisor: Array, values: Array) -> Array:
    """As many coefficients of values / divisor as there are values; of an array (n, m), column by column.

    >>> recursion(np.array([1.0, -0.5]), np.array([1.0, 0.0, 0.0]))
    array([1.  , 0.5 , 0.25])
    """
    if values.ndim == 2:
        return np.stack([recursion(divisor, column) for column in values.T], axis=1)
    return np.asarray(_recursion(*(np.ascontiguousarray(each, dtype=np.float64) for each in (divisor, values))))


@compiled()
def _impulse_response(divisor, most, vanished):  # type: ignore[no-untyped-def]
    out = np.empty(most)
    lags = len(divisor) - 1
    shares = divisor[1:] / divisor[0]
    waiting = np.zeros(lags + 1)
    now, largest, quiet = 1.0 / divisor[0], 0.0, 0
    for t in range(most):
        if t:
            now = waiting[0]
        for lag in range(lags):
            waiting[lag] = waiting[lag + 1] - shares[lag] * now
        out[t] = now
        size = abs(now)
        if not size < 1e150:
            out[t] = np.inf
            return out[: t + 1].copy()
        largest = max(largest, size)
        quiet = quiet + 1 if size <= vanished * largest else 0
        if quiet > lags:  # nothing that later terms depend on is left
            return out[: t + 1].copy()
    return out


def impulse_response(divisor: Array, most: int, vanished: float) -> Array:
    """The coefficients of 1 / divisor until they stay below `vanished` times the largest, `most` of them at most.

    One that explodes ends in an infinite coefficient.

    >>> impulse_response(np.array([1.0, -0.5]), 100, 0.2)
    array([1.    , 0.5   , 0.25  , 0.125 , 0.0625])
    """
    return np.asarray(_impulse_response(np.ascontiguousarray(divisor, dtype=np.float64), most, vanished))
