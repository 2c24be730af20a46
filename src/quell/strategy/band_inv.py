"""`band_inv` (BandInvMF): the optimal C⁻¹ with `bands` diagonals (arXiv:2505.12128, §5). Needs no buffers.

The search minimises error × the norm of the leftmost columns of |C|, starting from BISR. The paper takes C itself,
which is the same while C is non-negative; but with as many bands as the separation its optimum turns negative, columns
cancel, and the norm understates the sensitivity (the printed 7.87 for p = b is such a number). The strategy is priced
by `quell.analysis.sensitivity`, which trusts neither form.

With a `divergence` the norm gives way to the energy under amplification (`quell.algebra.overlaps`), for a strategy that
is to be amplified by balls-in-bins sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from quell._types import Array
from quell.algebra.descent import Convergence, Solution, Watch
from quell.participation import Participation
from quell.strategy.family import DIVERGENCE, HORIZON, Candidates, Family, Line, Space, shaped
from quell.strategy.optimised import amplified, decoder, solve
from quell.strategy.square_root import roots
from quell.strategy.structure import Parameter, ToeplitzStrategy
from quell.workload import Workload

_MOST_PLANNED = 8_000_000  # bands × steps


def band_inv(
    workload: Workload,
    participation: Participation,
    bands: int,
    objective: str = "rmse",
    solution: Array | None = None,
    divergence: float | None = None,
) -> ToeplitzStrategy:
    """The θ = C⁻¹ of `bands` coefficients that minimises sensitivity × error."""
    bands = min(bands, workload.steps)

    def search(watch: Watch) -> Solution:
        from quell.algebra.toeplitz import leftmost_energy, minimise_product

        _, start = roots(workload, bands)
        start = start / start[0]
        task = decoder(workload, bands, last_only=objective == "maxse")
        b, k = participation.separation, participation.count
        columns = partial(leftmost_energy, steps=workload.steps, separation=b, count=k)
        smooth = k == 1 or 4 * bands <= b  # with more bands C turns negative, and |C| has kinks
        return minimise_product(task, start, amplified(participation, divergence) or columns, smooth, watch)

    parameters: dict[str, Parameter] = {"bands": bands, "objective": objective}
    if divergence is not None:
        parameters[DIVERGENCE] = divergence

    def made(theta: Array, how: Convergence | None) -> ToeplitzStrategy:
        return ToeplitzStrategy(
            "band_inv", workload.steps, given_noising=theta, parameters=parameters, solution=theta, convergence=how
        )

    return solve("band_inv", workload, participation, parameters, search, solution, (bands,), made)


def _planned(space: Space) -> Candidates:
    """In very long runs only few bands are tried, to keep planning short."""
    return [each for each in space.noising_bands() if int(each["bands"]) * space.participation.steps <= _MOST_PLANNED]


def _first(family: Family, space: Space) -> Iterator[Line]:
    most = max((int(each["bands"]) for each in _planned(space)), default=0)
    return shaped(family, space, {"bands": most}) if most > 1 else iter(())


BAND_INV = Family(
    "band_inv",
    "optimal C^-1 with `bands` diagonals, needs no buffers (arXiv:2505.12128)",
    band_inv,
    _planned,
    first=_first,
    instant_steps=10_000,
    paper="BandInvMF",
    required=("bands",),
    optional={"objective": "rmse", HORIZON: None, DIVERGENCE: None},
    normalisable=True,
)
