"""Figures 1 to 3 of the BISR paper (arXiv:2505.12128): RMSE of square-root factorisations, for σ_(ε,δ) = 1.

    PYTHONPATH=src python experiments/figures_bisr.py

The paper gives curves, not numbers, so what is compared are its statements. The three (α, β) settings are those of its
Figure 5. "BandMF" is the optimal banded Toeplitz strategy, columns normalised, with b bands.
"""

from __future__ import annotations

import time

from common import RESULTS, Entry, Results
from plotting import lines

from quell import strategy, workload
from quell.analysis.error import error
from quell.analysis.sensitivity import sensitivity
from quell.errors import QuellError
from quell.schemes import Cyclic
from quell.strategy import Parameter

SETTINGS = ((1.0, 0.0), (0.999, 0.0), (1.0, 0.9))


def rmse(family: str, n: int, k: int, alpha: float, beta: float, **parameters: Parameter) -> float | None:
    """Sensitivity × ‖A·C⁻¹‖_F/√n; None where the family does not exist for the workload or finds no optimum."""
    task, cycle = workload.sgd(n, beta, alpha), Cyclic(n, n // k)
    try:
        built = strategy.build(family, task, cycle.participation, None, **parameters)
        return sensitivity(built, cycle.participation).value * error(built, task).rmse
    except QuellError as refusal:
        print(f"{family} {parameters} n={n} k={k} α={alpha} β={beta}: {refusal}", flush=True)
        return None


def figure1() -> list[Entry]:
    """Against the bandwidth, n = 16384 and k = 8, so b = 2048."""
    return [
        {
            "panel": f"α={alpha:g}, β={beta:g}",
            "curve": family.upper(),
            "x": p,
            "y": rmse(family, 16384, 8, alpha, beta, bands=p),
        }
        for alpha, beta in SETTINGS
        for family in ("bsr", "bisr")
        for p in (2**e for e in range(1, 13))
    ]


def figure2() -> list[Entry]:
    """Against n for k = 4 and 16; BISR with its best bandwidth among the powers of two."""
    points = []
    for k in (4, 16):
        for alpha, beta in SETTINGS:
            for n in (2**e for e in range(7, 13)):
                b = n // k
                inverse = [rmse("bisr", n, k, alpha, beta, bands=2**e) for e in range(1, b.bit_length())]
                found = {
                    "BSR p=b": rmse("bsr", n, k, alpha, beta, bands=b),
                    "BISR, best p": min(value for value in inverse if value is not None),
                    "BLT d=4": rmse("blt", n, k, alpha, beta, buffers=4),
                    "BandMF p=b": rmse("band_toeplitz", n, k, alpha, beta, bands=b),
                    "DP-SGD": rmse("identity", n, k, alpha, beta),
                }
                panel = f"k={k}, α={alpha:g}, β={beta:g}"
                points += [{"panel": panel, "curve": curve, "x": n, "y": value} for curve, value in found.items()]
    return points


def figure3() -> list[Entry]:
    """Small bandwidths, n = 4096 and k = 4."""
    families = {"BSR": "bsr", "BISR": "bisr", "BandMF": "band_toeplitz", "BandInvMF": "band_inv"}
    return [
        {"panel": f"α={alpha:g}, β={beta:g}", "curve": curve, "x": p, "y": rmse(family, 4096, 4, alpha, beta, bands=p)}
        for alpha, beta in SETTINGS
        for curve, family in families.items()
        for p in (1, 2, 3, 4, 6, 8, 12, 16)
    ]


FIGURES = {"figure1": (figure1, "bandwidth p"), "figure2": (figure2, "steps n"), "figure3": (figure3, "bandwidth p")}


def main() -> None:
    results = Results(RESULTS / "figures_bisr.json")
    for name, (make, axis) in FIGURES.items():
        if name not in results.runs:
            started = time.time()
            results.add(name, points=make(), seconds=time.time() - started)
        shown = [point for point in results.runs[name]["points"] if point["curve"] != "DP-SGD"]  # far above the others
        lines(f"bisr_{name}", shown, axis, "RMSE")


if __name__ == "__main__":
    main()
