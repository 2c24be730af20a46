"""The recurrences under test: real strategies of every kind, small enough for their dense matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy.linalg import toeplitz

from quell import workload
from quell._types import Array
from quell.noise import NoiseSpec
from quell.participation import Participation
from quell.strategy import Strategy, build
from quell.strategy.recurrence import Exponentials

STEPS = 40

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "independent": ("identity", {}),
    "lambda_cgd": ("lambda_cgd", {"lambda": 0.9}),
    "bisr": ("bisr", {"bands": 5}),
    "bisr normalised": ("bisr", {"bands": 5, "column_normalise": True}),
    "bsr": ("bsr", {"bands": 4}),
    "bsr normalised": ("bsr", {"bands": 4, "column_normalise": True}),
    "band": ("band", {"bands": 4}),
    "blt": ("blt", {"buffers": 2}),
    "two exponentials": ("two exponentials", {}),
    "tree": ("tree", {}),
}


@dataclass(frozen=True)
class TwoExponentials:
    """A BLT with two buffers that matter; at forty steps the optimal one needs a single buffer."""

    steps: int
    recurrence: Exponentials = Exponentials(np.array([0.3, -0.2]), np.array([0.9, 0.4]), None)  # noqa: RUF009

    def matrix(self) -> Array:
        powers = self.recurrence.decays[:, None] ** np.arange(self.steps - 1)
        noising = toeplitz(np.concatenate([[1.0], self.recurrence.scales @ powers]), np.eye(self.steps)[0])
        return np.asarray(np.linalg.inv(noising))


@cache
def strategy(case: str, steps: int = STEPS) -> Strategy | TwoExponentials:
    name, parameters = CASES[case]
    if name == "two exponentials":
        return TwoExponentials(steps)
    return build(name, workload.prefix(steps), Participation(steps, 10), **parameters)


def spec(case: str, scale: float = 1.0, steps: int = STEPS) -> NoiseSpec:
    return NoiseSpec(strategy(case, steps).recurrence, steps, scale)


def matrix(case: str, steps: int = STEPS) -> Array:
    return strategy(case, steps).matrix()
