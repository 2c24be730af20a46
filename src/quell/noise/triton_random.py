"""The generators and Box–Muller as Triton device functions: the same contract as `layout` and `normal`, lane by lane.

A lane makes one block, 16 words of ChaCha or 4 of Philox, and from them as many normals, all in registers. Results
are tuples with one tensor of lanes per word, so that word v of all lanes goes to 32 neighbouring elements at a time:
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
SHIFTER, SHIFTER_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)  # small integers are its last bits
MINUS_TWO_LN2 = tl.constexpr(normal.MINUS_TWO_LN2)
L0, L1, L2, L3, L4, L5, L6, L7, L8 = (tl.constexpr(value) for value in normal.LOG)
S0, S1, S2, S3 = (tl.constexpr(value) for value in normal.SIN)
C0, C1, C2, C3, C4 = (tl.constexpr(value) for value in normal.COS)
SIGMA0, SIGMA1, SIGMA2, SIGMA3 = (tl.constexpr(value) for value in generators.CHACHA_CONSTANTS)
PHILOX_M0, PHILOX_M1 = (tl.constexpr(value) for value in generators.PHILOX_MULTIPLIERS)
PHILOX_W0, PHILOX_W1 = (tl.constexpr(value) for value in generators.PHILOX_KEY_STEPS)


@triton.jit
def normals(ROUNDS: tl.constexpr, key, block, high, step, tensor):
    """As many tensors of normals as a block has words; [v] belongs to elements v·LANES + lane of each lane's tile.

    ROUNDS are those of ChaCha, 0 for Philox. `key` holds the 8 words of ChaCha's key or the 2 of this tensor's Philox
    key. `block` holds the low 32 bits of the lanes' block index and `high` those above, a scalar; step and tensor are
    scalars too; all are uint32.
    """
    w = _words(ROUNDS, key, block, high, step, tensor)
    least = w[0]
    u = (_uniform(w[0]),)
    for i in tl.static_range(2, len(w), 2):
        least = tl.minimum(least, w[i])
        u += (_uniform(w[i]),)
    if tl.min(least, axis=0) < REFINE_BELOW:  # one pair in 2²⁰, so the second words cost nothing on average
        second = _words(ROUNDS, key, block, high + REFINE_TAG, step, tensor)
        finer = ()
        for i in tl.static_range(len(w) // 2):
            finer += (_refined(w[2 * i], second[2 * i], u[i]),)
        u = finer
    z = ()
    for i in tl.static_range(len(w) // 2):
        z += _pair(w[2 * i], u[i], w[2 * i + 1])
    return z


@triton.jit
def load_key(ROUNDS: tl.constexpr, words):
    key = ()
    for i in tl.static_range(8 if ROUNDS else 2):
        key += (tl.load(words + i),)
    return key


@triton.jit
def _words(ROUNDS: tl.constexpr, key, block, high, step, tensor):
    if ROUNDS:
        return chacha(ROUNDS, key, block, high, step, tensor)
    else:  # noqa: RET505 - the compiler prunes the branch not taken
        return philox(key, block, high, step, tensor)


@triton.jit
def _uniform(w):
    """u = (w + ½)/2³²."""
    return tl.fma(w.to(tl.float32), 2.0**-32, 2.0**-33)


@triton.jit
def _refined(w, second, u):
    finer = tl.fma(second.to(tl.float32) + 0.5, 2.0**-32, w.to(tl.float32)) * 2.0**-32
    return tl.where(w < REFINE_BELOW, finer, u)


@triton.jit
def _pair(w, u, angle):
    offset = u.to(tl.int32, bitcast=True) - ROOT_HALF_BITS
    exponent = ((offset >> 23) + SHIFTER_BITS).to(tl.float32, bitcast=True) - SHIFTER  # 0 near one, as it should be
    fraction = ((offset & MANTISSA) + ROOT_HALF_BITS).to(tl.float32, bitcast=True) - 1.0
    minus_rest = (w + 1).to(tl.int32, bitcast=True).to(tl.float32)  # near one: −(2³² − 1 − w)
    m = tl.where(w >= NEAR_ONE, tl.fma(minus_rest, 2.0**-32, -(2.0**-33)), fraction)
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
def chacha(ROUNDS: tl.constexpr, key, block, high, step, tensor):
    """The 16 words of the RFC 8439 block function, with a multiple of 4 rounds.

    The rounds stay a loop: all unrolled they would take Triton a minute to compile.
    """
    k0, k1, k2, k3, k4, k5, k6, k7 = key
    none = block * 0  # makes a tensor of lanes of what all lanes share
    x0, x1, x2, x3 = none + SIGMA0, none + SIGMA1, none + SIGMA2, none + SIGMA3
    x4, x5, x6, x7 = none + k0, none + k1, none + k2, none + k3
    x8, x9, x10, x11 = none + k4, none + k5, none + k6, none + k7
    x12, x13, x14, x15 = block, none + high, none + step, none + tensor
    for _ in range(ROUNDS // 4):
        for _ in tl.static_range(2):  # two at a time, ptxas puts 7% fewer instructions on the busiest pipe
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
    k0, k1 = key
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
