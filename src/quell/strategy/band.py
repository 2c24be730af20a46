"""`band` and `dense`: the optimal C with `bands` diagonals, not restricted to Toeplitz (Problem 2.1 of
arXiv:2405.15913).

The columns of C have norm 1, so with no more bands than the separation the sensitivity is √k for k
participations: `bands` = separation is the optimal multi-epoch strategy of the paper. Its error is ‖A·C⁻¹‖_F,
minimised exactly in O(n·bands²) per evaluation by `quell.algebra.banded`, from the column-normalised
`band_toeplitz`. `dense` is the same without any limit on the bands, for a single participation.
"""

from __future__ import annotations

import numpy as np

from quell._types import Array
from quell.algebra.descent import Convergence, Solution, Watch
from quell.errors import QuellError
from quell.participation import Participation
from quell.strategy.band_toeplitz import band_toeplitz, checked_bands
from quell.strategy.family import Candidates, Family, Space, no_lines
from quell.strategy.optimised import solve
from quell.strategy.structure import BandedStrategy
from quell.workload import Workload, normalised

_MOST_PLANNED = 20_000  # numbers in C up to which a planner tries `band`: more take seconds to gain a percent
_MOST_DENSE = 4096
_MOST_RISE = 1e5  # of a learning rate over the bands: its square times 10⁻¹⁶ is what recursions through A⁻¹ are off by


def band(workload: Workload, participation: Participation, bands: int, solution: Array | None = None) -> BandedStrategy:
    """The C with unit columns and `bands` diagonals that minimises ‖A·C⁻¹‖_F."""
    bands = checked_bands(bands, participation)

    def search(watch: Watch) -> Solution:
        from quell.algebra import banded

        inverse = normalised(workload).inverse_bands
        if inverse is None:
            raise QuellError("band needs an SGD workload (momentum, weight decay, schedule), not given coefficients")
        if (rise := workload.rise(bands + 1)) > _MOST_RISE:
            raise QuellError(
                f"band cannot be optimised where a rate is {rise:.2g} times one of up to {bands + 1} steps before: "
                f"at most {_MOST_RISE:g}; smooth the schedule, or take band_toeplitz"
            )
        start = band_toeplitz(workload, participation, bands).column_normalised()
        return banded.optimise(start.row_bands, inverse, on_iteration=watch)

    once = Participation.single(workload.steps)

    def made(rows: Array, how: Convergence | None) -> BandedStrategy:
        return BandedStrategy("band", rows, {"bands": bands}, how)

    return solve("band", workload, once, {"bands": bands}, search, solution, (workload.steps, bands), made)


def dense(workload: Workload, participation: Participation, solution: Array | None = None) -> BandedStrategy:
    """The lower-triangular C with unit columns that minimises ‖A·C⁻¹‖_F, for one participation."""
    if participation.count > 1:
        bands = participation.separation
        quick = workload.steps * bands <= _MOST_PLANNED
        better = f"band with bands={bands} (the separation)" if quick else f"band_toeplitz with bands={min(bands, 16)}"
        raise QuellError(f"dense is for a single participation, not {participation.count}: take {better}")
    n = workload.steps
    if n > _MOST_DENSE:
        raise QuellError(f"dense holds {n:,}² numbers: at most {_MOST_DENSE:,} steps; take band or band_toeplitz")

    def search(watch: Watch) -> Solution:
        from quell.algebra.dense import optimise_dense

        matrix, how = optimise_dense(normalised(workload).matrix(), on_iteration=watch)
        rows = np.zeros((n, n))
        for d in range(n):
            rows[d:, d] = np.diagonal(matrix, -d)
        return rows, how

    def made(rows: Array, how: Convergence | None) -> BandedStrategy:
        return BandedStrategy("dense", rows, {}, how)

    return solve("dense", workload, participation, {}, search, solution, (n, n), made)


def _planned_bands(space: Space) -> Candidates:
    most = _MOST_PLANNED / space.participation.steps
    return [options for options in space.strategy_bands() if options["bands"] <= most]  # type: ignore[operator]


def _planned_dense(space: Space) -> Candidates:
    n = space.participation.steps
    return [{}] if space.participation.count == 1 and n <= min(space.buffers + 1, 400) else []


BAND = Family(
    "band",
    "optimal C with `bands` diagonals, not Toeplitz, needs bands - 1 buffers (arXiv:2405.15913)",
    band,
    _planned_bands,
    lines=no_lines,  # its Gram matrix takes seconds
    required=("bands",),
    rough_version="band_toeplitz",  # it takes seconds to gain a third of a percent
    paper="BandMF",
)
DENSE = Family(
    "dense",
    "optimal lower-triangular C for a single epoch, as many buffers as steps",
    dense,
    _planned_dense,
    lines=no_lines,
)
