"""Triton kernels over units of positions: Gram norms, weighted sums of per-unit gradients, gradients of scales.

Layers of one shape are served by one launch: `table` holds the addresses of their tensors. G is (units, positions,
outputs), A is (units, positions, inputs); both are read by tensor descriptors, beyond whose ends everything is zero.
Every program works for one unit of one layer, or adds up all units of a layer in their order.
"""

# mypy: ignore-errors
# The compiler infers the types.

from __future__ import annotations

import triton
import triton.language as tl

TYPES = {"torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16, "torch.float32": tl.float32}
CHUNK = tl.constexpr(1024)  # so many products are added in a row before they join a sum: rounding grows with it
SQUARES = tl.constexpr(32)  # likewise squares of one lane


@triton.jit
def _pair(number):
    """Which two blocks of positions a program compares: (0, 0), (1, 0), (1, 1), (2, 0), ..."""
    p = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)
    p = tl.where(p * (p + 1) // 2 > number, p - 1, p)
    p = tl.where((p + 1) * (p + 2) // 2 <= number, p + 1, p)
    return p, number - p * (p + 1) // 2


@triton.jit
def _products(X, unit, p, q, D, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """(TILE, TILE) x_r · x_c for two blocks of positions, in short sums."""
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, D, CHUNK):
        part = tl.zeros((TILE, TILE), tl.float32)
        for d in range(first, tl.minimum(first + CHUNK, D), DEPTH):
            left = X.load([unit, p * TILE, d]).reshape(TILE, DEPTH)
            right = X.load([unit, q * TILE, d]).reshape(TILE, DEPTH)
            part = tl.dot(left, tl.trans(right), part)
        total += part
    return total


@triton.jit
def _lengths(x, p, q, TILE: tl.constexpr):
    """The norms of a block's positions, on the diagonal; elsewhere zero."""
    k = tl.arange(0, TILE)
    return tl.sqrt(tl.where((k[:, None] == k[None, :]) & (p == q), x, 0.0))


@triton.jit
def _put(found, number, unit, pairs, p, q, square, size):
    """Pairs of different blocks count twice."""
    tl.store(found + unit * pairs + number, tl.where(p == q, 1.0, 2.0) * square)
    tl.store(found + (tl.num_programs(1) + unit) * pairs + number, size)


@triton.jit
def _factor(table, place, units, T, D, TYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A layer's (units, T, D) tensor, to be read in blocks of (1, ROWS, COLUMNS). Its rows start at 16-byte borders."""
    start = tl.load(table + place).to(tl.pointer_type(TYPE))
    stride = tl.cdiv(D, 8).to(tl.int64) * 8
    return tl.make_tensor_descriptor(start, [units, T, D], [T * stride, stride, 1], [1, ROWS, COLUMNS])


@triton.jit
def gram(table, found, units, T, OUT, IN, pairs, TYPE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    number, unit, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p, q = _pair(number)
    G = _factor(table, 2 * layer, units, T, OUT, TYPE, TILE, DEPTH)
    A = _factor(table, 2 * layer + 1, units, T, IN, TYPE, TILE, DEPTH)
    found += layer * 2 * units * pairs
    x = _products(G, unit, p, q, OUT, TILE, DEPTH)
    y = _products(A, unit, p, q, IN, TILE, DEPTH)
    size = tl.sum(_lengths(x, p, q, TILE) * _lengths(y, p, q, TILE))
    _put(found, number, unit, pairs, p, q, tl.sum(x * y), size)


@triton.jit
def token_gram(table, tokens, found, units, T, OUT, pairs, TYPE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    number, unit = tl.program_id(0), tl.program_id(1)
    p, q = _pair(number)
    G = _factor(table, 0, units, T, OUT, TYPE, TILE, DEPTH)
    x = _products(G, unit, p, q, OUT, TILE, DEPTH)
    r, c = p * TILE + tl.arange(0, TILE), q * TILE + tl.arange(0, TILE)
    left = tl.load(tokens + unit * T + r, mask=r < T, other=-1)
    right = tl.load(tokens + unit * T + c, mask=c < T, other=-2)
    equal = tl.sum(tl.where(left[:, None] == right[None, :], x, 0.0))
    _put(found, number, unit, pairs, p, q, equal, tl.sum(_lengths(x, p, q, TILE)))


@triton.jit
def bounded(found, norms, units, pairs, rounding, summing, underflow, BLOCK: tl.constexpr):
    """From each unit's sums over pairs to √(square + rounding·S²) + summing·S."""
    unit, layer, k = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    found += layer * 2 * units * pairs
    square = tl.load(found + unit * pairs + k, mask=k < pairs, other=0.0).to(tl.float64)
    size = tl.load(found + (units + unit) * pairs + k, mask=k < pairs, other=0.0).to(tl.float64)
    whole = tl.sum(size) * 1.001 + underflow
    bound = tl.maximum(tl.sum(square), 0.0) + rounding * whole * whole
    tl.store(norms + layer * units + unit, (tl.sqrt(bound) + summing * whole).to(tl.float32))


@triton.jit
def _tile(number, OUT, IN, TILE: tl.constexpr):
    """Which tile of the weight a program has: eight rows of tiles at a time, whose factors stay in the cache."""
    down, across = tl.cdiv(OUT, TILE), tl.cdiv(IN, TILE)
    group = number // (8 * across)
    rows = tl.minimum(down - group * 8, 8)
    within = number % (8 * across)
    return (group * 8 + within % rows) * TILE, (within // rows) * TILE


@triton.jit
def _step(G, A, unit, t, m, n, tile, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """tile + Σ_t g_t a_tᵀ over a few positions. Positions past the end of the unit are zero."""
    g = G.load([unit, t, m]).reshape(DEPTH, TILE)
    a = A.load([unit, t, n]).reshape(DEPTH, TILE)
    return tl.dot(tl.trans(g), a, tile)


@triton.jit
def weighted(table, weights, sums, units, T, OUT, IN, TYPE: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    number, layer = tl.program_id(0), tl.program_id(1)
    G = _factor(table, 2 * layer, units, T, OUT, TYPE, DEPTH, TILE)
    A = _factor(table, 2 * layer + 1, units, T, IN, TYPE, DEPTH, TILE)
    m, n = _tile(number, OUT, IN, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    tile = tl.zeros((TILE, TILE), tl.float32)
    steps = tl.cdiv(T, DEPTH)
    # One loop over units and positions, so that loads run ahead from one unit into the next.
    for step in range(units * steps):
        unit = step // steps
        tile = _step(G, A, unit, (step % steps) * DEPTH, m, n, tile, TILE, DEPTH)
        if step % steps == steps - 1:
            weight = tl.load(weights + unit)
            total += tl.where(weight != 0.0, weight * tile, 0.0)
            tile = tl.zeros((TILE, TILE), tl.float32)
    m, n = m + tl.arange(0, TILE), n + tl.arange(0, TILE)
    out = sums + layer.to(tl.int64) * OUT * IN + m[:, None].to(tl.int64) * IN + n[None, :]
    tl.store(out, total, mask=(m[:, None] < OUT) & (n[None, :] < IN))


@triton.jit
def squared_rows(table, found, size, units, parts, share, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of squares of each layer's rows (units, size), in parts."""
    part, unit, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    here = tl.load(table + layer).to(tl.pointer_type(TYPE)) + unit.to(tl.int64) * size
    end = tl.minimum((part + 1) * share, size)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * share, end, SQUARES * BLOCK):
        few = tl.zeros((BLOCK,), tl.float32)
        for first in range(start, tl.minimum(start + SQUARES * BLOCK, end), BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(here + at, mask=at < end, other=0.0).to(tl.float32)
            few += value * value
        squares += few
    tl.store(found + (layer * units + unit) * parts + part, tl.sum(squares))


@triton.jit
def weighted_rows(
    table, weights, parts, units, size, share, TYPE: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr
):
    """Weighted sums of each layer's rows (units, size), in parts: a few units in float32, then in the parts' type."""
    layer, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    first = split * share
    last = tl.minimum(first + share, units)
    here = tl.load(table + layer).to(tl.pointer_type(TYPE)) + first.to(tl.int64) * size + at
    found = tl.zeros((BLOCK,), parts.dtype.element_ty)
    for start in range(first, last, FEW):
        few = tl.zeros((BLOCK,), tl.float32)
        for unit in range(start, tl.minimum(start + FEW, last)):
            weight = tl.load(weights + unit)
            row = tl.load(here, mask=inside, other=0.0).to(tl.float32)
            few += tl.where(weight != 0.0, weight * row, 0.0)
            here += size
        found += few
    tl.store(parts + (split * tl.num_programs(1) + layer) * size + at, found, mask=inside)


@triton.jit
def scales(X, G, scale, shift, T, D, share, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    part, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    by_scale = tl.zeros((BLOCK,), tl.float32)
    by_shift = tl.zeros((BLOCK,), tl.float32)
    for t in range(part * share, tl.minimum((part + 1) * share, T)):
        row = (unit * T + t) * D + d
        x = tl.load(X + row, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(G + row, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            x = tl.where(inside, x - tl.sum(x) / D, 0.0)
        by_scale += g * x * tl.rsqrt(tl.sum(x * x) / D + eps)
        by_shift += g
    at = (unit * tl.num_programs(0) + part) * D + d
    tl.store(scale + at, by_scale, mask=inside)
    tl.store(shift + at, by_shift, mask=inside)


@triton.jit
def channel_scales(X, G, scale, shift, groups, C, T, eps, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of scale and shift of channels (examples, groups·C, T) that are normalised group by group."""
    group = tl.program_id(0).to(tl.int64) * groups + tl.program_id(1)
    c, t = tl.arange(0, CHANNELS)[:, None], tl.arange(0, BLOCK)[None, :]
    at = group * C * T + c * T + t
    total = tl.zeros((CHANNELS, BLOCK), tl.float32)
    for first in range(0, T, BLOCK):
        total += tl.load(X + at + first, mask=(c < C) & (first + t < T), other=0.0).to(tl.float32)
    mean = tl.sum(total) / (C * T)
    squares = tl.zeros((CHANNELS, BLOCK), tl.float32)
    for first in range(0, T, BLOCK):
        inside = (c < C) & (first + t < T)
        x = tl.load(X + at + first, mask=inside, other=0.0).to(tl.float32) - mean
        squares += tl.where(inside, x * x, 0.0)
    by = tl.rsqrt(tl.sum(squares) / (C * T) + eps)
    by_scale = tl.zeros((CHANNELS, BLOCK), tl.float32)
    by_shift = tl.zeros((CHANNELS, BLOCK), tl.float32)
    for first in range(0, T, BLOCK):
        inside = (c < C) & (first + t < T)
        g = tl.load(G + at + first, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + at + first, mask=inside, other=0.0).to(tl.float32) - mean
        by_scale += g * x * by
        by_shift += g
    c = tl.arange(0, CHANNELS)
    tl.store(scale + group * C + c, tl.sum(by_scale, 1), mask=c < C)
    tl.store(shift + group * C + c, tl.sum(by_shift, 1), mask=c < C)


@triton.jit
def unfold(
    X, out, by_row, by_channel, by_height, by_width, height, width, above, before, down, across, lower, right,
    places_across, K, T, KERNEL: tl.constexpr, ACROSS: tl.constexpr, ENTRIES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """(rows, K = channels × kernel, T places) the patches of images (rows, channels, height, width)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    t = tl.program_id(2) * PLACES + tl.arange(0, PLACES)
    y = (t // places_across * down - above)[None, :] + (k % KERNEL // ACROSS * lower)[:, None]
    x = (t % places_across * across - before)[None, :] + (k % ACROSS * right)[:, None]
    inside = (k < K)[:, None] & (t < T)[None, :]
    image = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    at = row * by_row + (k // KERNEL).to(tl.int64)[:, None] * by_channel + y * by_height + x * by_width
    value = tl.load(X + at, mask=inside & image, other=0.0)
    tl.store(out + (row * K + k[:, None]) * T + t[None, :], value, mask=inside)
