"""How much of each step's fresh noise float32 keeps: every family at many lengths, and what it costs to know.

    python benchmarks/precision.py            # 10 to a million steps, some minutes
    python benchmarks/precision.py 10 1000    # these numbers of steps only

Growth is the bound of `quell.strategy.precision`: the largest sum in a row over the fresh draw, at the worst step
(refused above 4,096). Shortfall is how much smaller float32 coefficients can make the noise, which the noise's scale
makes up for. Markdown goes to standard output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from quell import QuellError, strategy, workload
from quell.participation import Participation
from quell.strategy.precision import MOST_GROWTH, measure, shortfall

LENGTHS = (10, 100, 1000, 10_000, 100_000, 1_000_000)
EPOCHS = (1, 10)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "momentum 0.9": {"momentum": 0.9},
    "momentum 0.95, decay 0.9999": {"momentum": 0.95, "weight_decay": 0.9999},
}


def requests(n: int, separation: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parameters of every family that are within reach at this length, both ways of normalising."""
    bands = [p for p in (2, 16, 256) if p <= n]
    yield from (("identity", {}), ("diagonal", {}), ("tree", {}), ("lambda_cgd", {}), ("lambda_cgd", {"lambda": 1.0}))
    yield "square_root", {}
    for normalise in (False, True):
        both = {"column_normalise": normalise}
        yield "lambda_cgd", {**both, "objective": "training"}
        for p in bands:
            yield "bisr", {**both, "bands": p}
            yield "fractional", {**both, "bands": p}
            if p <= separation:
                yield "bsr", {**both, "bands": p}
                if p <= 64 and n * p <= 4_000_000:
                    yield "band_toeplitz", {**both, "bands": p}
            if p <= 16 and n * p <= 400_000:
                yield "band_inv", {**both, "bands": p}
                yield "band_inv", {**both, "bands": p, "horizon": max(2, n // 10)}
    if n <= 1000:
        yield "band_inv", {"bands": 4, "divergence": 1.0}
        yield "band_toeplitz", {"bands": min(4, separation), "divergence": 1.0}
    for buffers in (1, 3):
        yield "blt", {"buffers": buffers}
    if n <= 4000:
        yield from (("band", {"bands": p}) for p in bands if p <= separation and n * p <= 16_000)
    if n <= 100 and separation == n:
        yield "dense", {}


def main() -> None:
    lengths = [int(argument) for argument in sys.argv[1:]] or LENGTHS
    worst: dict[str, tuple[float, str]] = {}
    low: dict[str, tuple[float, str]] = {}
    slowest: dict[str, tuple[float, str]] = {}
    seen, refused = 0, 0
    for n in lengths:
        print(f"{n:,} steps", file=sys.stderr, flush=True)
        for epochs in EPOCHS:
            for optimizer, options in OPTIMIZERS.items():
                separation = n // epochs
                sums, pattern = workload.sgd(n, **options), Participation(n, separation)
                for name, parameters in requests(n, separation):
                    where = f"{name} {parameters}, {n:,} steps, {epochs} epochs, {optimizer}"
                    try:
                        built = strategy.build(name, sums, pattern, **parameters)
                    except QuellError as refusal:
                        refused += "round away" in str(refusal)
                        print(f"refused: {where}: {refusal}", file=sys.stderr)
                        continue
                    seen += 1
                    start = time.perf_counter()
                    growth = measure(built.recurrence, n).growth
                    took = time.perf_counter() - start
                    worst[name] = max(worst.get(name, (0.0, "")), (growth, where))
                    low[name] = max(low.get(name, (-1.0, "")), (shortfall(built.recurrence, n), where))
                    slowest[name] = max(slowest.get(name, (0.0, "")), (took, where))
    print(f"{seen:,} strategies, {refused} refused at the limit of {MOST_GROWTH:,.0f}.\n")
    print("| family | largest growth | where | largest shortfall | slowest check |\n|---|---|---|---|---|")
    for name in sorted(worst, key=lambda each: -worst[each][0]):
        print(f"| {name} | {worst[name][0]:.3g} | {worst[name][1]} | {low[name][0]:.1e} | {slowest[name][0]:.3f} s |")


if __name__ == "__main__":
    main()
