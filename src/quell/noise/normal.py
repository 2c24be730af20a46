"""Two random words to two standard normals, the same everywhere: Box–Muller with fixed float32 arithmetic.

With w the radius word and a the angle word of a pair,

    u = (w + ½)/2³²,   or (w + (w' + ½)/2³²)/2³² with a second word w' when w < 2¹²
    R = √(−2 ln u),    φ = (π/2)·t,  t = signed(4a + 2)/2³² ∈ (−½, ½)
    pair = (±R cos φ, R sin φ), the sign from bit 31 of a, the two swapped when bit 30 is set.

Why this is enough. The second word is drawn for one pair in a million, so it costs nothing on average, and it makes 64
random bits of radius where the tail needs them: the smallest u is 2⁻⁶⁵, so R reaches 9.49 and u = 0 cannot occur. The
spacing of R is below one unit in the last place of a float32 for R < 4.0 and never above 5·10⁻⁵ up to R = 5.27;
beyond, two words make it finer than float32 again. Above u = √½ the logarithm is taken of 1 − u, formed exactly from
the bits of w, so the smallest radii are resolved too (R ≥ 1.5·10⁻⁵; small normals come from small sines, not small R).

Every operation below is an IEEE-754 float32 operation that rounds once: conversions, products, sums, `fma` and √. The
compiled CPU path and the Triton kernels do the same in the same order, which is why they agree. NumPy has no fma, so
it is formed in float64, where the product is exact, and rounded: this differs from a true fma only if the float64 sum
falls on a float32 rounding boundary, once in about 2²⁹ operations.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

REFINE_BELOW: Final = 2**12  # radius words below this take a second word
NEAR_ONE: Final = 0xB504F334  # √½·2³²: from here on the logarithm is taken of 1 − u
ROOT_HALF_BITS: Final = 0x3F3504F3  # √½ as a float32
MANTISSA: Final = 0x007FFFFF

# Minimax polynomials (Remez, relative error below 3e-8), lowest degree first, rounded to float32.
MINUS_TWO_LN2: Final = -1.3862943649291992
LOG: Final = (  # −2·ln(1 + m)/m on [√½ − 1, √2 − 1]
    -2.0,
    0.9999997615814209,
    -0.6666837334632874,
    0.5000414848327637,
    -0.39913666248321533,
    0.33124786615371704,
    -0.2990453243255615,
    0.2873368561267853,
    -0.17444711923599243,
)
SIN: Final = (1.5707963705062866, -0.6459634900093079, 0.07968003302812576, -0.00460165785625577)  # sin(πt/2)/t in t²
COS: Final = (1.0, -1.2337005138397217, 0.253669410943985, -0.020861513912677765, 0.000906703295186162)  # cos(πt/2)


def pairs(radius: Words, angle: Words, refinement: Words) -> tuple[Floats, Floats]:
    """The two normals of each pair; `refinement` is read only where `radius` is below `REFINE_BELOW`.

    >>> first, second = pairs(*(np.array([word], np.uint32) for word in (0, 0, 0)))
    >>> bool(9.49 < first[0] < 9.5)
    True
    """
    size = _radius(radius, refinement)
    t = ((angle << np.uint32(2)) | np.uint32(2)).view(np.int32).astype(np.float32) * np.float32(2.0**-32)
    square = t * t
    sine = t * _polynomial(SIN, square)
    cosine = _polynomial(COS, square)
    cosine = (cosine.view(np.uint32) ^ (angle & np.uint32(0x80000000))).view(np.float32)
    swap = (angle & np.uint32(0x40000000)) != 0
    return size * np.where(swap, sine, cosine), size * np.where(swap, cosine, sine)


def _radius(w: Words, refinement: Words) -> Floats:
    half = np.float32(0.5)
    near_one = w >= np.uint32(NEAR_ONE)
    value = np.where(near_one, ~w, w).astype(np.float32) + half
    finer = fma(refinement.astype(np.float32) + half, np.float32(2.0**-32), w.astype(np.float32))
    value = np.where(w < np.uint32(REFINE_BELOW), finer, value)
    offset = value.view(np.int32) - np.int32(ROOT_HALF_BITS)
    exponent = ((offset >> np.int32(23)) - np.int32(32)).astype(np.float32)
    fraction = ((offset & np.int32(MANTISSA)) + np.int32(ROOT_HALF_BITS)).view(np.float32) - np.float32(1)
    m = np.where(near_one, value * np.float32(-(2.0**-32)), fraction)
    exponent = np.where(near_one, np.float32(0), exponent)
    return np.sqrt(fma(exponent, np.float32(MINUS_TWO_LN2), m * _polynomial(LOG, m)))


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = fma(value, x, np.float32(coefficient))
    return value


def fma(a: Floats | np.float32, b: Floats | np.float32, c: Floats | np.float32) -> Floats:
    """a·b + c rounded to float32 once (see the module's note)."""
    return np.asarray(np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)
