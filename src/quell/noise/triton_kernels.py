"""One fused pass per step on a GPU: read the gradient, make the row of C⁻¹Z in registers, write the sum back.

One launch serves every tensor of a dtype. `programs[pid]` names a row of the table `rows`, which says where that
tensor lies and which elements it holds (columns below); a program covers BLOCKS lanes of 16 elements each. The step is
read from device memory, so a captured CUDA graph replays the next step every time; past the last step the scale is
NaN, which no one can mistake for noise.

Tuning knobs are at the top; they change speed only, never the numbers.
"""

# mypy: ignore-errors
# The compiler infers the types.

import triton
import triton.language as tl

from quell.noise.triton_random import LANES, normals

BLOCKS = 128  # lanes per program; each makes 16 normals at a time
NUM_WARPS = 4
PREFETCH = {"chacha20": False, "philox": True}  # load the gradient before generating: for memory-bound passes

# Columns of `rows`, int64.
POINTER, FIRST_PROGRAM, FIRST_SPAN, OFFSET, LENGTH, TENSOR, BUFFER, KEY = (tl.constexpr(i) for i in range(8))
COLUMNS = tl.constexpr(8)
UNSPECIALISED = ["steps", "scale_rows", "count", "tap_rows", "stride"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def regenerate(
    programs, rows, key, counter, scales, scale_rows, steps, taps, count,
    CHACHA: tl.constexpr, DTYPE: tl.constexpr, BLOCKS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """x_t = Σ_j taps_j·z_{t−j}, all z made anew."""
    data, _, key, block, high, tensor, start, stop = _place(programs, rows, key, CHACHA, DTYPE, BLOCKS)
    t, scale = _now(counter, scales, scale_rows, steps)
    at = _offsets(BLOCKS)
    if PREFETCH:
        g = _load(data, at, start, stop)
    z = normals(CHACHA, key, block, high, t.to(tl.uint32), tensor)
    tap = tl.load(taps)
    x = _scaled(tap, z)
    for j in range(1, tl.minimum(count, t + 1).to(tl.int32)):
        z = normals(CHACHA, key, block, high, (t - j).to(tl.uint32), tensor)
        tap = tl.load(taps + j)
        x = _fused(tap, z, x)
    if not PREFETCH:
        g = _load(data, at, start, stop)
    _add(data, g, x, scale, at, start, stop)


@triton.jit(do_not_specialize=UNSPECIALISED)
def ring(
    programs, rows, key, counter, scales, scale_rows, steps, taps, tap_rows, buffers, count, stride,
    CHACHA: tl.constexpr, DTYPE: tl.constexpr, BLOCKS: tl.constexpr, KEEP_DRAW: tl.constexpr,
):  # fmt: skip
    """x_t = taps_0·z_t + Σ_d taps_d·kept_{t−d} over `count` kept rows; then x_t is kept, or z_t if KEEP_DRAW."""
    data, kept, key, block, high, tensor, start, stop = _place(programs, rows, key, CHACHA, DTYPE, BLOCKS)
    t, scale = _now(counter, scales, scale_rows, steps)
    at = _offsets(BLOCKS)
    kept += buffers
    taps += tl.minimum(t, tap_rows - 1) * (count + 1)
    z = normals(CHACHA, key, block, high, t.to(tl.uint32), tensor)
    tap = tl.load(taps)
    x = _scaled(tap, z)
    for d in range(1, count + 1):
        tap = tl.load(taps + d)
        y = _load(kept + (t + count - d) % count * stride, at, start, stop)
        x = _fused(tap, y, x)
    if count > 0:
        if KEEP_DRAW:
            _store(kept + t % count * stride, z, at, start, stop)
        else:
            _store(kept + t % count * stride, x, at, start, stop)
    _add(data, _load(data, at, start, stop), x, scale, at, start, stop)


@triton.jit(do_not_specialize=UNSPECIALISED)
def exponentials(
    programs, rows, key, counter, scales, scale_rows, steps, taps, buffers, count, stride,
    CHACHA: tl.constexpr, DTYPE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """x_t = z_t + Σ_i taps_i·s_i, then s_i ← z_t + taps_{count+i}·s_i."""
    data, kept, key, block, high, tensor, start, stop = _place(programs, rows, key, CHACHA, DTYPE, BLOCKS)
    t, scale = _now(counter, scales, scale_rows, steps)
    at = _offsets(BLOCKS)
    kept += buffers
    z = normals(CHACHA, key, block, high, t.to(tl.uint32), tensor)
    x = z
    for i in range(count):
        weight = tl.load(taps + i)
        decay = tl.load(taps + count + i)
        s = _load(kept, at, start, stop)
        x = _fused(weight, s, x)
        s = _fused(decay, s, z)
        _store(kept, s, at, start, stop)
        kept += stride  # i·stride would overflow 32 bits
    _add(data, _load(data, at, start, stop), x, scale, at, start, stop)


@triton.jit(do_not_specialize=UNSPECIALISED)
def fenwick(
    programs, rows, key, counter, scales, scale_rows, steps, moves, buffers, stride,
    CHACHA: tl.constexpr, DTYPE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """node = z_t + buffer[moves_t0], x_t = node − buffer[moves_t1], node kept in buffer[moves_t2]; −1 is no buffer."""
    data, kept, key, block, high, tensor, start, stop = _place(programs, rows, key, CHACHA, DTYPE, BLOCKS)
    t, scale = _now(counter, scales, scale_rows, steps)
    at = _offsets(BLOCKS)
    kept += buffers
    moves += tl.minimum(t, steps - 1) * 3
    plus = tl.load(moves).to(tl.int64)
    minus = tl.load(moves + 1).to(tl.int64)
    node = normals(CHACHA, key, block, high, t.to(tl.uint32), tensor)
    stop_plus = tl.where(plus >= 0, stop, start)
    stop_minus = tl.where(minus >= 0, stop, start)
    y = _load(kept + tl.maximum(plus, 0) * stride, at, start, stop_plus)
    node = _fused(1.0, y, node)
    y = _load(kept + tl.maximum(minus, 0) * stride, at, start, stop_minus)
    x = _fused(-1.0, y, node)
    _store(kept + tl.load(moves + 2).to(tl.int64) * stride, node, at, start, stop)
    _add(data, _load(data, at, start, stop), x, scale, at, start, stop)


@triton.jit
def _place(programs, rows, key, CHACHA: tl.constexpr, DTYPE: tl.constexpr, BLOCKS: tl.constexpr):
    """Where this program works: gradient and buffer positions, block indices, and its elements [start, stop)."""
    pid = tl.program_id(0)
    number = tl.load(programs + pid).to(tl.int64)
    row = rows + number * COLUMNS
    span = tl.load(row + FIRST_SPAN) + pid - tl.load(row + FIRST_PROGRAM)  # spans count from the unsharded start
    first = span * (BLOCKS * 16) - tl.load(row + OFFSET)  # of the shard; below 0 where it begins inside this span
    start = tl.maximum(-first, 0).to(tl.int32)
    stop = tl.minimum(tl.load(row + LENGTH) - first, BLOCKS * 16).to(tl.int32)
    data = tl.load(row + POINTER).to(tl.pointer_type(DTYPE)) + first
    kept = tl.load(row + BUFFER) + first
    lane = tl.arange(0, BLOCKS)
    if CHACHA:
        block = span * BLOCKS
        within = lane
    else:
        block = span * (BLOCKS * 4)
        within = (lane // LANES) * (LANES * 4) + lane % LANES
        key += tl.load(row + KEY)
    high = (block >> 32).to(tl.uint32)
    low = (block & 0xFFFFFFFF).to(tl.uint32) + within.to(tl.uint32)
    return data, kept, key, low, high, tl.load(row + TENSOR).to(tl.uint32), start, stop


@triton.jit
def _now(counter, scales, scale_rows, steps):
    t = tl.load(counter)
    scale = tl.load(scales + tl.minimum(t, scale_rows - 1), mask=t < steps, other=float("nan"))
    return t, scale


@triton.jit
def _offsets(BLOCKS: tl.constexpr):
    lane = tl.arange(0, BLOCKS)
    return (lane // LANES) * (LANES * 16) + lane % LANES


@triton.jit
def _scaled(c, a):
    return [c * a[v] for v in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def _fused(c, a, b):
    """c·a + b, rounded once."""
    return [tl.fma(c, a[v], b[v]) for v in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def _load(base, at, start, stop):
    here = base + at  # constant distances from one pointer cost no address arithmetic
    return [
        tl.load(here + v * LANES, mask=_within(at, v, start, stop), other=0.0)
        for v in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ]


@triton.jit
def _store(base, values, at, start, stop):
    here = base + at
    for v in tl.static_range(16):
        tl.store(here + v * LANES, values[v], mask=_within(at, v, start, stop))


@triton.jit
def _add(data, g, x, scale, at, start, stop):
    """gradient + (scale·x rounded to float32), rounded once to the gradient's dtype."""
    here = data + at
    for v in tl.static_range(16):
        noise = x[v] * scale
        total = g[v] + noise if g[v].dtype == tl.float64 else g[v].to(tl.float32) + noise
        tl.store(here + v * LANES, total.to(g[v].dtype), mask=_within(at, v, start, stop))


@triton.jit
def _within(at, v: tl.constexpr, start, stop):
    """start ≤ at + v·LANES < stop, by one comparison: below `start` the unsigned difference is huge."""
    return (at - start + v * LANES).to(tl.uint32) < (stop - start).to(tl.uint32)
