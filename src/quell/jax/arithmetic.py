"""Words to normals as `quell.noise.normal` does it, operation by operation, for XLA and for kernels.

**Why the bits agree.** Words are integers, so they agree everywhere. Normals need `fma`, which XLA does not have, and
products that are rounded on their own, which XLA does not promise: LLVM contracts a·b + c into one fma wherever it
sees both, on NVIDIA GPUs and on CPUs that have the instruction (x86 since 2013, all 64-bit ARM). So `Traced` writes
every wanted fma as a·b + c, where nothing stands between product and sum; and every product that must be rounded before
it is added passes through `apart`, which the compiler cannot look through. On a CPU without fma the normals agree to
float32 rounding. `Ptx`, for kernels on NVIDIA GPUs, leaves no choice: it names the instructions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from quell.noise import normal

SHIFTER, SHIFTER_BITS = 1.5 * 2.0**23, 0x4B400000  # small integers are its last bits

u32, i32, f32 = jnp.uint32, jnp.int32, jnp.float32


class Arithmetic(Protocol):
    """Float32 operations that round once."""

    def fused(self, a: Array, b: Any, c: Any) -> Array:
        """a·b + c."""

    def product(self, a: Array, b: Array) -> Array:
        """a·b, whatever is added to it later."""

    def root(self, x: Array) -> Array:
        """√x."""


class Traced(NamedTuple):
    """For XLA; `zero` is 0 in a way that no compiler knows."""

    zero: Array

    def fused(self, a: Array, b: Any, c: Any) -> Array:
        return a * b + c

    def product(self, a: Array, b: Array) -> Array:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(a * b, u32) ^ self.zero, f32)

    def root(self, x: Array) -> Array:
        return jnp.sqrt(x)


class Ptx:
    """For Pallas kernels that Triton compiles."""

    def fused(self, a: Array, b: Any, c: Any) -> Array:
        return _instruction("fma.rn.f32 $0, $1, $2, $3;", a, b, c)

    def product(self, a: Array, b: Array) -> Array:
        return _instruction("mul.rn.f32 $0, $1, $2;", a, b)

    def root(self, x: Array) -> Array:
        """By the steps of CUDA's own sqrt.rn less its branch for tiny x: here 2e-10 < x < 91."""
        inverse = _instruction("rsqrt.approx.ftz.f32 $0, $1;", x)
        root = self.product(x, inverse)
        return self.fused(self.fused(-root, root, x), inverse * f32(0.5), root)


def _instruction(text: str, *operands: Any) -> Array:
    from jax.experimental.pallas import triton  # only where a GPU needs it

    shape = jnp.broadcast_shapes(*(jnp.shape(operand) for operand in operands))
    (result,) = triton.elementwise_inline_asm(
        text,
        args=[jnp.broadcast_to(jnp.asarray(operand, f32), shape) for operand in operands],
        constraints=",".join(["=f", *["f"] * len(operands)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, f32)],
    )
    return result


def uniform(how: Arithmetic, w: Array) -> Array:
    """u = (w + ½)/2³²."""
    return how.fused(w.astype(f32), f32(2.0**-32), f32(2.0**-33))


def refined(how: Arithmetic, w: Array, second: Array, u: Array) -> Array:
    """u of a radius word that needs a second one; the others' u."""
    finer = how.fused(second.astype(f32) + f32(0.5), f32(2.0**-32), w.astype(f32)) * f32(2.0**-32)
    return jnp.where(w < u32(normal.REFINE_BELOW), finer, u)


def pair(how: Arithmetic, w: Array, u: Array, angle: Array) -> tuple[Array, Array]:
    """The two normals of a radius word, its u and an angle word."""
    offset = lax.bitcast_convert_type(u, i32) - i32(normal.ROOT_HALF_BITS)
    whole = lax.bitcast_convert_type((offset >> 23) + i32(SHIFTER_BITS), f32) - f32(SHIFTER)  # 0 near one, as it should
    bits = (offset & i32(normal.MANTISSA)) + i32(normal.ROOT_HALF_BITS)
    rest = lax.bitcast_convert_type(w + u32(1), i32).astype(f32)  # near one: −(2³² − 1 − w)
    near_one = how.fused(rest, f32(2.0**-32), f32(-(2.0**-33)))
    m = jnp.where(w >= u32(normal.NEAR_ONE), near_one, lax.bitcast_convert_type(bits, f32) - f32(1))
    logarithm = how.product(m, _polynomial(how, normal.LOG, m))
    size = how.root(how.fused(whole, f32(normal.MINUS_TWO_LN2), logarithm))
    t = lax.bitcast_convert_type((angle << 2) | u32(2), i32).astype(f32) * f32(2.0**-32)
    square = t * t
    sine = t * _polynomial(how, normal.SIN, square)
    cosine = lax.bitcast_convert_type(_polynomial(how, normal.COS, square), u32) ^ (angle & u32(0x80000000))
    cosine = lax.bitcast_convert_type(cosine, f32)
    swap = (angle & u32(0x40000000)) != 0
    return how.product(size, jnp.where(swap, sine, cosine)), how.product(size, jnp.where(swap, cosine, sine))


def _polynomial(how: Arithmetic, coefficients: tuple[float, ...], x: Array) -> Array:
    value: Any = f32(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = how.fused(value, x, f32(coefficient))
    return value
