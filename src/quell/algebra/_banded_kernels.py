"""Compiled loops behind `quell.algebra.banded`.

One recursion does the work. The rows of a lower-banded matrix E define a sequence by E θ = z, z i.i.d. standard
normal, with W = Cov(θ) = (EᵀE)⁻¹. Take B rows of E at a time ("new") after the m rows before them ("window", m
at least the number of sub-diagonals), and write these rows as [U | L], L lower triangular. Then
θ_new = F θ_window + L⁻¹ z with F = -L⁻¹U, hence

    W[new, window] = F W[window, window],   W[new, new] = F W[window, new] + L⁻¹L⁻ᵀ          (forward).

For the loss Σ W_ii let P be the symmetric matrix of derivatives still to be passed back, at first the identity. Going
back over the blocks, with all = window + new,

    ∂loss/∂[U | L] = -2 L⁻ᵀ P[new, all] W[all, all]
    P[window, window] += FᵀR + RᵀF,   R = ½ P[new, new] F + P[new, window]                   (backward).

With B = 1 this is the scalar recursion W[i, i-d] = Σ_k h_k W[i-k, i-d], h_k = -E[i, i-k]/E[i, i]; B = 8 to 32
turns it into matrix products whose kernel, `add_product`, is as fast as a BLAS. W is kept only for a *segment* of
rows: the forward pass saves W[window, window] at the start of each segment and the backward pass recomputes the
segment from there. That makes 8 m² operations a row instead of 6 m², but memory beyond input and gradient stays
small and everything in use stays in cache. In short runs all of W is kept.

All loops are serial, so results cannot depend on the number of threads. Fusing a multiplication with an addition
(`contract`) is the only liberty the compiler gets: infinities and nans behave as usual. Matrices are passed
flat, with a position and a stride, because that is how their windows slide.
"""
# mypy: disallow-untyped-calls=False

import math

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quell.algebra._compile import compiled

TILE = 8  # rows and columns that blocks and windows are multiples of
# Rows of a register tile: its sums must fit into the vector registers, of which AVX-512 has 32 and others 16.
ROWS = TILE if get_host_cpu_features().get("avx512vl", False) else TILE // 2
KEPT = 2_000_000  # numbers in W up to which it is kept for the backward pass


@compiled()
def banded_loss_and_gradient(theta, inverse_norms, inverse, window, block, segment, gradient, dots):
    """Σ W_ii and its gradient in theta (written to `gradient`); inf, and no gradient, if W overflows.

    theta, gradient: (n, p); inverse_norms: (n,) of theta's columns; inverse: (r, n), inverse[e, t] = A⁻¹[t, t-e],
    by lag so that loops along a row of C are contiguous; dots: (n,) the products C_j·∂loss/∂C_j, by the way.
    """
    n, bands = theta.shape
    segments = (n + segment - 1) // segment
    both, stride = window + block, row_stride(window, segment)
    last = segment * stride + segment  # where the last window of a segment starts
    size = (window + segment) * stride
    kept = segments if segments * size <= KEPT else 1  # short runs need not compute W a second time
    all_w, all_x, p = np.zeros((kept, size)), np.empty((kept, segment * both)), np.empty(size)
    saved, carried = np.empty(segments * window * window), np.zeros(window * window)
    slopes = np.empty(segment * both)
    room, spare, strip = np.empty(block * both + TILE * TILE), np.empty(block * both), np.empty(bands)

    loss = 0.0
    for g in range(segments):
        first, x, w = g * segment, all_x[g % kept], all_w[g % kept]
        copy(all_w[(g - 1) % kept], last, stride, saved, g * window * window, window, window, window)
        copy(saved, g * window * window, window, w, 0, stride, window, window)
        fill_rows(theta, inverse_norms, inverse, first, window, block, strip, x)
        advance(window, block, x, room, w, stride)
        part = 0.0
        for i in range(min(segment, n - first)):
            variance, own = w[(window + i) * (stride + 1)], x[i * both + window + i % block]
            # Var θ_i is at least 1/E_ii²; less (or nan) means that C⁻¹ blew up and rounding took over.
            if not variance >= 0.999 * own * own:
                return math.inf
            part += variance
        loss += part
        if not math.isfinite(loss):
            return math.inf

    dots[:], done = 0.0, n
    for g in range(segments - 1, -1, -1):
        first, x, w = g * segment, all_x[g % kept], all_w[g % kept]
        count = min(segment, n - first)
        if g < segments - kept:
            copy(saved, g * window * window, window, w, 0, stride, window, window)
            fill_rows(theta, inverse_norms, inverse, first, window, block, strip, x)
            advance(window, block, x, room, w, stride)
        p[:] = 0.0
        copy(carried, 0, window, p, last, stride, window, window)
        for i in range(count):
            p[(window + i) * (stride + 1)] += 1.0
        retreat(window, block, x, w, p, stride, room, spare, slopes)
        copy(p, 0, stride, carried, 0, window, window, window)
        chain_rows(theta, inverse_norms, inverse, first, count, window, block, slopes, strip, gradient, dots)
        # Column j ends bands - 1 rows below its diagonal: from there on, rows have all their dots.
        ready = min(first + bands - 1, done) if g else 0
        project_rows(theta, inverse_norms, ready, done, gradient, dots)
        done = ready
    return loss


@compiled()
def banded_variances(bands, step, window, block, segment, out):
    """out[i] = W_ii for E with row bands `bands[i * step]` (step 0: every row the same)."""
    both, stride = window + block, row_stride(window, segment)
    w = np.zeros((window + segment) * stride)
    x, room = np.empty(segment * both), np.empty(block * both + TILE * TILE)
    for first in range(0, out.size, segment):
        copy(w, segment * stride + segment, stride, w, 0, stride, window, window)
        x[:] = 0.0
        for i in range(segment):
            t, at = first + i, i * both + window + i % block
            x[at] = 1.0
            if t < out.size:
                for d in range(min(bands.shape[1], t + 1)):
                    x[at - d] = bands[t * step, d]
        advance(window, block, x, room, w, stride)
        for i in range(min(segment, out.size - first)):
            out[first + i] = w[(window + i) * (stride + 1)]


@compiled()
def forced_variances(bands, step, forcing, out):
    """out[i] = Var θ_i for E θ = T(forcing) z, row by row: few bands, any number of forcing coefficients.

    With e = E[i, i], h_d = -E[i, i-d]/e and f the forcing,
        Cov(θ_i, z_{i-j}) = f_j/e + Σ_d h_d Cov(θ_{i-d}, z_{i-j})
        Cov(θ_i, θ_{i-d}) = Σ_d' h_d' Cov(θ_{i-d'}, θ_{i-d}) + Σ_j f_j/e Cov(z_{i-j}, θ_{i-d}),   d = 0 last.
    Row t of both tables lives in line t mod (number of bands): nothing is ever shifted.
    """
    lines, terms = bands.shape[1], forcing.size
    with_noise, with_past = np.zeros((lines, terms)), np.zeros((lines, lines))
    h = np.empty(lines)
    for i in range(out.size):
        row, e = bands[i * step], bands[i * step, 0]
        past = min(lines - 1, i)
        noise, mine = with_noise[i % lines], with_past[i % lines]
        for j in range(terms):
            noise[j] = forcing[j] / e if j <= i else 0.0  # there is no noise before the first step
        for d in range(1, past + 1):
            h[d] = -row[d] / e
            theirs = with_noise[(i - d) % lines]
            for j in range(terms - d):
                noise[j + d] += h[d] * theirs[j]
        for d in range(1, past + 1):
            total = 0.0
            for k in range(1, past + 1):
                total += h[k] * with_past[(i - min(d, k)) % lines, abs(d - k)]
            theirs, forced = with_noise[(i - d) % lines], 0.0
            for j in range(terms - d):
                forced += forcing[j + d] * theirs[j]
            mine[d] = total + forced / e
        total = 0.0
        for j in range(terms):
            total += forcing[j] * noise[j]
        total /= e
        for d in range(1, past + 1):
            total += h[d] * mine[d]
        mine[0] = total
        out[i] = total


@compiled()
def multiply_bands(left, left_step, right, right_step, out):
    """out[i, d] = Σ_a left[i, a] right[i-a, d-a], entries left of column zero taken as zero."""
    for i in range(out.shape[0]):
        for a in range(min(left.shape[1], i + 1)):
            factor = left[i * left_step, a]
            row, target = right[(i - a) * right_step], out[i, a:]
            for b in range(min(right.shape[1], i - a + 1)):
                target[b] += factor * row[b]


@compiled()
def column_norms(theta, out):
    """out[j] = norm of column j. False if a diagonal entry is not positive: then theta is no strategy."""
    n, bands = theta.shape
    out[:] = 0.0
    for t in range(n):
        here = min(bands, t + 1)
        values, sums = theta[t], out[t - here + 1 : t + 1]
        if not values[0] > 0.0:
            return False
        for j in range(here):
            value = values[np.uintp(here - 1 - j)]
            sums[j] += value * value
    for j in range(n):
        out[j] = math.sqrt(out[j])
    return True


@compiled()
def divide_columns(bands, divisors):
    """Divide column j by divisors[j], in place; entries outside the matrix become zero."""
    for t in range(bands.shape[0]):
        here = min(bands.shape[1], t + 1)
        row, below = bands[t], divisors[t - here + 1 : t + 1]
        for c in range(here):
            row[c] /= below[np.uintp(here - 1 - c)]
        row[here:] = 0.0


@compiled()
def fill_rows(theta, inverse_norms, inverse, first, window, block, strip, x):
    """x = the rows from `first` of E = C·A⁻¹, C = theta·diag(inverse_norms), each laid out as in its block's [U | L].

    Rows past the end are those of the identity.
    """
    n, bands = theta.shape
    both = window + block
    x[:] = 0.0
    for i in range(x.size // both):
        t, at = first + i, i * both + window + i % block  # `at`: the diagonal
        if t >= n:
            x[at] = 1.0
            continue
        here = min(bands, t + 1)
        left = t - here + 1  # this row's first column
        values, norms = theta[t], inverse_norms[left:]
        for j in range(here):
            strip[j] = values[np.uintp(here - 1 - j)] * norms[j]  # unsigned: no test for wrap-around, so vectorised
        for e in range(inverse.shape[0]):
            low = max(0, e - left)
            target, lag, part = x[at - here + 1 - e + low :], inverse[e, left + low :], strip[low:]
            for j in range(here - low):
                target[j] += part[j] * lag[j]


@compiled()
def advance(window, block, x, room, w, stride):
    """Forward recursion over a segment: turns x from rows [U | L] into [F | L⁻¹] and extends W by them."""
    both = window + block
    for s in range(0, x.size // both, block):
        top, at = window + s, s * both
        eliminate(window, block, x, at, room)
        above, below, corner = s * (stride + 1), top * stride + s, top * (stride + 1)
        clear(w, below, stride, block, both)
        add_product(x, at, both, 1, w, above, stride, w, below, stride, block, window, window)
        transpose(w, below, stride, w, above + window, stride, block, window)
        transpose(x, at + window, both, room, 0, block, block, block)
        add_product(x, at, both, 1, w, above + window, stride, w, corner, stride, block, window, block)
        add_product(x, at + window, both, 1, room, 0, block, w, corner, stride, block, block, block)
        for i in range(block):
            for j in range(i):  # exact symmetry: rounding must not build up
                w[corner + j * stride + i] = w[corner + i * stride + j]


@compiled()
def eliminate(window, block, x, at, room):
    """Replace the block [U | L] at x[at:] by L⁻¹ [-U | I] = [F | L⁻¹], eight rows at a time."""
    both = window + block
    small = block * both  # room's last 64 places hold -D⁻¹
    for r in range(0, block, TILE):
        here, edge = at + r * both, window + r  # these rows read [U | known | D], D triangular from column `edge`
        clear(room, small, TILE, TILE, TILE)
        for i in range(TILE):
            row = here + i * both + edge
            scale = -1.0 / x[row + i]
            for j in range(i):
                total = 0.0
                for k in range(j, i):
                    total += x[row + k] * room[small + k * TILE + j]
                room[small + i * TILE + j] = total * scale
            room[small + i * TILE + i] = scale
        copy(x, here, both, room, 0, both, TILE, window)
        clear(room, window, both, TILE, r + TILE)
        for i in range(TILE):
            room[i * both + edge + i] = -1.0
        add_product(x, here + window, both, 1, x, at, both, room, 0, both, TILE, r, edge)
        clear(x, here, both, TILE, both)
        add_product(room, small, TILE, 1, room, 0, both, x, here, both, TILE, TILE, edge + TILE)


@compiled()
def retreat(window, block, x, w, p, stride, back, spare, slopes):
    """Backward recursion over a segment: carry p to its first rows, leave -∂loss/∂[U | L] in `slopes`.

    Only the symmetric part of p means anything: p[window, window] += FᵀR, R = P[new, new] F + 2 P[new, window],
    has the symmetric part asked for at half the work.
    """
    both = window + block
    slopes[:] = 0.0
    for s in range(x.size // both - block, -1, -block):
        at, above, below = s * both, s * (stride + 1), (window + s) * stride + s
        transpose(p, above + window, stride, back, 0, both, both, block)
        for i in range(block):
            row, values = back[i * both :], p[below + i * stride :]
            for j in range(both):
                row[j] += values[j]
        spare[:] = 0.0
        add_product(back, 0, both, 1, w, above, stride, spare, 0, both, block, both, both)
        add_product(x, at + window, 1, both, spare, 0, both, slopes, at, both, block, block, both)
        for i in range(block):
            for j in range(window, both):
                back[i * both + j] *= 0.5
        add_product(back, window, both, 1, x, at, both, back, 0, both, block, block, window)
        add_product(x, at, 1, both, back, 0, both, p, above, stride, window, block, window)


@compiled()
def chain_rows(theta, inverse_norms, inverse, first, count, window, block, slopes, strip, gradient, dots):
    """gradient = ∂loss/∂C for `count` rows, from -∂loss/∂E; dots[j] += its product with column j of C."""
    bands = theta.shape[1]
    for i in range(count):
        t, at = first + i, i * (window + block) + window + i % block
        here = min(bands, t + 1)
        left = t - here + 1
        for j in range(here):
            strip[j] = 0.0
        for e in range(inverse.shape[0]):
            low = max(0, e - left)
            source, lag, part = slopes[at - here + 1 - e + low :], inverse[e, left + low :], strip[low:]
            for j in range(here - low):
                part[j] -= source[j] * lag[j]
        values, norms, sums, out = theta[t], inverse_norms[left:], dots[left:], gradient[t]
        for j in range(here):
            sums[j] += strip[j] * values[np.uintp(here - 1 - j)] * norms[j]
        for j in range(here):
            out[j] = strip[np.uintp(here - 1 - j)]
        for j in range(here, bands):
            out[j] = 0.0


@compiled()
def project_rows(theta, inverse_norms, first, last, gradient, dots):
    """From ∂loss/∂C to ∂loss/∂theta, C having theta's columns scaled to norm one."""
    bands = theta.shape[1]
    for t in range(first, last):
        here = min(bands, t + 1)
        values, out = theta[t], gradient[t]
        norms, sums = inverse_norms[t - here + 1 :], dots[t - here + 1 :]
        for j in range(here):
            scale = norms[np.uintp(here - 1 - j)]
            out[j] = (out[j] - values[j] * scale * sums[np.uintp(here - 1 - j)]) * scale


@compiled()
def row_stride(window, segment):
    """Length of a row of W. Rows a power of two apart would compete for the same few cache lines: avoid that."""
    return window + segment + 8


@compiled()
def clear(target, at, stride, rows, cols):
    for i in range(rows):
        row = target[at + i * stride :]
        for j in range(cols):
            row[j] = 0.0


@compiled()
def copy(source, s_at, s_stride, target, t_at, t_stride, rows, cols):
    for i in range(rows):
        row, values = target[t_at + i * t_stride :], source[s_at + i * s_stride :]
        for j in range(cols):
            row[j] = values[j]


@compiled()
def transpose(source, s_at, s_stride, target, t_at, t_stride, rows, cols):
    for j in range(cols):
        for i in range(rows):
            target[t_at + j * t_stride + i] = source[s_at + i * s_stride + j]


@intrinsic
def add_tile(typing, a, a_at, down, right, b, b_at, b_stride, c, c_at, c_stride, inner):
    """One ROWS x TILE tile of `add_product`, with the sums held in vector registers over the whole inner loop.

    Written in LLVM's own terms because its vectoriser, given plain loops, reloads and stores c at every term:
    that costs two thirds of the speed on matrices this small. LLVM splits the eight-wide vectors as the
    machine at hand requires.
    """
    index = types.intp

    def generate(context, builder, signature, args):
        # `add_product` is called from ten places; copying it into each would take seconds to compile for no speed.
        builder.function.attributes.add("noinline")
        a_data, b_data, c_data = (
            context.make_array(signature.args[k])(context, builder, args[k]).data for k in (0, 4, 7)
        )
        a_at, down, right, b_at, b_stride, c_at, c_stride, inner = (args[k] for k in (1, 2, 3, 5, 6, 8, 9, 10))
        vector, lane = ir.VectorType(ir.DoubleType(), TILE), ir.IntType(32)
        nothing = ir.Constant(vector, ir.Undefined)

        def row(data, position):
            return builder.bitcast(builder.gep(data, [position]), vector.as_pointer())

        def times(count, stride):
            return builder.mul(ir.Constant(stride.type, count), stride)

        targets = [row(c_data, builder.add(c_at, times(i, c_stride))) for i in range(ROWS)]
        sums = [cgutils.alloca_once_value(builder, builder.load(target, align=8)) for target in targets]
        with cgutils.for_range(builder, inner) as loop:
            values = builder.load(row(b_data, builder.add(b_at, builder.mul(loop.index, b_stride))), align=8)
            at = builder.add(a_at, builder.mul(loop.index, right))
            for i in range(ROWS):
                factor = builder.load(builder.gep(a_data, [builder.add(at, times(i, down))]))
                spread = builder.insert_element(nothing, factor, ir.Constant(lane, 0))
                spread = builder.shuffle_vector(spread, nothing, ir.Constant(ir.VectorType(lane, TILE), [0] * TILE))
                term = builder.fmul(spread, values, flags=("contract",))
                builder.store(builder.fadd(builder.load(sums[i]), term, flags=("contract",)), sums[i])
        for total, target in zip(sums, targets, strict=True):
            builder.store(builder.load(total), target, align=8)
        return context.get_dummy_value()

    return types.void(a, index, index, index, b, index, index, c, index, index, index), generate


# The signature keeps numba from compiling it anew for every constant that appears in a call.
@compiled("void(f8[::1], i8, i8, i8, f8[::1], i8, i8, f8[::1], i8, i8, i8, i8, i8)")
def add_product(a, a_at, down, right, b, b_at, b_stride, c, c_at, c_stride, rows, inner, cols):
    """C += A·B for matrices inside flat arrays; rows and cols are multiples of TILE.

    A[i, k] = a[a_at + i·down + k·right] (so a transpose costs nothing), B[k, j] = b[b_at + k·b_stride + j].
    """
    for k in range(0, inner, 128):  # eight columns of 128 rows of b stay in the first-level cache
        deep = min(128, inner - k)
        for j in range(0, cols, TILE):
            for i in range(0, rows, ROWS):
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
