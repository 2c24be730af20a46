"""A step's normals on NVIDIA GPUs: one Pallas kernel, which Triton compiles, that keeps all words in registers.

The same numbers as `quell.jax.normals` makes with XLA, where every round of ChaCha would go through memory. A program
is one warp and makes some tiles of the list, one after the other; a lane makes one block of each tile. With
`interpret=True` the kernel runs as traced operations on any device, which is how it is tested without a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas

from quell.jax.arithmetic import Arithmetic, Ptx, Traced, pair, refined, uniform
from quell.jax.normals import Source, product
from quell.noise import generators, normal
from quell.noise.layout import DRAW, LANES, REFINE, WORDS, chacha_rounds, tile_size

TOGETHER = {"chacha20": 2, "chacha8": 2, "philox": 16}  # tiles that a program makes

INTERPRETED = "interpreted"  # a platform for tests
PLATFORMS = ("cuda", INTERPRETED) if find_spec("jax.experimental.pallas.triton") else ()

u32, i32, f32 = jnp.uint32, jnp.int32, jnp.float32


def fresh(
    source: Source, step: Array, taps: Array | None, tensor: Array, tile: Array, interpret: bool = False
) -> Array:
    """(tiles, elements of a tile) the normals of these tiles at one step; with taps, Σ_j taps_j·z_{step−j}.

    Their number is a multiple of `TOGETHER`.
    """
    from jax.experimental.pallas import triton

    generator, together = source.generator, TOGETHER[source.generator]
    words = WORDS[generator]

    def kernel(keys: Any, zero: Any, now: Any, weights: Any, tensors: Any, tiles: Any, made: Any) -> None:
        how: Arithmetic = Traced(zero[0]) if interpret else Ptx()

        def one(number: Array, carried: Array) -> Array:
            owner = tensors[number]
            row = 0 if chacha_rounds(generator) else owner.astype(i32)
            key = [keys[row, i] for i in range(source.keys.shape[1])]
            block = tiles[number] * u32(LANES) + lax.iota(u32, LANES)

            def draw(at: Array) -> list[Array]:
                return _normals(how, generator, key, block, at.astype(u32), owner)

            def add(j: Array, sums: list[Array]) -> list[Array]:
                weight = weights[j]
                return [how.fused(z, weight, x) for z, x in zip(draw(now[0] - j), sums, strict=True)]

            if taps is None:
                noise = draw(now[0])
            else:
                nothing = [jnp.zeros(LANES, f32)] * words
                noise = lax.fori_loop(0, jnp.minimum(len(taps), now[0] + 1), add, nothing)
            for word, values in enumerate(noise):
                made[number, pallas.ds(word * LANES, LANES)] = values
            return carried

        lax.fori_loop(0, together, one, i32(0))

    whole, some = pallas.BlockSpec(), pallas.BlockSpec((together,), lambda i: (i,))
    call = pallas.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((len(tile), tile_size(generator)), f32),
        grid=(len(tile) // together,),
        in_specs=[whole, whole, whole, whole, some, some],
        out_specs=pallas.BlockSpec((together, tile_size(generator)), lambda i: (i, 0)),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="quell_noise",
    )
    weights = jnp.ones(1, f32) if taps is None else taps
    return call(source.keys, source.zero[None], step[None], weights, tensor.astype(u32), tile)


def _normals(
    how: Arithmetic, generator: str, key: list[Array], block: Array, step: Array, tensor: Array
) -> list[Array]:
    """As many arrays of normals as a block has words; each belongs to neighbouring elements."""

    def words(purpose: int) -> list[Array]:
        counter = [block, *(jnp.broadcast_to(word, LANES) for word in (u32(purpose << 16), step, tensor))]
        rounds = chacha_rounds(generator)
        return _chacha(rounds, key, counter) if rounds else _philox(key, counter)

    drawn = words(DRAW)
    radii, angles = drawn[0::2], drawn[1::2]
    u = [uniform(how, w) for w in radii]
    least = radii[0]
    for w in radii[1:]:
        least = jnp.minimum(least, w)

    def finer() -> list[Array]:
        return [refined(how, *each) for each in zip(radii, words(REFINE)[0::2], u, strict=True)]

    u = lax.cond(jnp.min(least) < u32(normal.REFINE_BELOW), finer, lambda: u)
    return [z for each in zip(radii, u, angles, strict=True) for z in pair(how, *each)]


def _chacha(rounds: int, key: list[Array], counter: list[Array]) -> list[Array]:
    shared = [u32(word) for word in generators.CHACHA_CONSTANTS] + key
    start = [jnp.broadcast_to(word, LANES) for word in shared] + counter

    def four_rounds(_: Array, x: list[Array]) -> list[Array]:
        x = list(x)
        generators.double_round(x)
        generators.double_round(x)
        return x

    end = lax.fori_loop(0, rounds // 4, four_rounds, start)
    return [last + first for last, first in zip(end, start, strict=True)]


def _philox(key: list[Array], c: list[Array]) -> list[Array]:
    k0, k1 = key
    for _ in range(10):
        low0, high0 = product(c[0], generators.PHILOX_MULTIPLIERS[0])
        low1, high1 = product(c[2], generators.PHILOX_MULTIPLIERS[1])
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = k0 + u32(generators.PHILOX_KEY_STEPS[0]), k1 + u32(generators.PHILOX_KEY_STEPS[1])
    return c
