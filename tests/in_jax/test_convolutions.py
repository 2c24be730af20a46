"""Kernel gradients per unit, as products, against the convolutions that `vmap` makes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from quell.jax import convolutions
from quell.jax.convolutions import with_products

UNITS = 5
IMAGES = ("NHWC", "HWIO", "NHWC")
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any, dict[str, Any]]] = {
    "same": ((1, 9, 8, 3), (3, 2, 3, 4), IMAGES, {"padding": "SAME"}),
    "two rows, strides": ((2, 9, 8, 3), (3, 2, 3, 4), IMAGES, {"padding": "SAME", "window_strides": (2, 1)}),
    "dilated": ((1, 11, 12, 3), (3, 3, 3, 4), IMAGES, {"padding": "VALID", "rhs_dilation": (2, 1)}),
    "transposed": ((1, 5, 6, 3), (3, 3, 3, 4), IMAGES, {"padding": ((2, 1), (1, 1)), "lhs_dilation": (2, 3)}),
    "cut off": ((1, 9, 9, 3), (3, 3, 3, 4), IMAGES, {"padding": ((-1, 0), (0, 1))}),
    "channels first": ((1, 3, 9, 8), (4, 3, 3, 2), ("NCHW", "OIHW", "NCHW"), {"padding": "VALID"}),
    "one dimension": ((2, 20, 3), (5, 3, 4), ("NWC", "WIO", "NWC"), {"padding": "SAME"}),
}


def gradients(case: str, wrap: Any = lambda f: f) -> tuple[Any, Any, Any]:
    """The gradient of one unit after the other, by vmap, and what vmap takes."""
    shape, kernel_shape, numbers, options = CASES[case]
    random = np.random.default_rng(1)
    x, kernel = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((UNITS, *shape), kernel_shape))
    options = {"window_strides": (1,) * (len(shape) - 2), **options}

    def loss(kernel: Any, x: Any) -> Any:
        def inner(kernel: Any) -> Any:
            return jnp.tanh(lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)).sum()

        return wrap(inner)(kernel)

    alone = jax.jit(lambda kernel, x: lax.map(lambda one: jax.grad(loss)(kernel, one), x))(kernel, x)
    return alone, jax.vmap(jax.grad(loss), (None, 0)), (kernel, x)


QUICK = ("two rows, strides", "transposed", "channels first")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def test_products_are_the_gradients_of_single_units(case: str) -> None:
    alone, mapped, args = gradients(case)
    assert f"feature_group_count={UNITS}" in str(jax.make_jaxpr(mapped)(*args))
    fast = with_products(mapped, UNITS)
    assert "feature_group_count=5" not in str(jax.make_jaxpr(fast)(*args))
    np.testing.assert_allclose(jax.jit(fast)(*args), alone, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda kernel: lax.cond(kernel.sum() > -99, f, lambda k: 0.0 * k.sum(), kernel),
    ],
    ids=["jit", "checkpoint", "cond"],
)
def test_programs_within_programs(wrap: Any) -> None:
    alone, mapped, args = gradients("same", wrap)
    fast = with_products(mapped, UNITS)
    assert "feature_group_count=5" not in str(jax.make_jaxpr(fast)(*args))
    np.testing.assert_allclose(jax.jit(fast)(*args), alone, rtol=2e-5, atol=2e-5)


def test_convolutions_of_the_model_itself_stay() -> None:
    """Five groups, as many as units, in the forward pass."""

    def forward(kernel: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=IMAGES, feature_group_count=5)

    text = str(jax.make_jaxpr(with_products(forward, 5))(jnp.ones((3, 3, 1, 5)), jnp.ones((2, 9, 9, 5))))
    assert "conv_general_dilated" in text
    assert "dot_general" not in text


def test_a_wrong_patch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = convolutions._met
    monkeypatch.setattr(convolutions, "_met", lambda x, place, *rest: right(x, place[::-1], *rest))
    alone, mapped, args = gradients("dilated")
    assert not np.allclose(jax.jit(with_products(mapped, UNITS))(*args), alone, rtol=1e-2, atol=1e-2)
