"""Independent noise at every step: C = I, the mechanism of DP-SGD and the baseline of every comparison."""

from __future__ import annotations

import math

import numpy as np

from quell.participation import Participation
from quell.strategy.family import Family
from quell.strategy.structure import ToeplitzStrategy
from quell.workload import Workload


def identity(workload: Workload, _: Participation) -> ToeplitzStrategy:
    """C = I."""
    return ToeplitzStrategy("identity", workload.steps, np.ones(1), np.ones(1))


IDENTITY = Family(
    "identity",
    "independent noise at every step",
    identity,
    sturdy=True,
    instant_steps=math.inf,
    paper="DP-SGD",
)
