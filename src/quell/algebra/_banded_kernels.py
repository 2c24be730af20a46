"""Compiled loops behind `quell.algebra.banded`.

One recursion does the work. The rows of a lower-banded matrix E define a sequence by E θ = z, z i.i.d. standard
normal, with W = Cov(θ) = (EᵀE)⁻¹. Take B rows of E at a time ("new") after the m rows before them ("window", m
at least the number of sub-diagonals), and write these rows as [U | L], L lower triangular. Then
θ_new = F θ_window + L⁻¹ z with F = -L⁻¹U, hence

    W[new, window] = F W[window, window],   W[new, new] = F W[window, new] + L⁻¹L⁻ᵀ          (forward).

For a loss Σ v_i W_ii let P be the symmetric matrix of derivatives still to be passed back, at first diag v. Going
back over the blocks, with all = window + new,

    ∂loss/∂[U | L] = -2 L⁻ᵀ P[new, all] W[all, all]
    P[window, window] += FᵀR + RᵀF,   R = ½ P[new, new] F + P[new, window]                   (backward).

With B = 1 this is the scalar recursion of ALGORITHMS.md §2; B = 8 to 32 turns it into matrix products, about 6 m²
operations a row, that run as fast as a BLAS. W itself is kept only for a *segment* of rows: the forward pass
saves W[window, window] at the start of each segment and the backward pass recomputes the segment from there,
so memory beyond input and gradient stays small and everything in use stays in cache.

All loops are serial, so results cannot depend on the number of threads. Fusing a multiplication with an addition
(`contract`) is the only liberty the compiler gets: infinities and nans behave as usual. Matrices are passed
flat, with a position and a stride, because that is how their windows slide.
"""
# mypy: disallow-untyped-decorators=False

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from quell._types import Array

TILE = 8  # rows and columns of a register tile; blocks and windows are multiples of it
_FAST: dict[str, Any] = {"cache": True, "fastmath": {"contract"}, "error_model": "numpy", "nogil": True}


@njit(**_FAST)
def banded_loss_and_gradient(
    theta: Array,
    inverse_norms: Array,
    inverse: Array,
    weights: Array,
    window: int,
    block: int,
    segment: int,
    gradient: Array,
) -> float:
    """Σ v_i W_ii and its gradient in theta (written to `gradient`); inf, and no gradient, if W overflows."""
    n, bands = theta.shape
    segments = (n + segment - 1) // segment
    size, both = window + segment, window + block
    # Eight columns more than needed: rows a power of two apart would compete for the same few cache lines.
    w, p = np.zeros((size, size + 8)), np.empty((size, size + 8))
    saved = np.empty((segments, window, window))
    x, slopes = np.empty((segment, both)), np.empty((segment, both))
    room, spare, strip = np.empty((block, both)), np.empty((block, both)), np.empty(bands)

    loss = 0.0
    for g in range(segments):
        saved[g] = w[segment:size, segment:size]
        w[:window, :window] = saved[g]
        fill_rows(theta, inverse_norms, inverse, g * segment, window, block, strip, x)
        advance(window, block, x, room, w)
        part = 0.0
        for i in range(min(segment, n - g * segment)):
            part += weights[g * segment + i] * w[window + i, window + i]
        loss += part
        if not math.isfinite(loss):
            return math.inf

    dots, done = np.zeros(n), n
    carried = np.zeros((window, window))
    for g in range(segments - 1, -1, -1):
        first = g * segment
        count = min(segment, n - first)
        if g < segments - 1:
            w[:window, :window] = saved[g]
            fill_rows(theta, inverse_norms, inverse, first, window, block, strip, x)
            advance(window, block, x, room, w)
        p[:] = 0.0
        p[segment:size, segment:size] = carried
        for i in range(count):
            p[window + i, window + i] += weights[first + i]
        retreat(window, block, x, w, p, room, spare, slopes)
        carried[:] = p[:window, :window]
        chain_rows(theta, inverse_norms, inverse, first, count, window, block, slopes, gradient, dots)
        # Column j ends bands - 1 rows below its diagonal: from there on, rows have all their dots.
        ready = min(first + bands - 1, done) if g else 0
        project_rows(theta, inverse_norms, ready, done, gradient, dots)
        done = ready
    return loss


@njit(**_FAST)
def fill_rows(
    theta: Array, inverse_norms: Array, inverse: Array, first: int, window: int, block: int, strip: Array, x: Array
) -> None:
    """x[i] = row first + i of E = C·A⁻¹, C = theta·diag(inverse_norms), laid out as in its block's [U | L].

    inverse: (r, n), inverse[e, t] = A⁻¹[t, t-e]; by lag, so that loops along a row of C are contiguous.
    Rows past the end are those of the identity.
    """
    n, bands = theta.shape
    for i in range(x.shape[0]):
        t, at = first + i, window + i % block
        row = x[i]
        row[:] = 0.0
        if t >= n:
            row[at] = 1.0
            continue
        here = min(bands, t + 1)
        for j in range(here):  # strip[j] = C[t, t - here + 1 + j]
            strip[j] = theta[t, here - 1 - j] * inverse_norms[t - here + 1 + j]
        for e in range(inverse.shape[0]):
            lag, low = inverse[e], max(0, e - (t - here + 1))
            for j in range(low, here):
                row[at - here + 1 + j - e] += strip[j] * lag[t - here + 1 + j]


@njit(**_FAST)
def advance(window: int, block: int, x: Array, room: Array, w: Array) -> None:
    """Forward recursion over a segment: turns x from rows [U | L] into [F | L⁻¹] and extends W by them."""
    both, stride = window + block, w.shape[1]
    fx, fw, fr = x.reshape(-1), w.reshape(-1), room.reshape(-1)
    for s in range(0, x.shape[0], block):
        eliminate(s, window, block, x, room)
        top = window + s
        for i in range(block):
            w[top + i, s : top + block] = 0.0
            for j in range(block):
                room[i, j] = x[s + j, window + i]
        add_product(
            fx, s * both, both, 1, fw, s * stride + s, stride, fw, top * stride + s, stride, block, window, window
        )
        for j in range(s, top):
            for i in range(top, top + block):
                w[j, i] = w[i, j]
        corner = top * stride + top
        add_product(fx, s * both, both, 1, fw, s * stride + top, stride, fw, corner, stride, block, window, block)
        add_product(fx, s * both + window, both, 1, fr, 0, both, fw, corner, stride, block, block, block)
        for i in range(top, top + block):
            for j in range(top, i):
                w[j, i] = w[i, j]


@njit(**_FAST)
def eliminate(s: int, window: int, block: int, x: Array, room: Array) -> None:
    """Replace the block [U | L] at row s of x by L⁻¹ [-U | I] = [F | L⁻¹], eight rows at a time."""
    both = window + block
    fx, fr = x.reshape(-1), room.reshape(-1)
    small = np.empty(TILE * TILE)
    for r in range(0, block, TILE):
        edge = window + r  # these rows read [known | D], D lower triangular from column `edge`
        for i in range(TILE):  # small = -D⁻¹
            row = s + r + i
            scale = -1.0 / x[row, edge + i]
            for j in range(i):
                total = 0.0
                for k in range(j, i):
                    total += x[row, edge + k] * small[k * TILE + j]
                small[i * TILE + j] = total * scale
            small[i * TILE + i] = scale
            for j in range(i + 1, TILE):
                small[i * TILE + j] = 0.0
        for i in range(TILE):  # room = known[:, U] - 0 (old L columns cleared) and -I in D's place
            source, target = x[s + r + i], room[i]
            target[:window] = source[:window]
            target[window : edge + TILE] = 0.0
            target[edge + i] = -1.0
        if r:
            add_product(fx, (s + r) * both + window, both, 1, fx, s * both, both, fr, 0, both, TILE, r, edge)
        for i in range(TILE):
            x[s + r + i] = 0.0
        add_product(small, 0, TILE, 1, fr, 0, both, fx, (s + r) * both, both, TILE, TILE, edge + TILE)


@njit(**_FAST)
def retreat(window: int, block: int, x: Array, w: Array, p: Array, back: Array, spare: Array, slopes: Array) -> None:
    """Backward recursion over a segment: carry p to its first rows, leave -∂loss/∂[U | L] in `slopes`.

    Only the symmetric part of p means anything: p[window, window] += FᵀR, R = P[new, new] F + 2 P[new, window],
    has the symmetric part asked for at half the work.
    """
    both, stride = window + block, w.shape[1]
    fx, fw, fp, fb = x.reshape(-1), w.reshape(-1), p.reshape(-1), back.reshape(-1)
    fs, fl = spare.reshape(-1), slopes.reshape(-1)
    for s in range(x.shape[0] - block, -1, -block):
        top, at = window + s, s * both
        for j in range(both):
            for i in range(block):
                back[i, j] = p[top + i, s + j] + p[s + j, top + i]
        spare[:] = 0.0
        slopes[s : s + block] = 0.0
        add_product(fb, 0, both, 1, fw, s * stride + s, stride, fs, 0, both, block, both, both)
        add_product(fx, at + window, 1, both, fs, 0, both, fl, at, both, block, block, both)
        back[:, window:] *= 0.5
        add_product(fb, window, both, 1, fx, at, both, fb, 0, both, block, block, window)
        add_product(fx, at, 1, both, fb, 0, both, fp, s * stride + s, stride, window, block, window)


@njit(**_FAST)
def chain_rows(
    theta: Array,
    inverse_norms: Array,
    inverse: Array,
    first: int,
    count: int,
    window: int,
    block: int,
    slopes: Array,
    gradient: Array,
    dots: Array,
) -> None:
    """gradient = ∂loss/∂C for `count` rows, from -∂loss/∂E; dots[j] += its product with column j of C."""
    bands = theta.shape[1]
    for i in range(count):
        t, at = first + i, window + i % block
        mine, slope = gradient[t], slopes[i]
        mine[:] = 0.0
        for e in range(inverse.shape[0]):
            lag = inverse[e]
            for c in range(min(bands, t - e + 1)):
                mine[c] -= slope[at - e - c] * lag[t - c]
        for c in range(min(bands, t + 1)):
            dots[t - c] += mine[c] * theta[t, c] * inverse_norms[t - c]


@njit(**_FAST)
def project_rows(theta: Array, inverse_norms: Array, first: int, last: int, gradient: Array, dots: Array) -> None:
    """From ∂loss/∂C to ∂loss/∂theta, C having theta's columns scaled to norm one."""
    bands = theta.shape[1]
    for t in range(first, last):
        for c in range(min(bands, t + 1)):
            scale = inverse_norms[t - c]
            gradient[t, c] = (gradient[t, c] - theta[t, c] * scale * dots[t - c]) * scale


@njit(**_FAST)
def add_product(
    a: Array,
    a_at: int,
    down: int,
    right: int,
    b: Array,
    b_at: int,
    b_stride: int,
    c: Array,
    c_at: int,
    c_stride: int,
    rows: int,
    inner: int,
    cols: int,
) -> None:
    """C += A·B for matrices inside flat arrays; rows and cols are multiples of TILE.

    A[i, k] = a[a_at + i·down + k·right] (so a transpose costs nothing), B[k, j] = b[b_at + k·b_stride + j].
    """
    for k in range(0, inner, 128):  # eight columns of 128 rows of b stay in the first-level cache
        deep = min(128, inner - k)
        for j in range(0, cols, TILE):
            for i in range(0, rows, TILE):
                add_tile(
                    a,
                    a_at + i * down + k * right,
                    down,
                    right,
                    b,
                    b_at + k * b_stride + j,
                    b_stride,
                    c,
                    c_at + i * c_stride + j,
                    c_stride,
                    deep,
                )


@intrinsic  # type: ignore[untyped-decorator]
def add_tile(
    typing: Any,
    a: Any,
    a_at: Any,
    down: Any,
    right: Any,
    b: Any,
    b_at: Any,
    b_stride: Any,
    c: Any,
    c_at: Any,
    c_stride: Any,
    inner: Any,
) -> Any:
    """One TILE x TILE tile of `add_product`, with the sums held in vector registers over the whole inner loop.

    Written in LLVM's own terms because its vectoriser, given plain loops, reloads and stores c at every term:
    that costs two thirds of the speed on matrices this small. LLVM splits the eight-wide vectors as the
    machine at hand requires.
    """
    index = types.intp

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a_data, b_data, c_data = (
            context.make_array(signature.args[k])(context, builder, args[k]).data for k in (0, 4, 7)
        )
        a_at, down, right, b_at, b_stride, c_at, c_stride, inner = (args[k] for k in (1, 2, 3, 5, 6, 8, 9, 10))
        vector, lane = ir.VectorType(ir.DoubleType(), TILE), ir.IntType(32)
        nothing = ir.Constant(vector, ir.Undefined)

        def row(data: Any, position: Any) -> Any:
            return builder.bitcast(builder.gep(data, [position]), vector.as_pointer())

        def times(count: int, stride: Any) -> Any:
            return builder.mul(ir.Constant(stride.type, count), stride)

        targets = [row(c_data, builder.add(c_at, times(i, c_stride))) for i in range(TILE)]
        sums = [cgutils.alloca_once_value(builder, builder.load(target, align=8)) for target in targets]
        with cgutils.for_range(builder, inner) as loop:
            values = builder.load(row(b_data, builder.add(b_at, builder.mul(loop.index, b_stride))), align=8)
            at = builder.add(a_at, builder.mul(loop.index, right))
            for i in range(TILE):
                factor = builder.load(builder.gep(a_data, [builder.add(at, times(i, down))]))
                spread = builder.insert_element(nothing, factor, ir.Constant(lane, 0))
                spread = builder.shuffle_vector(spread, nothing, ir.Constant(ir.VectorType(lane, TILE), [0] * TILE))
                term = builder.fmul(spread, values, flags=("contract",))
                builder.store(builder.fadd(builder.load(sums[i]), term, flags=("contract",)), sums[i])
        for total, target in zip(sums, targets, strict=True):
            builder.store(builder.load(total), target, align=8)
        return context.get_dummy_value()

    return types.void(a, index, index, index, b, index, index, c, index, index, index), generate
