"""Clip every unit's gradient and add them up, one micro-batch of fixed shape at a time.

What privacy rests on here: no unit moves the sum by more than `max_grad_norm`. So norms and sums are float32 whatever
the model's dtype, norms are raised by more than their additions can lose, and a unit whose gradient is not finite
(which no factor would tame) counts as zero, as padded rows do. `quell.jax.alone` keeps the units of several devices
apart until they are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from quell.adapters.choice import require_clip_norm
from quell.errors import QuellError, require_count
from quell.jax.alone import as_units_vary, refuse_collectives
from quell.jax.convolutions import with_products

BLOCK = 32  # squares are added in blocks of so many, those in blocks again, so that each takes part in few additions
RAISED = 1 + 2.0**-14  # at most 7 levels of 32 additions for 2³² squares, 2⁻²⁴ each: 2⁻¹⁶ of the sum is not reached

f32 = jnp.float32


def clipped_grad(
    loss: Callable[..., Any],
    max_grad_norm: float,
    *,
    micro_batch: int = 32,
    rows_per_unit: int | None = None,
    with_norms: bool = False,
) -> Callable[..., Any]:
    """A function that sums the gradients of a batch's units, each clipped to `max_grad_norm`.

    Args:
        loss: `loss(params, *unit)`, the loss of *one* unit. It may be wrapped in `jax.checkpoint`, and take a random
            key as part of the unit.
        max_grad_norm: The norm to clip each unit's gradient to, over all parameters together.
        micro_batch: How many gradients to hold in memory at once.
        rows_per_unit: For units of several rows, such as a user's: `loss` is that of one row, and the mean over the
            unit's rows is clipped. Arrays of the batch have the shape (units, rows_per_unit, ...).
        with_norms: Also return the norm of each unit's gradient, which no noise protects: for `Log(norms=True)`.

    Returns:
        `sums(params, batch, mask=None)`: `batch` is a tuple of pytrees whose first axis is that of units, `mask` says
        which units count. The result has the tree of `params`, in float32, for `privatize`'s transformation.
        Micro-batches in which no unit counts are skipped. With norms it is `(sums, norms)`: the norms before clipping
        are infinite where they are not finite, and NaN where a unit does not count.

    >>> def squared(w, x, y):
    ...     return (w @ x - y) ** 2 / 2
    >>> sums = clipped_grad(squared, max_grad_norm=1.0)
    >>> x, y = jnp.eye(2), jnp.array([0.1, 3.0])
    >>> [round(float(value), 3) for value in sums(jnp.zeros(2), (x, y))]
    [-0.1, -1.0]
    """
    bound, size = require_clip_norm(max_grad_norm), require_count("micro_batch", micro_batch)
    of_unit = loss if rows_per_unit is None else _mean_loss(loss, require_count("rows_per_unit", rows_per_unit))

    def sums(params: Any, batch: tuple[Any, ...], mask: Array | None = None) -> Any:
        shapes = {leaf.shape[:1] for leaf in jax.tree_util.tree_leaves(batch)}
        if not isinstance(batch, tuple) or len(shapes) != 1 or shapes == {()}:
            raise QuellError("batch must be a tuple of arrays, or trees of them, that all have one row per unit")
        count = int(shapes.pop()[0])
        counts = jnp.ones(count, bool) if mask is None else jnp.asarray(mask, bool)
        if counts.shape != (count,):
            raise QuellError(f"mask has shape {counts.shape}, but the batch has {count:,} rows: one entry for each")
        zeros = jax.tree_util.tree_map(lambda leaf: jnp.zeros(leaf.shape, f32), params)
        params, zeros, counts, nobody = as_units_vary(
            (params, zeros, counts, jnp.full(size, jnp.nan, f32)), batch, mask
        )
        clipped = partial(_added, of_unit, bound, params)
        if 0 < count <= size:
            total, norms = clipped(zeros, batch, counts)
            return (total, norms) if with_norms else total
        cut = jax.tree_util.tree_map(lambda leaf: _cut(leaf, size), (batch, counts))

        def add(total: Any, part: Any) -> tuple[Any, Array]:
            if mask is None:  # every micro-batch has units that count
                return clipped(total, *part)
            found: tuple[Any, Array] = lax.cond(
                jnp.any(part[1]), lambda: clipped(total, *part), lambda: (total, nobody)
            )
            return found

        total, norms = lax.scan(add, zeros, cut)
        return (total, norms.reshape(-1)[:count]) if with_norms else total

    return sums


def _mean_loss(loss: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """The mean loss over a unit's rows."""

    def mean(params: Any, *unit: Any) -> Array:
        for leaf in jax.tree_util.tree_leaves(unit):
            if leaf.shape[:1] != (rows,):
                raise QuellError(
                    f"a unit has an array of shape {leaf.shape}, but rows_per_unit={rows}: pass arrays of shape "
                    f"(units, {rows}, ...), as indices of quell.jax.batches are"
                )
        return jnp.mean(jax.vmap(partial(loss, params))(*unit))

    return mean


def _added(
    loss: Callable[..., Any], bound: float, params: Any, total: Any, units: Any, counts: Array
) -> tuple[Any, Array]:
    """The total with the clipped gradients of these units, and their norms."""
    each = jax.vmap(jax.grad(loss), in_axes=(None, *[0] * len(units)))
    gradients = with_products(each, len(counts), refuse_collectives)(params, *units)
    unit = f32(2.0 ** math.frexp(bound)[1])  # norms are measured in this, so that squares neither overflow nor vanish
    squares = sum(
        _sum_of_squares(leaf.astype(f32).reshape(len(counts), leaf[0].size) / unit)
        for leaf in jax.tree_util.tree_leaves(gradients)
    )
    norms = jnp.sqrt(squares) * f32(RAISED)
    sound = counts & jnp.isfinite(norms)
    limit = f32(bound) / unit
    factors = jnp.where(sound, limit / jnp.maximum(norms, limit), 0)

    def add(sum_: Array, gradient: Array) -> Array:
        kept = jnp.where(sound.reshape(-1, *[1] * sum_.ndim), gradient.astype(f32), 0)
        added: Array = sum_ + jnp.tensordot(factors, kept, axes=1, precision=lax.Precision.HIGHEST)
        return added

    seen = jnp.where(sound, norms * unit, jnp.where(counts, f32(jnp.inf), f32(jnp.nan)))
    return jax.tree_util.tree_map(add, total, gradients), seen


def _sum_of_squares(rows: Array) -> Array:
    """(rows,) in float32, by blocks: one long addition loses a percent of ten million squares."""
    squares = rows * rows
    while squares.shape[1] > 1:
        padded = jnp.pad(squares, ((0, 0), (0, -squares.shape[1] % BLOCK)))
        squares = lax.optimization_barrier(padded.reshape(len(rows), -1, BLOCK).sum(axis=2))
    return squares.sum(axis=1)


def _cut(leaf: Array, size: int) -> Array:
    """(micro-batches, size, ...), filled up with rows that do not count: zeros, or copies where zeros are no keys."""
    more = -leaf.shape[0] % size
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        padded = jnp.concatenate([leaf, leaf[:more]])
    else:
        padded = jnp.pad(leaf, [(0, more)] + [(0, 0)] * (leaf.ndim - 1))
    return padded.reshape(-1, size, *leaf.shape[1:])
