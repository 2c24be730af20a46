"""Is a plan file true? Recompute every claim in it from first principles and compare.

The stated noise is not compared with a calibration but put into the privacy formula: (σ, sensitivity) must
really buy (ε, δ). Errors and yardsticks must match to 1e-6. Up to 512 steps the strategy is also written out as
dense matrices, which share no code with the fast paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from quell.error import error
from quell.errors import QuellError
from quell.mechanism import Mechanism, Problem
from quell.planning import FORMAT, VERSION, Plan, problem_of, recommend
from quell.privacy import Guarantee, gaussian_delta, gaussian_sigma
from quell.sensitivity import sensitivity
from quell.setup import Setup
from quell.strategy import build, find

_TOLERANCE = 1e-6
_DENSE = 512


@dataclass(frozen=True)
class Check:
    """One claim of a plan file: what it says, what comes out, and whether it holds."""

    claim: str
    stated: float | str
    recomputed: float | str
    holds: bool


def verify(path: str | Path) -> list[Check]:
    """Every claim in a plan file, recomputed. Unreadable files raise; false claims come back with `holds=False`."""
    return list(_checks(*_read(path)))


def verified_plan(path: str | Path) -> Plan:
    """The plan in a file, refused when one of its claims does not hold."""
    setup, content = _read(path)
    if false := [check for check in _checks(setup, content) if not check.holds]:
        first = false[0]
        raise QuellError(
            f"{path} is not a true plan: {first.claim} is stated as {first.stated} but comes out as {first.recomputed}"
            f" ({len(false)} claims fail): make a new plan"
        )
    problem = problem_of(setup)
    mechanisms = tuple(_rebuild(problem, row)[0] for row in content["mechanisms"])
    return Plan(setup, mechanisms, content["recommended"])


def _read(path: str | Path) -> tuple[Setup, dict[str, Any]]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise QuellError(f"cannot read the plan {path}: {problem.strerror}") from problem
    except ValueError as problem:
        raise QuellError(
            f"{path} is not a plan: it does not hold valid JSON; it may be damaged or cut short"
        ) from problem
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise QuellError(f"{path} is not a plan file: it lacks format={FORMAT!r}")
    if content.get("version") != VERSION:
        raise QuellError(
            f"{path} has plan version {content.get('version')!r}, this Quell reads version {VERSION}: "
            "use the Quell that wrote it, or make a new plan"
        )
    try:
        if set(content["setup"]) != {field.name for field in fields(Setup)}:
            raise QuellError(f"{path} is damaged: its set-up does not have the fields of a plan; make a new plan")
        rows, index = content["mechanisms"], content["recommended"]
        if not rows or not isinstance(index, int) or not 0 <= index < len(rows):
            raise QuellError(f"{path} is damaged: it recommends mechanism {index!r} of {len(rows)}; make a new plan")
        return Setup(**content["setup"]), content
    except (KeyError, TypeError, AttributeError) as problem:
        raise QuellError(
            f"{path} is damaged: a part of the plan is missing or of the wrong kind; make a new plan"
        ) from problem


def _checks(setup: Setup, content: dict[str, Any]) -> Iterator[Check]:
    problem = problem_of(setup)
    mechanisms = []
    for row in content["mechanisms"]:
        try:
            mechanism, fresh = _rebuild(problem, row)
            yield from _row_checks(problem, mechanism, row, fresh)
            mechanisms.append(mechanism)
        except QuellError as refusal:
            yield Check(f"mechanism {row.get('mechanism')}", "can be built and priced", str(refusal), False)
        except (KeyError, TypeError, ValueError, AttributeError) as trouble:
            raise QuellError("the plan is damaged: a mechanism lacks a value or has one of the wrong kind") from trouble
    if len(mechanisms) == len(content["mechanisms"]):
        best = recommend(setup, mechanisms)
        yield Check("recommended mechanism", content["recommended"], best, content["recommended"] == best)


def _rebuild(problem: Problem, row: dict[str, Any]) -> tuple[Mechanism, dict[str, Any]]:
    """The mechanism that a row describes, with the noise that the row states, and the row as it should read."""
    family = find(row["mechanism"])
    names = (*family.required, *family.optional, "column_normalise")
    parameters = {name: row[name] for name in names if name in row}
    solution = np.asarray(row["solution"], dtype=np.float64) if "solution" in row else None
    strategy = build(family.name, problem.workload, problem.sampling.participation, solution, **parameters)
    moved = sensitivity(strategy, problem.sampling.participation)
    stated = Guarantee(row["epsilon"], row["delta"], row["noise_multiplier"], row["sampling"], moved)
    mechanism = Mechanism(strategy, stated, error(strategy, problem.workload))
    return mechanism, problem.row(mechanism)


def _row_checks(problem: Problem, mechanism: Mechanism, row: dict[str, Any], fresh: dict[str, Any]) -> Iterator[Check]:
    label = repr(mechanism.strategy)
    for key, expected in (("epsilon", problem.epsilon), ("delta", problem.delta)):
        yield Check(f"{label}: {key}", row[key], expected, row[key] == expected)
    needed = mechanism.guarantee.sensitivity.value * gaussian_sigma(problem.epsilon, problem.delta)
    yield Check(f"{label}: noise multiplier", row["noise_multiplier"], needed, _close(row["noise_multiplier"], needed))
    bought = gaussian_delta(mechanism.noise_multiplier / mechanism.guarantee.sensitivity.value, problem.epsilon)
    yield Check(f"{label}: delta bought by the noise", row["delta"], bought, bought <= row["delta"] * (1 + 1e-9))
    for key, expected in fresh.items():
        if key not in row:
            yield Check(f"{label}: {key}", "missing", _shown(expected), False)
        elif isinstance(expected, float):
            yield Check(f"{label}: {key}", row[key], expected, _close(row[key], expected))
        else:
            yield Check(f"{label}: {key}", _shown(row[key]), _shown(expected), row[key] == expected)
    if extra := sorted(set(row) - set(fresh)):
        yield Check(f"{label}: unknown entries", ", ".join(extra), "none", False)
    if problem.workload.steps <= _DENSE:
        yield from _dense_checks(problem, mechanism, label)


def _dense_checks(problem: Problem, mechanism: Mechanism, label: str) -> Iterator[Check]:
    strategy, noising = mechanism.strategy.matrix(), mechanism.strategy.noising_matrix()
    off = float(np.max(np.abs(strategy @ noising - np.eye(len(strategy)))))
    yield Check(f"{label}: largest entry of C·C⁻¹ − I", 0.0, off, off < 1e-8)
    decoder = problem.workload.matrix() @ noising
    rmse = float(np.linalg.norm(decoder)) / math.sqrt(len(decoder)) * mechanism.noise_multiplier
    yield Check(f"{label}: rmse, dense", mechanism.rmse, rmse, _close(rmse, mechanism.rmse))
    leftmost = float(np.linalg.norm(strategy[:, problem.sampling.participation.first_steps()].sum(axis=1)))
    stated = mechanism.guarantee.sensitivity.value
    yield Check(f"{label}: sensitivity, leftmost pattern", stated, leftmost, leftmost <= stated * (1 + 1e-9))


def _close(stated: float, recomputed: float) -> bool:
    return math.isclose(stated, recomputed, rel_tol=_TOLERANCE)


def _shown(value: Any) -> float | str:
    return value if isinstance(value, float) else str(value)
