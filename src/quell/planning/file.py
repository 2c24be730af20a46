"""Write plan files atomically; read and verify them without trusting them.

Only three things are taken from a row: which mechanism it is, the numbers of an optimised one, and its noise. The
accountant of the plan's sampling scheme must certify (ε, δ) for that noise. Everything else in the file is recomputed
and must match. Up to 512 steps the strategy is also checked as dense matrices, which share no code with the fast paths.
Files of version 2 are read too (`quell.planning.version2`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quell import files
from quell.analysis.sensitivity import sensitivity
from quell.costs import TimeLimit
from quell.errors import QuellError, short
from quell.planning import shapes, version2
from quell.planning.mechanism import Mechanism
from quell.planning.planner import COMPARISONS, FORMAT, VERSION, Plan, recommend
from quell.planning.prices import Prices
from quell.privacy.accountant import FAILURE_SHARE
from quell.privacy.importance import METHOD
from quell.run import Run
from quell.schemes import SCHEMES
from quell.strategy import find

MOST_BYTES = 1 << 27  # plans have a few megabytes at most
_TOLERANCE = 1e-9
_ESTIMATED = 0.02  # of the yardstick in files of version 2, if batches are random: it was estimated in another way
_DENSE = 512
_LONG = 200  # characters of a file's own words that are shown

_PLAIN = {shapes.REST: shapes.PLAIN}
_GROUPS = {  # of a run's arguments
    "promise": dict.fromkeys(("epsilon", "delta", "unit"), shapes.SETTING),
    "optimizer": {
        **dict.fromkeys(("momentum", "weight_decay", "adaptive", "ema?"), shapes.SETTING),
        "learning_rates": shapes.is_schedule,
    },
    "limits": {**dict.fromkeys(("memory", "draws"), shapes.SETTING), "time_limit": object},
}
_DATA = ("examples?", "users?", "groups?", "separation?", "participations?")  # which go together is up to `Run`
_PLAN = {
    "format": str,
    "version": shapes.PLAIN,
    "run": {
        **dict.fromkeys((*_DATA, "batch_size", "epochs", "sampling", "objective"), shapes.SETTING),
        **_GROUPS,
    },
    "yardsticks": _PLAIN,
    "recommended": shapes.PLAIN,
    "mechanisms": object,
}
_ROW = {
    "family": str,
    "parameters": _PLAIN,
    "solution?": shapes.is_solution,
    "noise": {"multiplier": float, **_PLAIN},
    "error": _PLAIN,
    "guarantee": {"sampling": str, **_PLAIN},
}


@dataclass(frozen=True)
class Check:
    """One claim of a plan file: the stated value, the recomputed value, and whether the claim holds."""

    claim: str
    stated: float | str
    recomputed: float | str
    holds: bool


def text_of(content: dict[str, Any]) -> str:
    """A plan's plain data as the text of its file."""
    return json.dumps(content, indent=2) + "\n"


def write(content: dict[str, Any], path: str | Path) -> None:
    """Write a plan as JSON, atomically."""
    text = text_of(content)
    if len(text) > MOST_BYTES:
        raise QuellError(
            f"the plan would take {len(text):,} bytes, more than the {MOST_BYTES:,} that are read again: "
            "keep fewer mechanisms, or name a schedule instead of listing its learning rates"
        )
    try:
        with files.whole(path) as file:  # a plan holds no secrets; colleagues verify it
            file.write(text.encode())
    except OSError as problem:
        raise QuellError(f"cannot write the plan to {path}: {problem.strerror}") from problem


def verify(path: str | Path) -> list[Check]:
    """Recompute every claim in a plan file from first principles.

    Args:
        path: A file written by `Plan.save` or `quell plan --save`.

    Returns:
        One check per claim; a false claim has `holds=False`. Files that are not plans raise `QuellError`.
    """
    return checked(path)[0]


def verified_plan(path: str | Path) -> Plan:
    """The plan in a file; raises `QuellError` if one of its claims does not hold."""
    checks, plan = checked(path)
    if false := [check for check in checks if not check.holds]:
        first = false[0]
        raise QuellError(
            f"{path} is not a true plan: for {first.claim} it says '{first.stated}', and recomputing gives "
            f"'{first.recomputed}' ({len(false):,} of {len(checks):,} claims are false): make a new plan"
        )
    assert plan is not None
    return plan


def checked(path: str | Path) -> tuple[list[Check], Plan | None]:
    """All checks, and the plan if every mechanism in it could be built."""
    content = _read(path)
    old = content["version"] == version2.VERSION
    if wrong := version2.misshapen(content) if old else shapes.odd_plan(content, _PLAN, _ROW):
        raise QuellError(f"{path} is damaged: {wrong}; make a new plan")
    try:
        prices = Prices(version2.run_of(content["setup"]) if old else _run_of(content["run"]))
    except QuellError as refusal:
        raise QuellError(f"the run that {path} states is not valid: {refusal}") from refusal
    stated: list[dict[str, Any]] = content["mechanisms"]
    rows = [version2.core(row) for row in stated] if old else stated
    drawn = sum(_is_drawn(row["guarantee"]["sampling"]) for row in rows)
    if drawn > COMPARISONS:  # among many certificates by draws one holds by luck
        return [Check("mechanisms certified by draws", str(drawn), f"at most {COMPARISONS}", False)], None
    about = {"dpsgd_rmse": _ESTIMATED} if old and prices.dpsgd.scheme.amplifies else {}
    checks: list[Check] = []
    mechanisms: list[Mechanism] = []
    for row, claims in zip(rows, stated, strict=True):
        try:
            mechanism = _rebuild(prices, row)
            fresh = version2.row(prices, mechanism) if old else mechanism.as_dict(prices.run.objective)
            checks += _compared(repr(mechanism.strategy), claims, _as_certified(claims, fresh, mechanism), about)
            checks += _second_opinions(prices, mechanism)
            mechanisms.append(mechanism)
        except QuellError as refusal:
            claim = f"mechanism {_shown(row['family'])}"
            checks.append(Check(claim, "can be built, and its noise suffices", str(refusal), False))
    if len(mechanisms) < len(rows):
        return checks, None
    if not old:
        checks += _compared("yardsticks", content["yardsticks"], prices.yardsticks, about)
        checks += _compared("run", content["run"], prices.run.as_dict(), {})
    best = version2.recommend(prices, mechanisms) if old else recommend(prices.run, mechanisms)
    checks.append(Check("recommended mechanism", content["recommended"], best, content["recommended"] == best))
    return checks, Plan(prices.run, tuple(mechanisms), content["recommended"])


def certified(run: object, row: object) -> tuple[Prices, Mechanism]:
    """The run and one mechanism of it from plain data, as a plan file holds them; the noise is certified anew.

    A mechanism may come from a plan, whose certificates share their failure probability, or have been priced alone.
    """
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "run": run, "yardsticks": {}}
    content |= {"recommended": 0, "mechanisms": [row]}
    if wrong := shapes.odd_plan(content, _PLAN, _ROW):
        raise QuellError(f"a plan is damaged: {wrong}")
    prices = Prices(_run_of(content["run"]))
    try:
        return prices, _rebuild(prices, content["mechanisms"][0])
    except QuellError:
        return prices, _rebuild(prices, content["mechanisms"][0], comparisons=1)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        text = files.read(path, MOST_BYTES)
    except IsADirectoryError:
        raise QuellError(
            f"cannot read {path}: it is a folder; give the plan file in it (quell train: plan.json or trial-plan.json)"
        ) from None
    except OSError as problem:
        raise QuellError(f"cannot read the plan {path}: {problem.strerror}") from problem
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as problem:
        raise QuellError(f"{path} is not a plan: it does not hold valid JSON, or is damaged or cut short") from problem
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise QuellError(f"{path} is not a plan file: it lacks format={FORMAT!r}")
    version = content.get("version")
    if type(version) is not int or version not in (version2.VERSION, VERSION):
        raise QuellError(
            f"{path} has plan version {short(version)}, this Quell reads versions {version2.VERSION} and {VERSION}: "
            "use the Quell that wrote it, or make a new plan"
        )
    return content


def _run_of(content: dict[str, Any]) -> Run:
    """The run that a file states. Its unit of privacy follows from the rest and is compared later."""
    flat = {name: value for name, value in content.items() if name not in _GROUPS}
    limits, promise = dict(content["limits"]), content["promise"]
    if limits["time_limit"] is not None:
        limits["time_limit"] = TimeLimit.of_plain(limits["time_limit"])
    stated = [*flat, *content["optimizer"], *limits, "epsilon", "delta"]
    if len(stated) > len(set(stated)):
        raise QuellError("the run states one thing in two places: restore the file from a copy")
    return Run.from_data(**flat, **content["optimizer"], **limits, epsilon=promise["epsilon"], delta=promise["delta"])


def _is_drawn(sampling: str) -> bool:
    return sampling in SCHEMES and SCHEMES[sampling].drawn


def _rebuild(prices: Prices, row: dict[str, Any], comparisons: int = COMPARISONS) -> Mechanism:
    """The mechanism of a row with the noise that the row states; raises if that noise is too small."""
    family, sampling = find(row["family"]), row["guarantee"]["sampling"]
    solution = np.asarray(row["solution"], dtype=np.float64) if "solution" in row else None
    parameters = {name: value for name, value in row["parameters"].items() if name in family.takes}
    strategy = prices.build(family.name, solution, **parameters)
    kind = SCHEMES.get(sampling)
    if kind is None or kind not in prices.kinds_for(strategy):
        raise QuellError(f"the plan's sampling is {prices.run.sampling}, but the mechanism claims {short(sampling)}")
    return prices.certify(strategy, kind, comparisons, noise=row["noise"]["multiplier"])


def _as_certified(stated: dict[str, Any], fresh: dict[str, Any], mechanism: Mechanism) -> dict[str, Any]:
    """What is recomputed of a row. One that was certified by draws stays true where it now takes none."""
    guarantee = mechanism.guarantee
    by_draws = {"method": METHOD, "failure_probability": guarantee.delta * FAILURE_SHARE}
    fewer = _is_drawn(guarantee.sampling) and not guarantee.failure_probability
    if not fewer or not by_draws.items() <= stated.get("guarantee", {}).items():
        return fresh
    return {**fresh, "guarantee": {**fresh["guarantee"], **by_draws}}


def _compared(label: str, stated: dict[str, Any], fresh: dict[str, Any], about: dict[str, float]) -> Iterator[Check]:
    """Every value of a part of the file beside the one that was recomputed; tables in it are taken apart.

    `about` names estimates, with how far they may be off.
    """
    for key, expected in fresh.items():
        if key not in stated:
            yield Check(f"{label}: {key}", "missing", _shown(expected), False)
        elif isinstance(expected, dict) and isinstance(stated[key], dict):
            yield from _compared(f"{label}: {key}", stated[key], expected, about)
        elif isinstance(expected, float):
            close = type(stated[key]) is float and math.isclose(
                stated[key], expected, rel_tol=about.get(key, _TOLERANCE)
            )
            yield Check(f"{label}: {key}", _shown(stated[key]), expected, close)
        else:
            same = type(stated[key]) is type(expected) and stated[key] == expected
            yield Check(f"{label}: {key}", _shown(stated[key]), _shown(expected), same)
    if extra := sorted(set(stated) - set(fresh)):
        yield Check(f"{label}: unknown entries", _shown(", ".join(extra)), "none", False)


def _second_opinions(prices: Prices, mechanism: Mechanism) -> Iterator[Check]:
    """Independent checks: the lower bound and, for short runs, dense matrices."""
    label, run = repr(mechanism.strategy), prices.run
    if not mechanism.scheme.amplifies:
        below = mechanism.rmse < prices.lower_bound * (1 - _TOLERANCE)
        yield Check(f"{label}: rmse at least the lower bound", mechanism.rmse, prices.lower_bound, not below)
    if run.steps > _DENSE:
        return
    strategy, noising = mechanism.strategy.matrix(), mechanism.strategy.noising_matrix()
    off = float(np.max(np.abs(strategy @ noising - np.eye(len(strategy)))))
    yield Check(f"{label}: largest entry of C·C⁻¹ − I", 0.0, off, off < 1e-8)
    decoder = run.workload.matrix() @ noising
    rmse = float(np.linalg.norm(decoder)) / math.sqrt(len(decoder)) * mechanism.noise_multiplier
    close = math.isclose(rmse, mechanism.rmse, rel_tol=1e-6)
    yield Check(f"{label}: rmse, dense", mechanism.rmse, rmse, close)
    leftmost = float(np.linalg.norm(strategy[:, run.participation.first_steps()].sum(axis=1)))
    stated = sensitivity(mechanism.strategy, run.participation).value
    yield Check(f"{label}: sensitivity, leftmost pattern", stated, leftmost, leftmost <= stated)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key given twice, which different readers would understand differently."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is given twice")
    return content


def _shown(value: Any) -> float | str:
    """A value of a file that is safe to print: not too long, and without control characters."""
    if isinstance(value, float):
        return value
    text = short(value) if isinstance(value, int) else str(value)
    text = text if len(text) <= _LONG else text[:_LONG] + "…"
    return text if text.isprintable() else ascii(text)
