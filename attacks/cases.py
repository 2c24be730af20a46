"""Random training runs: workloads with momentum, decay and schedules, and strategies of every family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quell import strategy, workload
from quell.participation import Participation
from quell.strategy import Strategy

SLOW_TO_FIND = ("band", "dense", "blt", "fractional")  # a search of a second or so each


def random_workload(random: np.random.Generator, steps: int) -> workload.Workload:
    """What some SGD does with its gradients."""
    decay = 1.0 if random.random() < 0.5 else float(random.uniform(0.9, 1.0))
    momentum = 0.0 if random.random() < 0.4 else float(random.uniform(0.0, 0.95) * decay)
    rates: Any = None
    match random.integers(0, 5):
        case 0:
            rates = workload.schedule("cosine", steps)
        case 1:
            rates = workload.schedule("linear", steps)
        case 2:
            rates = random.uniform(0.1, 1.0, steps)
    return workload.sgd(steps, momentum, decay, rates)


def random_family(random: np.random.Generator, names: Sequence[str] | None = None) -> str:
    """Any family, or one of these; those whose search is slow come up less often."""
    names = list(names or strategy.FAMILIES)
    weights = np.array([0.25 if name in SLOW_TO_FIND else 1.0 for name in names])
    return str(random.choice(names, p=weights / weights.sum()))


def random_parameters(random: np.random.Generator, family: str, most_bands: int) -> dict[str, Any]:
    """Values for every parameter that the family needs, and for some of those that it takes."""
    takes = strategy.FAMILIES[family].takes
    given: dict[str, Any] = {}
    if "bands" in takes:
        given["bands"] = int(random.integers(1, most_bands + 1))
    if "buffers" in takes:
        given["buffers"] = int(random.integers(0, 4))
    for name in ("lambda", "gamma"):
        if name in takes and random.random() < 0.7:
            given[name] = float(random.uniform(0, 1))
    if "objective" in takes and random.random() < 0.2:
        given["objective"] = "maxse"
    if "horizon" in takes and random.random() < 0.3:
        given["horizon"] = int(random.integers(2, 40))
    elif "divergence" in takes and random.random() < 0.2:
        given["divergence"] = float(random.uniform(0.2, 5))
    if "column_normalise" in takes:
        given["column_normalise"] = bool(random.random() < 0.4)
    return given


def build(
    family: str, work: workload.Workload, participation: Participation, parameters: Mapping[str, Any]
) -> Strategy:
    """The strategy; refused (QuellError) where the family does not go with the run."""
    return strategy.build(family, work, participation, **parameters)


def released_matrix(chosen: Strategy) -> np.ndarray[Any, np.dtype[np.float64]]:
    """C as the noise has it: the inverse of what the noise is made from."""
    return np.asarray(np.linalg.inv(chosen.noising_matrix()), dtype=np.float64)
