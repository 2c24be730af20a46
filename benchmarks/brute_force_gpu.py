"""Plain Monte Carlo for balls-in-bins, 10⁸ draws a strategy on a GPU, beside Quell's certified noise.

    python benchmarks/brute_force_gpu.py benchmarks/results/accounting_cases.json [--draws 1e8] [--out FILE]

Shares no code with quell.privacy: outputs y ∈ Rⁿ are drawn whole, from the mixture over bins and from noise alone, and
the privacy loss is ln mean_j exp(⟨y, m_j⟩/σ² − ‖m_j‖²/2σ²) with dense m_j. The same draws serve all noise levels; the
level at which the larger δ of the two directions crosses 1e-5 is interpolated. At 10⁸ draws δ is known to about 3%, σ
to about 0.2%.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from scipy.signal import lfilter

DELTA = 1e-5
GRID = (0.985, 1.0, 1.015)  # times the estimated noise
CHUNK = 1 << 16


def modes(strategy: str, n: int, b: int) -> np.ndarray:
    """(b, n) what an example in bin j adds to C·G."""
    impulse = np.zeros(n)
    impulse[0] = 1.0
    if strategy.startswith("λCGD"):
        column = 0.95 ** np.arange(n)
    elif strategy.startswith("BISR"):
        inverse = np.cumprod([1.0, *((2 * k - 3) / (2 * k) for k in range(1, 16))])
        column = lfilter([1.0], inverse, impulse)
    else:
        column = impulse
    takes_part = np.zeros((b, n))
    for j in range(b):
        takes_part[j, j::b] = 1.0
    return np.stack([np.convolve(row, column)[:n] for row in takes_part])


def deltas(m: torch.Tensor, levels: list[tuple[float, float]], draws: int) -> np.ndarray:
    """(levels, 2) δ of removing and of adding an example at each (σ, ε)."""
    b, n = m.shape
    gram = m @ m.T
    half = 0.5 * gram.diagonal()
    sums = torch.zeros((len(levels), 2), dtype=torch.float64, device=m.device)
    random = torch.Generator(m.device).manual_seed(20261115)
    for _ in range(draws // CHUNK):
        noise = torch.randn((CHUNK, n), generator=random, device=m.device) @ m.T
        own = torch.randint(0, b, (CHUNK,), generator=random, device=m.device)
        moved = gram[own]
        for i, (sigma, epsilon) in enumerate(levels):
            quiet = noise / sigma - half / sigma**2
            for side, exponent, sign in ((0, quiet + moved / sigma**2, 1.0), (1, quiet, -1.0)):
                loss = sign * (torch.logsumexp(exponent, dim=1) - math.log(b))
                sums[i, side] += -torch.expm1((epsilon - loss.double()).clamp(max=0.0)).sum()
    return (sums / (draws // CHUNK * CHUNK)).cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--draws", type=float, default=1e8)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    cases = [case for case in json.loads(options.cases.read_text()) if case["n"] == 3900]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = [f"{name}, torch {torch.__version__}, {options.draws:.0e} draws a strategy", ""]
    lines += [
        "| strategy | ε | brute-force σ | ± | certified σ | certified above brute force |",
        "|---|---|---|---|---|---|",
    ]
    for strategy in dict.fromkeys(case["strategy"] for case in cases):
        began = time.perf_counter()
        chosen = [case for case in cases if case["strategy"] == strategy]
        m = torch.tensor(modes(strategy, 3900, 390), dtype=torch.float32, device=device)
        levels = [(case["estimate"] * factor, case["epsilon"]) for case in chosen for factor in GRID]
        found = deltas(m, levels, int(options.draws)).max(axis=1).reshape(len(chosen), len(GRID))
        for case, row in zip(chosen, found, strict=True):
            sigmas = case["estimate"] * np.array(GRID)
            sigma = math.exp(np.interp(-math.log(DELTA), -np.log(row), np.log(sigmas)))
            slope = math.log(row[-1] / row[0]) / math.log(GRID[-1] / GRID[0])
            error = 2 / math.sqrt(DELTA * options.draws) / abs(slope)  # at most: variance ≤ mean for values in [0, 1]
            lines.append(
                f"| {strategy} | {case['epsilon']:g} | {sigma:.4f} | {error:.2%} | {case['sigma']:g} "
                f"| {case['sigma'] / sigma - 1:.2%} |"
            )
        print(f"{strategy}: {time.perf_counter() - began:.0f} s", flush=True)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
