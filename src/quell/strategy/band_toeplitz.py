"""`band_toeplitz`: the optimal Toeplitz C with `bands` diagonals (BandMF at scale, arXiv:2405.15913, §3.2).

With no more bands than the separation the sensitivity is √k·‖c‖ whatever the k participations, so one search
serves every number of epochs. Columns are normalised by default, which brings it within 2% of the exact optimum
`band`. A learning-rate schedule is optimised for as if the rate were constant; the error is then that of the
schedule.

With a `divergence` ‖c‖² gives way to the energy under amplification (`quell.algebra.overlaps`), for a strategy that is
to be amplified by balls-in-bins sampling.
"""

from __future__ import annotations

from collections.abc import Iterator

from quell._types import Array
from quell.algebra.descent import Convergence, Solution, Watch
from quell.errors import QuellError
from quell.participation import Participation
from quell.strategy.family import DIVERGENCE, HORIZON, Family, Line, Space, shaped
from quell.strategy.optimised import amplified, decoder, solve
from quell.strategy.square_root import roots
from quell.strategy.structure import Parameter, ToeplitzStrategy
from quell.workload import Workload

_FEWEST_SHAPED = 16  # bands: with fewer there is little to shape


def band_toeplitz(
    workload: Workload,
    participation: Participation,
    bands: int,
    objective: str = "rmse",
    solution: Array | None = None,
    divergence: float | None = None,
) -> ToeplitzStrategy:
    """The c of `bands` coefficients that minimises sensitivity × error."""
    bands = checked_bands(bands, participation)

    def search(watch: Watch) -> Solution:
        from quell.algebra.toeplitz import minimise_quotient

        start, _ = roots(workload, bands)
        task = decoder(workload, bands, last_only=objective == "maxse")
        return minimise_quotient(task, start / start[0], amplified(participation, divergence), watch)

    parameters: dict[str, Parameter] = {"bands": bands, "objective": objective}
    pattern = participation
    if divergence is None:  # the problem does not depend on the pattern, so all patterns share one cache entry
        pattern = Participation.single(workload.steps)
    else:
        parameters[DIVERGENCE] = divergence

    def made(c: Array, how: Convergence | None) -> ToeplitzStrategy:
        return ToeplitzStrategy("band_toeplitz", workload.steps, c, parameters=parameters, solution=c, convergence=how)

    return solve("band_toeplitz", workload, pattern, parameters, search, solution, (bands,), made)


def checked_bands(bands: int, participation: Participation) -> int:
    """Bands beyond the separation are refused: the columns of one example would overlap, which helps nobody."""
    bands = min(bands, participation.steps)
    if bands > participation.separation:
        raise QuellError(f"bands={bands} exceed the separation of {participation.separation} steps: take at most that")
    return bands


def _first(family: Family, space: Space) -> Iterator[Line]:
    most = max((int(each["bands"]) for each in space.strategy_bands()), default=0)
    return shaped(family, space, {"bands": most}) if most >= _FEWEST_SHAPED else iter(())


BAND_TOEPLITZ = Family(
    "band_toeplitz",
    "optimal Toeplitz C with `bands` diagonals, needs bands - 1 buffers (arXiv:2405.15913)",
    band_toeplitz,
    Space.strategy_bands,
    first=_first,
    sturdy=True,
    paper="Toeplitz BandMF",
    required=("bands",),
    optional={"objective": "rmse", HORIZON: None, DIVERGENCE: None},
    normalisable=True,
    normalised=True,
)
