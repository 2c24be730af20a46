"""The ConvNet of the CIFAR-10 experiment in Flax, and its private training with `quell.jax`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from jax import Array

import quell.jax


def flax_model(model: torch.nn.Sequential) -> tuple[Any, Any]:
    """The same network with the same weights in Flax: its graph and its parameters."""
    layers: list[Any] = []
    for layer in model:
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            weight, bias = (value.detach().cpu().numpy() for value in (layer.weight, layer.bias))
            start = {"bias_init": partial(given, bias), "rngs": nnx.Rngs(0)}
            if isinstance(layer, torch.nn.Conv2d):
                kernel = weight.transpose(2, 3, 1, 0)
                layers.append(
                    nnx.Conv(*kernel.shape[2:], kernel.shape[:2], kernel_init=partial(given, kernel), **start)
                )
            else:  # PyTorch flattens channels first
                kernel = weight.reshape(len(bias), -1, 4, 4).transpose(2, 3, 1, 0).reshape(-1, len(bias))
                layers.append(nnx.Linear(*kernel.shape, kernel_init=partial(given, kernel), **start))
        elif isinstance(layer, torch.nn.MaxPool2d):
            layers.append(partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2)))
        else:
            layers.append(nnx.relu if isinstance(layer, torch.nn.ReLU) else lambda x: x.reshape(len(x), -1))
    return nnx.split(nnx.Sequential(*layers))


def given(values: np.ndarray, *_: Any, **__: Any) -> Array:
    return jnp.asarray(values)


def loss_of(graph: Any) -> Callable[..., Array]:
    def loss(params: Any, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x[None])[0], y)

    return loss


def trained_in_jax(job: Any, line: Any, pixels: Any, micro_batch: int, most: int | None) -> float:
    """The accuracy of the same run by quell.jax: the README's loop."""
    from common import plan_of, seeded_key
    from training import convnet

    images, labels = (jnp.asarray(pixels[name]) for name in ("x_train", "y_train"))
    plan = plan_of(line, len(labels))
    graph, params = flax_model(convnet(job.seed, job.he))
    private = quell.jax.privatize(plan, params, job.clip, key=seeded_key(job.name))
    momentum, decay = plan.run.optimizer.momentum, plan.run.optimizer.weight_decay
    rate = job.rate * (1 - momentum)
    optimizer = optax.chain(
        private, optax.trace(momentum), optax.add_decayed_weights((1 - decay) / rate), optax.scale(-rate)
    )
    sums = quell.jax.clipped_grad(loss_of(graph), private, micro_batch=micro_batch)

    @partial(jax.jit, donate_argnums=(0, 1))
    def one(params: Any, state: Any, images: Array, labels: Array, indices: Array, mask: Array) -> Any:
        batch = scaled(images[indices]), labels[indices].astype(jnp.int32)
        updates, state = optimizer.update(sums(params, batch, mask), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def right(params: Any, images: Array, labels: Array) -> Array:
        return jnp.sum(jnp.argmax(nnx.merge(graph, params)(scaled(images)), axis=1) == labels)

    state = optimizer.init(params)
    for indices, mask in islice(quell.jax.batches(private, len(labels)), most):
        params, state = one(params, state, images, labels, indices, mask)
    quell.jax.check(state)
    private.close()
    return 100 * sum(int(right(params, *part)) for part in parts(pixels)) / len(pixels["y_test"])


def scaled(images: Array) -> Array:
    return (images.astype(jnp.float32) / 255 - 0.5) / 0.25


def parts(pixels: Any, size: int = 2500) -> Iterator[tuple[Array, Array]]:
    for start in range(0, len(pixels["y_test"]), size):
        yield tuple(jnp.asarray(pixels[name][start : start + size]) for name in ("x_test", "y_test"))
