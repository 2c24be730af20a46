"""Gradients of a convolution's kernel for each unit apart, as matrix products.

`vmap` of such a gradient is one grouped convolution with a group for every unit and windows as large as the images,
which is slow on GPUs and CPUs. The same sums are a product of two matrices per unit: the patches that each entry of the
kernel met, and the gradients of the outputs. `with_products` computes a function with every such convolution replaced,
also inside `jit`, `scan`, `cond` and `checkpoint`; everything else stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core


def with_products(
    function: Callable[..., Any], rows: int, look: Callable[[Any], None] = lambda program: None
) -> Callable[..., Any]:
    """The same function of the same arguments. `function` maps `rows` units by `vmap`; `look` sees its program."""

    def computed(*args: Any) -> Any:
        traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        look(traced)
        found = core.jaxpr_as_fun(_rewritten(traced, rows))(*jax.tree_util.tree_leaves(args))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), found)

    return computed


def _rewritten(value: Any, rows: int) -> Any:
    """A program with its convolutions replaced, or a parameter of an operation with the programs in it rewritten."""
    if isinstance(value, tuple | list):
        return type(value)(_rewritten(each, rows) for each in value)
    if isinstance(value, core.Jaxpr):  # first: from JAX 0.11 on, closed ones are no other class
        return value.replace(eqns=[_replaced(equation, rows) for equation in value.eqns])
    if isinstance(value, core.ClosedJaxpr):
        return value.replace(jaxpr=_rewritten(value.jaxpr, rows))
    return value


def _replaced(equation: Any, rows: int) -> Any:
    if not _grouped_by_unit(equation, rows):
        programs = [name for name, value in equation.params.items() if _has_programs(value)]
        changed = {name: _rewritten(equation.params[name], rows) for name in programs}
        return equation.replace(params={**equation.params, **changed}) if programs else equation
    like = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    shape, params = equation.outvars[0].aval.shape, equation.params
    (call,) = jax.make_jaxpr(jax.jit(lambda x, y: _kernel_gradients(x, y, shape, params)))(*like).eqns
    return equation.replace(primitive=call.primitive, params=call.params)


def _has_programs(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr) or (
        isinstance(value, tuple | list) and any(map(_has_programs, value))
    )


def _grouped_by_unit(equation: Any, rows: int) -> bool:
    """Is it a convolution with a group per unit, whose window has no fewer places than its result?"""
    params = equation.params
    if equation.primitive.name != "conv_general_dilated" or params["feature_group_count"] != rows or rows == 1:
        return False
    numbers = params["dimension_numbers"]
    window = [equation.invars[1].aval.shape[i] for i in numbers.rhs_spec[2:]]
    result = [equation.outvars[0].aval.shape[i] for i in numbers.out_spec[2:]]
    return bool(math.prod(result) <= math.prod(window))


def _kernel_gradients(inputs: Array, outputs: Array, shape: tuple[int, ...], params: dict[str, Any]) -> Array:
    """The convolution, by one product of (patches, entries of the kernel) and (patches, channels) for each unit."""
    numbers, units = params["dimension_numbers"], params["feature_group_count"]
    (channel, feature, *places), (out, into, *window) = numbers.lhs_spec, numbers.rhs_spec
    x = lax.transpose(inputs, (feature, *places, channel))
    x = x.reshape(units, -1, *x.shape[1:])
    y = lax.transpose(outputs, (into, *window, out))
    y = jnp.moveaxis(y.reshape(*y.shape[:-1], units, -1), -2, 0)
    ends = zip(params["padding"], params["lhs_dilation"], strict=True)
    none = (0, 0, 0)
    x = lax.pad(x, jnp.zeros((), x.dtype), [none, none, *((lo, hi, gap - 1) for (lo, hi), gap in ends), none])
    sizes = [shape[i] for i in numbers.out_spec[2:]]
    met = [_met(x, place, y.shape[2:-1], params) for place in product(*map(range, sizes))]
    patches = jnp.stack(met, axis=-2)
    rows = math.prod(patches.shape[1:-2])
    found = lax.dot_general(
        patches.reshape(units, rows, -1),
        y.reshape(units, rows, -1),
        (((1,), (1,)), ((0,), (0,))),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    found = jnp.moveaxis(found.reshape(units, *sizes, x.shape[-1], y.shape[-1]), 0, -2)
    found = found.reshape(*sizes, x.shape[-1], -1)
    order = [0] * len(shape)  # where the result's dimensions lie: (*places, channel, feature) here
    for here, there in enumerate((*numbers.out_spec[2:], *numbers.out_spec[:2])):
        order[there] = here
    return lax.transpose(found, order)


def _met(x: Array, place: tuple[int, ...], window: tuple[int, ...], params: dict[str, Any]) -> Array:
    """What the kernel's entry at `place` was multiplied by, for every output."""
    start = [at * stride for at, stride in zip(place, params["window_strides"], strict=True)]
    steps = params["rhs_dilation"]
    stop = [first + (size - 1) * step + 1 for first, size, step in zip(start, window, steps, strict=True)]
    return lax.slice(x, (0, 0, *start, 0), (*x.shape[:2], *stop, x.shape[-1]), (1, 1, *steps, 1))
