"""The generators and Box–Muller as Triton device functions: the same contract as `layout` and `normal`, lane by lane.

A lane makes 16 words, one block of ChaCha20 or four of Philox, and from them 16 normals, all in registers. Results are
tuples with one tensor of lanes per word, so that word v of all lanes goes to 32 neighbouring elements at a time:
contiguous, coalesced memory access.
"""

# mypy: ignore-errors
# The compiler infers the types.

import triton
import triton.language as tl

from quell.noise import generators, layout, normal

LANES = tl.constexpr(layout.LANES)
REFINE_TAG = tl.constexpr(layout.REFINE << 16)
REFINE_BELOW = tl.constexpr(normal.REFINE_BELOW)
NEAR_ONE = tl.constexpr(normal.NEAR_ONE)
ROOT_HALF_BITS = tl.constexpr(normal.ROOT_HALF_BITS)
MANTISSA = tl.constexpr(normal.MANTISSA)
MINUS_TWO_LN2 = tl.constexpr(normal.MINUS_TWO_LN2)
L0, L1, L2, L3, L4, L5, L6, L7, L8 = (tl.constexpr(value) for value in normal.LOG)
S0, S1, S2, S3 = (tl.constexpr(value) for value in normal.SIN)
C0, C1, C2, C3, C4 = (tl.constexpr(value) for value in normal.COS)
SIGMA0, SIGMA1, SIGMA2, SIGMA3 = (tl.constexpr(value) for value in generators.CHACHA_CONSTANTS)
PHILOX_M0, PHILOX_M1 = (tl.constexpr(value) for value in generators.PHILOX_MULTIPLIERS)
PHILOX_W0, PHILOX_W1 = (tl.constexpr(value) for value in generators.PHILOX_KEY_STEPS)


@triton.jit
def normals(CHACHA: tl.constexpr, key, block, high, step, tensor):
    """Sixteen tensors of normals; [v] belongs to elements v·LANES + lane of each lane's unit of 16·LANES elements.

    `key` points at the 8 words of ChaCha20's key or the 2 of this tensor's Philox key. `block` holds the low 32 bits of
    the lanes' (first) block index and `high` those above, a scalar; step and tensor are scalars too; all are uint32.
    """
    w = _words(CHACHA, key, block, high, step, tensor)
    least = tl.minimum(tl.minimum(w[0], w[2]), tl.minimum(w[4], w[6]))
    least = tl.minimum(least, tl.minimum(tl.minimum(w[8], w[10]), tl.minimum(w[12], w[14])))
    r = [_radius_argument(w[2 * i]) for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    if tl.min(least, axis=0) < REFINE_BELOW:  # one pair in 2²⁰, so the second words cost nothing on average
        second = _words(CHACHA, key, block, high + REFINE_TAG, step, tensor)
        r = [_refined(w[2 * i], second[2 * i], r[i]) for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    z0, z1 = _pair(r[0], w[1])
    z2, z3 = _pair(r[1], w[3])
    z4, z5 = _pair(r[2], w[5])
    z6, z7 = _pair(r[3], w[7])
    z8, z9 = _pair(r[4], w[9])
    z10, z11 = _pair(r[5], w[11])
    z12, z13 = _pair(r[6], w[13])
    z14, z15 = _pair(r[7], w[15])
    return z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15


@triton.jit
def _words(CHACHA: tl.constexpr, key, block, high, step, tensor):
    if CHACHA:  # a unit is one tile: one block per lane
        return chacha20(key, block, high, step, tensor)
    else:  # noqa: RET505 - a unit is four tiles; the compiler prunes the branch not taken
        a0, a1, a2, a3 = philox(key, block, high, step, tensor)
        b0, b1, b2, b3 = philox(key, block + LANES, high, step, tensor)
        c0, c1, c2, c3 = philox(key, block + 2 * LANES, high, step, tensor)
        d0, d1, d2, d3 = philox(key, block + 3 * LANES, high, step, tensor)
        return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@triton.jit
def _radius_argument(w):
    """w + ½ as a float32, or −(2³² − w − ½) where u is near one; the sign says which."""
    near_one = w >= NEAR_ONE
    value = tl.where(near_one, ~w, w).to(tl.float32) + 0.5
    return tl.where(near_one, -value, value)


@triton.jit
def _refined(w, second, value):
    finer = tl.fma(second.to(tl.float32) + 0.5, 2.0**-32, w.to(tl.float32))
    return tl.where(w < REFINE_BELOW, finer, value)


@triton.jit
def _pair(value, angle):
    near_one = value < 0
    offset = value.to(tl.int32, bitcast=True) - ROOT_HALF_BITS
    exponent = ((offset >> 23) - 32).to(tl.float32)
    fraction = ((offset & MANTISSA) + ROOT_HALF_BITS).to(tl.float32, bitcast=True) - 1.0
    m = tl.where(near_one, value * 2.0**-32, fraction)
    exponent = tl.where(near_one, 0.0, exponent)
    p = tl.fma(m, L8, L7)
    p = tl.fma(p, m, L6)
    p = tl.fma(p, m, L5)
    p = tl.fma(p, m, L4)
    p = tl.fma(p, m, L3)
    p = tl.fma(p, m, L2)
    p = tl.fma(p, m, L1)
    p = tl.fma(p, m, L0)
    size = _square_root(tl.fma(exponent, MINUS_TWO_LN2, m * p))
    t = ((angle << 2) | 2).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-32
    square = t * t
    s = tl.fma(square, S3, S2)
    s = tl.fma(s, square, S1)
    s = t * tl.fma(s, square, S0)
    c = tl.fma(square, C4, C3)
    c = tl.fma(c, square, C2)
    c = tl.fma(c, square, C1)
    c = tl.fma(c, square, C0)
    c = (c.to(tl.uint32, bitcast=True) ^ (angle & 0x80000000)).to(tl.float32, bitcast=True)
    swap = (angle & 0x40000000) != 0
    return size * tl.where(swap, s, c), size * tl.where(swap, c, s)


@triton.jit
def _square_root(x):
    """√x correctly rounded, by the steps of CUDA's own sqrt.rn less its branch for tiny x: here 2e-10 < x < 91."""
    inverse = tl.rsqrt(x)
    root = x * inverse
    return tl.fma(tl.fma(-root, root, x), inverse * 0.5, root)


@triton.jit
def chacha20(key, block, high, step, tensor):
    """The 16 words of the RFC 8439 block function.

    The rounds stay a loop: unrolled they save 2% of the instructions and take Triton a minute to compile.
    """
    k0, k1, k2, k3 = tl.load(key), tl.load(key + 1), tl.load(key + 2), tl.load(key + 3)
    k4, k5, k6, k7 = tl.load(key + 4), tl.load(key + 5), tl.load(key + 6), tl.load(key + 7)
    none = block * 0  # makes a tensor of lanes of what all lanes share
    x0, x1, x2, x3 = none + SIGMA0, none + SIGMA1, none + SIGMA2, none + SIGMA3
    x4, x5, x6, x7 = none + k0, none + k1, none + k2, none + k3
    x8, x9, x10, x11 = none + k4, none + k5, none + k6, none + k7
    x12, x13, x14, x15 = block, none + high, none + step, none + tensor
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + SIGMA0, x1 + SIGMA1, x2 + SIGMA2, x3 + SIGMA3, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + block, x13 + high, x14 + step, x15 + tensor,
    )  # fmt: skip


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def philox(key, block, high, step, tensor):
    """The 4 words of Philox4x32-10."""
    k0 = tl.load(key)
    k1 = tl.load(key + 1)
    c0, c1, c2, c3 = block, high, step, tensor
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * PHILOX_M0  # both halves by one instruction, where umulhi would take a second
        p1 = c2.to(tl.uint64) * PHILOX_M1
        c0, c1, c2, c3 = _high(p1) ^ c1 ^ k0, p1.to(tl.uint32), _high(p0) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 = k0 + PHILOX_W0
        k1 = k1 + PHILOX_W1
    return c0, c1, c2, c3


@triton.jit
def _high(product):
    return (product >> 32).to(tl.uint32)
