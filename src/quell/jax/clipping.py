"""Clip every unit's gradient and add them up, one micro-batch of fixed shape at a time.

What privacy rests on here: no unit moves the sum by more than `max_grad_norm`. So norms and sums are float32 whatever
the model's dtype, norms are raised by more than their additions can lose, and a unit whose gradient is not finite
(which no factor would tame) counts as zero, as padded rows do. `quell.jax.alone` keeps the units of several devices
apart until they are clipped.

**What rounding adds.** Each clipped gradient has a norm C of at most `max_grad_norm`, but a unit also decides how the
sum is rounded. At most 32 units are added in float32, and the sums of such groups as pairs of float32 numbers, which
are rounded to one at the end. A unit changes the rounding of its own group, by 32²·2⁻²³·C at most, that of the pairs in
their 47th bit (which raised norms make up for), and that of the result. So among B units it moves the sum by at most
(1 + (B + 32²)·2⁻²³)·C in norm, and by so much only if all gradients point the same way: 1.0006·C for B = 4,096. A
`psum` over D devices rounds D times instead of once, so D·B stands in place of B.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import sequential_vmap

from quell.adapters.choice import require_clip_norm
from quell.errors import QuellError, require_count
from quell.jax.alone import as_units_vary, manual_axes, refuse_coupled
from quell.jax.convolutions import with_products
from quell.jax.devices import as_xla_shards
from quell.jax.given import number, require_floats
from quell.jax.private import Private

BLOCK = 32  # squares are added in blocks of so many, those in blocks again, so that each takes part in few additions
RAISED = 1 + 2.0**-14  # at most 7 levels of 32 additions for 2³² squares, 2⁻²⁴ each: 2⁻¹⁶ of the sum is not reached
GROUP = 32  # units that are added in float32; with more, one unit would change how all others are rounded
LEAST, MOST = 2.0**-126, 2.0**127  # of a clip norm: the power of two above it is a normal float32

f32 = jnp.float32
Pair = tuple[Array, Array]  # a number as two: rounded to float32, and what that lacks


def clipped_grad(
    loss: Callable[..., Any],
    max_grad_norm: float | Private,
    *,
    micro_batch: int = 32,
    rows_per_unit: int | None = None,
    with_norms: bool = False,
) -> Callable[..., Any]:
    """A function that sums the gradients of a batch's units, each clipped to `max_grad_norm`.

    Args:
        loss: `loss(params, *unit)`, the loss of *one* unit. It may be wrapped in `jax.checkpoint`, and take a random
            key as part of the unit: those of `batches(...).keys`. It returns one real number.
        max_grad_norm: What `privatize` returned, for its clip norm, its rows per user and the shapes of its parameters;
            or the norm itself, as a number, with which parameters are not compared. Each unit's gradient is clipped to
            it, over all parameters together.
        micro_batch: How many gradients to hold in memory at once.
        rows_per_unit: For units of several rows, such as augmentations: `loss` is that of one row, and the mean over
            the unit's rows is clipped. Arrays of the batch have the shape (units, rows_per_unit, ...). With a plan per
            user it is known, and units are users.
        with_norms: Also return the norm of each unit's gradient, which no noise protects: for `Log(norms=True)`.

    Returns:
        `sums(params, batch, mask)`: `batch` is a tuple of pytrees whose first axis is that of units, `mask` says
        which units count. None if all do, which is refused where rows may be padding: with the plan's batches it is for
        those of equal size, whole and outside `shard_map`. The result has the tree of `params`, in float32, for
        `update`.
        Micro-batches in which no unit counts are skipped. With norms it is `(sums, norms)`: the norms before clipping
        are infinite where they are not finite, and NaN where a unit does not count.

    >>> def squared(w, x, y):
    ...     return (w @ x - y) ** 2 / 2
    >>> sums = clipped_grad(squared, max_grad_norm=1.0)
    >>> x, y = jnp.eye(2), jnp.array([0.1, 3.0])
    >>> [round(float(value), 3) for value in sums(jnp.zeros(2), (x, y), None)]
    [-0.1, -1.0]
    """
    max_grad_norm = number(max_grad_norm)
    if not isinstance(max_grad_norm, Private | Real):
        raise QuellError(f"clipped_grad takes what privatize returned, or a norm, not a {type(max_grad_norm).__name__}")
    private = max_grad_norm if isinstance(max_grad_norm, Private) else None
    if isinstance(max_grad_norm, Private):
        max_grad_norm, rows_per_unit = _of_run(max_grad_norm, rows_per_unit)
    bound, size = require_clip_norm(max_grad_norm), require_count("micro_batch", micro_batch)
    if not LEAST <= bound < MOST:
        raise QuellError(f"max_grad_norm={bound:g} is outside what float32 can measure: {LEAST:g} to {MOST:g}")
    of_row = _one_number(loss)
    of_unit = of_row if rows_per_unit is None else _mean_loss(of_row, require_count("rows_per_unit", rows_per_unit))

    def sums(params: Any, batch: tuple[Any, ...], mask: Array | None) -> Any:
        require_floats(jax.tree_util.tree_leaves(params))
        if private is not None:
            private.host.require_whole(params)
        shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(batch)}
        if not isinstance(batch, tuple) or len(shapes) != 1 or shapes == {()}:
            raise QuellError("batch must be a tuple of arrays, or trees of them, that all have one row per unit")
        (count,) = shapes.pop()
        if mask is None:
            _require_full_batches(private, count)
        elif not jnp.issubdtype(dtype := getattr(mask, "dtype", np.dtype(object)), jnp.bool_):
            raise QuellError(f"mask has dtype {dtype}: a unit counts or not, so pass an array of True and False")
        elif jnp.shape(mask) != (count,):
            raise QuellError(f"mask has shape {jnp.shape(mask)}, but the batch has {count:,} rows: one entry for each")
        total, norms = as_xla_shards(added_up, params, batch, mask)
        return (total, norms) if with_norms else total

    def added_up(params: Any, batch: tuple[Any, ...], mask: Array | None) -> tuple[Any, Array]:
        count = len(jax.tree_util.tree_leaves(batch)[0])
        counts = jnp.ones(count, bool) if mask is None else jnp.asarray(mask, bool)
        leaves, tree = jax.tree_util.tree_flatten(params)
        zeros = [(jnp.zeros(leaf.shape, f32), jnp.zeros(leaf.shape, f32)) for leaf in leaves]
        params, zeros, counts, nobody = as_units_vary(
            (params, zeros, counts, jnp.full(size, jnp.nan, f32)), batch, mask
        )
        clipped = partial(_clipped_sum, of_unit, bound, params)
        if 0 < count <= size:
            total, norms = clipped(batch, counts)
            return tree.unflatten(high for high, _ in total), norms
        cut = jax.tree_util.tree_map(lambda leaf: _cut(leaf, size), (batch, counts))

        def add(total: list[Pair], units: Any) -> tuple[list[Pair], Array]:
            part, norms = clipped(*units)
            return list(map(_plus, total, part)), norms

        def add_any(total: list[Pair], units: Any) -> tuple[list[Pair], Array]:
            adding = partial(add, total, units)
            found: tuple[list[Pair], Array] = lax.cond(jnp.any(units[1]), adding, lambda: (total, nobody))
            return found

        total, norms = lax.scan(add if mask is None else add_any, zeros, cut)  # without a mask all have units
        return tree.unflatten(high for high, _ in total), norms.reshape(-1)[:count]

    return sums


def _require_full_batches(private: Private | None, count: int) -> None:
    """Refuse a missing mask where rows may be padding: they count for nobody, and would be clipped and added."""
    drawn = None if private is None else private.drawn
    if drawn is not None and (manual_axes() or not drawn.scheme.equal_sizes or count != drawn.expected_size):
        raise QuellError(
            f"batches of this plan have {float(drawn.expected_size):,.6g} units on average and may come padded to one "
            f"size, so mask=None would count rows of padding among these {count:,}: pass the mask that "
            "quell.jax.batches gives with the indices"
        )


def _of_run(private: Private, rows_per_unit: int | None) -> tuple[float, int | None]:
    """The clip norm and the rows per unit of a run."""
    if private.max_grad_norm is None:
        raise QuellError("privatize was given no max_grad_norm: pass the norm to clip to as a number")
    if private.users is None:
        return private.max_grad_norm, rows_per_unit
    if rows_per_unit not in (None, private.users.most):
        raise QuellError(f"rows_per_unit={rows_per_unit}, but privatize has rows_per_user={private.users.most}")
    return private.max_grad_norm, private.users.most


def _one_number(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The same loss; refused where it returns anything but one real number."""

    def checked(params: Any, *unit: Any) -> Any:
        found = loss(params, *unit)
        if not (isinstance(found, Real) or hasattr(found, "dtype")):
            returned = f"a {type(found).__name__}"
        elif jnp.shape(found) or not jnp.issubdtype(jnp.result_type(found), jnp.floating):
            returned = f"shape {jnp.shape(found)} and dtype {jnp.result_type(found)}"
        else:
            return found
        raise QuellError(
            f"the loss returned {returned}: it must return the loss of one unit as one real floating-point number, "
            "without auxiliary outputs"
        )

    return checked


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


def _clipped_sum(
    loss: Callable[..., Any], bound: float, params: Any, units: Any, counts: Array
) -> tuple[list[Pair], Array]:
    """The sum of the clipped gradients of these units, leaf by leaf, and their norms."""
    each = jax.vmap(jax.grad(loss), in_axes=(None, *[0] * len(units)))
    made = with_products(each, len(counts), refuse_coupled)(params, *units)
    gradients = _in_memory([leaf.astype(f32) for leaf in jax.tree_util.tree_leaves(made)])
    unit = f32(2.0 ** math.frexp(bound)[1])  # norms are measured in this, so that squares neither overflow nor vanish
    squares = sum(_sum_of_squares(leaf.reshape(len(counts), math.prod(leaf.shape[1:])) / unit) for leaf in gradients)
    norms = jnp.sqrt(squares) * f32(RAISED)
    sound = counts & jnp.isfinite(norms)
    limit = f32(bound) / unit
    factors = jnp.where(sound, limit / jnp.maximum(norms, limit), 0)

    def added(gradient: Array) -> Pair:
        kept = jnp.where(sound.reshape(-1, *[1] * (gradient.ndim - 1)), gradient, 0)
        return _weighted_sum(factors, kept)

    seen = jnp.where(sound, norms * unit, jnp.where(counts, f32(jnp.inf), f32(jnp.nan)))
    return [added(gradient) for gradient in gradients], seen


@sequential_vmap
def _in_memory(leaves: list[Array]) -> list[Array]:
    """The same numbers, in memory before they are used, so that what is added up is what was measured.

    Else XLA makes cheap gradients anew in every fusion that uses them, rounded in another way, which is all there is
    where they cancel. It does so across an `optimization_barrier`, but not across a branch that it cannot decide. What
    decides here is every element: some may be constants, as of a parameter that the loss does not use or is linear in.
    """
    never = sum(jnp.sum(jnp.isfinite(leaf), dtype=f32) for leaf in leaves) < 0
    held: list[Array] = lax.cond(never, lambda: [jnp.zeros_like(leaf) for leaf in leaves], lambda: leaves)
    return held


def _weighted_sum(factors: Array, rows: Array) -> Pair:
    """Σ_i factors_i·rows_i, in float32 by groups, and the groups as pairs, two by two."""
    whole = len(factors) // GROUP * GROUP
    parts = []
    for each, size in ((slice(whole), GROUP), (slice(whole, None), len(factors) - whole)):
        if len(factors[each]):
            groups = len(factors[each]) // size
            weights, own = (array[each].reshape(groups, size, *array.shape[1:]) for array in (factors, rows))
            parts.append(jnp.einsum("gu,gu...->g...", weights, own, precision=lax.Precision.HIGHEST))
    # Else a product may be fused with the next addition, and not be rounded.
    high = lax.optimization_barrier(jnp.concatenate(parts))
    low = jnp.zeros_like(high)
    while len(high) > 1:
        if len(high) % 2:
            high, low = (jnp.concatenate([each, jnp.zeros_like(each[:1])]) for each in (high, low))
        high, low = _plus((high[0::2], low[0::2]), (high[1::2], low[1::2]))
    return high[0], low[0]


def _plus(one: Pair, other: Pair) -> Pair:
    """The sum of two pairs, by Knuth's TwoSum, which finds what an addition loses: rounded to 47 bits, not 24."""
    (high, low), (part, less) = one, other
    rough = high + part
    seen = rough - high
    rest = (low + less) + ((high - (rough - seen)) + (part - seen))
    new = rough + rest
    return new, rest - (new - rough)


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
    return padded.reshape(len(padded) // size, size, *leaf.shape[1:])
