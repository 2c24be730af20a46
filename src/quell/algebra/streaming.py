"""Streaming linear operators: lower-triangular matrices that read and write one row at a time.

Appendix C of the BandMF paper (arXiv:2405.15913). An operator is two functions, `init` and `step`: the state starts
empty and every step maps (state, input row) to (state, output row). Workloads and inverse strategies alike have this
shape: it is the entry point for research on new ones. The operators only use arithmetic, so rows and bands may be
PyTorch tensors as well (`quell.research`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quell._types import Array

State = Any
Step = Callable[[State, Array], tuple[State, Array]]


@dataclass(frozen=True)
class StreamingOperator:
    """y_i = a linear function of z_0 … z_i, holding at most `buffers` rows between steps."""

    init: Callable[[], State]
    step: Step
    buffers: int


def banded(bands: Array) -> StreamingOperator:
    """Multiplication by a row-banded matrix: `bands[i, d]` is its entry (i, i−d).

    >>> materialise(banded(np.array([[1.0, 0.0], [1.0, -0.5]])), 2)
    array([[ 1. ,  0. ],
           [-0.5,  1. ]])
    """

    def step(state: tuple[int, list[Array]], row: Array) -> tuple[Any, Array]:
        i, past = state
        recent = [row, *past]
        output = sum((bands[i, d] * recent[d] for d in range(len(recent))), start=0.0 * row)
        return (i + 1, recent[: bands.shape[1] - 1]), output

    return StreamingOperator(lambda: (0, []), step, bands.shape[1] - 1)


def banded_inverse(bands: Array) -> StreamingOperator:
    """Multiplication by the inverse of a row-banded matrix (Algorithm 1 of the paper).

    >>> materialise(banded_inverse(np.array([[1.0, 0.0], [1.0, -1.0]])), 2)
    array([[1., 0.],
           [1., 1.]])
    """

    def step(state: tuple[int, list[Array]], row: Array) -> tuple[Any, Array]:
        i, past = state
        known = sum((bands[i, d + 1] * past[d] for d in range(len(past))), start=0.0 * row)
        output = (row - known) / bands[i, 0]
        return (i + 1, [output, *past][: bands.shape[1] - 1]), output

    return StreamingOperator(lambda: (0, []), step, bands.shape[1] - 1)


def lower_triangular(matrix: Array) -> StreamingOperator:
    """Multiplication by a dense lower-triangular matrix, which has to remember everything."""

    def step(past: list[Array], row: Array) -> tuple[Any, Array]:
        past = [*past, row]
        return past, np.asarray(np.tensordot(matrix[len(past) - 1, : len(past)], np.stack(past), axes=1))

    return StreamingOperator(list, step, len(matrix) - 1)


def compose(outer: StreamingOperator, inner: StreamingOperator) -> StreamingOperator:
    """The operator of the matrix product outer·inner."""

    def step(state: tuple[State, State], row: Array) -> tuple[Any, Array]:
        inner_state, middle = inner.step(state[0], row)
        outer_state, output = outer.step(state[1], middle)
        return (inner_state, outer_state), output

    return StreamingOperator(lambda: (inner.init(), outer.init()), step, outer.buffers + inner.buffers)


def materialise(operator: StreamingOperator, n: int) -> Array:
    """The n×n matrix of an operator."""
    state, rows = operator.init(), []
    for unit in np.eye(n):
        state, row = operator.step(state, unit)
        rows.append(row)
    return np.stack(rows)
