"""What the optimised families share: the workload as a decoder, the disk cache, and the convergence report."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quell import cache
from quell._types import Array
from quell.algebra.descent import Convergence, Solution, Watch
from quell.errors import QuellError
from quell.participation import Participation
from quell.progress import announce
from quell.strategy.structure import BandedStrategy, ToeplitzStrategy
from quell.workload import Workload

if TYPE_CHECKING:
    from quell.algebra.decoder import Decoder
    from quell.algebra.toeplitz import Energy

_SOLVER = 4  # raised when a better optimiser makes old cache entries worth replacing

Built = TypeVar("Built", ToeplitzStrategy, BandedStrategy)


def solve(
    family: str,
    workload: Workload,
    participation: Participation,
    parameters: dict[str, Any],
    search: Callable[[Watch], Solution],
    known: Array | None,
    shape: tuple[int | None, ...],
    make: Callable[[Array, Convergence | None], Built],
) -> Built:
    """The strategy that `make` builds from the solution of one optimisation problem.

    The solution is the one that is already known, a stored one, or a fresh one. The folder of stored ones may hold
    anything: what `make` refuses is searched anew.
    """
    if known is not None:
        if not _fits(known, shape):
            raise QuellError(f"the given solution of {family} has shape {known.shape} instead of {shape}")
        return make(known, None)

    def watch(so_far: Convergence) -> None:
        announce(f"{family}: iteration {so_far.iterations}, last step gained {max(so_far.last_improvement, 0.0):.1e}")

    def fresh() -> cache.Entry:
        found, how = search(watch)
        return found, asdict(how)

    problem = {
        "family": family,
        "solver": _SOLVER,
        "parameters": parameters,
        "workload": fingerprint(workload),
        "participation": [participation.steps, participation.separation, participation.count],
    }
    accepted: list[Built] = []

    def is_sound(entry: cache.Entry) -> bool:
        accepted.clear()
        if _fits(entry[0], shape) and _is_report(entry[1]):
            with suppress(QuellError):
                accepted.append(make(entry[0], Convergence(**entry[1])))
        return bool(accepted)

    array, facts = cache.remember(problem, fresh, is_sound)
    if accepted:
        return accepted[0]
    how = Convergence(**facts)
    if not how.converged or not _fits(array, shape):
        raise QuellError(f"the search for {family} did not converge ({how.reason.rstrip('.')}): try fewer bands")
    return make(array, how)


def _fits(array: Array, shape: tuple[int | None, ...]) -> bool:
    """Whether an array has the shape, None standing for any length, and holds finite float64 numbers."""
    lengths = len(array.shape) == len(shape) and all(b in (None, a) for a, b in zip(array.shape, shape, strict=True))
    return lengths and array.dtype == np.float64 and bool(np.all(np.isfinite(array)))


def _is_report(facts: dict[str, Any]) -> bool:
    kinds = {"iterations": int, "evaluations": int, "loss": float, "gradient_norm": float, "last_improvement": float}
    return (
        isinstance(facts, dict)
        and set(facts) == {*kinds, "converged", "reason"}
        and all(isinstance(facts[name], kind) for name, kind in kinds.items())
        and facts["converged"] is True
        and isinstance(facts["reason"], str)
    )


def fingerprint(workload: Workload) -> dict[str, Any]:
    """Plain data that determines a workload."""
    return {
        "decay": workload.decay,
        "momentum": workload.momentum,
        "rates": None if workload.rates is None else cache.digest(workload.rates),
        "given": None if workload.given is None else cache.digest(workload.given),
        **({"ema": workload.ema} if workload.ema else {}),
    }


def amplified(participation: Participation, divergence: float | None) -> Energy | None:
    """The function that a strategy optimised for this divergence minimises; None without a divergence."""
    if divergence is None:
        return None
    from quell.algebra.overlaps import amplified_energy

    b, k = participation.separation, participation.count
    return partial(amplified_energy, separation=b, count=k, divergence=divergence)


def decoder(workload: Workload, bands: int, *, last_only: bool) -> Decoder:
    """The workload at a constant rate, as `quell.algebra.toeplitz` wants it."""
    from quell.algebra.decoder import Decoder

    if workload.inverse_series is None:
        return Decoder(workload.steps, workload.coefficients, np.ones(1), last_only)
    averaged = (1.0 - workload.ema) * workload.decay / (workload.decay - workload.ema)  # of the slowest exponential
    return Decoder(
        workload.steps,
        np.ones(1),
        workload.inverse_series,
        last_only,
        horizon=40 * bands + 400 + math.ceil(40 * workload.ema / (1.0 - workload.ema)),
        rate=workload.decay,
        residue=workload.decay / (workload.decay - workload.momentum) * averaged,
    )
