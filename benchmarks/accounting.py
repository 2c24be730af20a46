"""Certified noise under balls-in-bins sampling: time and width, beside jax-privacy's Monte-Carlo accountant.

    python benchmarks/accounting.py [--peer PYTHON] [--quick] [--out FILE] [--cases FILE]

Quell: one whole `calibrate` in a fresh process (search, both directions, certificate). jax-privacy (`--peer`, an
interpreter of an environment that has it): its own rate of privacy-loss samples, both directions, times the number
that its own `minimum_samples_to_calibrate` asks for to report δ = 1e-5 at the noise that Quell certified, for a single
noise level: its best case, since a sweep needs that for every level. The product is an extrapolation; nobody can wait
for it. `brute_force_gpu.py` puts plain Monte-Carlo noise beside the certified one, from the file that `--cases` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

Case = dict[str, Any]
DELTA = 1e-5
STRATEGIES: dict[str, tuple[str, dict[str, float]]] = {
    "C = I": ("identity", {}),
    "λCGD λ=0.95": ("lambda_cgd", {"lambda": 0.95}),
    "BISR p=16": ("bisr", {"bands": 16}),
}
CASES: list[Case] = [
    *({"strategy": s, "n": 3900, "b": 390, "epsilon": e} for s in STRATEGIES for e in (0.5, 2.0, 8.0)),
    *({"strategy": s, "n": 10**5, "b": 10**4, "epsilon": e} for s in STRATEGIES for e in (2.0, 8.0)),
]
PEER_SAMPLES = 200


def quell_side(case: Case) -> Case:
    from quell import privacy, strategy, workload
    from quell.schemes import BallsInBins

    name, parameters = STRATEGIES[case["strategy"]]
    scheme = BallsInBins(case["n"], case["b"])
    began = time.perf_counter()
    built = strategy.build(name, workload.prefix(case["n"]), scheme.participation, **parameters)
    found = privacy.calibrate(built, scheme, case["epsilon"], DELTA)
    seconds = time.perf_counter() - began
    about = privacy.estimate(built, scheme, case["epsilon"], DELTA).noise_multiplier
    assert found.bracket is not None
    return {
        "seconds": seconds,
        "sigma": found.noise_multiplier,
        "estimate": about,
        "bracket": found.bracket,
        "method": found.method,
        "delta": accountant_estimate(built, scheme, found.noise_multiplier, case["epsilon"]),
        "column": list(built.coefficients),
    }


def accountant_estimate(built: Any, scheme: Any, sigma: float, epsilon: float) -> float:
    """δ without its confidence margin, which is what a sampler's mean comes out at."""
    from quell.privacy.accounting import _accountant

    return _accountant(built, scheme).estimate(sigma, epsilon, True)[0]


def peer_side(case: Case) -> Case:
    from jax_privacy import batch_selection
    from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

    scheme = batch_selection.BallsInBinsSampling(iterations=case["n"], cycle_length=case["b"])
    column = np.array(case["column"])
    began = time.perf_counter()
    for positive in (True, False):
        sample_generation.get_privacy_loss_sample(
            scheme, case["sigma"], column, seed=1, positive_sample=positive, num_samples=PEER_SAMPLES
        )
    rate = (time.perf_counter() - began) / PEER_SAMPLES
    return {"rate": rate, "samples": delta_calculation.minimum_samples_to_calibrate(case["delta"], DELTA)}


def run(python: str, side: str, case: Case) -> Case:
    command = [python, __file__, "--side", side]
    done = subprocess.run(command, input=json.dumps(case), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Case = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}")
    say("")
    say("| strategy | n | b | ε | Quell s | certified σ | above estimate | how | peer draws | peer s | times faster |")
    say("|---|---|---|---|---|---|---|---|---|---|---|")
    kept = []
    for case in CASES:
        if options.quick and case["n"] > 3900:
            continue
        ours = run(sys.executable, "quell", case)
        kept.append({**case, **{key: ours[key] for key in ("sigma", "estimate")}})
        peer = ["", "", ""]
        if options.peer and case["n"] == 3900:
            theirs = run(options.peer, "peer", {**case, **ours})
            seconds = theirs["rate"] * theirs["samples"]
            peer = [f"{theirs['samples']:.2g}", f"{seconds:.2g}", f"{seconds / ours['seconds']:.2g}"]
        cells = [
            case["strategy"],
            f"{case['n']:,}",
            f"{case['b']:,}",
            f"{case['epsilon']:g}",
            f"{ours['seconds']:.1f}",
            f"{ours['sigma']:g}",
            f"{ours['sigma'] / ours['estimate'] - 1:.2%}",
            ours["method"],
            *peer,
        ]
        say("| " + " | ".join(cells) + " |")
    if options.cases:
        options.cases.write_text(json.dumps(kept, indent=1) + "\n")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="an interpreter with jax-privacy")
    parser.add_argument("--quick", action="store_true", help="leave out n = 100,000")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--cases", type=Path, help="write the noise levels for brute_force_gpu.py to this file")
    parser.add_argument("--side", choices=["quell", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        compare(options)
    else:
        print(json.dumps({"quell": quell_side, "peer": peer_side}[options.side](json.load(sys.stdin))))


if __name__ == "__main__":
    main()
