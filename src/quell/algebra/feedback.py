"""Training on a quadratic loss as a recursion: gradients answer to the weights, so noise is corrected later.

With curvature λ and learning rate lr the weights are u_t = α·u_{t−1} − s_t·m_t, m_t = β·m_{t−1} + q·u_{t−1} + noise,
with the *feedback* q = lr·λ and the schedule s: the workload A becomes (A⁻¹ + q·S)⁻¹, S the shift by one step.
"""

from __future__ import annotations

import numpy as np

from quell._types import Array
from quell.algebra._compile import compiled


@compiled()
def _energy(values, divisor):  # type: ignore[no-untyped-def]
    first = 1.0 / divisor[0]
    a, b, c = divisor[1] * first, divisor[2] * first, divisor[3] * first
    one = two = three = total = 0.0
    for t in range(len(values)):
        now = values[t] * first - a * one - b * two - c * three
        total += now * now
        one, two, three = now, one, two
    return total


def energy(values: Array, divisor: Array) -> float:
    """Σ_t y_t² of y = values / divisor, a series of up to four coefficients.

    >>> energy(np.array([1.0, 0.0, 0.0]), np.array([1.0, -1.0]))
    3.0
    """
    padded = np.zeros(4)
    padded[: len(divisor)] = divisor
    return float(_energy(np.ascontiguousarray(values, dtype=np.float64), padded))


@compiled()
def _last_row(rates, decay, momentum, ema, feedback):  # type: ignore[no-untyped-def]
    row = np.empty(len(rates))
    average, weight, moved = 1.0, 0.0, 0.0
    for t in range(len(rates) - 1, -1, -1):
        weight += (1.0 - ema) * average
        moved += rates[t] * weight
        row[t] = moved
        average *= ema
        weight, moved = decay * weight - feedback * moved, momentum * moved
    return row


def last_row(rates: Array, decay: float, momentum: float, ema: float, feedback: float) -> Array:
    """(n,) how much each step's gradient moves the last weights, or their average: the run differentiated backwards.

    >>> last_row(np.ones(3), 1.0, 0.0, 0.0, 0.5)
    array([0.25, 0.5 , 1.  ])
    """
    return np.asarray(_last_row(np.ascontiguousarray(rates), decay, momentum, ema, feedback))


@compiled()
def _left_over(rates, decay, momentum, ema, feedback):  # type: ignore[no-untyped-def]
    out = np.empty(len(feedback))
    for row in range(len(feedback)):
        weight = average = 1.0
        moved = 0.0
        for t in range(len(rates)):
            moved = momentum * moved + feedback[row] * weight
            weight = decay * weight + (1.0 - decay) - rates[t] * moved
            average = ema * average + (1.0 - ema) * weight
        out[row] = average
    return out


def left_over(rates: Array, decay: float, momentum: float, ema: float, feedback: Array) -> Array:
    """(q,) what is left of a distance of 1 to the optimum after the run, without noise, for each feedback q = lr·λ.

    Decay pulls the weights back to where they started. `ema` is the rate at which the weights are averaged.

    >>> left_over(np.ones(2), 1.0, 0.0, 0.0, np.array([0.0, 0.5, 1.0]))
    array([1.  , 0.25, 0.  ])
    """
    return np.asarray(_left_over(np.ascontiguousarray(rates), decay, momentum, ema, np.ascontiguousarray(feedback)))
