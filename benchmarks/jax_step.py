"""What noise and private steps cost in JAX, as ratios within the same run.

    python benchmarks/jax_step.py [--elements 100000000] [--rounds 15] [--width 1024]

Noise: adding a plan's row to that many float32 numbers, as a multiple of `jax.random.normal` + add, for λCGD and for
BISR with 4 bands (p = 4). Step: an MLP with clipped gradients, as a multiple of the step without
privacy. jax-privacy, where it is installed, makes noise with the same C⁻¹ (its dense noising matrix, which is how it
remakes old draws) and clips with its own `clipped_grad`. Contenders take turns in a shuffled order; medians count.
Nothing is written: what is printed belongs to the machine it ran on.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import quell.jax
from quell import workload
from quell.noise import Key, NoiseSpec, NoiseStream
from quell.participation import Participation
from quell.strategy import build

try:
    import jax_privacy
except ImportError:
    jax_privacy = None

STEPS = 1000
MECHANISMS = {"λCGD": ("lambda_cgd", {"lambda": 0.9}), "BISR, p = 4": ("bisr", {"bands": 4})}
Contender = Callable[[], Any]


def compared(title: str, baseline: str, contenders: dict[str, Contender], rounds: int) -> None:
    """Print every contender's median time, and its ratio to the baseline's."""
    for run in contenders.values():  # compile, and let recurrences get past their first steps
        for _ in range(5):
            jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            start = time.perf_counter()
            jax.block_until_ready(contenders[name]())
            times[name].append(time.perf_counter() - start)
    base = statistics.median(times[baseline])
    print(f"\n{title}")
    for name, found in times.items():
        print(f"  {name:<28} {statistics.median(found) * 1e3:10.3f} ms   {statistics.median(found) / base:6.2f}x")


def stepping(transform: optax.GradientTransformation, sums: Any) -> Contender:
    """One update after the other, on sums that stay; the state is donated."""
    update = jax.jit(transform.update, donate_argnums=1)
    held = [transform.init(sums)]

    def run() -> Any:
        noisy, held[0] = update(sums, held[0])
        return noisy

    return run


def noise(elements: int, rounds: int) -> None:
    sums = jnp.zeros(elements)
    plain = jax.jit(lambda key, sums: sums + jax.random.normal(key, sums.shape))
    keys = iter(jax.random.split(jax.random.key(0), 10_000))
    contenders: dict[str, Contender] = {"jax.random.normal + add": lambda: plain(next(keys), sums)}
    for title, (family, options) in MECHANISMS.items():
        strategy = build(family, workload.prefix(STEPS), Participation(STEPS, 100), **options)
        spec = NoiseSpec(strategy.recurrence, STEPS, 1.0)
        for generator in ("chacha20", "chacha8", "philox"):
            made = quell.jax.privatize(spec, sums, expected_batch_size=1.0, key=Key.generate(), generator=generator)
            contenders[f"{title}, {generator}"] = stepping(made, sums)
        if jax_privacy is not None:
            noising = np.linalg.inv(strategy.matrix()).astype(np.float32)
            noising[np.abs(noising) < 1e-7] = 0  # what inversion leaves off the bands
            theirs = jax_privacy.noise_addition.matrix_factorization_privatizer(
                jnp.asarray(noising), stddev=1.0, prng_key=0
            )
            contenders[f"{title}, jax-privacy"] = stepping(theirs, sums)
    compared(f"Noise for {elements:,} elements", "jax.random.normal + add", contenders, rounds)


def bits(elements: int = 1 << 20) -> None:
    """How far the noise of this device is NumPy's: normals of one row whose scale is 1."""
    strategy = build("lambda_cgd", workload.prefix(STEPS), Participation(STEPS, 100), **MECHANISMS["λCGD"][1])
    spec = NoiseSpec(strategy.recurrence, STEPS, 1.0)
    for generator in ("chacha20", "philox"):
        sums, expected = jnp.zeros(elements), np.zeros(elements, np.float32)
        made = quell.jax.privatize(spec, sums, expected_batch_size=1.0, seed=1, generator=generator)
        found, _ = made.update(sums, made.init(sums))
        NoiseStream(spec, [elements], key=Key.from_seed(1), generator=generator).add_(expected)
        count = int(np.sum(np.asarray(found) != expected))
        worst = float(np.max(np.abs(np.asarray(found) - expected)))
        print(f"{generator}: {count:,} of {elements:,} releases differ from the CPU's; the most by {worst:.2e}")


def step(width: int, rounds: int, batch_size: int = 256) -> None:
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = {"in": (784, width), "hidden": (width, width), "out": (width, 10)}
    params = {
        name: jax.random.normal(key, s) / s[0] ** 0.5 for key, (name, s) in zip(keys, shapes.items(), strict=False)
    }
    batch = jax.random.normal(keys[3], (batch_size, 784)), jnp.arange(batch_size) % 10

    def loss(params: Any, x: Any, y: Any) -> Any:
        hidden = jax.nn.relu(jax.nn.relu(x @ params["in"]) @ params["hidden"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], y)

    def mean(params: Any, x: Any, y: Any) -> Any:
        return jax.vmap(loss, (None, 0, 0))(params, x, y).mean()

    strategy = build("lambda_cgd", workload.prefix(STEPS), Participation(STEPS, 100), **MECHANISMS["λCGD"][1])
    spec = NoiseSpec(strategy.recurrence, STEPS, 1.0)
    own = quell.jax.privatize(spec, params, expected_batch_size=batch_size, key=Key.generate())
    clipped = quell.jax.clipped_grad(loss, 1.0, micro_batch=64)
    contenders = {
        "not private": trained(jax.grad(mean), optax.sgd(0.1), params, batch),
        "quell.jax": trained(lambda p, *b: clipped(p, b), optax.chain(own, optax.sgd(0.1)), params, batch),
    }
    if jax_privacy is not None:
        theirs = jax_privacy.clipped_grad(
            loss,
            l2_clip_norm=1.0,
            batch_argnums=(1, 2),
            keep_batch_dim=False,
            microbatch_size=64,
            normalize_by=batch_size,
        )
        noising = np.tril(np.linalg.inv(strategy.matrix()), 0).astype(np.float32)
        noising[np.abs(noising) < 1e-7] = 0
        added = jax_privacy.noise_addition.matrix_factorization_privatizer(
            jnp.asarray(noising), stddev=1 / batch_size, prng_key=0
        )
        contenders["jax-privacy"] = trained(theirs, optax.chain(added, optax.sgd(0.1)), params, batch)
    compared(f"Step of an MLP of width {width:,}, batch {batch_size}", "not private", contenders, rounds)


def trained(gradients: Callable[..., Any], optimizer: Any, params: Any, batch: Any) -> Contender:
    @jax.jit
    def one(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(gradients(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    held = [(params, optimizer.init(params))]

    def run() -> Any:
        held[0] = one(*held[0])
        return held[0][0]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; jax-privacy: {jax_privacy is not None}")
    bits()
    noise(options.elements, options.rounds)
    step(options.width, options.rounds)


if __name__ == "__main__":
    main()
