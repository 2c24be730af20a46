"""Where bounds without draws are closer than certificates by draws, for balls in bins: noise of both over the estimate.

    python benchmarks/draws_or_not.py [--quick] [--out FILE]

"lower" and "upper" are the noise at which the bounds of `quell.privacy.shared` reach δ = 1e-5, "Rényi" the noise of the
older bound without draws, and "draws" what importance sampling alone certifies (to 0.15% where it was not used); all
divided by the estimated noise.
"certified" names what a plan would use. Independent noise needs neither: it is convolved exactly.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

from quell import strategy, workload
from quell.privacy import importance
from quell.privacy.accountant import FAILURE_SHARE
from quell.privacy.bin_pair import BinPair
from quell.privacy.mixture import BinAccountant
from quell.privacy.tilting import sampling_free
from quell.schemes import BallsInBins

DELTA = 1e-5
STRATEGIES: dict[str, tuple[str, dict[str, float]]] = {
    "C = I": ("identity", {}),
    "BISR p=4": ("bisr", {"bands": 4}),
    "λCGD λ=0.95": ("lambda_cgd", {"lambda": 0.95}),
    "band_inv p=4": ("band_inv", {"bands": 4}),
    "BLT": ("blt", {}),
}
RUNS = [(400, 8), (1000, 100), (3900, 390)]  # steps, bins
EPSILONS = (0.5, 2.0, 9.0)


def crossing(function: Callable[[float], float], about: float) -> float:
    """The noise at which a falling bound reaches δ."""
    low, high = math.log(0.2 * about), math.log(8 * about)
    for _ in range(14):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(math.exp(middle)) > DELTA else (low, middle)
    return math.exp(high)


def by_draws(accountant: BinAccountant, epsilon: float, about: float) -> float:
    """The noise at which a certificate by draws is expected to come out at δ, its failure probability included."""
    failure = DELTA * FAILURE_SHARE / 8

    def upper(sigma: float) -> float:
        size = accountant._size(careful=True)
        return importance.scout(BinPair(accountant.bins, sigma), epsilon, failure, size).expected_upper

    low, high = math.log(about), math.log(1.1 * about)
    for _ in range(6):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if upper(math.exp(middle)) > DELTA * (1 - FAILURE_SHARE) else (low, middle)
    return math.exp(high)


def row(name: str, steps: int, bins: int, epsilon: float) -> str:
    family, parameters = STRATEGIES[name]
    scheme = BallsInBins(steps, bins)
    built = strategy.build(family, workload.prefix(steps), scheme.participation, **parameters)
    accountant = scheme.account(built)
    assert isinstance(accountant, BinAccountant)
    about = accountant.estimate_sigma(epsilon, DELTA)[0]
    began = time.process_time()
    sigma, certificate = accountant.certified_sigma(epsilon, DELTA)
    seconds = time.process_time() - began
    cells = [name, f"{steps:,}", str(bins), f"{epsilon:g}", f"{about:.4g}"]
    if accountant.statistical:
        shared = accountant._shared

        def renyi(noise: float) -> float:
            return max(sampling_free(BinPair(accountant.bins, noise), way, epsilon) for way in importance.DIRECTIONS)

        found = [
            crossing(lambda noise: shared.lower(noise, epsilon), about),
            crossing(lambda noise: shared.upper(noise, epsilon, DELTA), about),
            crossing(renyi, about),
            sigma if certificate.failure else by_draws(accountant, epsilon, about),
        ]
        cells += [f"{noise / about:.4f}" if noise > 0.2001 * about else "< 0.2" for noise in found]
    else:
        cells += [""] * 4
    how = "draws" if certificate.failure else "no draws" if accountant.statistical else "exact"
    return "| " + " | ".join([*cells, f"{sigma / about:.4f}", how, f"{seconds:.1f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the first run, at ε = 1")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    lines = ["| strategy | n | b | ε | estimated σ | lower | upper | Rényi | draws | certified | by | CPU s |"]
    lines.append("|" + "---|" * 12)
    print("\n".join(lines), flush=True)
    for steps, bins in RUNS[:1] if options.quick else RUNS:
        for name in STRATEGIES:
            for epsilon in (1.0,) if options.quick else EPSILONS:
                lines.append(row(name, steps, bins, epsilon))
                print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
