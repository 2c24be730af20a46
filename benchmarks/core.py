"""How long do coefficients, sensitivity and error take at a million steps? Ratios to one FFT product in the same run.

python benchmarks/core.py [--steps 1000000]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from quell.algebra import series
from quell.planning import Prices
from quell.run import Run


def median_seconds(action: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**6)
    n = parser.parse_args().steps
    ones = np.ones(n)
    series.multiply(ones, ones, n)
    unit = median_seconds(lambda: series.multiply(ones, ones, n))
    print(f"n = {n:,}; one FFT product: {unit:.3f} s; goal: 2 s for coefficients, sensitivity and error of a mechanism")
    cases = [
        ("lambda_cgd", {"lambda": 0.95}),
        ("bisr", {"bands": 16}),
        ("bisr", {"bands": 1000}),
        ("bsr", {"bands": 16}),
    ]
    for momentum, decay in ((0.0, 1.0), (0.9, 0.9999)):
        for name, parameters in cases:
            for normalise in ({}, {"column_normalise": True}):
                run = Run.from_steps(steps=n, epochs=10, epsilon=8.0, delta=1e-5, momentum=momentum, weight_decay=decay)
                prices = Prices(run)
                options = {**parameters, **normalise}
                prices.price(name, **options)  # the first call compiles
                seconds = median_seconds(partial(prices.price, name, **options), 3)
                print(
                    f"momentum {momentum:3} {name:10} {options!s:45} {seconds:7.3f} s  {seconds / unit:6.1f} products"
                )
    start_up = median_seconds(lambda: subprocess.run([sys.executable, "-c", "import quell"], check=True))
    bare = median_seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
    print(f"import quell: {start_up - bare:.3f} s on top of {bare:.3f} s for a bare interpreter (goal: 0.3 s)")


if __name__ == "__main__":
    main()
