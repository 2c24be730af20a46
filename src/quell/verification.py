"""Is a plan file true? Recompute every claim in it from first principles and compare.

Of a row only three things are taken over: which mechanism it is, the numbers an optimised one consists of, and the
noise. That noise is put into the accountant of the plan's own sampling scheme: it must really buy (ε, δ). Everything
else a row says is computed afresh and must match. Up to 512 steps the strategy is also written out as dense matrices,
which share no code with the fast paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from quell import files, privacy
from quell.errors import QuellError, short
from quell.mechanism import Mechanism, Problem
from quell.planning import COMPARISONS, FORMAT, MOST_BYTES, MOST_ROWS, VERSION, Plan, problem_of, recommend
from quell.sampling import BallsInBins, BMinSep, Cyclic
from quell.sensitivity import sensitivity
from quell.setup import Setup
from quell.strategy import build, find

_TOLERANCE = 1e-9
_DENSE = 512
_BY_DRAWS = (BallsInBins.name, BMinSep.name)  # schemes whose accountants draw
_PLAIN = (str, int, float)
_LONG = 200  # characters of a file's own words that are shown


@dataclass(frozen=True)
class Check:
    """One claim of a plan file: what it says, what comes out, and whether it holds."""

    claim: str
    stated: float | str
    recomputed: float | str
    holds: bool


def verify(path: str | Path) -> list[Check]:
    """Every claim in a plan file, recomputed. Unreadable files raise; false claims come back with `holds=False`."""
    return _checked(path)[0]


def verified_plan(path: str | Path) -> Plan:
    """The plan in a file, refused when one of its claims does not hold."""
    checks, plan = _checked(path)
    if false := [check for check in checks if not check.holds]:
        first = false[0]
        raise QuellError(
            f"{path} is not a true plan: {first.claim} is stated as {first.stated} but comes out as {first.recomputed}"
            f" ({len(false)} claims fail): make a new plan"
        )
    assert plan is not None
    return plan


def _checked(path: str | Path) -> tuple[list[Check], Plan | None]:
    """All checks, and the plan itself where every mechanism in it could be built."""
    setup, content = _read(path)
    problem = problem_of(setup)
    drawn = sum(row["sampling"] in _BY_DRAWS for row in content["mechanisms"])
    if drawn > COMPARISONS:  # among many certificates by draws one holds by luck
        return [Check("mechanisms certified by draws", str(drawn), f"at most {COMPARISONS}", False)], None
    checks: list[Check] = []
    mechanisms: list[Mechanism] = []
    for row in content["mechanisms"]:
        try:
            mechanism = _rebuild(problem, row)
            checks += _row_checks(problem, mechanism, row)
            mechanisms.append(mechanism)
        except QuellError as refusal:
            claim = f"mechanism {_shown(row['mechanism'])}"
            checks.append(Check(claim, "can be built, and its noise suffices", str(refusal), False))
    if len(mechanisms) < len(content["mechanisms"]):
        return checks, None
    best = recommend(setup, mechanisms)
    checks.append(Check("recommended mechanism", content["recommended"], best, content["recommended"] == best))
    return checks, Plan(setup, tuple(mechanisms), content["recommended"])


def _read(path: str | Path) -> tuple[Setup, dict[str, Any]]:
    try:
        text = files.read(path, MOST_BYTES)
    except OSError as problem:
        raise QuellError(f"cannot read the plan {path}: {problem.strerror}") from problem
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as problem:
        raise QuellError(f"{path} is not a plan: it does not hold valid JSON, or is damaged or cut short") from problem
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise QuellError(f"{path} is not a plan file: it lacks format={FORMAT!r}")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise QuellError(
            f"{path} has plan version {short(version)}, this Quell reads version {VERSION}: "
            "use the Quell that wrote it, or make a new plan"
        )
    if wrong := _misshapen(content):
        raise QuellError(f"{path} is damaged: {wrong}; make a new plan")
    return Setup(**content["setup"]), content


def _misshapen(content: dict[str, Any]) -> str | None:
    """What in the content of a file is not of the kind that a plan has there; None where everything is.

    Whether the values are right is for `Setup`, the strategies and the accountants to say. They can rely on finding
    strings, numbers and lists of numbers where a plan has such, nested no deeper, and no more rows than a plan has.
    """
    if set(content) != {"format", "version", "setup", "recommended", "mechanisms"}:
        return "it does not have the parts of a plan"
    setup, rows, index = content["setup"], content["mechanisms"], content["recommended"]
    if not isinstance(setup, dict) or set(setup) != {field.name for field in fields(Setup)}:
        return "its setup does not have the parts of a set-up"
    for name, value in setup.items():
        listed = name == "learning_rates" and _are_numbers(value)
        if not (value is None or listed or name == "time_limit" or isinstance(value, _PLAIN)):
            return f"setup.{name}={short(value)} is not what a set-up has there"
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        return f"its mechanisms are not a list of at most {MOST_ROWS} rows"
    if type(index) is not int or not 0 <= index < len(rows):
        return f"recommended={short(index)} is not the number of one of its rows"
    return next((f"row {number} of its mechanisms: {w}" for number, row in enumerate(rows) if (w := _odd(row))), None)


def _odd(row: object) -> str | None:
    """What in a row is not of the kind that a row has there."""
    if not isinstance(row, dict):
        return f"{short(row)} is not a mechanism"
    for name, kind in (("mechanism", str), ("sampling", str), ("noise_multiplier", float)):
        if type(row.get(name)) is not kind:
            return f"{name}={short(row.get(name))} is missing or of the wrong kind"
    for name, value in row.items():
        if name == "solution":
            good = _are_numbers(value) or _is_table(value)
        elif name == "guarantee":
            good = isinstance(value, dict) and all(isinstance(each, _PLAIN) for each in value.values())
        else:
            good = isinstance(value, _PLAIN)
        if not good:
            return f"{short(name)}={short(value)} is not what a row has there"
    return None


def _are_numbers(value: object) -> bool:
    """A list of numbers, whole ones only as large as float64 has them exactly."""
    return isinstance(value, list) and all(
        type(each) is float or (type(each) is int and abs(each) <= 2**53) for each in value
    )


def _is_table(value: object) -> bool:
    """Lists of numbers, all of one length."""
    return isinstance(value, list) and all(_are_numbers(row) and len(row) == len(value[0]) for row in value)


def _rebuild(problem: Problem, row: dict[str, Any]) -> Mechanism:
    """The mechanism that a row describes, with the noise that the row states; refused where that is too little."""
    family = find(row["mechanism"])
    parameters = {name: row[name] for name in family.takes if name in row}
    solution = np.asarray(row["solution"], dtype=np.float64) if "solution" in row else None
    strategy = build(family.name, problem.workload, problem.cycle.participation, solution, **parameters)
    sampling = row["sampling"]
    if sampling not in problem.schemes_for(strategy):
        raise QuellError(f"the plan's sampling is {problem.sampling}, but the mechanism claims {short(sampling)}")
    guarantee = privacy.certify(
        strategy,
        problem.scheme_of(strategy, sampling),
        row["noise_multiplier"],
        problem.epsilon,
        problem.delta,
        COMPARISONS,
    )
    return problem.with_claim(strategy, guarantee)


def _row_checks(problem: Problem, mechanism: Mechanism, row: dict[str, Any]) -> Iterator[Check]:
    label, fresh = repr(mechanism.strategy), problem.row(mechanism)
    for key, expected in fresh.items():
        if key not in row:
            yield Check(f"{label}: {key}", "missing", _shown(expected), False)
        elif isinstance(expected, float):
            close = type(row[key]) is float and math.isclose(row[key], expected, rel_tol=_TOLERANCE)
            yield Check(f"{label}: {key}", _shown(row[key]), expected, close)
        else:
            same = type(row[key]) is type(expected) and row[key] == expected
            yield Check(f"{label}: {key}", _shown(row[key]), _shown(expected), same)
    if mechanism.guarantee.sampling == Cyclic.name:
        below = mechanism.rmse < problem.lower_bound * (1 - _TOLERANCE)
        yield Check(f"{label}: rmse at least the lower bound", mechanism.rmse, problem.lower_bound, not below)
    if extra := sorted(set(row) - set(fresh)):
        yield Check(f"{label}: unknown entries", _shown(", ".join(extra)), "none", False)
    if problem.workload.steps <= _DENSE:
        yield from _dense_checks(problem, mechanism, label)


def _dense_checks(problem: Problem, mechanism: Mechanism, label: str) -> Iterator[Check]:
    strategy, noising = mechanism.strategy.matrix(), mechanism.strategy.noising_matrix()
    off = float(np.max(np.abs(strategy @ noising - np.eye(len(strategy)))))
    yield Check(f"{label}: largest entry of C·C⁻¹ − I", 0.0, off, off < 1e-8)
    decoder = problem.workload.matrix() @ noising
    rmse = float(np.linalg.norm(decoder)) / math.sqrt(len(decoder)) * mechanism.noise_multiplier
    close = math.isclose(rmse, mechanism.rmse, rel_tol=1e-6)
    yield Check(f"{label}: rmse, dense", mechanism.rmse, rmse, close)
    leftmost = float(np.linalg.norm(strategy[:, problem.cycle.participation.first_steps()].sum(axis=1)))
    stated = sensitivity(mechanism.strategy, problem.cycle.participation).value
    yield Check(f"{label}: sensitivity, leftmost pattern", stated, leftmost, leftmost <= stated)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key given twice means one thing to this reader and another to the next: refused."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is given twice")
    return content


def _shown(value: Any) -> float | str:
    """A value of a file, fit for a terminal: not too long, and without what would move the cursor."""
    if isinstance(value, float):
        return value
    text = short(value) if isinstance(value, int) else str(value)
    text = text if len(text) <= _LONG else text[:_LONG] + "…"
    return text if text.isprintable() else ascii(text)
