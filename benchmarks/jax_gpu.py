"""Noise, private steps and a training run in JAX, beside PyTorch and jax-privacy in the same process.

    PYTHONPATH=src python benchmarks/jax_gpu.py [--data FOLDER] [--markdown FILE] [--parts bits,noise,train,step]

- bits: does this device release the same bits as the compiled CPU path, for every recurrence?
- noise: adding a row to 10⁸ and 10⁹ float32 numbers, for λCGD and BISR with 4 bands (p = 4), beside Quell's Triton
  kernels, `jax.random.normal` + add, and jax-privacy with the same C⁻¹, both ways it has: old draws remade, or kept.
- step: the ConvNet of the CIFAR-10 experiment, with clipping and noise, beside jax-privacy's `clipped_grad` and the
  step without privacy; for each the best of several micro-batches.
- train: that experiment's BISR plan with p = 4, from the same initial weights, in JAX and in PyTorch; three seeds.

Contenders take turns in a shuffled order, several updates in a row; medians count. `--tiny` tries everything on a CPU
in a minute or two. A part that fails says why, and the others go on. jax-privacy takes part where its files, chex and
toolz can be imported; the accounting packages that it imports, and does not use here, may be missing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
sys.path.append(str(Path(__file__).parent.parent / "experiments"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax import Array, lax

import quell.jax
from quell.jax import kernels
from quell.jax.normals import Source
from quell.jax.rows import Row, add_row
from quell.noise import Key, NoiseSpec, NoiseStream, generators
from quell.strategy.recurrence import Exponentials, Fenwick, Recurrence, Regenerate, Ring

STEPS = 2000
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF_POWER = np.array([1.0, -0.5, -0.125, -0.0625])  # of (1 − x)^½: BISR with 4 bands
MECHANISMS = {"λCGD": np.array([1.0, -0.9]), "BISR, p = 4": HALF_POWER}
RECURRENCES: dict[str, Recurrence] = {
    **{name: Regenerate(taps) for name, taps in MECHANISMS.items()},
    "ring, b = 4": Ring(np.array([1.0, 0.5, 0.375, 0.3125])),
    "BLT, d = 2": Exponentials(np.array([-0.05, -0.01]), np.array([0.5, 0.9])),
    "tree": Fenwick(STEPS),
}
PLAN, CLIP, RATE, HE = "BISR p=4 | ε=9 | balls_in_bins | full", 1.0, 5.6, False  # as tuned by experiments/cifar10.py
Turn = Callable[[], Any]  # what it returns is waited for


class Report:
    """Prints as it goes, and keeps what was printed."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.lines, self.deadline = path, list[str](), time.perf_counter() + seconds

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)
        if self.path is not None:
            self.path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        if time.perf_counter() > self.deadline:
            self.say(f"\n{name}: left out, the time is up")
            return None
        try:
            return action()
        except Exception as problem:
            traceback.print_exc()
            self.say(f"\n{name}: FAILED, {type(problem).__name__}: {' '.join(str(problem).split())[:300]}")
            return None

    def compare(self, contenders: dict[str, Turn], baseline: str, rounds: int, in_a_row: int) -> dict[str, float]:
        """A table of the median milliseconds of one update, and its ratio to the baseline's."""
        able: dict[str, Turn] = {}
        for name, turn in contenders.items():  # compile, and let recurrences get past their first steps
            if self.attempt(name, lambda turn=turn: [waited(turn()) for _ in range(5)]) is not None:
                able[name] = turn
        times: dict[str, list[float]] = {name: [] for name in able}
        for _ in range(rounds):
            for name in random.sample(list(able), len(able)):
                start = time.perf_counter()
                for _ in range(in_a_row):
                    last = able[name]()
                waited(last)
                times[name].append((time.perf_counter() - start) / in_a_row * 1e3)
        found = {name: statistics.median(each) for name, each in times.items()}
        self.say(f"\n| | ms | × {baseline} |\n|---|---:|---:|")
        for name, median in found.items():
            self.say(f"| {name} | {median:.3f} | {median / found.get(baseline, float('nan')):.2f} |")
        return found


def waited(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return torch.cuda.synchronize() if result.is_cuda else None
    return jax.block_until_ready(result)


def peer() -> tuple[Any, Any] | None:
    """jax-privacy's modules for clipping and noise; not its __init__, which imports all its accountants."""
    found = find_spec("jax_privacy")
    if found is None or found.submodule_search_locations is None:
        return None
    package = types.ModuleType("jax_privacy")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules.setdefault("jax_privacy", package)
    if find_spec("dp_accounting") is None:
        sys.modules["dp_accounting"] = MagicMock()
    from jax_privacy import clipping, noise_addition

    return clipping, noise_addition


# ---- noise ----------------------------------------------------------------------------------------------------------


def spec_of(recurrence: Recurrence) -> NoiseSpec:
    return NoiseSpec(recurrence, STEPS, 1.0)


def bits(report: Report, elements: int) -> None:
    report.say("\n## Bits against the compiled CPU path\n")
    report.say("| noise | generator | divided by | elements | that differ | by at most, ulps |")
    report.say("|---|---|---:|---:|---:|---:|")
    shapes = {"a": (elements,), "b": (33, 1001), "c": ()}
    cases = [(name, "chacha20", 1.0) for name in RECURRENCES]
    cases += [("λCGD", "chacha20", 515.46), ("λCGD", "chacha8", 1.0), ("λCGD", "philox", 1.0)]
    for name, generator, expected in cases:
        spec, params = spec_of(RECURRENCES[name]), {key: jnp.zeros(shape) for key, shape in shapes.items()}
        made = quell.jax.privatize(spec, params, expected_batch_size=expected, seed=1, generator=generator)
        stream = NoiseStream(spec, list(shapes.values()), key=Key.from_seed(1), generator=generator)
        state, total, count, most = made.init(params), 0, 0, 0
        for step in range(6):
            sums = [np.random.default_rng(step).normal(size=s).astype(np.float32) for s in shapes.values()]
            means, state = made.update(dict(zip(shapes, deepcopy(sums), strict=True)), state)
            stream.add_(sums)
            for mine, other in zip(means.values(), sums, strict=True):
                ours, theirs = np.atleast_1d(np.asarray(mine)), np.atleast_1d(other / np.float32(expected))
                away = np.abs(ours.view(np.int32).astype(np.int64) - theirs.view(np.int32))
                total, count, most = total + away.size, count + int(np.sum(away > 0)), max(most, int(away.max()))
        quell.jax.check(state)
        report.say(f"| {name} | {generator} | {expected:g} | {total:,} | {count:,} | {most} |")


def noise(report: Report, elements: int, rounds: int, others: Any) -> None:
    report.say(f"\n## Noise for {elements:,} float32 numbers, ChaCha20")
    sums = jnp.zeros(elements)
    plain = jax.jit(lambda key, sums: sums + jax.random.normal(key, sums.shape))
    keys = iter(jax.random.split(jax.random.key(0), 10_000))
    baseline = "jax.random.normal + add"
    contenders: dict[str, Turn] = {baseline: lambda: plain(next(keys), sums)}
    for name, taps in MECHANISMS.items():
        spec = spec_of(Regenerate(taps))
        contenders[f"{name}, Triton"] = in_torch(spec, elements)
        made = quell.jax.privatize(spec, sums, expected_batch_size=1.0, key=Key.generate())
        contenders[f"{name}, quell.jax"] = stepping(made, sums)
        contenders[f"{name}, quell.jax, its row alone"] = row_alone(made, sums)
        if others is not None:
            theirs = partial(others[1].matrix_factorization_privatizer, stddev=1.0, prng_key=0)
            dense = sum(np.eye(STEPS, k=-lag, dtype=np.float32) * tap for lag, tap in enumerate(taps))
            contenders[f"{name}, jax-privacy, remade"] = stepping(theirs(jnp.asarray(dense)), sums)
            contenders[f"{name}, jax-privacy, {len(taps) - 1} kept"] = stepping(theirs(kept_draws(others, taps)), sums)
    found = report.compare(contenders, baseline, rounds, 10)
    report.say()
    for name in MECHANISMS:
        triton = found.get(f"{name}, Triton", float("nan"))
        for who in ("quell.jax", "quell.jax, its row alone"):
            report.say(f"- {name}: {who} takes {found[f'{name}, {who}'] / triton:.2f} times Triton's (goal 1.5)")


def in_torch(spec: NoiseSpec, elements: int) -> Turn:
    tensor = torch.zeros(elements, device=DEVICE)
    stream = NoiseStream(spec, [tensor], key=Key.generate())

    def turn() -> torch.Tensor:
        stream.add_([tensor])
        return tensor

    return turn


def stepping(transform: optax.GradientTransformation, sums: Array) -> Turn:
    """One update after the other, on sums that stay; the state is donated."""
    update = jax.jit(transform.update, donate_argnums=1)
    held = [transform.init(sums)]

    def turn() -> Any:
        noisy, held[0] = update(sums, held[0])
        return noisy

    return turn


def row_alone(made: quell.jax.Private, sums: Array) -> Turn:
    """The same row without asking the host for permission: what the device itself takes."""
    host = made.host
    words = jnp.asarray(np.stack([generators.key_words(host.generator, host.key, 0)]))

    @jax.jit
    def row(step: Array, keys: Array, zero: Array, sums: Array) -> Any:
        source = Source(host.generator, keys, zero)
        at = Row.of(host._recipe, step)
        added, _ = add_row(
            host._recipe,
            source,
            host._slices,
            lax.axis_index,
            at,
            [sums],
            [jnp.zeros((0, *sums.shape))],
            host._platform,
        )
        return added[0], step + 1

    held = [jnp.int32(0)]

    def turn() -> Any:
        noisy, held[0] = row(held[0], words, jnp.uint32(0), sums)
        return noisy

    return turn


def kept_draws(others: Any, taps: np.ndarray) -> Any:
    """C⁻¹ as jax-privacy's streaming matrix: the last draws are kept."""
    matrix = others[1].streaming_matrix.StreamingMatrix

    def after(value: Array, kept: Any) -> tuple[Array, Any]:
        row = taps[0] * value + sum(tap * old for tap, old in zip(taps[1:], kept, strict=True))
        return row.astype(value.dtype), (value, *kept[:-1])

    def before(like: Any) -> Any:
        return tuple(jnp.zeros(like.shape, like.dtype) for _ in taps[1:])

    return matrix.from_array_implementation(before, after)


# ---- the ConvNet ----------------------------------------------------------------------------------------------------


def step(report: Report, batch_size: int, rounds: int, micro_batches: list[int], others: Any) -> None:
    from jax_convnet import flax_model, loss_of
    from training import convnet

    report.say(f"\n## A step of the ConvNet, batch {batch_size}")
    graph, params = flax_model(convnet(1, HE))
    loss = loss_of(graph)
    x = jax.random.normal(jax.random.key(1), (batch_size, 32, 32, 3))
    y = jnp.arange(batch_size) % 10
    spec = spec_of(Regenerate(HALF_POWER))

    def mean(params: Any, x: Array, y: Array) -> Array:
        return jax.vmap(loss, (None, 0, 0))(params, x, y).mean()

    contenders = {"not private": updating(jax.grad(mean), optax.sgd(0.1), params, x, y)}
    for micro in micro_batches:
        own = quell.jax.privatize(spec, params, expected_batch_size=batch_size, key=Key.generate())
        sums = quell.jax.clipped_grad(loss, CLIP, micro_batch=micro)
        clipped = partial(lambda sums, params, x, y: sums(params, (x, y), None), sums)
        contenders[f"quell.jax, micro-batch {micro}"] = updating(
            clipped, optax.chain(own, optax.sgd(0.1)), params, x, y
        )
        if others is not None:
            theirs = others[0].clipped_grad(
                loss,
                l2_clip_norm=CLIP,
                batch_argnums=(1, 2),
                keep_batch_dim=False,
                microbatch_size=micro if micro < batch_size else None,
                normalize_by=batch_size,
            )
            added = others[1].matrix_factorization_privatizer(
                kept_draws(others, HALF_POWER), stddev=1 / batch_size, prng_key=0
            )
            optimizer = optax.chain(added, optax.sgd(0.1))
            contenders[f"jax-privacy, micro-batch {micro}"] = updating(theirs, optimizer, params, x, y)
    found = report.compare(contenders, "not private", rounds, 3)
    best = {who: min((ms for name, ms in found.items() if name.startswith(who)), default=float("nan"))
            for who in ("quell.jax", "jax-privacy")}  # fmt: skip
    report.say(
        f"\n- at its best, quell.jax takes {best['quell.jax'] / best['jax-privacy']:.2f} times jax-privacy's (goal 0.8)"
    )


def updating(gradients: Callable[..., Any], optimizer: Any, params: Any, x: Array, y: Array) -> Turn:
    @jax.jit
    def one(params: Any, state: Any, x: Array, y: Array) -> Any:
        updates, state = optimizer.update(gradients(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    held = [(params, optimizer.init(params))]

    def turn() -> Any:
        held[0] = one(*held[0], x, y)
        return held[0][0]

    return turn


# ---- training -------------------------------------------------------------------------------------------------------


def train(report: Report, folder: Path, micro_batch: int, tiny: bool) -> None:
    import training
    from common import PLANS, read_json
    from jax_convnet import trained_in_jax

    line = read_json(PLANS / "cifar10.json")[PLAN]
    pixels = training.read_cifar10(folder, 975 if tiny else None)
    training._start(pixels)
    sets, most = training._data["full"], 2 if tiny else None
    report.say(f"\n## Training: {PLAN}, {'a few' if tiny else line['steps']} steps\n")
    report.say("| seed | JAX, % | s | PyTorch, % | s |\n|---|---:|---:|---:|---:|")
    rows = []
    for seed in (1,) if tiny else (1, 2, 3):
        job = training.Job(PLAN, "full", CLIP, RATE, HE, seed)
        times = [time.perf_counter()]
        accuracies = [trained_in_jax(job, line, pixels, micro_batch, most)]
        times.append(time.perf_counter())
        accuracies.append(training.trained(job, line, *sets, most)[-1])
        times.append(time.perf_counter())
        (jax_s, torch_s), rows = (b - a for a, b in pairwise(times)), [*rows, accuracies]
        report.say(f"| {seed} | {accuracies[0]:.2f} | {jax_s:.1f} | {accuracies[1]:.2f} | {torch_s:.1f} |")
    if len(rows) > 1:
        (mine, theirs), (own_sd, other_sd) = np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1)
        error = float(np.sqrt((own_sd**2 + other_sd**2) / len(rows)))
        report.say(f"\n- JAX {mine:.2f}%, PyTorch {theirs:.2f}%: {mine - theirs:+.2f} ± {error:.2f} (standard error)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with CIFAR-10, for the part train")
    parser.add_argument("--parts", default="bits,noise,train,step")
    parser.add_argument("--elements", default="100000000,1000000000", help="how many numbers noise is added to")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=480.0, help="after so many, nothing new begins")
    parser.add_argument("--markdown", type=Path, help="also write what is printed here")
    parser.add_argument("--tiny", action="store_true", help="few elements, examples and steps, to try the script")
    parser.add_argument("--xla", action="store_true", help="noise by XLA alone, also on a GPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.xla:
        kernels.PLATFORMS = ()
    report, tiny = Report(options.markdown, options.seconds), options.tiny
    others = report.attempt("jax-privacy", peer)
    report.say(
        f"# quell.jax\n\n`benchmarks/jax_gpu.py` on {jax.devices()[0].device_kind}: jax {jax.__version__}, torch "
        f"{torch.__version__}; jax-privacy {'takes part' if others else 'is not there'}"
    )
    sizes = [20_000] if tiny else [int(size) for size in options.elements.split(",")]
    todo: dict[str, Callable[[], Any]] = {
        "bits": lambda: bits(report, 3000 if tiny else 1 << 20),
        "noise": lambda: [noise(report, size, options.rounds, others) for size in sizes],
        "step": lambda: step(report, 8 if tiny else 512, options.rounds, [4, 8] if tiny else [128, 512], others),
        "train": lambda: train(report, options.data, 4 if tiny else 128, tiny),
    }
    for part in options.parts.split(","):
        if part == "train" and options.data is None:
            continue
        start = time.perf_counter()
        report.attempt(part, todo[part])
        print(f"({part}: {time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
