"""`blt`: buffered linear Toeplitz, C and C⁻¹ both sums of exponentials (arXiv:2504.21413).

Its noise costs d buffers however long the run; four or five come within a few percent of the best Toeplitz
strategy. The closed forms behind the search (`quell.algebra.blt`) cover momentum and weight decay as well as
prefix sums. Without `buffers` the smallest number is taken that one more would improve by less than 1%.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import numpy as np

from quell._types import Array
from quell.algebra.descent import Convergence, Solution, Watch
from quell.errors import QuellError
from quell.participation import Participation
from quell.strategy.family import HORIZON, Candidates, Family, Line, Space, shaped
from quell.strategy.optimised import solve
from quell.strategy.recurrence import Exponentials
from quell.strategy.structure import ToeplitzStrategy
from quell.workload import Workload

_MOST_SHAPED = 2  # most buffers worth having with a horizon
_MOST_BUFFERS, _MOST_PLANNED = 10, 3  # beyond three a planner's seconds buy a percent


def blt(
    workload: Workload,
    participation: Participation,
    buffers: int | None = None,
    objective: str = "rmse",
    solution: Array | None = None,
) -> ToeplitzStrategy:
    """The BLT with `buffers` buffers that minimises sensitivity × error."""
    from quell.algebra import blt as exponentials

    if workload.given is not None:
        raise QuellError("blt needs an SGD workload (momentum and weight decay): it cannot use given coefficients")
    if buffers is not None and buffers > _MOST_BUFFERS:
        raise QuellError(f"buffers={buffers} are more than a blt can use: beyond {_MOST_BUFFERS} nothing improves")

    if buffers == 0:  # independent noise, the best there is for full batches
        solution = np.zeros((2, 0))

    def search(watch: Watch) -> Solution:
        from quell.algebra.blt_optimise import optimise_blt

        second = max(workload.momentum, workload.ema)  # of three poles the two slowest: the search takes no more
        found, how = optimise_blt(
            workload.steps,
            buffers,
            poles=(workload.decay, second),
            participations=participation.count,
            separation=participation.separation,
            objective=cast(Literal["rmse", "maxse"], objective),
            on_iteration=watch,
        )
        return np.array([found.gaps, found.noising_gaps]).reshape(2, -1), how

    parameters = {"buffers": buffers, "objective": objective}

    def made(numbers: Array, how: Convergence | None) -> ToeplitzStrategy:
        # C decides the sensitivity and C⁻¹ makes the noise; both follow from the decays, so they cannot disagree.
        found = exponentials.from_gaps(*numbers.tolist())
        return ToeplitzStrategy(
            "blt",
            workload.steps,
            exponentials.coefficients(found, workload.steps),
            exponentials.noising_coefficients(found, workload.steps),
            exponentials=Exponentials(np.array(found.noising_scales), np.array(found.noising_decays)),
            parameters={"buffers": found.buffers, "objective": objective},
            solution=numbers,
            convergence=how,
        )

    shape = (2, None if solution is None else buffers)
    return solve("blt", workload, participation, parameters, search, solution, shape, made)


def _buffers(space: Space) -> Candidates:
    return [{"buffers": d} for d in range(1, 1 + int(min(space.buffers, _MOST_PLANNED)))]


def _first(family: Family, space: Space) -> Iterator[Line]:
    most = int(min(space.buffers, _MOST_SHAPED))
    return shaped(family, space, {"buffers": most}) if most else iter(())


BLT = Family(
    "blt",
    "buffered linear Toeplitz: C and C^-1 sums of `buffers` exponentials (arXiv:2504.21413)",
    blt,
    _buffers,
    first=_first,
    sturdy=True,
    optional={"buffers": None, "objective": "rmse", HORIZON: None},
)
