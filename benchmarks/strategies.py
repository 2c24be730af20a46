"""Optimised strategies: time and loss reached, Quell beside jax-privacy, in one run on one machine.

    python benchmarks/strategies.py [--peer PYTHON] [--quick] [--out FILE]

`--peer` is an interpreter with jax-privacy installed (`pip install jax-privacy` in an environment of its own); without
it only Quell runs. Seconds are CPU-seconds on one core, which other work on the machine disturbs less. Each case
starts in a fresh process, so both sides pay for compilation in the time shown. Imports do not count. Quell's kernels
come from numba's cache after the first run, as a user's do. Losses of both sides are computed by the same float64 code:
sensitivity × ‖A·C⁻¹‖_F/√n on prefix sums, one participation unless k is given.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

Case = dict[str, Any]

CASES: list[Case] = [
    *({"kind": "band_toeplitz", "n": n, "bands": p} for n in (10**4, 10**5, 10**6) for p in (16, 64)),
    *({"kind": "evaluation", "n": n, "bands": 16} for n in (4096, 10**5, 10**6)),
    {"kind": "evaluation", "n": 10**6, "bands": 64},
    *({"kind": "band", "n": n, "bands": 16} for n in (512, 1024, 2048, 4096, 10**5, 10**6)),
    *({"kind": "blt", "n": 10**4, "buffers": d} for d in (3, 4)),
    {"kind": "blt", "n": 3900, "k": 10, "buffers": 3},
    *({"kind": "dense", "n": n} for n in (512, 1024)),
    *({"kind": "band_inv", "n": n, "k": 10, "bands": 16} for n in (3900, 10**5, 10**6)),
]


def peer_can(case: Case) -> bool:
    """jax-privacy has no banded-inverse optimiser, and its exact banded one needs O(n²) time and much memory."""
    return case["kind"] != "band_inv" and (case["kind"] not in ("band", "evaluation") or case["n"] <= 4096)


def quell_side(case: Case) -> tuple[dict[str, float], np.ndarray | None]:
    os.environ["QUELL_CACHE"] = "off"
    import scipy.optimize
    import scipy.signal  # noqa: F401 - imported here so that no case pays for it

    from quell import strategy, workload
    from quell.algebra import banded, dense  # noqa: F401
    from quell.participation import Participation

    n = case["n"]
    task, pattern = workload.prefix(n), Participation(n, n // case.get("k", 1))
    if case["kind"] == "evaluation":
        start = strategy.build("bsr", task, pattern, bands=case["bands"], column_normalise=True).row_bands
        times = []
        for _ in range(6):
            began = time.process_time()
            banded.Loss(start.shape, task.inverse_bands)(start)
            times.append(time.process_time() - began)
        return {"seconds": sorted(times[1:])[2], "peak": _peak()}, None
    began = time.process_time()
    options = {name: case[name] for name in ("bands", "buffers") if name in case}
    built = strategy.build(case["kind"], task, pattern, **options)
    seconds = time.process_time() - began
    return {"seconds": seconds, "iterations": built.convergence.iterations, "peak": _peak()}, built.solution


def jax_privacy_side(case: Case) -> tuple[dict[str, float], np.ndarray | None]:
    import jax
    from jax_privacy.matrix_factorization import banded, buffered_toeplitz, dense, toeplitz

    n, kind = case["n"], case["kind"]
    began = time.process_time()
    if kind == "evaluation":  # its own loss, differentiated and compiled; the median of five calls after the first
        start = banded.ColumnNormalizedBanded.default(n, case["bands"])
        evaluate = jax.jit(jax.value_and_grad(lambda c: banded.per_query_error(c).mean()))
        times = []
        for _ in range(6):
            began = time.process_time()
            jax.block_until_ready(evaluate(start))
            times.append(time.process_time() - began)
        return {"seconds": sorted(times[1:])[2], "peak": _peak()}, None
    if kind == "band_toeplitz":
        found = toeplitz.optimize_banded_toeplitz(n, case["bands"])
    elif kind == "band":
        found = banded.optimize(n, bands=case["bands"]).materialize()
    elif kind == "dense":
        found = dense.optimize(n)
    else:
        jax.config.update("jax_enable_x64", True)
        d, k = case["buffers"], case.get("k", 1)
        blt = buffered_toeplitz.optimize(
            n=n, min_sep=n // k, max_participations=k, error="mean", min_buffers=d, max_buffers=d
        )
        found = np.array([np.asarray(blt.output_scale), np.asarray(blt.buf_decay)])
    array = np.asarray(found, dtype=np.float64)
    return {"seconds": time.process_time() - began, "peak": _peak()}, array


def run(python: str, side: str, case: Case, limit: float) -> tuple[Case, np.ndarray | None]:
    """One case in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "solution.npy"
        command = [python, __file__, "--side", side, "--case", json.dumps(case), "--target", str(target)]
        try:
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
        except subprocess.TimeoutExpired:
            return {"note": f"more than {limit:.0f}"}, None
        if done.returncode:
            return {"note": (done.stderr.strip().splitlines() or ["failed"])[-1][:80]}, None
        return json.loads(done.stdout.splitlines()[-1]), np.load(target) if target.exists() else None


def loss(case: Case, solution: np.ndarray | None) -> float:
    """sensitivity × RMSE of what either side returned, by one piece of code."""
    if solution is None:
        return float("nan")
    import scipy.linalg

    from quell import workload
    from quell.algebra import blt
    from quell.analysis.error import error
    from quell.analysis.sensitivity import sensitivity
    from quell.participation import Participation
    from quell.strategy import BandedStrategy, ToeplitzStrategy

    n, kind = case["n"], case["kind"]
    task, pattern = workload.prefix(n), Participation(n, n // case.get("k", 1))
    if kind == "band_toeplitz":
        c = ToeplitzStrategy("c", n, solution)
    elif kind == "band_inv":
        c = ToeplitzStrategy("c", n, given_noising=solution)
    elif kind == "blt":
        if case["side"] == "quell":
            found = blt.from_gaps(*solution)
            c = ToeplitzStrategy("c", n, blt.coefficients(found, n), blt.noising_coefficients(found, n))
        else:  # scales and decays
            sums = sum(scale * decay ** np.arange(n - 1.0) for scale, decay in solution.T)
            c = ToeplitzStrategy("c", n, np.concatenate([[1.0], sums]))
    elif case["side"] == "peer":  # a dense matrix
        decoder = scipy.linalg.solve_triangular(solution.T, np.tri(n).T).T
        return float(np.linalg.norm(decoder) / np.sqrt(n) * np.linalg.norm(solution, axis=0).max())
    else:
        c = BandedStrategy("c", solution)
    return error(c, task).rmse * sensitivity(c, pattern).value


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def compare(options: argparse.Namespace) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}")
    say("")
    say("| case | Quell s | peer s | times faster | Quell loss | peer loss / Quell loss − 1 | Quell GiB | peer GiB |")
    say("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if options.quick and (case["n"] >= 10**6 or case["kind"] in ("band", "dense")):
            continue
        if options.only and case["kind"] not in options.only.split(","):
            continue
        ours, solution = run(sys.executable, "quell", case, 1200)
        theirs: Case = {"note": ""}
        found = None
        if options.peer and peer_can(case):
            theirs, found = run(options.peer, "jax_privacy", case, options.limit)
        mine = loss({**case, "side": "quell"}, solution)
        settings = " ".join(f"{key}={case[key]}" for key in ("bands", "buffers", "k") if key in case)
        faster = f"{theirs['seconds'] / ours['seconds']:.3g}" if "seconds" in theirs and "seconds" in ours else ""
        cells = [
            f"{case['kind']} n={case['n']:,} {settings}",
            f"{ours['seconds']:.3g}" if "seconds" in ours else ours["note"],
            f"{theirs['seconds']:.3g}" if "seconds" in theirs else theirs["note"],
            faster,
            "" if np.isnan(mine) else f"{mine:.8g}",
            "" if found is None else f"{loss({**case, 'side': 'peer'}, found) / mine - 1:.1e}",
            f"{ours.get('peak', float('nan')):.2f}",
            f"{theirs['peak']:.2f}" if "peak" in theirs else "",
        ]
        say("| " + " | ".join(cells) + " |")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="an interpreter with jax-privacy")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which a peer's case is given up")
    parser.add_argument("--only", default="", help="run only cases whose kind is in this comma-separated list")
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--side", choices=["quell", "jax_privacy"], help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        compare(options)
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    facts, solution = {"quell": quell_side, "jax_privacy": jax_privacy_side}[options.side](options.case)
    if solution is not None:
        np.save(options.target, solution)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
