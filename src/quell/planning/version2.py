"""Plan files of version 2: rows that repeat the run. They are read and checked in full, and never written.

A row had everything in one flat table: the family's parameters beside the run, the promise and the costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quell.analysis.error import error
from quell.analysis.objective import ADAPTIVE_FORGETTING, FORGETTING
from quell.costs import TimeLimit
from quell.errors import QuellError, short
from quell.planning import shapes
from quell.planning.mechanism import Mechanism
from quell.planning.prices import Prices
from quell.run import Run
from quell.strategy import FAMILIES
from quell.workload import forgetting, sgd

VERSION = 2
_PLAIN = {shapes.REST: shapes.PLAIN}
_SETTINGS = (
    *("examples", "batch_size", "epochs", "epsilon", "delta", "momentum", "weight_decay", "memory", "draws"),
    *("sampling", "objective", "adaptive", "separation", "participations"),
)
_SETUP = {"learning_rates": shapes.is_schedule, "time_limit": object}
_PLAN = {
    "format": str,
    "version": shapes.PLAIN,
    "setup": {**dict.fromkeys(_SETTINGS, shapes.SETTING), **_SETUP},
    "recommended": shapes.PLAIN,
    "mechanisms": object,
}
_ROW = {
    **dict.fromkeys(("mechanism", "sampling"), str),
    "noise_multiplier": float,
    "solution?": shapes.is_solution,
    "guarantee?": _PLAIN,
    **_PLAIN,
}


def misshapen(content: dict[str, Any]) -> str | None:
    """The first part of such a plan that has the wrong shape, in words; None if there is none."""
    return shapes.odd_plan(content, _PLAN, _ROW)


def run_of(setup: dict[str, Any]) -> Run:
    """The run that a file states."""
    if not isinstance(setup["sampling"], str):
        raise QuellError(f"sampling={short(setup['sampling'])} must be the names of schemes")
    limit = setup["time_limit"]
    return Run.from_data(**{**setup, "time_limit": None if limit is None else TimeLimit.of_plain(limit)})


def core(row: dict[str, Any]) -> dict[str, Any]:
    """What is taken over from a row, in the shape of today."""
    family = FAMILIES.get(row["mechanism"])
    return {
        "family": row["mechanism"],
        "parameters": {name: row[name] for name in (family.takes if family else ()) if name in row},
        **({"solution": row["solution"]} if "solution" in row else {}),
        "noise": {"multiplier": row["noise_multiplier"]},
        "guarantee": {"sampling": row["sampling"]},
    }


def score(prices: Prices, mechanism: Mechanism, objective: str) -> float:
    """A score as version 2 defined it. What predicts training was another number where there is momentum or decay."""
    task, strategy = prices.run.workload, mechanism.strategy
    if objective != "training" or task.is_prefix:
        return mechanism.score(objective)
    horizon = (ADAPTIVE_FORGETTING if prices.run.optimizer.adaptive else FORGETTING) * task.steps
    own, plain = error(strategy, forgetting(task, horizon)).rmse, error(strategy, sgd(task.steps)).rmse
    return math.sqrt(own * plain) * mechanism.noise_multiplier


def recommend(prices: Prices, mechanisms: Sequence[Mechanism]) -> int:
    """The index of the mechanism that version 2 recommended: within the limits, with the least score."""
    run = prices.run
    keys = [(not run.limits.fits(each), score(prices, each, run.objective)) for each in mechanisms]
    return keys.index(min(keys))


def row(prices: Prices, mechanism: Mechanism) -> dict[str, Any]:
    """The row of a mechanism as version 2 wrote it, recomputed."""
    run, now, moved = prices.run, mechanism.as_dict(), mechanism.guarantee.sensitivity
    return {
        "mechanism": now["family"],
        **now["parameters"],
        **({"solution": now["solution"]} if "solution" in now else {}),
        "steps": run.steps,
        "epochs": run.participation.count if run.user_level else run.epochs,
        "separation": run.participation.separation,
        "participations": run.participation.count,
        "momentum": run.optimizer.momentum,
        "weight_decay": run.optimizer.weight_decay,
        "learning_rates": "constant" if run.workload.rates is None else "scheduled",
        "epsilon": run.epsilon,
        "delta": run.delta,
        "sampling": mechanism.sampling,
        "sensitivity": moved.value,
        "sensitivity_kind": moved.kind,
        "noise_multiplier": mechanism.noise_multiplier,
        **{name: score(prices, mechanism, name) for name in ("rmse", "maxse", "training")},
        "buffers": mechanism.buffers,
        "draws": mechanism.draws,
        "dpsgd_rmse": prices.dpsgd.rmse,
        "lower_bound": prices.lower_bound,
        "guarantee": {
            "epsilon": run.epsilon,
            "delta": run.delta,
            "unit": run.promise.unit,
            "adjacency": mechanism.guarantee.adjacency,
            "sampling": mechanism.sampling,
            "method": mechanism.guarantee.method,
            "failure_probability": mechanism.guarantee.failure_probability,
            "sensitivity": moved.kind,
            "sensitivity_method": moved.method,
        },
    }
