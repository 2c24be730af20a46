"""Where a run stands, as a pytree that checkpoints keep, and `check`, which raises what a compiled step could not."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from quell.errors import QuellError

REFUSALS: list[str] = []  # what `NoiseState.refused` counts, from 1 on


class NoiseState(NamedTuple):
    """Where a run's noise stands. Save it with the rest of the optimizer's state; the key is not in it.

    `buffers` hold recent noise, so a state that has them is as secret as the key.
    """

    step: Array  # the step that is due, counted from 0
    refused: Array  # 0, or a number that `check` turns into words
    run: Array  # (4,) names key, plan, clip norm, generator and parameters
    buffers: tuple[Array, ...]  # (count, *shape) for each parameter; none where rows need none


def check(state: Any) -> None:
    """Raise `QuellError` if a step of this run was refused, which has made its updates NaN. Waits for the device.

    Args:
        state: The optimizer's state, or any pytree with it inside.
    """
    for found in states_in(state):
        code = int(found.refused)
        if code:
            known = 0 < code <= len(REFUSALS)
            raise QuellError(REFUSALS[code - 1] if known else "a step was refused in another process: see its errors")


def states_in(state: Any) -> list[NoiseState]:
    """All states of `privatize` in a pytree; there is one at least."""
    leaves = jax.tree_util.tree_leaves(state, is_leaf=lambda node: isinstance(node, NoiseState))
    found = [leaf for leaf in leaves if isinstance(leaf, NoiseState)]
    if not found:
        raise QuellError("there is no state of quell.jax.privatize in this: pass the optimizer's whole state")
    if any(np.ndim(each.step) for each in found):
        raise QuellError(
            "this is a stack of several states, as vmap or scan makes it: pass one of them, such as the last. Mapped "
            "over, update releases nothing but its first step, as each step's noise is used once"
        )
    return found


def step_of(state: Any, run: ArrayLike) -> int:
    """The step that is due in the state of this run, which may have other runs' states beside it; refused without."""
    own = [int(found.step) for found in states_in(state) if np.array_equal(found.run, run)]
    if not own:
        raise QuellError("this is the state of another run: pass the one that this transformation's update returned")
    return max(own)
