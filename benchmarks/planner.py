"""How long does `quell plan` take? Fresh processes; wall clock and CPU time.

"Cold" starts from an empty cache; "warm" has the strategies of an earlier plan of the same run, as when ε or the
objective is changed. Compiled code is in `__pycache__` both times.

python benchmarks/planner.py [--million]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

CIFAR = ["--examples", "50000", "--batch-size", "128", "--epochs", "10", "--epsilon", "8", "--delta", "1e-5"]
MILLION = ["--examples", "10000000", "--batch-size", "100", "--epochs", "10", "--epsilon", "8", "--delta", "1e-8"]
CALLS = [("--fast, 3,900 steps", ["--fast", *CIFAR], 1), ("3,900 steps", CIFAR, 6)]
ROUNDS = 3  # of which the median is shown


def seconds(arguments: list[str], cache: str) -> tuple[float, float]:
    """Wall clock and CPU time (of all threads) of one `quell plan`, imports included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "quell", "plan", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "QUELL_CACHE": cache},
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def medians(measured: list[tuple[float, float]]) -> str:
    return " | ".join(f"{statistics.median(column):.1f}" for column in zip(*measured, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="also a run of a million steps")
    calls = [*CALLS, ("1,000,000 steps", MILLION, 60)] if parser.parse_args().million else CALLS
    seconds(CALLS[0][1], "off")  # compiles what is not in __pycache__ yet
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the first call\n")
    print("| call | cold: wall, s | CPU, s | warm: wall, s | CPU, s | goal, warm wall, s |\n|---|---|---|---|---|---|")
    for name, arguments, goal in calls:
        cold, warm = [], []
        for _ in range(ROUNDS if goal < 60 else 1):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(seconds(arguments, cache))
                warm.append(seconds(arguments, cache))
        print(f"| {name} | {medians(cold)} | {medians(warm)} | {goal} |", flush=True)


if __name__ == "__main__":
    main()
