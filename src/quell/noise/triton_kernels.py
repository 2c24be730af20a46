"""One fused pass per step on a GPU: read the gradient, make the row of C⁻¹Z in registers, write the sum back.

One launch serves every tensor of a dtype. `programs[pid]` names a row of the table `rows`, which says where that
tensor lies and which elements it holds (columns below). A program is one warp; it covers SPAN elements of one tensor,
PART at a time: one or more tiles, each thread making as many neighbouring lanes, so that complete parts move in
vectors. The step is read from device memory, so a captured CUDA graph replays the next step every time; past the last
step the scale is NaN, which no one can mistake for noise.

Tuning knobs are at the top; they change speed only, never the numbers. Few registers per thread let many warps hide
each other's waiting; at these limits Philox spills nothing to memory, ChaCha20 a few values outside its rounds. ChaCha8
has the settings of ChaCha20 and was not tuned. A ring with few rows can load them all before it makes the draw, which
then hides their way from memory; that takes registers for each row, so fewer warps.
"""

# mypy: ignore-errors
# The compiler infers the types.

from typing import NamedTuple

import triton
import triton.language as tl

from quell.noise.spec import Recipe
from quell.noise.triton_random import LANES, load_key, normals


class Knobs(NamedTuple):
    """How a kernel is launched. Each quarter of a processor runs 16,384 // (32·registers) warps at a time."""

    span: int  # elements per program; a power of 2, as is this:
    part: int  # elements at a time
    registers: int  # the most a thread may take, a multiple of 8
    ahead: int = 0  # how many kept rows a ring loads, with the gradient, before it makes the draw


KNOBS = {"chacha20": Knobs(1024, 512, 80), "chacha8": Knobs(1024, 512, 80), "philox": Knobs(2048, 256, 64)}
RING_KNOBS = {  # for rings that keep at most so many rows, smallest first; others take theirs from above
    "chacha20": {3: Knobs(1024, 512, 128, ahead=3)},
    "chacha8": {3: Knobs(1024, 512, 128, ahead=3)},
    "philox": {},
}


def knobs(generator: str, recipe: Recipe) -> Knobs:
    """The settings for a recipe's kernel; no more is loaded ahead than is kept, and nothing where draws are remade."""
    waits = recipe.kind == "ring" and not recipe.remade  # for its rows, more than for its draws
    few = (found for most, found in RING_KNOBS[generator].items() if waits and recipe.buffers <= most)
    chosen = next(few, KNOBS[generator])
    return chosen._replace(ahead=min(chosen.ahead, recipe.buffers))


# Columns of `rows`, int64.
POINTER, FIRST_PROGRAM, FIRST_SPAN, OFFSET, LENGTH, TENSOR, BUFFER, KEY = (tl.constexpr(i) for i in range(8))
COLUMNS = tl.constexpr(8)
ALIGNED = tl.constexpr(16)  # bytes, what vectors need
WHOLE = tl.constexpr(2.0**23)  # float32 numbers from here on are whole
UNSPECIALISED = ["steps", "scale_rows", "count", "tap_rows", "width", "stride"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def regenerate(
    programs, rows, key, counter, scales, scale_rows, steps, taps, count,
    ROUNDS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """x_t = Σ_j taps_j·z_{t−j}, all z made anew."""
    data, _, key, block, high, tensor, start, stop = _place(programs, rows, key, ROUNDS, DTYPE, WORDS, SPAN)
    t, scale, grid = _now(counter, scales, scale_rows, steps)
    at, lane = _lanes(WORDS, PART)
    draws = tl.minimum(count, t + 1).to(tl.int32)
    for skip in range(start // PART * PART, stop, PART):
        low = block + skip // WORDS + lane
        x = _nothing(at, WORDS)
        made = 0
        # Apart, the first draw saves Philox 10% of its instructions, ChaCha20 4% but for 4 times the compile time.
        if ROUNDS == 0:
            z = normals(ROUNDS, key, low, high, t.to(tl.uint32), tensor)
            tap = tl.load(taps)
            x = _fused(tap, z, x)
            made = 1
        for j in range(made, draws):
            z = normals(ROUNDS, key, low, high, (t - j).to(tl.uint32), tensor)
            tap = tl.load(taps + j)
            x = _fused(tap, z, x)
        g = _load(data + skip, at, start - skip, stop - skip, WORDS)
        _add(data + skip, g, x, scale, grid, at, start - skip, stop - skip)


@triton.jit(do_not_specialize=UNSPECIALISED)
def ring(
    programs, rows, key, counter, scales, scale_rows, steps, taps, tap_rows, width, buffers, count, stride,
    ROUNDS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, PART: tl.constexpr,
    KEEP_DRAW: tl.constexpr, REMAKE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """x_t = taps_0·z_t + Σ_d taps_d·kept_{t−d} over `count` kept rows; then x_t is kept, or z_t if KEEP_DRAW.

    There are `width` taps; if REMAKE, those beyond the kept rows belong to older draws, which are made anew.
    """
    data, kept, key, block, high, tensor, start, stop = _place(programs, rows, key, ROUNDS, DTYPE, WORDS, SPAN)
    t, scale, grid = _now(counter, scales, scale_rows, steps)
    at, lane = _lanes(WORDS, PART)
    kept += buffers
    taps += tl.minimum(t, tap_rows - 1) * width
    oldest = t % tl.maximum(count, 1)  # a 64-bit remainder is slow: once will do
    for skip in range(start // PART * PART, stop, PART):
        slot = oldest
        early = ()
        for _ in tl.static_range(AHEAD):
            slot = tl.where(slot > 0, slot, count) - 1
            early += (_load(kept + slot * stride + skip, at, start - skip, stop - skip, WORDS),)
        if AHEAD > 0:  # with many rows the registers are worth more to other warps
            g = _load(data + skip, at, start - skip, stop - skip, WORDS)
        z = normals(ROUNDS, key, block + skip // WORDS + lane, high, t.to(tl.uint32), tensor)
        tap = tl.load(taps)
        x = _scaled(tap, z)
        for d in tl.static_range(AHEAD):
            tap = tl.load(taps + d + 1)
            x = _fused(tap, early[d], x)
        for d in range(AHEAD + 1, count + 1):
            slot = tl.where(slot > 0, slot, count) - 1
            tap = tl.load(taps + d)
            y = _load(kept + slot * stride + skip, at, start - skip, stop - skip, WORDS)
            x = _fused(tap, y, x)
        if count > 0:
            if KEEP_DRAW:
                _store(kept + oldest * stride + skip, z, at, start - skip, stop - skip)
            else:
                _store(kept + oldest * stride + skip, x, at, start - skip, stop - skip)
        if REMAKE:
            for j in range(count + 1, tl.minimum(width, t + 1).to(tl.int32)):
                old = normals(ROUNDS, key, block + skip // WORDS + lane, high, (t - j).to(tl.uint32), tensor)
                tap = tl.load(taps + j)
                x = _fused(tap, old, x)
        if AHEAD == 0:
            g = _load(data + skip, at, start - skip, stop - skip, WORDS)
        _add(data + skip, g, x, scale, grid, at, start - skip, stop - skip)


@triton.jit(do_not_specialize=UNSPECIALISED)
def exponentials(
    programs, rows, key, counter, scales, scale_rows, steps, taps, buffers, count, stride,
    ROUNDS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """x_t = z_t + Σ_i taps_i·s_i, then s_i ← z_t + taps_{count+i}·s_i."""
    data, kept, key, block, high, tensor, start, stop = _place(programs, rows, key, ROUNDS, DTYPE, WORDS, SPAN)
    t, scale, grid = _now(counter, scales, scale_rows, steps)
    at, lane = _lanes(WORDS, PART)
    kept += buffers
    for skip in range(start // PART * PART, stop, PART):
        z = normals(ROUNDS, key, block + skip // WORDS + lane, high, t.to(tl.uint32), tensor)
        x = z
        state = kept + skip
        for i in range(count):
            weight = tl.load(taps + i)
            decay = tl.load(taps + count + i)
            s = _load(state, at, start - skip, stop - skip, WORDS)
            x = _fused(weight, s, x)
            s = _fused(decay, s, z)
            _store(state, s, at, start - skip, stop - skip)
            state += stride  # i·stride would overflow 32 bits
        g = _load(data + skip, at, start - skip, stop - skip, WORDS)
        _add(data + skip, g, x, scale, grid, at, start - skip, stop - skip)


@triton.jit(do_not_specialize=UNSPECIALISED)
def fenwick(
    programs, rows, key, counter, scales, scale_rows, steps, moves, buffers, stride,
    ROUNDS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """node = z_t + buffer[moves_t0], x_t = node − buffer[moves_t1], node kept in buffer[moves_t2]; −1 is no buffer."""
    data, kept, key, block, high, tensor, start, stop = _place(programs, rows, key, ROUNDS, DTYPE, WORDS, SPAN)
    t, scale, grid = _now(counter, scales, scale_rows, steps)
    at, lane = _lanes(WORDS, PART)
    kept += buffers
    moves += tl.minimum(t, steps - 1) * 3
    plus = tl.load(moves).to(tl.int64)
    minus = tl.load(moves + 1).to(tl.int64)
    into = tl.load(moves + 2).to(tl.int64)
    stop_plus = tl.where(plus >= 0, stop, start)
    stop_minus = tl.where(minus >= 0, stop, start)
    for skip in range(start // PART * PART, stop, PART):
        node = normals(ROUNDS, key, block + skip // WORDS + lane, high, t.to(tl.uint32), tensor)
        y = _load(kept + tl.maximum(plus, 0) * stride + skip, at, start - skip, stop_plus - skip, WORDS)
        node = _fused(1.0, y, node)
        y = _load(kept + tl.maximum(minus, 0) * stride + skip, at, start - skip, stop_minus - skip, WORDS)
        x = _fused(-1.0, y, node)
        _store(kept + into * stride + skip, node, at, start - skip, stop - skip)
        g = _load(data + skip, at, start - skip, stop - skip, WORDS)
        _add(data + skip, g, x, scale, grid, at, start - skip, stop - skip)


@triton.jit
def _place(programs, rows, key, ROUNDS: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr):
    """Where this program works: gradient and buffer positions, first block, and its elements [start, stop)."""
    pid = tl.program_id(0)
    number = tl.load(programs + pid).to(tl.int64)
    row = rows + number * COLUMNS
    span = tl.load(row + FIRST_SPAN) + pid - tl.load(row + FIRST_PROGRAM)  # spans count from the unsharded start
    first = span * SPAN - tl.load(row + OFFSET)  # of the shard; below 0 where it begins inside this span
    start = tl.maximum(-first, 0).to(tl.int32)
    stop = tl.minimum(tl.load(row + LENGTH) - first, SPAN).to(tl.int32)
    data = tl.load(row + POINTER).to(tl.pointer_type(DTYPE)) + first
    kept = tl.load(row + BUFFER) + first
    key = load_key(ROUNDS, key + tl.load(row + KEY))
    block = span * (SPAN // WORDS)
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    return data, kept, key, low, high, tl.load(row + TENSOR).to(tl.uint32), start, stop


@triton.jit
def _lanes(WORDS: tl.constexpr, PART: tl.constexpr):
    """The lanes of a part: positions of their first elements and, in `_flat` order, their numbers.

    Positions are (LANES, tiles), in memory's order, if there is more than one tile. A single one has no vectors, and
    a second axis for it would make Triton compile half as long again.
    """
    TILES: tl.constexpr = PART // (LANES * WORDS)
    flat = tl.arange(0, LANES * TILES)
    if TILES == 1:
        return flat, flat.to(tl.uint32)
    else:  # noqa: RET505 - the compiler prunes the branch not taken
        lane = tl.arange(0, LANES)[:, None] * TILES + tl.arange(0, TILES)[None, :]
        flat = flat % LANES * TILES + flat // LANES
        return lane // LANES * (LANES * WORDS) + lane % LANES, flat.to(tl.uint32)


@triton.jit
def _now(counter, scales, scale_rows, steps):
    """The step, and its row of `scales`: what multiplies the noise, and the grid that the release is rounded to."""
    t = tl.load(counter)
    scales += 2 * tl.minimum(t, scale_rows - 1)
    scale = tl.load(scales, mask=t < steps, other=float("nan"))
    return t, scale, tl.load(scales + 1)


@triton.jit
def _nothing(at, WORDS: tl.constexpr):
    """Tensors of −0, which change nothing they are added to."""
    return (tl.full((at.numel,), -0.0, tl.float32),) * WORDS


@triton.jit
def _scaled(c, a):
    return [c * y for y in a]


@triton.jit
def _fused(c, a, b):
    """c·a + b, rounded once."""
    sums = ()
    for v in tl.static_range(len(a)):
        sums += (tl.fma(c, a[v], b[v]),)
    return sums


@triton.jit
def _load(base, at, start, stop, WORDS: tl.constexpr):
    if _whole(base, at, start, stop, WORDS):
        values = _load_whole(_aligned(base, at) + at, WORDS)
    else:
        values = _load_some(base + at, at, start, stop, WORDS)
    return values


@triton.jit
def _load_whole(here, WORDS: tl.constexpr):
    values = ()
    for v in tl.static_range(WORDS):
        values += (_flat(tl.load(here + v * LANES)),)  # constant distances cost no address arithmetic
    return values


@triton.jit
def _load_some(here, at, start, stop, WORDS: tl.constexpr):
    values = ()
    for v in tl.static_range(WORDS):
        values += (_flat(tl.load(here + v * LANES, mask=_within(at, v, start, stop), other=0.0)),)
    return values


@triton.jit
def _store(base, values, at, start, stop):
    if _whole(base, at, start, stop, len(values)):
        here = _aligned(base, at) + at
        for v in tl.static_range(len(values)):
            tl.store(here + v * LANES, _wide(values[v], at))
    else:
        here = base + at
        for v in tl.static_range(len(values)):
            tl.store(here + v * LANES, _wide(values[v], at), mask=_within(at, v, start, stop))


@triton.jit
def _add(data, g, x, scale, grid, at, start, stop):
    """gradient + scale·x in float32, rounded to a multiple of the grid, then to the gradient's dtype.

    From 2²³ times the grid on, every float32 is a multiple.
    """
    sums = ()
    inverse = 1.0 / grid
    for v in tl.static_range(len(x)):
        total = g[v].to(tl.float32) + x[v] * scale
        units = total * inverse
        nearest = tl.floor(units + 0.5) * grid  # halves go up: to even, odd multiples would be rarer
        sums += (tl.where(tl.abs(units) < WHOLE, nearest, total).to(g[v].dtype),)
    _store(data, sums, at, start, stop)


@triton.jit
def _whole(base, at, start, stop, WORDS: tl.constexpr):
    """Is the part complete, so that it needs no masks, and aligned if there are vectors?"""
    complete = (start <= 0) & (stop >= WORDS * at.numel)
    return complete & (base.to(tl.int64) % ALIGNED == 0) if len(at.shape) == 2 else complete


@triton.jit
def _aligned(base, at):
    """The same address, which the compiler now knows to be aligned if there are vectors."""
    if len(at.shape) == 2:
        base = tl.multiple_of((base.to(tl.int64) // ALIGNED * ALIGNED).to(base.dtype), ALIGNED)
    return base


@triton.jit
def _within(at, v: tl.constexpr, start, stop):
    """start ≤ at + v·LANES < stop, by one comparison: below `start` the unsigned difference is huge."""
    return (at - start + v * LANES).to(tl.uint32) < (stop - start).to(tl.uint32)


@triton.jit
def _flat(x):
    """(LANES, TILES) in memory's order to the one axis on which numbers are made; no value leaves its thread."""
    return tl.reshape(tl.trans(x), (x.numel,)) if len(x.shape) == 2 else x


@triton.jit
def _wide(x, like):
    return tl.trans(tl.reshape(x, (like.shape[1], like.shape[0]))) if len(like.shape) == 2 else x
