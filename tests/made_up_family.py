"""A made-up family, as somebody would add it: every step takes a share of the last step's noise back."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from quell.participation import Participation
from quell.strategy.family import Family, Line, Space
from quell.strategy.structure import ToeplitzStrategy
from quell.workload import Workload


def echo(workload: Workload, _: Participation, echo: float = 0.5) -> ToeplitzStrategy:
    """C⁻¹ = 1 − echo·x."""
    return ToeplitzStrategy("echo", workload.steps, given_noising=np.array([1.0, -echo]), parameters={"echo": echo})


def _lines(_: Family, space: Space) -> Iterator[Line]:
    if space.correlates:
        yield [{"echo": share / 10} for share in range(1, 10)]


ECHO = Family(
    "echo",
    "repeats a share of the last noise, negatively",
    echo,
    lambda space: [{"echo": 0.5}],
    _lines,
    optional={"echo": 0.5},
    instant_steps=math.inf,
    paper="Repeated Noise",
)
