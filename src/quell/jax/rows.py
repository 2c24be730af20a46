"""One step's row of scale·C⁻¹Z, added to a device's slices of the gradient sums and rounded to the grid of releases.

The same recurrences, operation by operation, as `quell.noise.cpu_kernels`; `quell.jax.normals` says why the bits agree.
Normals are made some tiles at a time, in one loop over the tiles of all tensors: compile time does not grow with the
model, and beyond gradients and buffers a step needs one float32 vector of the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from quell.jax import kernels
from quell.jax.arithmetic import Traced
from quell.jax.normals import Source, normals
from quell.jax.slices import Cover, Slice
from quell.noise.layout import LANES, tile_size
from quell.noise.spec import Recipe

WHOLE = 2.0**23  # float32 numbers from here on are whole
UNROLLED = 16  # kept rows that are added without a loop
AT_ONCE = {"cpu": 2**17}  # normals made at once, by platform: on a CPU as many as fit its cache
AT_ONCE_ELSEWHERE = 2**24

f32, u32 = jnp.float32, jnp.uint32


class Row(NamedTuple):
    """What a recipe says about one step."""

    step: Array
    taps: Array
    scale: Array
    grid: Array
    inverse: Array  # of the grid, exact
    moves: Array

    @classmethod
    def of(cls, recipe: Recipe, step: Array) -> Row:
        scales, grids = jnp.asarray(recipe.scales), jnp.asarray(recipe.grids)
        row, taps = jnp.minimum(step, len(scales) - 1), jnp.asarray(recipe.taps)
        moves = jnp.zeros((1, 3), jnp.int32) if recipe.moves is None else jnp.asarray(recipe.moves)
        at = jnp.minimum(step, len(moves) - 1)
        inverse = jnp.asarray(1 / recipe.grids)
        return cls(step, taps[jnp.minimum(step, len(taps) - 1)], scales[row], grids[row], inverse[row], moves[at])


def add_row(
    recipe: Recipe,
    source: Source,
    slices: Sequence[Slice],
    coordinate: Callable[[str], Array],
    row: Row,
    sums: Sequence[Array],
    buffers: Sequence[Array],
    platform: str,
) -> tuple[list[Array], list[Array]]:
    """The noisy slices, in float32, and the slices' buffers (count, *local) after this step, if the recipe has any."""
    bases = jnp.stack([where.base(coordinate) for where in slices])
    cover = Cover(slices, tile_size(source.generator))
    noises = cover.cut(_fresh(recipe, source, cover, bases, row, platform), bases)
    added, kept = [], []
    for number, (noise, total) in enumerate(zip(noises, sums, strict=True)):
        made = noise.reshape(total.shape)
        if recipe.kind != "regenerate":
            old = buffers[number]
            made, slot, new = _KINDS[recipe.kind](row, made, old, source.how)
            kept.append(lax.dynamic_update_slice(old, new, (slot, *[jnp.zeros_like(slot)] * total.ndim)))
        added.append(_released(total.astype(f32), made, row, source.how))
    return added, kept


def _fresh(recipe: Recipe, source: Source, cover: Cover, bases: Array, row: Row, platform: str) -> Array:
    """The new normals of every tile; of a `regenerate`, which keeps none, the sum with those of older steps."""
    if platform in kernels.PLATFORMS:
        taps = row.taps if recipe.kind == "regenerate" else None
        together = kernels.TOGETHER[source.generator]
        numbers = jnp.arange(-(-cover.tiles // together) * together, dtype=u32)
        where = cover.addresses(numbers, bases)
        return kernels.fresh(source, row.step, taps, *where, interpret=platform == kernels.INTERPRETED)
    together = max(1, min(cover.tiles, AT_ONCE.get(platform, AT_ONCE_ELSEWHERE) // tile_size(source.generator)))

    def some(first: Array) -> Array:
        tensor, tile = cover.addresses(first * u32(together) + jnp.arange(together, dtype=u32), bases)
        if recipe.kind != "regenerate":
            return normals(source, row.step, tensor, tile)

        def add(j: Array, noise: Array) -> Array:
            return row.taps[j] * normals(source, row.step - j, tensor, tile) + noise

        shape = (together, tile_size(source.generator) // LANES, LANES)
        return lax.fori_loop(0, jnp.minimum(len(row.taps), row.step + 1), add, jnp.zeros(shape, f32))

    return lax.map(some, jnp.arange(-(-cover.tiles // together), dtype=u32))


def _ring(row: Row, new: Array, kept: Array, how: Traced) -> tuple[Array, Array, Array]:
    count = len(kept)

    def add(d: Array | int, noise: Array) -> Array:
        return row.taps[d] * kept[(row.step + count - d) % count] + noise

    noise = lax.fori_loop(1, count + 1, add, how.product(row.taps[0], new), unroll=min(count, UNROLLED))
    return noise, row.step % count, noise[None]


def _exponentials(row: Row, new: Array, kept: Array, how: Traced) -> tuple[Array, Array, Array]:
    count, noise = len(kept), new
    for i in range(count):
        noise = row.taps[i] * kept[i] + noise
    return noise, jnp.int32(0), row.taps[count:].reshape(-1, *[1] * new.ndim) * kept + new[None]


def _fenwick(row: Row, new: Array, kept: Array, how: Traced) -> tuple[Array, Array, Array]:
    plus, minus, keep = row.moves[0], row.moves[1], row.moves[2]
    node = new + jnp.where(plus >= 0, kept[plus], f32(0))
    return node - jnp.where(minus >= 0, kept[minus], f32(0)), keep, node[None]


_KINDS = {"ring": _ring, "exponentials": _exponentials, "fenwick": _fenwick}


def _released(gradient: Array, noise: Array, row: Row, how: Traced) -> Array:
    """gradient + noise, rounded to a multiple of the grid; from 2²³ times the grid on, every float32 is one."""
    total = gradient + how.product(noise, row.scale)
    units = total * row.inverse
    nearest = jnp.floor(units + f32(0.5)) * row.grid  # halves go up: to even, odd multiples would be rarer
    return jnp.where(jnp.abs(units) < f32(WHOLE), nearest, total)
