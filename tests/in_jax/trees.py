"""Keys and trees of parameters for the tests of `quell.jax`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quell.noise import Key

SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {  # and how they are sharded over ("x", "y")
    "rows": ((16, 96), P("x", None)),
    "runs of 8": ((24, 64), P(None, ("x", "y"))),
    "both": ((8, 12, 34), P("y", "x", None)),
    "aligned": ((8192,), P("x")),
    "whole": ((701,), P()),
    "scalar": ((), P()),
    "nothing": ((0, 4), P()),
}


def arrays(fill: Callable[[tuple[int, ...]], Any] = np.zeros) -> dict[str, Any]:
    return {name: np.array(fill(shape), np.float32) for name, (shape, _) in SHAPES.items()}


def tree(mesh: Any, fill: Callable[[tuple[int, ...]], Any] = np.zeros) -> dict[str, Any]:
    """Arrays of all `SHAPES`, sharded over the mesh if there is one."""
    if mesh is None:
        return jax.device_put(arrays(fill))
    return jax.device_put(arrays(fill), {name: NamedSharding(mesh, spec) for name, (_, spec) in SHAPES.items()})


def seeded(number: int) -> Key:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Key.from_seed(number)
