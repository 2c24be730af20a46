"""Plan files of version 2: rows that repeat the run. They are read and checked in full, and never written.

A row had everything in one flat table: the family's parameters beside the run, the promise and the costs.
"""

from __future__ import annotations

from typing import Any

from quell.costs import TimeLimit
from quell.errors import QuellError, short
from quell.planning.mechanism import Mechanism
from quell.planning.prices import Prices
from quell.planning.shapes import are_numbers, are_plain, is_plain, is_solution, odd_rows
from quell.run import Run
from quell.strategy import FAMILIES

VERSION = 2
_PARTS = {"format", "version", "setup", "recommended", "mechanisms"}
_SETUP = {
    *("examples", "batch_size", "epochs", "epsilon", "delta", "momentum", "weight_decay", "learning_rates", "memory"),
    *("draws", "sampling", "objective", "adaptive", "time_limit", "separation", "participations"),
}


def misshapen(content: dict[str, Any]) -> str | None:
    """What in the content of a file is not of the kind that such a plan has there; None where everything is."""
    if set(content) != _PARTS:
        return "it does not have the parts of a plan"
    setup = content["setup"]
    if not isinstance(setup, dict) or set(setup) != _SETUP:
        return "its setup does not have the parts of a set-up"
    for name, value in setup.items():
        listed = name == "learning_rates" and are_numbers(value)
        if not (value is None or listed or name == "time_limit" or is_plain(value)):
            return f"setup.{name}={short(value)} is not what a set-up has there"
    return odd_rows(content, _odd)


def _odd(row: object) -> str | None:
    if not isinstance(row, dict):
        return f"{short(row)} is not a mechanism"
    for name, kind in (("mechanism", str), ("sampling", str), ("noise_multiplier", float)):
        if type(row.get(name)) is not kind:
            return f"{name}={short(row.get(name))} is missing or of the wrong kind"
    for name, value in row.items():
        plain = {"solution": is_solution, "guarantee": are_plain}.get(name, is_plain)(value)
        if not plain:
            return f"{short(name)}={short(value)} is not what a row has there"
    return None


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
        **{name: now["error"][name] for name in ("rmse", "maxse", "training")},
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
