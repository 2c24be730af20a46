"""Keeps a unit's gradient its own inside `shard_map`, where devices share parameters and each has units of its own.

Unless `check_vma=False` is given, JAX makes the gradient of parameters that all devices share the *sum* over the
devices. Clipped after that, units of several devices would be clipped as one, and each would move the result by more
than the clip norm. So the parameters are made to differ by device, as the units do, before anything is differentiated;
and a program that still adds something up over devices is refused.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from quell.errors import QuellError

_HARMLESS = ("axis_index", "pvary", "pcast")


def manual_axes() -> tuple[str, ...]:
    """The mesh axes of the `shard_map` that is being traced."""
    return tuple(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def as_units_vary(tree: Any, batch: Any, mask: Any) -> Any:
    """The same values, which JAX takes to differ between devices wherever the units, or which of them count, do."""
    if not manual_axes():
        return tree
    differs: Array | bool = False  # always False: there is nothing in an empty slice
    for leaf in jax.tree_util.tree_leaves((batch, mask)):
        empty = jnp.asarray(leaf)[:0]
        differs = differs | jnp.any(empty == empty)
    return jax.tree_util.tree_map(lambda leaf: lax.select(differs, leaf, leaf), tree)


def refuse_collectives(program: Any, own: frozenset[Any] = frozenset()) -> None:
    """Refuse a traced program that computes with several devices' values, such as `lax.psum` in a loss.

    `own` are the axes of a `shard_map` inside the loss, over which the values are those of one unit.
    """
    if isinstance(program, tuple | list):
        for each in program:
            refuse_collectives(each, own)
    elif isinstance(program, core.ClosedJaxpr | core.Jaxpr):
        for equation in getattr(program, "jaxpr", program).eqns:
            name, params = equation.primitive.name, equation.params
            if name in _HARMLESS:
                continue
            if name == "shard_map":
                refuse_collectives(params["jaxpr"], own | set(params.get("newly_manual_axes", ())))
                continue
            given = (axes if isinstance(axes, tuple) else (axes,) for axes in map(params.get, ("axes", "axis_name")))
            named = {axis for axes in given for axis in axes if axis is not None and not isinstance(axis, Integral)}
            if named - own:
                raise QuellError(
                    f"the gradient of one unit is computed with those of other devices ({name}), so it cannot be "
                    "clipped alone: compute a unit's whole loss on one device, and add up after clipped_grad"
                )
            refuse_collectives(tuple(params.values()), own)
