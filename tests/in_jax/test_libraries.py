"""Models of Linen, Equinox and NNX through the same steps as plain functions, and sums beside jax-privacy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from quell.jax import check, clipped_grad, privatize
from tests.noise import cases

from .trees import seeded

equinox, jax_privacy = pytest.importorskip("equinox"), pytest.importorskip("jax_privacy")
linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

RANDOM = np.random.default_rng(8)
X, Y = RANDOM.standard_normal((11, 5)).astype(np.float32), RANDOM.standard_normal((11, 3)).astype(np.float32)
KERNEL, BIAS = RANDOM.standard_normal((5, 3)).astype(np.float32), RANDOM.standard_normal(3).astype(np.float32)
MASK = np.arange(11) != 4
Model = tuple[
    Any, Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]
]  # parameters, prediction, (kernel, bias)


def plain() -> Model:
    return (
        {"k": KERNEL, "b": BIAS},
        lambda params, x: x @ params["k"] + params["b"],
        lambda tree: (tree["k"], tree["b"]),
    )


def of_linen() -> Model:
    model = linen.Dense(3)
    params = {"params": {"kernel": jnp.asarray(KERNEL), "bias": jnp.asarray(BIAS)}}
    return params, model.apply, lambda tree: (tree["params"]["kernel"], tree["params"]["bias"])


def of_nnx() -> Model:
    """As docs/jax.md has it, with the random state of a dropout, which drops nothing here, beside the parameters."""
    inits = {"kernel_init": lambda *_: jnp.asarray(KERNEL), "bias_init": lambda *_: jnp.asarray(BIAS)}
    model = nnx.Sequential(nnx.Linear(5, 3, **inits, rngs=nnx.Rngs(0)), nnx.Dropout(1e-9, rngs=nnx.Rngs(1)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def predict(params: Any, x: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        nnx.reseed(model, default=jax.random.key(2))
        return model(x)

    return params, predict, lambda tree: tuple(tree["layers"][0][name][...] for name in ("kernel", "bias"))


def of_equinox() -> Model:
    model = equinox.nn.Linear(5, 3, key=jax.random.key(0))
    model = equinox.tree_at(lambda m: (m.weight, m.bias), model, (jnp.asarray(KERNEL.T), jnp.asarray(BIAS)))
    params, static = equinox.partition(model, equinox.is_inexact_array)
    return params, lambda p, x: equinox.combine(p, static)(x), lambda tree: (tree.weight.T, tree.bias)


def loss_of(predict: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda params, x, y: jnp.sum((predict(params, x) - y) ** 2)


def by_hand() -> tuple[Any, Any]:
    x, y = X[MASK].astype(np.float64), Y[MASK].astype(np.float64)
    slopes = 2 * (x @ KERNEL + BIAS - y)
    norms = np.sqrt((slopes**2).sum(axis=1) * ((x**2).sum(axis=1) + 1))
    clipped = slopes * np.minimum(1, 2.0 / norms)[:, None]
    return x.T @ clipped, clipped.sum(axis=0)


@pytest.mark.parametrize("library", [of_linen, of_equinox, pytest.param(of_nnx, marks=pytest.mark.slow)])
def test_clipped_sums_and_a_private_step(library: Callable[[], Model]) -> None:
    params, predict, parts = library()
    sums = clipped_grad(loss_of(predict), 2.0, micro_batch=4)
    private = privatize(
        cases.spec("independent", 1e-6), params, expected_batch_size=1.0, key=seeded(1), generator="philox"
    )
    optimizer = optax.chain(private, optax.scale(-1.0))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(sums(params, (X, Y), MASK), state, params)
        return optax.apply_updates(params, updates), state

    after, state = step(params, optimizer.init(params))
    check(state)
    for found, start, summed in zip(parts(after), (KERNEL, BIAS), by_hand(), strict=True):
        np.testing.assert_allclose(found, start - summed, rtol=1e-3, atol=1e-3)


def test_sums_are_those_of_jax_privacy() -> None:
    params, predict, _ = plain()
    theirs = jax_privacy.clipped_grad(
        loss_of(predict), l2_clip_norm=2.0, batch_argnums=(1, 2), keep_batch_dim=False, microbatch_size=None
    )
    own = jax.jit(clipped_grad(loss_of(predict), 2.0, micro_batch=4))(params, (X, Y), MASK)
    other = jax.jit(theirs)(params, X, Y, is_padding_example=jnp.asarray(~MASK))
    for name in params:
        np.testing.assert_allclose(own[name], other[name], rtol=1e-3, atol=1e-4)
