"""The normals of `quell.noise` in XLA: the same key, counters, layout and float32 arithmetic, traced by JAX.

Tests compare the bits with NumPy's reference and with the compiled CPU path; `quell.jax.arithmetic` says why they
agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from quell.jax.arithmetic import Traced, pair, refined, uniform
from quell.noise import generators, normal
from quell.noise.layout import DRAW, LANES, REFINE, WORDS, chacha_rounds

u32 = jnp.uint32


class Source(NamedTuple):
    """What makes the normals. `zero` is 0 in a way that no compiler knows."""

    generator: str
    keys: Array  # (tensors, words): 8 words for ChaCha, the same for all tensors, and 2 for Philox
    zero: Array

    @property
    def how(self) -> Traced:
        return Traced(self.zero)


def normals(source: Source, step: Array, tensor: Array, tile: Array) -> Array:
    """(tiles, W, LANES) the normals of these tiles of these tensors at one step, in the order of elements.

    Second radius words are drawn only if one of the first ones needs them.
    """

    def draw(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        purpose, drawn, _ = state
        words = _words(source, step, tensor, tile, purpose)
        return purpose + 1, jnp.where(purpose == DRAW, words, drawn), words

    def wanted(state: tuple[Array, Array, Array]) -> Array:
        purpose, drawn, _ = state
        return (purpose == DRAW) | ((purpose == REFINE) & jnp.any(drawn[0::2] < u32(normal.REFINE_BELOW)))

    nothing = jnp.zeros((WORDS[source.generator], len(tile), LANES), u32)
    _, words, second = lax.while_loop(wanted, draw, (u32(DRAW), nothing, nothing))
    how, w = source.how, words[0::2]
    u = refined(how, w, second[0::2], uniform(how, w))
    made = jnp.stack(pair(how, w, u, words[1::2]), axis=1)
    return jnp.moveaxis(made.reshape(words.shape), 0, 1)


def _words(source: Source, step: Array, tensor: Array, tile: Array, purpose: Array) -> Array:
    """(W, tiles, LANES) the words of the blocks of these tiles. A tensor's block numbers fit 32 bits here."""
    block = tile[:, None] * u32(LANES) + jnp.arange(LANES, dtype=u32)[None]
    counter = [block, purpose << 16, step.astype(u32), tensor.astype(u32)[:, None]]
    c = [jnp.broadcast_to(word, block.shape) for word in counter]
    rounds = chacha_rounds(source.generator)
    return _chacha(rounds, source.keys[0], jnp.stack(c)) if rounds else _philox(source.keys[tensor], c)


def _chacha(rounds: int, key: Array, counter: Array) -> Array:
    """The four rows of ChaCha's state are arrays (4, tiles, LANES): four quarter rounds are one, on whole rows."""
    constants = jnp.asarray(generators.CHACHA_CONSTANTS, u32)
    start = [jnp.broadcast_to(row[:, None, None], counter.shape) for row in (constants, key[:4], key[4:])] + [counter]

    def quarter_rounds(x: list[Array]) -> list[Array]:
        for places in generators.QUARTER_ROUND:
            generators.mix(x, *places)
            x = list(lax.optimization_barrier(x))  # else XLA computes every row from the first one on, again and again
        return x

    def double_round(_: Any, rows: list[Array]) -> list[Array]:
        x = quarter_rounds(list(rows))
        x = quarter_rounds([jnp.roll(row, -turn, axis=0) for turn, row in enumerate(x)])  # diagonals become columns
        return [jnp.roll(row, turn, axis=0) for turn, row in enumerate(x)]

    end = lax.fori_loop(0, rounds // 2, double_round, start)
    return jnp.concatenate([last + first for last, first in zip(end, start, strict=True)])


def _philox(keys: Array, counter: list[Array]) -> Array:
    def one(number: Array, c: list[Array]) -> list[Array]:
        k0, k1 = (keys[:, i, None] + u32(generators.PHILOX_KEY_STEPS[i]) * u32(number) for i in (0, 1))
        low0, high0 = product(c[0], generators.PHILOX_MULTIPLIERS[0])
        low1, high1 = product(c[2], generators.PHILOX_MULTIPLIERS[1])
        return [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]

    return jnp.stack(lax.fori_loop(0, 10, one, counter))


def product(x: Array, factor: int) -> tuple[Array, Array]:
    """The low and high words of a product, in 32-bit arithmetic."""
    half = u32(0xFFFF)
    low, high = x & half, x >> 16
    f_low, f_high = u32(factor & 0xFFFF), u32(factor >> 16)
    cross, other = high * f_low, low * f_high
    carried = (low * f_low >> 16) + (cross & half) + (other & half)
    return x * u32(factor), high * f_high + (cross >> 16) + (other >> 16) + (carried >> 16)
