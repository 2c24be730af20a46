"""How much noise certificates cost: certified σ over the σ at which the estimated δ is the promised one.

    python benchmarks/tightness.py [--most-steps N]

b-min-sep beside balls in bins with as many steps and, on average, as many participations; BSR with at most 8 bands.
"""

from __future__ import annotations

import argparse
import time

from quell import privacy, strategy, workload
from quell.schemes import BallsInBins, BMinSep

CASES = [  # steps, separation, rate, ε, δ
    (50, 8, 0.3, 0.5, 1e-5),
    (50, 8, 0.3, 8.0, 1e-10),
    (100, 8, 0.1, 2.0, 1e-6),
    (100, 16, 0.06, 1.0, 1e-8),
    (200, 16, 0.06, 4.0, 1e-5),
    (400, 32, 0.05, 8.0, 1e-5),
    (500, 32, 0.02, 2.0, 1e-10),
    (1000, 64, 0.02, 8.0, 1e-6),
    (2000, 64, 0.02, 0.5, 1e-5),
]


def measured(scheme: BMinSep | BallsInBins, epsilon: float, delta: float) -> tuple[float, str, float]:
    """Certified over estimated σ, whether draws certified it, and CPU seconds."""
    built = strategy.build("bsr", workload.prefix(scheme.steps), scheme.participation, bands=min(8, scheme.separation))
    began = time.process_time()
    found = privacy.calibrate(built, scheme, epsilon, delta)
    seconds = time.process_time() - began
    about = privacy.estimate(built, scheme, epsilon, delta).noise_multiplier
    return found.noise_multiplier / about, "draws" if found.failure_probability else "no draws", seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-steps", type=int, default=2000, help="leave out longer runs")
    most = parser.parse_args().most_steps
    print("| steps | b | rate | ε | δ | b_min_sep | by | CPU s | balls_in_bins | by | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for steps, separation, rate, epsilon, delta in CASES:
        if steps > most:
            continue
        chain = BMinSep(steps, separation, rate)
        cells = [f"{steps:,}", str(separation), f"{rate:g}", f"{epsilon:g}", f"{delta:g}"]
        for scheme in (chain, BallsInBins(steps, max(separation, round(1 / chain.fraction)))):
            ratio, how, seconds = measured(scheme, epsilon, delta)
            cells += [f"{ratio:.3f}", how, f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
