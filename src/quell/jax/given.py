"""What is asked of the numbers and arrays that `quell.jax` is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quell.errors import QuellError


def number(value: Any) -> Any:
    """An array of one number as that number; everything else as it is."""
    known = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    return value.item() if known and value.ndim == 0 else value


def require_floats(leaves: Iterable[Any]) -> None:
    """Refuse leaves that are no arrays of real floating-point numbers."""
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise QuellError(
                f"a leaf is a {type(leaf).__name__}: pass arrays only. Of an Equinox model, those are params in "
                "params, static = equinox.partition(model, equinox.is_inexact_array)"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise QuellError(
                f"a leaf has dtype {leaf.dtype}, and noise is added to real floating-point numbers: pass the trained "
                "parameters only, and let the loss close over the others"
            )
