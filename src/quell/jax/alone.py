"""Keeps a unit's gradient its own: apart from those of other devices, and without random numbers that units share.

Inside `shard_map` devices share parameters, and each has units of its own. Unless `check_vma=False` is given, JAX makes
the gradient of parameters that all devices share the *sum* over the devices. Clipped after that, units of several
devices would be clipped as one, and each would move the result by more than the clip norm. So the parameters are made
to differ by device, as the units do, before anything is differentiated; and a program that still adds something up over
devices is refused.

Some of JAX's random generators are not mapped over: under `vmap` the first unit's key decides what all draw, so one
unit more changes everybody's gradient. A program that draws by another generator than threefry is refused.
"""

from __future__ import annotations

from functools import cache
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from quell.errors import QuellError

_HARMLESS = ("axis_index", "pvary", "pcast")
_NOT_MAPPED = {"rng_bit_generator": "rbg", "rng_uniform": "rng_uniform"}  # XLA's own
_DRAW_NOTHING = ("random_unwrap", "random_clone")


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


def refuse_coupled(program: Any, own: frozenset[Any] = frozenset()) -> None:
    """Refuse a traced program whose units share something: other devices' values, by `lax.psum`, or what rbg draws.

    `own` are the axes of a `shard_map` inside the loss, over which the values are those of one unit.
    """
    if isinstance(program, tuple | list):
        for each in program:
            refuse_coupled(each, own)
    elif isinstance(program, core.ClosedJaxpr | core.Jaxpr):
        for equation in getattr(program, "jaxpr", program).eqns:
            name, params = equation.primitive.name, equation.params
            if name in _HARMLESS:
                continue
            _refuse_draws(equation)
            if name == "shard_map":
                refuse_coupled(params["jaxpr"], own | set(params.get("newly_manual_axes", ())))
                continue
            given = (axes if isinstance(axes, tuple) else (axes,) for axes in map(params.get, ("axes", "axis_name")))
            named = {axis for axes in given for axis in axes if axis is not None and not isinstance(axis, Integral)}
            if named - own:
                raise QuellError(
                    f"the gradient of one unit is computed with those of other devices ({name}), so it cannot be "
                    "clipped alone: compute a unit's whole loss on one device, and add up after clipped_grad"
                )
            refuse_coupled(tuple(params.values()), own)


def _refuse_draws(equation: Any) -> None:
    """Refuse an operation that draws by a generator whose numbers `vmap` may take from the first unit's key."""
    name, drawn_by = equation.primitive.name, None
    if name in _NOT_MAPPED:
        drawn_by = _NOT_MAPPED[name]
    elif name.startswith("random_") and name not in _DRAW_NOTHING:
        types = [getattr(atom.aval, "dtype", np.dtype(bool)) for atom in equation.invars]
        others = [each for each in types if jnp.issubdtype(each, jax.dtypes.prng_key) and each != _threefry()]
        drawn_by = str(others[0])[len("key<") : -1].replace("urbg", "unsafe_rbg") if others else None
    if drawn_by is not None:
        raise QuellError(
            f"the loss draws random numbers by JAX's {drawn_by} generator, which under vmap can give all units those "
            "of the first: use threefry keys (those of quell.jax.batches(...).keys, or "
            "jax.random.key(seed, impl='threefry2x32')), or draw before clipped_grad"
        )


@cache
def _threefry() -> Any:
    """The dtype of its keys."""
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
