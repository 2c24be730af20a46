"""What a step's noise costs on a CPU, as multiples of torch's `randn` + `add_` in the same run.

    python benchmarks/noise_cpu.py [--elements 10000000] [--threads 2]

Goals at 10⁷ float32 parameters: independent noise ≤ 1.5×, λCGD ≤ 2.5×.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from quell.noise import Key, NoiseSpec, NoiseStream
from quell.noise.layout import WORDS
from quell.strategy.recurrence import Exponentials, Recurrence, Regenerate, Ring


def median_ms(action: Callable[[], object], repeats: int) -> float:
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def half_power(bands: int) -> np.ndarray:
    """The first coefficients of (1 − x)^½, the noising of BISR."""
    return np.cumprod(np.concatenate([[1.0], (np.arange(1, bands) - 1.5) / np.arange(1, bands)]))


def half_power_inverse(bands: int) -> np.ndarray:
    """The first coefficients of (1 − x)^−½, the C of BSR."""
    return np.cumprod(np.concatenate([[1.0], (np.arange(1, bands) - 0.5) / np.arange(1, bands)]))


CASES: dict[str, tuple[Recurrence, bool]] = {
    "independent": (Regenerate(np.ones(1)), False),
    "λCGD": (Regenerate(np.array([1.0, -0.95])), False),
    "BISR p=4": (Regenerate(half_power(4)), False),
    "BISR p=16": (Regenerate(half_power(16)), False),
    "BISR p=16, buffered": (Regenerate(half_power(16)), True),
    "ring b=4": (Ring(half_power_inverse(4)), False),
    "ring b=16": (Ring(half_power_inverse(16)), False),
    "BLT d=4": (Exponentials(np.array([-0.05, -0.02, -0.01, -0.001]), np.array([0.5, 0.8, 0.9, 0.99])), False),
}
GOALS = {"independent": 1.5, "λCGD": 2.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10**7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    gradient = torch.zeros(options.elements)
    unit = median_ms(lambda: gradient.add_(torch.randn(options.elements)), options.repeats)
    copy = median_ms(lambda: torch.zeros(options.elements).copy_(gradient), options.repeats)
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    print(f"{options.elements:,} float32: randn + add_ {unit:.1f} ms (the unit), fresh copy {copy:.1f} ms")
    print(f"{'noise':22} {'generator':10} {'ms':>8} {'× randn + add_':>15}")
    for name, (recurrence, buffered) in CASES.items():
        for generator in WORDS:
            spec = NoiseSpec(recurrence, 10**6, 1.0)
            stream = NoiseStream(
                spec, [gradient], key=Key.generate(), generator=generator, buffered=buffered, threads=options.threads
            )
            for _ in range(recurrence.draws):  # early steps have fewer draws
                stream.add_(gradient)
            ms = median_ms(lambda stream=stream: stream.add_(gradient), options.repeats)
            goal = f"  goal {GOALS[name]}: {'met' if ms <= GOALS[name] * unit else 'MISSED'}" if name in GOALS else ""
            print(f"{name:22} {generator:10} {ms:8.1f} {ms / unit:15.2f}{goal}")


if __name__ == "__main__":
    main()
