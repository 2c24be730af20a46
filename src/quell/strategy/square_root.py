"""Square roots of the workload: `square_root`, `bsr` (C banded) and `bisr` (C⁻¹ banded).

C = A^{1/2} spreads the difficulty of A evenly over the two factors and is near-optimal for one participation
(arXiv:2405.13763). Keeping its first `bands` diagonals gives BSR; keeping those of C⁻¹ = A^{-1/2} gives BISR
(arXiv:2505.12128, Definition 1), asymptotically optimal for many epochs and free of memory, because a short C⁻¹
can be remade from counters. All are Toeplitz: series powers of 1/((1−αx)(1−βx)). A learning-rate schedule makes
A non-Toeplitz; the strategies are then those of the same optimizer at a constant rate, which costs a little
error and nothing else.
"""

from __future__ import annotations

import math

from quell._types import Array
from quell.algebra import series
from quell.participation import Participation
from quell.strategy.family import Candidates, Family, Space
from quell.strategy.structure import ToeplitzStrategy
from quell.workload import Workload


def square_root(workload: Workload, _: Participation) -> ToeplitzStrategy:
    """C = A^{1/2}, all n diagonals."""
    steps = workload.steps
    return ToeplitzStrategy("square_root", steps, *roots(workload, steps))


def bsr(workload: Workload, _: Participation, bands: int) -> ToeplitzStrategy:
    """C = the first `bands` diagonals of A^{1/2}."""
    bands = min(bands, workload.steps)
    coefficients, _inverse = roots(workload, bands)
    return ToeplitzStrategy("bsr", workload.steps, coefficients, parameters={"bands": bands})


def bisr(workload: Workload, _: Participation, bands: int) -> ToeplitzStrategy:
    """C⁻¹ = the first `bands` diagonals of A^{-1/2}."""
    bands = min(bands, workload.steps)
    _root, noising = roots(workload, bands)
    return ToeplitzStrategy("bisr", workload.steps, given_noising=noising, parameters={"bands": bands})


def roots(workload: Workload, n: int) -> tuple[Array, Array]:
    """The first n coefficients of A^{1/2} and A^{-1/2}, from whichever of A and 1/A is short."""
    if workload.inverse_series is not None:
        monic = workload.inverse_series / workload.inverse_series[0]  # a factor on C changes nothing
        return series.power(monic, -0.5, n), series.power(monic, 0.5, n)
    return series.power(workload.coefficients, 0.5, n), series.power(workload.coefficients, -0.5, n)


def _every_step(space: Space) -> Candidates:
    return [{}] if space.participation.steps - 1 <= space.buffers else []


SQUARE_ROOT = Family(
    "square_root",
    "the full square root of the workload: near-optimal for one epoch, as many buffers as steps",
    square_root,
    _every_step,
    normalisable=True,
)
BSR = Family(
    "bsr",
    "banded square root: C has `bands` diagonals, needs bands - 1 buffers (arXiv:2405.13763)",
    bsr,
    Space.strategy_bands,
    required=("bands",),
    normalisable=True,
)
BISR = Family(
    "bisr",
    "banded inverse square root: C^-1 has `bands` diagonals, needs no buffers (arXiv:2505.12128)",
    bisr,
    Space.noising_bands,
    instant_steps=math.inf,
    required=("bands",),
    normalisable=True,
)
