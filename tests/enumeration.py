"""Sensitivity by its definition, for tiny runs: the oracle of the tests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from quell._types import Array
from quell.participation import Participation


def by_enumeration(matrix: Array, participation: Participation) -> float:
    """max over all patterns of √Σ|(CᵀC)_ij|."""
    gram = np.abs(matrix.T @ matrix)
    return math.sqrt(max(gram[np.ix_(pattern, pattern)].sum() for pattern in patterns(participation)))


def patterns(participation: Participation, start: int = 0, left: int | None = None) -> Iterator[list[int]]:
    """All non-empty patterns, by recursion."""
    left = participation.count if left is None else left
    for first in range(start, participation.steps) if left else ():
        yield [first]
        for rest in patterns(participation, first + participation.separation, left - 1):
            yield [first, *rest]
