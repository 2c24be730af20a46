"""Is the noise on this GPU right, and what does a step of it cost?

    PYTHONPATH=src python benchmarks/noise_gpu.py --out results/ [--tune] [--sizes 10000000,100000000,1000000000]

First every Triton kernel is checked against the CPU path (itself tested against the NumPy reference), then the table:
each kind of noise for 10⁷, 10⁸ and 10⁹ float32 parameters, as multiples of a device copy and of torch's randn + add in
the same run. Times are medians over CUDA-graph replays where the work can be captured. A failing case prints its
exception and the run goes on; `--budget` seconds after the start no new case begins.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from quell.noise import Key, NoiseSpec, NoiseStream, Shard, generators, triton_kernels
from quell.noise.cpu import CpuEngine
from quell.noise.gpu import GpuEngine
from quell.strategy.recurrence import Exponentials, Fenwick, Recurrence, Regenerate, Ring

DEVICE = torch.device("cuda")
STEPS = 10**5
GENERATORS = ("philox", "chacha8", "chacha20")


def half_power(bands: int) -> np.ndarray:
    """The first coefficients of (1 − x)^½, the noising of BISR."""
    return np.cumprod(np.concatenate([[1.0], (np.arange(1, bands) - 1.5) / np.arange(1, bands)]))


def half_power_inverse(bands: int) -> np.ndarray:
    """The first coefficients of (1 − x)^−½, the C of BSR."""
    return np.cumprod(np.concatenate([[1.0], (np.arange(1, bands) - 0.5) / np.arange(1, bands)]))


CASES: dict[str, Recurrence] = {
    "independent": Regenerate(np.ones(1)),
    "λCGD": Regenerate(np.array([1.0, -0.95])),
    "BISR p=4": Regenerate(half_power(4)),
    "BISR p=16": Regenerate(half_power(16)),
    "BISR p=16, 4 kept": Regenerate(half_power(16)),
    "BISR p=16, 8 kept": Regenerate(half_power(16)),
    "BISR p=16, 15 kept": Regenerate(half_power(16)),
    "ring b=4": Ring(half_power_inverse(4)),
    "ring b=16": Ring(half_power_inverse(16)),
    "ring b=64": Ring(half_power_inverse(64)),
    "BLT d=4": Exponentials(np.array([-0.05, -0.02, -0.01, -0.001]), np.array([0.5, 0.8, 0.9, 0.99])),
}
KEPT = {"BISR p=16, 4 kept": 4, "BISR p=16, 8 kept": 8, "BISR p=16, 15 kept": 15}  # old draws; the others are remade


class Report:
    """Prints as it goes, and keeps what was printed."""

    def __init__(self, out: Path | None, budget: float) -> None:
        self.out, self.start, self.budget = out, time.perf_counter(), budget
        self.lines: list[str] = []
        self.data: dict[str, Any] = {"cases": []}

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)
        if self.out is not None:
            (self.out / "noise_gpu.md").write_text("\n".join(self.lines) + "\n", encoding="utf-8")
            (self.out / "noise_gpu.json").write_text(json.dumps(self.data, indent=1, ensure_ascii=False) + "\n")

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """The action's result; None, with the reason printed, if it failed or time is up."""
        if time.perf_counter() - self.start > self.budget:
            self.say(f"{name}: left out, the time is up")
            return None
        try:
            return action()
        except torch.cuda.OutOfMemoryError:
            self.say(f"{name}: left out, too little memory")
        except Exception as problem:
            where = traceback.format_exc().strip().splitlines()[-3:]
            self.say(f"{name}: FAILED, {type(problem).__name__}: {str(problem)[:500]} | {' '.join(where)[:400]}")
        finally:
            torch.cuda.empty_cache()
        return None


# ---- is it right? ---------------------------------------------------------------------------------------------------


def validate(report: Report) -> None:
    report.say("\n## Against the CPU path\n")
    report.say("| noise | generator | gradients | elements | max abs deviation | elements that differ |")
    report.say("|---|---|---|---|---|---|")
    small = (Shard(0, 12_345, 300_000), Shard(7, 0, 0), Shard(2, 2**40 + 5, 1_000), Shard(3, 0, 1))
    large = (Shard(0, 0, 2**24),)
    recurrences: dict[str, tuple[Recurrence, int]] = {  # and how many old draws to keep
        "independent": (Regenerate(np.ones(1)), 0),
        "λCGD, row scale": (Regenerate(np.array([1.0, -0.95]), np.linspace(0.5, 2, 60)), 0),
        "BISR p=16": (Regenerate(half_power(16)), 0),
        "BISR p=16, 5 kept": (Regenerate(half_power(16)), 5),
        "BISR p=16, 15 kept": (Regenerate(half_power(16)), 15),
        "ring b=4": (Ring(half_power_inverse(4)), 0),
        "ring b=4, per step": (Ring(np.linspace(1, 2, 60)[:, None] * half_power_inverse(4)), 0),
        "BLT d=4": (CASES["BLT d=4"], 0),
        "tree": (Fenwick(60), 0),
    }
    for generator in GENERATORS:
        for name, (recurrence, keep) in recurrences.items():
            case = (report, name, recurrence, keep, generator)
            report.attempt(f"{name} {generator}", lambda case=case: compare(*case, torch.float32, small, 20))
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            case = (report, "λCGD", CASES["λCGD"], 0, generator)
            report.attempt(f"{dtype} {generator}", lambda case=case, dtype=dtype: compare(*case, dtype, small, 3))
        case = (report, "λCGD, all tails", CASES["λCGD"], 0, generator)  # long enough to meet small radius words
        report.attempt(f"tails {generator}", lambda case=case: compare(*case, torch.float32, large, 3))
        report.attempt(f"reference {generator}", lambda g=generator: against_reference(report, g))
        report.attempt(f"graph {generator}", lambda g=generator: graph_replay(report, g))


def compare(
    report: Report,
    name: str,
    recurrence: Recurrence,
    keep: int,
    generator: str,
    dtype: torch.dtype,
    shards: tuple[Shard, ...],
    steps: int,
) -> None:
    recipe, key = NoiseSpec(recurrence, 60, 1.5).recipe(keep), Key.generate()
    cpu, gpu = CpuEngine(recipe, generator, key, shards, None), GpuEngine(recipe, generator, key, shards, DEVICE)
    worst, differ, total = 0.0, 0, 0
    for _ in range(steps):
        a = [torch.randn(shard.length, dtype=torch.float64).to(dtype) for shard in shards]
        b = [tensor.to(DEVICE) for tensor in a]
        cpu.add(a)
        gpu.add(b)
        for one, other in zip(a, b, strict=True):
            gap = (one.double() - other.cpu().double()).abs().nan_to_num(nan=float("inf"))
            worst = max(worst, gap.max().item() if len(gap) else 0.0)
            differ, total = differ + int((gap > 0).sum()), total + len(gap)
    short = str(dtype).removeprefix("torch.")
    report.say(f"| {name} | {generator} | {short} | {total:,} | {worst:.3g} | {differ:,} |")


def against_reference(report: Report, generator: str) -> None:
    key, shard = Key.generate(), Shard(5, 1_000_003, 200_000)
    engine = GpuEngine(NoiseSpec(CASES["independent"], 60, 1.0).recipe(), generator, key, (shard,), DEVICE)
    engine.restore(11, None)
    made = torch.zeros(shard.length, device=DEVICE)
    engine.add([made])
    expected = generators.normals(generator, key, 11, shard.tensor, shard.offset, shard.length)
    gap = np.abs(made.cpu().numpy() - expected)
    line = f"| NumPy reference | {generator} | float32 | {len(gap):,} | {gap.max():.3g} | {np.count_nonzero(gap):,} |"
    report.say(line)


def graph_replay(report: Report, generator: str) -> None:
    """Ten replays of one captured graph against ten calls; then past the end, where all must be NaN."""
    key, size = Key.generate(), 100_000
    spec = NoiseSpec(Regenerate(half_power(4)), 13, 1.0)
    graphed = NoiseStream(spec, [size], key=key, generator=generator)
    called = NoiseStream(spec, [size], key=Key(key.reveal()), generator=generator, replay=True)
    a, b = torch.zeros(size, device=DEVICE), torch.zeros(size, device=DEVICE)
    graph = capture(lambda: graphed.add_(a), lambda: graphed.prepare(a))
    called.add_(b)  # the warm-up of the capture was a step too
    for _ in range(10):
        graph.replay()
        called.add_(b)
    gap, differ = float((a - b).abs().max()), int((a != b).sum())
    step = graphed.step
    for _ in range(3):
        graph.replay()
    past = bool(a.isnan().all())
    what = f"graph replay: step {step} = {called.step}, NaN past the end: {past}"
    report.say(f"| {what} | {generator} | float32 | {size:,} | {gap:.3g} | {differ} |")


# ---- how fast is it? ------------------------------------------------------------------------------------------------


def capture(action: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> torch.cuda.CUDAGraph:
    """A graph of one call, after one call to warm up."""
    if prepare is not None:
        prepare()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph


def milliseconds(action: Callable[[], Any], most_seconds: float = 0.6) -> float:
    """Median over batches of back-to-back calls, timed by events."""
    for _ in range(2):
        action()
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    batch = max(1, min(20, int(0.02 / once)))
    batches = max(3, min(15, int(most_seconds / (once * batch))))
    times = []
    for _ in range(batches):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(batch):
            action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / batch)
    return statistics.median(times)


def baselines(size: int) -> dict[str, float]:
    gradient = torch.zeros(size, device=DEVICE)
    times = {"copy": milliseconds(partial(torch.empty_like(gradient).copy_, gradient))}
    times["randn + add"] = milliseconds(lambda: gradient.add_(torch.randn(size, device=DEVICE)))
    times["naive λCGD"] = milliseconds(naive_lambda_cgd(gradient))
    return times


def naive_lambda_cgd(gradient: torch.Tensor) -> Callable[[], None]:
    """λCGD as a PyTorch user would write it: set the generator back, draw the old noise again, draw the new."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    state = generator.get_state()

    def step() -> None:
        nonlocal state
        generator.set_state(state)
        gradient.add_(torch.randn(len(gradient), device=DEVICE, generator=generator), alpha=-0.95)
        state = generator.get_state()
        gradient.add_(torch.randn(len(gradient), device=DEVICE, generator=generator))

    return step


def time_noise(name: str, generator: str, gradients: list[torch.Tensor]) -> tuple[float, float, int]:
    """(ms by graph replay, ms by plain calls, bytes of device memory taken) of one of CASES."""
    recurrence = CASES[name]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    spec = NoiseSpec(recurrence, STEPS, 1e-3)
    stream = NoiseStream(spec, gradients, key=Key.generate(), generator=generator)
    if name in KEPT:  # so many, whether the cost model finds it worth it or not
        stream._memory, stream._recipe = None, spec.recipe(KEPT[name])
    torch.cuda.reset_peak_memory_stats()
    for _ in range(recurrence.draws):  # early steps have fewer draws
        stream.add_(gradients)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    plain = milliseconds(lambda: stream.add_(gradients), 0.3)
    graph = capture(lambda: stream.add_(gradients))
    return milliseconds(graph.replay), plain, taken


def table(report: Report, size: int, only: str) -> dict[str, Any]:
    report.say(f"\n## {size:,} float32 parameters\n")
    units = report.attempt("baselines", lambda: baselines(size))
    if units is None:
        return {}
    for name, ms in units.items():
        report.say(f"- {name}: {ms:.4g} ms")
    report.say(
        "\n| noise | generator | ms | × copy | × randn + add | × naive λCGD | % of bandwidth floor "
        "| extra bytes per parameter | ms, plain calls |"
    )
    report.say("|---|---|---|---|---|---|---|---|---|")
    results: dict[str, Any] = {"size": size, **units}
    for name, recurrence in ((name, each) for name, each in CASES.items() if only in name):
        for generator in GENERATORS:
            buffers = KEPT.get(name, recurrence.buffers)
            if 4 * size * (buffers + 2) > 0.9 * torch.cuda.mem_get_info()[0]:
                report.say(f"| {name} | {generator} | left out: {buffers} buffers do not fit | | | | | | |")
                continue

            def measure(name: str = name, generator: str = generator) -> tuple[float, float, int]:
                return time_noise(name, generator, [torch.zeros(size, device=DEVICE)])

            found = report.attempt(f"{name} {generator}", measure)
            if found is None:
                continue
            ms, plain, taken = found
            writes = buffers if isinstance(recurrence, Exponentials) else min(buffers, 1)
            floor = units["copy"] * (2 + buffers + writes) / 2
            results[f"{name} {generator}"] = {"ms": ms, "plain": plain, "bytes": taken, "floor": floor}
            report.data["cases"].append(
                {"size": size, "noise": name, "generator": generator, "ms": ms, "plain_ms": plain}
            )
            report.say(
                f"| {name} | {generator} | {ms:.4g} | {ms / units['copy']:.2f} | {ms / units['randn + add']:.2f} | "
                f"{ms / units['naive λCGD']:.2f} | {100 * floor / ms:.0f} | {taken / size:.4f} | {plain:.4g} |"
            )
    return results


def many_tensors(report: Report) -> float | None:
    """300 tensors of very different sizes against one flat tensor of the same total."""
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(np.log(100), np.log(1e6), 300)).astype(int).tolist()
    flat = time_noise("λCGD", "chacha20", [torch.zeros(sum(sizes), device=DEVICE)])
    split = time_noise("λCGD", "chacha20", [torch.zeros(size, device=DEVICE) for size in sizes])
    ratio = split[0] / flat[0]
    report.say(
        f"\n300 tensors, {sum(sizes):,} parameters, λCGD chacha20: {split[0]:.4g} ms, "
        f"one flat tensor {flat[0]:.4g} ms: {ratio:.2f}× "
        f"(plain calls {split[1]:.4g} and {flat[1]:.4g} ms: {split[1] / flat[1]:.2f}×)"
    )
    return ratio


def goals(report: Report, results: dict[str, Any], ratio: float | None) -> None:
    """The goals of the issue, judged at the size given."""
    report.say(f"\n## Goals, at {results.get('size', 0):,} parameters\n")

    def judge(what: str, value: float, limit: float, at_least: bool = False) -> None:
        met = value >= limit if at_least else value <= limit
        report.say(f"- {'met   ' if met else 'MISSED'} {what}: {value:.3g} (goal {'≥' if at_least else '≤'} {limit})")

    def ms(case: str) -> float:
        return float(results[case]["ms"])

    for case, unit, limit in (
        ("λCGD philox", "randn + add", 0.9),
        ("λCGD chacha20", "naive λCGD", 0.9),
        ("independent philox", "copy", 1.25),
    ):
        if case in results:
            judge(f"{case} / ({unit})", ms(case) / results[unit], limit)
    for case in (f"ring b={bands} {generator}" for generator in GENERATORS for bands in (4, 16, 64)):
        if case in results:
            judge(f"{case}, share of the bandwidth floor", results[case]["floor"] / ms(case), 0.8, at_least=True)
    for case in ("λCGD philox", "BISR p=16 chacha20"):
        if case in results:
            judge(f"{case}, extra bytes per parameter", results[case]["bytes"] / results["size"], 0.01)
    for case in ("BISR p=16 chacha8", "BISR p=16, 8 kept chacha8", "BISR p=16, 8 kept chacha20"):
        if case in results:
            judge(f"{case}, ms per 10⁹ parameters", ms(case) * 1e9 / results["size"], 25)
    if ratio is not None:
        judge("300 tensors / one flat tensor", ratio, 2.0)


SETTINGS = {  # Knobs(span, part, registers): more per program, wider vectors, more or fewer warps at a time
    "philox": ((2048, 256, 64), (1024, 256, 64), (4096, 256, 64), (2048, 256, 80), (2048, 512, 96), (2048, 512, 128)),
    "chacha8": ((1024, 512, 80), (2048, 512, 80), (1024, 512, 64), (1024, 512, 96), (2048, 1024, 128)),
    "chacha20": ((1024, 512, 80), (2048, 512, 80), (1024, 512, 96)),
}


def tune(report: Report, size: int = 10**8) -> None:
    """Other launch settings: what to write at the top of triton_kernels.py."""
    names = ("independent", "λCGD", "BISR p=16", "ring b=16")
    report.say(f"\n## Tuning, {size:,} parameters, ms; a copy takes {baselines(size)['copy']:.4g}\n")
    report.say(f"| generator | span | part | registers | {' | '.join(names)} |")
    report.say("|---|---|---|---|---|---|---|---|")
    for generator, settings in SETTINGS.items():
        kept = triton_kernels.KNOBS[generator]
        for setting in settings:
            triton_kernels.KNOBS[generator] = triton_kernels.Knobs(*setting)

            def measure(generator: str = generator) -> list[float]:
                return [time_noise(n, generator, [torch.zeros(size, device=DEVICE)])[0] for n in names]

            found = report.attempt(f"tuning {generator} {setting}", measure)
            if found is not None:
                report.say(
                    f"| {generator} | {' | '.join(map(str, setting))} | {' | '.join(f'{ms:.4g}' for ms in found)} |"
                )
        triton_kernels.KNOBS[generator] = kept


def header(report: Report) -> None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        card = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        card = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}"
    report.say("# Noise on a GPU\n")
    report.say(f"{card}; {versions}, Python {platform.python_version()}")
    report.data["machine"] = {"card": card, "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", default="10000000,100000000,1000000000")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which no new case begins")
    parser.add_argument("--tune", action="store_true", help="try other launch settings instead of the table")
    parser.add_argument("--no-validate", action="store_true")
    parser.add_argument("--only", default="", help="only noise with this in its name: p=16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU; on a CPU run benchmarks/noise_cpu.py")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out, options.budget)
    header(report)
    if not options.no_validate:
        validate(report)
        report.say(f"\nvalidation took {time.perf_counter() - report.start:.0f} s")
    if options.tune:
        tune(report)
        return
    judged: dict[str, Any] = {}
    ratio = None if options.only else report.attempt("many tensors", lambda: many_tensors(report))
    for size in map(int, options.sizes.split(",")):
        results = table(report, size, options.only)
        judged = results if size == 10**8 or not judged else judged
    report.attempt("goals", lambda: goals(report, judged, ratio))
    report.say(f"\n{time.perf_counter() - report.start:.0f} s in all")


if __name__ == "__main__":
    main()
