"""The same words, normals and recurrences compiled for the CPU: vectorised by LLVM, one thread per call.

A call works through groups of GROUP elements held in scratch arrays that fit the first-level cache: words, normals,
row, gradient. Loops run over LANES neighbouring elements, so every loop is a handful of vector instructions. Each
element's arithmetic is fixed (`quell.noise.normal`), so the result depends neither on threads nor on how the work is
cut. The interpreter lock is released.

All of it is one file because Numba's cache on disk notices changes in the file of the cached function only. For the
same reason, whoever changes a constant in `normal` or `layout` must delete the `__pycache__` folder beside this file.
"""

# mypy: ignore-errors
# The compiler infers the types.

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from quell.noise import generators, normal
from quell.noise.layout import LANES, REFINE, UNIT

GROUP = 8 * UNIT  # elements worked on at a time

u32, i32, f32 = np.uint32, np.int32, np.float32
_I32, _F32 = ir.IntType(32), ir.FloatType()


def _instruction(signature, emit):
    """What Numba needs for a function that is one LLVM instruction: exact 32-bit types, where it would widen to 64."""

    def codegen(context, builder, sig, args):
        return emit(builder, *args)

    return signature, codegen


@intrinsic
def rotate_left(typing, x, turn):
    def emit(b, x, turn):
        return b.or_(b.shl(x, turn), b.lshr(x, b.sub(ir.Constant(_I32, 32), turn)))

    return _instruction(types.uint32(types.uint32, types.uint32), emit)


@intrinsic
def fma(typing, a, b, c):
    return _instruction(types.float32(types.float32, types.float32, types.float32), lambda b, *args: b.fma(*args))


@intrinsic
def bits_of(typing, x):
    return _instruction(types.int32(types.float32), lambda b, x: b.bitcast(x, _I32))


@intrinsic
def from_bits(typing, x):
    return _instruction(types.float32(types.int32), lambda b, x: b.bitcast(x, _F32))


@intrinsic
def float_of_unsigned(typing, x):
    return _instruction(types.float32(types.uint32), lambda b, x: b.uitofp(x, _F32))


@intrinsic
def float_of_signed(typing, x):
    return _instruction(types.float32(types.int32), lambda b, x: b.sitofp(x, _F32))


# ---- words ----------------------------------------------------------------------------------------------------------

S0, S1, S2, S3 = (u32(value) for value in generators.CHACHA_CONSTANTS)
M0, M1 = (np.uint64(value) for value in generators.PHILOX_MULTIPLIERS)
W0, W1 = (u32(value) for value in generators.PHILOX_KEY_STEPS)


@njit(cache=True)
def _quarter(a, b, c, d):
    a = u32(a + b)
    d = rotate_left(u32(d ^ a), u32(16))
    c = u32(c + d)
    b = rotate_left(u32(b ^ c), u32(12))
    a = u32(a + b)
    d = rotate_left(u32(d ^ a), u32(8))
    c = u32(c + d)
    b = rotate_left(u32(b ^ c), u32(7))
    return a, b, c, d


@njit(cache=True)
def _double_round(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15):
    x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
    x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
    x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
    x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
    x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
    x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
    x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
    x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@njit(cache=True)
def _chacha_tile(rounds, key, low, high, step, tensor, out):
    """8 rounds, or 20."""
    k0, k1, k2, k3, k4, k5, k6, k7 = key[0], key[1], key[2], key[3], key[4], key[5], key[6], key[7]
    for lane in range(LANES):  # the rounds are written out, because only then does LLVM vectorise over lanes
        s = (S0, S1, S2, S3, k0, k1, k2, k3, k4, k5, k6, k7, u32(low + u32(lane)), high, step, tensor)
        x = _double_round(*_double_round(*_double_round(*_double_round(*s))))
        if rounds == 20:
            x = _double_round(*_double_round(*_double_round(*x)))
            x = _double_round(*_double_round(*_double_round(*x)))
        out[0, lane] = u32(x[0] + s[0])
        out[1, lane] = u32(x[1] + s[1])
        out[2, lane] = u32(x[2] + s[2])
        out[3, lane] = u32(x[3] + s[3])
        out[4, lane] = u32(x[4] + s[4])
        out[5, lane] = u32(x[5] + s[5])
        out[6, lane] = u32(x[6] + s[6])
        out[7, lane] = u32(x[7] + s[7])
        out[8, lane] = u32(x[8] + s[8])
        out[9, lane] = u32(x[9] + s[9])
        out[10, lane] = u32(x[10] + s[10])
        out[11, lane] = u32(x[11] + s[11])
        out[12, lane] = u32(x[12] + s[12])
        out[13, lane] = u32(x[13] + s[13])
        out[14, lane] = u32(x[14] + s[14])
        out[15, lane] = u32(x[15] + s[15])


@njit(cache=True)
def _philox_round(c0, c1, c2, c3, k0, k1):
    p0, p1 = np.uint64(c0) * M0, np.uint64(c2) * M1
    high0, high1 = u32(p0 >> np.uint64(32)), u32(p1 >> np.uint64(32))
    return u32(high1 ^ c1 ^ k0), u32(p1), u32(high0 ^ c3 ^ k1), u32(p0), u32(k0 + W0), u32(k1 + W1)


@njit(cache=True)
def _philox_tile(key, low, high, step, tensor, out):
    k0, k1 = key[0], key[1]
    for lane in range(LANES):
        x = (u32(low + u32(lane)), high, step, tensor, k0, k1)
        x = _philox_round(*_philox_round(*_philox_round(*_philox_round(*_philox_round(*x)))))
        x = _philox_round(*_philox_round(*_philox_round(*_philox_round(*_philox_round(*x)))))
        out[0, lane] = x[0]
        out[1, lane] = x[1]
        out[2, lane] = x[2]
        out[3, lane] = x[3]


@njit(cache=True)
def _unit_words(rounds, key, unit, purpose, step, tensor, out):
    """(16, LANES) the words of one unit: one tile of ChaCha, four of Philox, which is 0 rounds of ChaCha."""
    if rounds:
        block = unit * LANES
        high = u32((block >> 32) | (purpose << 16))
        _chacha_tile(rounds, key, u32(block & 0xFFFFFFFF), high, u32(step), u32(tensor), out)
    else:
        for tile in range(4):
            block = (4 * unit + tile) * LANES
            high = u32((block >> 32) | (purpose << 16))
            _philox_tile(key, u32(block & 0xFFFFFFFF), high, u32(step), u32(tensor), out[4 * tile : 4 * tile + 4])


# ---- normals --------------------------------------------------------------------------------------------------------

REFINE_BELOW, NEAR_ONE = u32(normal.REFINE_BELOW), u32(normal.NEAR_ONE)
ROOT_HALF_BITS, MANTISSA = i32(normal.ROOT_HALF_BITS), i32(normal.MANTISSA)
MINUS_TWO_LN2, TINY = f32(normal.MINUS_TWO_LN2), f32(2.0**-32)
L0, L1, L2, L3, L4, L5, L6, L7, L8 = (f32(value) for value in normal.LOG)
A0, A1, A2, A3 = (f32(value) for value in normal.SIN)
C0, C1, C2, C3, C4 = (f32(value) for value in normal.COS)


@njit(cache=True)
def _pair(w, value, angle):
    """The two normals of radius word w, already turned into the float `value`, and an angle word."""
    near_one = w >= NEAR_ONE
    offset = i32(bits_of(value) - ROOT_HALF_BITS)
    exponent = float_of_signed(i32((offset >> i32(23)) - i32(32)))
    fraction = from_bits(i32((offset & MANTISSA) + ROOT_HALF_BITS)) - f32(1)
    m = f32(value * -TINY) if near_one else fraction
    exponent = f32(0) if near_one else exponent
    p = fma(L8, m, L7)
    p = fma(p, m, L6)
    p = fma(p, m, L5)
    p = fma(p, m, L4)
    p = fma(p, m, L3)
    p = fma(p, m, L2)
    p = fma(p, m, L1)
    p = fma(p, m, L0)
    size = np.sqrt(fma(exponent, MINUS_TWO_LN2, f32(m * p)))
    t = f32(float_of_signed(i32((angle << u32(2)) | u32(2))) * TINY)
    square = f32(t * t)
    s = fma(A3, square, A2)
    s = fma(s, square, A1)
    s = f32(t * fma(s, square, A0))
    c = fma(C4, square, C3)
    c = fma(c, square, C2)
    c = fma(c, square, C1)
    c = fma(c, square, C0)
    c = from_bits(i32(u32(bits_of(c)) ^ (angle & u32(0x80000000))))
    swap = (angle & u32(0x40000000)) != u32(0)
    return f32(size * (s if swap else c)), f32(size * (c if swap else s))


@njit(cache=True)
def _unit_normals(words, z):
    """(16, LANES) words to normals, without second words."""
    for row in range(0, 16, 2):
        for lane in range(LANES):
            w, angle = words[row, lane], words[row + 1, lane]
            value = float_of_unsigned(u32(~w) if w >= NEAR_ONE else w) + f32(0.5)
            first, second = _pair(w, value, angle)
            z[row, lane] = first
            z[row + 1, lane] = second


@njit(cache=True)
def _least_radius(words):
    least = u32(0xFFFFFFFF)  # a pass of its own: inside _unit_normals it would keep LLVM from vectorising
    for lane in range(LANES):
        a = min(min(words[0, lane], words[2, lane]), min(words[4, lane], words[6, lane]))
        b = min(min(words[8, lane], words[10, lane]), min(words[12, lane], words[14, lane]))
        least = min(least, min(a, b))
    return least


@njit(cache=True)
def _refine(words, second, z):
    for row in range(0, 16, 2):
        for lane in range(LANES):
            w = words[row, lane]
            if w < REFINE_BELOW:
                value = fma(float_of_unsigned(second[row, lane]) + f32(0.5), TINY, float_of_unsigned(w))
                z[row, lane], z[row + 1, lane] = _pair(w, value, words[row + 1, lane])


@njit(nogil=True, cache=True)
def draw(rounds, key, step, tensor, unit, words, z):
    """Fill z (units, 16, LANES) with the normals of consecutive units from `unit` on; `words` is scratch like z."""
    for u in range(len(z)):
        _unit_words(rounds, key, unit + u, 0, step, tensor, words[u])
    for u in range(len(z)):
        _unit_normals(words[u], z[u])
        if _least_radius(words[u]) < REFINE_BELOW:
            second = np.empty((16, LANES), np.uint32)
            _unit_words(rounds, key, unit + u, REFINE, step, tensor, second)
            _refine(words[u], second, z[u])


# ---- recurrences ----------------------------------------------------------------------------------------------------
# All take a run of whole units [first, last) of the unsharded tensor, and `gradient`, the shard that begins at element
# `offset`; `buffers` is (count, total) with the shard's part from `base` on.


WHOLE = f32(2.0**23)  # float32 numbers from here on are whole


@njit(cache=True)
def _clip(unit, units, offset, length):
    """Where a group's elements lie: [a, b) of the shard, from `shift` on in the group's scratch."""
    begin = unit * UNIT - offset
    a, b = max(begin, 0), min(begin + units * UNIT, length)
    return a, b, a - begin


@njit(cache=True)
def _add(gradient, row, scale, grid):
    """gradient + noise, rounded to a multiple of the grid; from 2²³ times the grid on, every float32 is one."""
    inverse = f32(f32(1) / grid)
    for i in range(len(gradient)):
        total = f32(gradient[i] + f32(row[i] * scale))
        units = f32(total * inverse)
        nearest = f32(np.floor(f32(units + f32(0.5))) * grid)  # halves go up: to even, odd multiples would be rarer
        gradient[i] = nearest if abs(units) < WHOLE else total


@njit(cache=True)
def _accumulate(row, tap, values):
    for i in range(len(row)):
        row[i] = fma(tap, values[i], row[i])


@njit(cache=True)
def _scratch():
    """Room for one group: words and normals by unit, and a row."""
    units = GROUP // UNIT
    shape = (units, 16, LANES)
    return np.empty(shape, np.uint32), np.empty(shape, np.float32), np.empty(GROUP, np.float32)


@njit(cache=True)
def _drawn(unit, last, offset, length, rounds, key, step, tensor, words, z):
    """The new normals of the group at `unit`, and where [a, b) in the shard they belong."""
    here = min(len(z), last - unit)
    draw(rounds, key, step, tensor, unit, words, z[:here])
    a, b, shift = _clip(unit, here, offset, length)
    return z.reshape(GROUP)[shift : shift + b - a], a, b


@njit(nogil=True, cache=True)
def ring(gradient, offset, first, last, rounds, key, tensor, step, taps, scale, grid, buffers, base, keep_draw):
    """Taps beyond the kept rows, all of them if there are none, belong to older draws, which are made anew."""
    count = len(buffers)
    words, z, scratch = _scratch()
    for unit in range(first, last, len(z)):
        new, a, b = _drawn(unit, last, offset, len(gradient), rounds, key, step, tensor, words, z)
        row = scratch[: b - a]
        for i in range(b - a):
            row[i] = f32(taps[0] * new[i])
        for d in range(1, count + 1):
            _accumulate(row, taps[d], buffers[(step + count - d) % count, base + a : base + b])
        if count > 0:
            buffers[step % count, base + a : base + b] = new if keep_draw else row
        for j in range(count + 1, min(len(taps), step + 1)):
            old, _, _ = _drawn(unit, last, offset, len(gradient), rounds, key, step - j, tensor, words, z)
            _accumulate(row, taps[j], old)
        _add(gradient[a:b], row, scale, grid)


@njit(nogil=True, cache=True)
def exponentials(gradient, offset, first, last, rounds, key, tensor, step, taps, scale, grid, buffers, base):
    count = len(taps) // 2
    words, z, scratch = _scratch()
    for unit in range(first, last, len(z)):
        new, a, b = _drawn(unit, last, offset, len(gradient), rounds, key, step, tensor, words, z)
        row = scratch[: b - a]
        row[:] = new
        for i in range(count):
            state = buffers[i, base + a : base + b]
            _accumulate(row, taps[i], state)
            decay = taps[count + i]
            for e in range(b - a):
                state[e] = fma(decay, state[e], new[e])
        _add(gradient[a:b], row, scale, grid)


@njit(nogil=True, cache=True)
def fenwick(gradient, offset, first, last, rounds, key, tensor, step, scale, grid, buffers, base, plus, minus, keep):
    words, z, scratch = _scratch()
    for unit in range(first, last, len(z)):
        node, a, b = _drawn(unit, last, offset, len(gradient), rounds, key, step, tensor, words, z)
        row = scratch[: b - a]
        if plus >= 0:
            _accumulate(node, f32(1), buffers[plus, base + a : base + b])
        row[:] = node
        if minus >= 0:
            _accumulate(row, f32(-1), buffers[minus, base + a : base + b])
        buffers[keep, base + a : base + b] = node
        _add(gradient[a:b], row, scale, grid)
