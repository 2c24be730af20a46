"""Work on each device's parts of arrays, by `shard_map`, where some of the arrays may be empty.

XLA of JAX 0.11.2 crashes on a `shard_map` whose body uses an array without elements that it was given, on any platform
(in Shardy, `ManualComputationUnusedInputsPattern`). Results without elements, and inputs that are not used, work. So
empty arrays never enter a `shard_map` of ours; in one that is not ours they are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def on_parts(
    work: Callable[..., list[Array]], mesh: Any, specs: Sequence[Any], arrays: Sequence[Array], *same: Array
) -> list[Array]:
    """`work(parts, *same)` on each device's parts of the arrays, which returns parts of the same shapes.

    `same` are whole on every device. Empty arrays are returned as they came.
    """
    filled = [number for number, each in enumerate(arrays) if each.size]
    empty = {
        number: (NamedSharding(mesh, specs[number]).shard_shape(each.shape), each.dtype)
        for number, each in enumerate(arrays)
        if not each.size
    }

    def some_parts(given: list[Array], *same: Array) -> list[Array]:
        parts = dict(zip(filled, given, strict=True)) | {number: jnp.zeros(*each) for number, each in empty.items()}
        found = work([parts[number] for number in range(len(arrays))], *same)
        return [found[number] for number in filled]

    places = [specs[number] for number in filled]
    mapped = jax.shard_map(
        some_parts, mesh=mesh, in_specs=(places, *[P()] * len(same)), out_specs=places, check_vma=False
    )
    made = dict(zip(filled, mapped([arrays[number] for number in filled], *same), strict=True))
    return [made.get(number, each) for number, each in enumerate(arrays)]


def without_empty(arrays: Sequence[Array]) -> list[Array]:
    """The arrays, of which the empty ones are new, so that those that were given are not used."""
    return [each if each.size else jnp.zeros(each.shape, each.dtype) for each in arrays]
