"""Triton kernels over units of positions: Gram norms, tiles of per-unit gradients, gradients of scales.

Every program works for one unit, or adds up some units in their order. `G` is (units, positions, outputs), `A` is
(units, positions, inputs), both contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(1024)  # so many products are added in a row before they join a sum: rounding grows with it


@triton.jit
def _pair(number):
    """Which two blocks of positions a program compares: (0, 0), (1, 0), (1, 1), (2, 0), ..."""
    p = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)
    p = tl.where(p * (p + 1) // 2 > number, p - 1, p)
    p = tl.where((p + 1) * (p + 2) // 2 <= number, p + 1, p)
    return p, number - p * (p + 1) // 2


@triton.jit
def _products(X, r, c, T, D, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """(TILE, TILE) x_r · x_c for two blocks of positions, in short sums."""
    k = tl.arange(0, DEPTH)
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, D, CHUNK):
        part = tl.zeros((TILE, TILE), tl.float32)
        for d in range(first, tl.minimum(first + CHUNK, D), DEPTH):
            here = (d + k) < D
            left = tl.load(X + r[:, None] * D + (d + k)[None, :], mask=(r[:, None] < T) & here[None, :], other=0.0)
            right = tl.load(X + c[None, :] * D + (d + k)[:, None], mask=(c[None, :] < T) & here[:, None], other=0.0)
            part = tl.dot(left, right, part)
        total += part
    return total


@triton.jit
def gram(G, A, found, T, O, I, pairs, TILE: tl.constexpr, DEPTH: tl.constexpr):
    number, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p, q = _pair(number)
    r, c = p * TILE + tl.arange(0, TILE), q * TILE + tl.arange(0, TILE)
    x = _products(G + unit * T * O, r, c, T, O, TILE, DEPTH)
    y = _products(A + unit * T * I, r, c, T, I, TILE, DEPTH)
    twice = tl.where(p == q, 1.0, 2.0)
    tl.store(found + unit * pairs + number, twice * tl.sum(x * y))
    same = (r[:, None] == c[None, :]) & (p == q)
    lengths = tl.sqrt(tl.where(same, x, 0.0)) * tl.sqrt(tl.where(same, y, 0.0))
    tl.store(found + (tl.num_programs(1) + unit) * pairs + number, tl.sum(lengths))


@triton.jit
def token_gram(G, tokens, found, T, O, pairs, TILE: tl.constexpr, DEPTH: tl.constexpr):
    number, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p, q = _pair(number)
    r, c = p * TILE + tl.arange(0, TILE), q * TILE + tl.arange(0, TILE)
    x = _products(G + unit * T * O, r, c, T, O, TILE, DEPTH)
    left = tl.load(tokens + unit * T + r, mask=r < T, other=-1)
    right = tl.load(tokens + unit * T + c, mask=c < T, other=-2)
    twice = tl.where(p == q, 1.0, 2.0)
    tl.store(found + unit * pairs + number, twice * tl.sum(tl.where(left[:, None] == right[None, :], x, 0.0)))
    same = (r[:, None] == c[None, :]) & (p == q)
    tl.store(found + (tl.num_programs(1) + unit) * pairs + number, tl.sum(tl.sqrt(tl.where(same, x, 0.0))))


@triton.jit
def bounded(found, norms, units, pairs, rounding, underflow, BLOCK: tl.constexpr):
    """From each unit's sums over pairs to √(square + rounding·S²)."""
    unit, k = tl.program_id(0), tl.arange(0, BLOCK)
    square = tl.load(found + unit * pairs + k, mask=k < pairs, other=0.0).to(tl.float64)
    size = tl.load(found + (units + unit) * pairs + k, mask=k < pairs, other=0.0).to(tl.float64)
    whole = tl.sum(size) * 1.001 + underflow
    tl.store(norms + unit, tl.sqrt(tl.maximum(tl.sum(square), 0.0) + rounding * whole * whole).to(tl.float32))


@triton.jit
def _operands(G, A, unit, t, m, n, T, O, I, DEPTH: tl.constexpr):
    """A step of Σ_t g_t a_tᵀ: (TILE, DEPTH) of gᵀ and (DEPTH, TILE) of a. Positions past the end are zero."""
    k = t + tl.arange(0, DEPTH)
    base = unit * tl.full((), T, tl.int64)
    g = tl.load(G + base * O + k[:, None] * O + m[None, :], mask=(k[:, None] < T) & (m[None, :] < O), other=0.0)
    a = tl.load(A + base * I + k[:, None] * I + n[None, :], mask=(k[:, None] < T) & (n[None, :] < I), other=0.0)
    return tl.trans(g), a


@triton.jit
def _tile(number, O, I, TILE: tl.constexpr):
    across = tl.cdiv(I, TILE)
    return (number // across) * TILE + tl.arange(0, TILE), (number % across) * TILE + tl.arange(0, TILE)


@triton.jit
def direct(G, A, squares, T, O, I, tiles, TILE: tl.constexpr, DEPTH: tl.constexpr):
    number, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m, n = _tile(number, O, I, TILE)
    tile = tl.zeros((TILE, TILE), tl.float32)
    for t in range(0, T, DEPTH):
        g, a = _operands(G, A, unit, t, m, n, T, O, I, DEPTH)
        tile = tl.dot(g, a, tile)
    tl.store(squares + unit * tiles + number, tl.sum(tile * tile))


@triton.jit
def weighted(G, A, weights, parts, units, T, O, I, share, TILE: tl.constexpr, DEPTH: tl.constexpr):
    number, split = tl.program_id(0), tl.program_id(1)
    m, n = _tile(number, O, I, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    tile = tl.zeros((TILE, TILE), tl.float32)
    first = split * share
    steps = tl.cdiv(T, DEPTH)
    # One loop over units and positions, so that loads run ahead from one unit into the next.
    for step in range(0, tl.maximum(tl.minimum(share, units - first), 0) * steps):
        unit = first + step // steps
        g, a = _operands(G, A, unit, (step % steps) * DEPTH, m, n, T, O, I, DEPTH)
        tile = tl.dot(g, a, tile)
        if step % steps == steps - 1:
            weight = tl.load(weights + unit)
            total += tl.where(weight != 0.0, weight * tile, 0.0)
            tile = tl.zeros((TILE, TILE), tl.float32)
    out = parts + split.to(tl.int64) * O * I + m[:, None].to(tl.int64) * I + n[None, :]
    tl.store(out, total, mask=(m[:, None] < O) & (n[None, :] < I))


@triton.jit
def weighted_rows(rows, weights, total, units, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.zeros((BLOCK,), tl.float32)
    here = rows + at
    for unit in range(0, units):
        weight = tl.load(weights + unit)
        row = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        found += tl.where(weight != 0.0, weight * row, 0.0)
        here += size
    tl.store(total + at, found, mask=inside)


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
