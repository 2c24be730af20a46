"""Figures 2 to 4 of the BandMF paper (arXiv:2405.15913): solution quality, scalability, the best number of bands.

    PYTHONPATH=src python experiments/figures_bandmf.py

Prefix sums throughout. The paper gives curves, not numbers, so what is compared are its statements. Amplified noise
multipliers are the estimates of `quell.privacy.estimate` (cyclic Poisson sampling, δ = 1e-8), good to 0.1%: these
figures make no privacy claim. Strategies of Figures 3 and 4 are banded Toeplitz, up to 512 bands
with normalised columns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import cache

from common import RESULTS, Entry, Results
from plotting import lines

from quell import privacy, strategy, workload
from quell.algebra import banded
from quell.analysis.error import error
from quell.analysis.sensitivity import sensitivity
from quell.participation import Participation
from quell.schemes import CyclicPoisson
from quell.strategy import Parameter, Strategy

DELTA = 1e-8


@cache
def built(family: str, n: int, bands: int, normalise: bool | None = None) -> Strategy:
    options: dict[str, Parameter] = {} if normalise is None else {"column_normalise": normalise}
    return strategy.build(family, workload.prefix(n), Participation.single(n), None, bands=bands, **options)


def loss(chosen: Strategy) -> float:
    """Sensitivity × RMSE with one participation."""
    n = chosen.steps
    return sensitivity(chosen, Participation.single(n)).value * error(chosen, workload.prefix(n)).rmse


def figure2_quality() -> list[Entry]:
    """RMSE beside the optimal banded strategy: n = 1024 against the bands, and 16 bands against n."""
    points = []
    for panel, cases in (
        ("n=1024", [(2**e, 1024, 2**e) for e in range(1, 9)]),
        ("16 bands", [(2**e, 2**e, 16) for e in range(6, 15)]),
    ):
        for x, n, bands in cases:
            best = loss(built("band", n, bands))
            for curve, normalise in (("Toeplitz", False), ("Toeplitz, columns normalised", True)):
                ratio = loss(built("band_toeplitz", n, bands, normalise)) / best
                points.append({"panel": panel, "curve": curve, "x": x, "y": ratio})
    return points


def figure2_seconds() -> list[Entry]:
    """Seconds for one loss and gradient of the exact banded problem, and for a whole Toeplitz search."""
    points = []
    for panel, cases in (
        ("16 bands", [(2**e, 2**e, 16) for e in range(10, 21, 2)]),
        ("n=16384", [(2**e, 2**14, 2**e) for e in range(1, 9)]),
    ):
        for x, n, bands in cases:
            task, pattern = workload.prefix(n), Participation.single(n)
            start = strategy.build("bsr", task, pattern, None, bands=bands, column_normalise=True).row_bands
            evaluation = median_seconds(
                lambda start=start, task=task: banded.loss_and_gradient(start, task.inverse_bands)
            )
            began = time.perf_counter()
            os.environ["QUELL_CACHE"] = "off"  # a search is timed, not the memory of one
            strategy.build("band_toeplitz", task, pattern, None, bands=bands)
            search = time.perf_counter() - began
            points += [
                {"panel": panel, "curve": "banded, loss and gradient", "x": x, "y": evaluation},
                {"panel": panel, "curve": "Toeplitz, whole search", "x": x, "y": search},
            ]
    return points


def median_seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


@cache
def amplified(n: int, epochs: int, bands: int, epsilon: float) -> float:
    """RMSE with cyclic Poisson sampling over `bands` groups; with n/epochs of them nothing is amplified."""
    chosen = built("band_toeplitz", n, bands, bands <= 512)  # normalised columns have no fast error beyond
    scheme = CyclicPoisson.of_fraction(n, bands, epochs / n)
    return privacy.estimate(chosen, scheme, epsilon, DELTA).noise_multiplier * error(chosen, workload.prefix(n)).rmse


def best_bands(n: int, epochs: int, epsilon: float) -> tuple[int, float]:
    """The best power of two: the error falls, then rises with the bands."""
    bands, found = 1, amplified(n, epochs, 1, epsilon)
    while 2 * bands * epochs <= n and (better := amplified(n, epochs, 2 * bands, epsilon)) < found:
        bands, found = 2 * bands, better
    return bands, found


def figure3_bands() -> list[Entry]:
    """RMSE against the bands at ε = 1, n = 16384."""
    return [
        {"panel": "n=16384, ε=1", "curve": f"{k} epochs", "x": 2**e, "y": amplified(2**14, k, 2**e, 1.0)}
        for k in (2, 8, 32, 128, 512)
        for e in range(min(11, 15 - k.bit_length()))
    ]


def figure3_best() -> list[Entry]:
    """The best number of bands, n = 4096."""
    return [
        {"panel": "n=4096", "curve": f"ε={epsilon:g}", "x": k, "y": best_bands(2**12, k, epsilon)[0]}
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)
        for k in (1, 4, 16, 64, 256)
    ]


def figure4() -> list[Entry]:
    """What amplification and correlation are worth at n = 16384: RMSE without either, over the best with both."""
    points = []
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        for k in (2, 8, 32, 128, 512):
            n = 2**14
            best = best_bands(n, k, epsilon)[1]
            for panel, other in (("without amplification", n // k), ("without correlation", 1)):
                ratio = amplified(n, k, other, epsilon) / best
                points.append({"panel": panel, "curve": f"ε={epsilon:g}", "x": k, "y": ratio})
    return points


FIGURES = {
    "figure2_quality": (figure2_quality, "bands, or steps n", "RMSE / optimal", "x"),
    "figure2_seconds": (figure2_seconds, "steps n, or bands", "seconds", "xy"),
    "figure3_bands": (figure3_bands, "bands", "RMSE", "xy"),
    "figure3_best": (figure3_best, "epochs", "best number of bands", "xy"),
    "figure4": (figure4, "epochs", "RMSE / best", "xy"),
}


def main() -> None:
    results = Results(RESULTS / "figures_bandmf.json")
    for name, (make, x_label, y_label, log) in FIGURES.items():
        if name not in results.runs:
            started = time.time()
            results.add(name, points=make(), seconds=time.time() - started)
            print(name, f"{time.time() - started:.0f} s", flush=True)
        lines(f"bandmf_{name}", results.runs[name]["points"], x_label, y_label, log)


if __name__ == "__main__":
    main()
