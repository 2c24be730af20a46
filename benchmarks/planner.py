"""How long does `quell plan` take? Fresh processes, no stored strategies; wall clock and CPU time.

python benchmarks/planner.py [--million]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time

CIFAR = ["--examples", "50000", "--batch-size", "128", "--epochs", "10", "--epsilon", "8", "--delta", "1e-5"]
MILLION = ["--examples", "10000000", "--batch-size", "100", "--epochs", "10", "--epsilon", "8", "--delta", "1e-8"]
CALLS = [("--fast, 3,900 steps", ["--fast", *CIFAR], 2), ("3,900 steps", CIFAR, 10)]


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall clock and CPU time (of all threads) of one `quell plan`, imports included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "quell", "plan", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "QUELL_CACHE": "off"},
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="also a run of a million steps")
    calls = [*CALLS, ("1,000,000 steps", MILLION, 60)] if parser.parse_args().million else CALLS
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the first call\n")
    print("| call | wall, s | CPU, s | goal for the wall on two idle cores, s |\n|---|---|---|---|")
    for name, arguments, goal in calls:
        wall, processor = seconds(arguments)
        print(f"| {name} | {wall:.1f} | {processor:.1f} | {goal} |", flush=True)


if __name__ == "__main__":
    main()
