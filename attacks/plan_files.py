"""Plan files with something changed: no false one may verify, and none may end in anything but a sentence.

Honest plans of many kinds are saved and changed: stronger claims edited in consistently (less noise with the errors to
match, a smaller ε or δ wherever it is written, another scheme, other sizes), single values moved a little or replaced
by rubbish, keys dropped, copied and renamed, text cut. A file that verifies must state what the plan loaded from it
states, and its noise must truly buy its (ε, δ), judged by `attacks.truth`.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import quell
from attacks.outcome import Outcome, Trial, spread, summed
from attacks.pricing import true_delta
from quell.errors import QuellError
from quell.planning import Plan, Prices
from quell.run import Run

SECONDS = 60.0  # of processor time that a small file may take
_PORTION = 250  # mutations of one task
_BASE: dict[str, Any] = {"examples": 48, "batch_size": 8, "epochs": 3, "epsilon": 2.0, "delta": 1e-4}
_USER = {"separation": 3, "participations": 4}
HONEST: tuple[tuple[dict[str, Any], tuple[tuple[str, dict[str, Any]], ...]], ...] = (
    ({"sampling": "cyclic"}, (("identity", {}), ("bisr", {"bands": 4}), ("tree", {}))),
    ({"sampling": "cyclic", "momentum": 0.9}, (("bsr", {"bands": 3}), ("lambda_cgd", {"lambda": 0.8}))),
    ({"sampling": "cyclic", "learning_rates": "cosine"}, (("band_toeplitz", {"bands": 4}), ("identity", {}))),
    ({"sampling": "cyclic", "epsilon": 0.5}, (("band_inv", {"bands": 4}), ("blt", {"buffers": 2}))),
    ({"sampling": "cyclic", "weight_decay": 0.99}, (("band", {"bands": 3}), ("diagonal", {}))),
    (dict(_USER), (("bisr", {"bands": 4, "column_normalise": True}), ("square_root", {}))),
    ({"sampling": "balls_in_bins", "epochs": 1, "batch_size": 12, "delta": 1e-2}, (("identity", {}),)),
    ({"sampling": "balls_in_bins", "batch_size": 12, "delta": 1e-2}, (("bsr", {"bands": 2}),)),
    ({"sampling": "poisson", "batch_size": 24, "epochs": 2}, (("identity", {}),)),
)
_WEIGHTS = np.array([30, 30, 30, 30, 30, 30, 2, 0.5, 0.2])  # by how long it takes to verify one
_RUBBISH: tuple[Any, ...] = (
    None, True, False, "", "cyclic", "nan", [], [1.0], {}, {"a": 1}, 0, -1, 1, 2, 10**30, 0.0, -0.0, 1e-320, 1e308,
    math.nan, math.inf, -math.inf, -1.5, [[1.0]], ["x"], "\ud800",
)  # fmt: skip


def attack(count: int, seed: int, workers: int = 1) -> list[Outcome]:
    """So many mutated files."""
    portions = [(seed + first, min(_PORTION, count - first)) for first in range(0, count, _PORTION)]
    found = [trial for trials in spread(portion, portions, workers) for trial in trials]
    true = sum(not trial.refused and not trial.flaw for trial in found)
    return [summed("mutated plan files", found, f"{true:,} accepted, truly")]


def portion(task: tuple[int, int]) -> list[Trial]:
    seed, count = task
    random = np.random.default_rng([seed, 2])
    with tempfile.TemporaryDirectory() as folder:
        return [one(random, Path(folder) / "plan.json") for _ in range(count)]


@cache
def honest(number: int) -> dict[str, Any]:
    """The content of an honest plan file."""
    changes, rows = HONEST[number]
    run = Run.from_data(**{**_BASE, **changes})
    prices = Prices(run)
    priced = sorted((prices.price(name, **given) for name, given in rows), key=lambda row: row.score(run.objective))
    plan = Plan(run, tuple(priced), 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert all(check.holds for check in quell.verify(path)), f"the honest plan {number} does not verify"
    return content


def one(random: np.random.Generator, path: Path) -> Trial:
    """Change one plan, verify it, and judge it where it was accepted."""
    number = int(random.choice(len(HONEST), p=_WEIGHTS / _WEIGHTS.sum()))
    content = copy.deepcopy(honest(number))
    weights = np.array(list(_CHANGES.values()))
    change = list(_CHANGES)[int(random.choice(len(weights), p=weights / weights.sum()))]
    text = change(content, random)
    label = f"plan {number} after {change.__name__.strip('_')}"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        with _Limited():
            if not all(check.holds for check in quell.verify(path)):
                return Trial("plans", refused=True)
            return judged(path, label)
    except QuellError:
        return Trial("plans", refused=True)
    except Exception as problem:
        return Trial("plans", flaw=f"{label} raised {type(problem).__name__}: {problem}; the file was {text[:200]!r}")


def judged(path: Path, label: str) -> Trial:
    """An accepted file: does it say what it loads as, and is that true?"""
    plan, content = Plan.load(path), json.loads(path.read_text(encoding="utf-8"))
    fresh = json.loads(json.dumps(plan.as_dict()))
    content["run"]["sampling"] = fresh["run"]["sampling"]  # what may be chosen from; the choice is in the rows
    if not _same(content, fresh):
        return Trial("plans", flaw=f"{label} verifies, but states something else than the plan that it loads as")
    worst = 0.0
    for row in plan.mechanisms:
        scheme = plan.prices.scheme_of(row)
        measured = true_delta(row.strategy, scheme, row.noise_multiplier, plan.run.epsilon, seed=3)
        worst = max(worst, measured.lower / plan.run.delta)
        if worst > 1:
            return Trial("plans", worst, f"{label} verifies, but the delta of {row!r} is {measured.delta:.4g}")
    return Trial("plans", worst)


def _same(stated: Any, fresh: Any) -> bool:
    if isinstance(stated, dict) and isinstance(fresh, dict):
        return stated.keys() == fresh.keys() and all(_same(stated[key], fresh[key]) for key in stated)
    if isinstance(stated, list) and isinstance(fresh, list):
        return len(stated) == len(fresh) and all(_same(a, b) for a, b in zip(stated, fresh, strict=True))
    numbers = (int, float)
    if isinstance(stated, numbers) and isinstance(fresh, numbers):
        return stated == fresh or math.isclose(stated, fresh, rel_tol=1e-8)
    return bool(stated == fresh)


def _less_noise(content: dict[str, Any], random: np.random.Generator) -> str:
    """A smaller noise multiplier, with the errors to match."""
    share = 1 - 10 ** random.uniform(-5, -0.1)
    for row in content["mechanisms"]:
        for part, key in (("noise", "multiplier"), ("error", "rmse"), ("error", "maxse"), ("error", "training")):
            row[part][key] *= share
    return json.dumps(content)


def _stronger_promise(content: dict[str, Any], random: np.random.Generator) -> str:
    """A smaller ε or δ."""
    key, share = str(random.choice(["epsilon", "delta"])), 1 - 10 ** random.uniform(-5, -0.1)
    content["run"]["promise"][key] *= share
    return json.dumps(content)


def _other_scheme(content: dict[str, Any], random: np.random.Generator) -> str:
    """The same noise under another scheme, or another unit of privacy."""
    name = str(random.choice(["cyclic", "balls_in_bins", "poisson", "cyclic_poisson", "b_min_sep", "best"]))
    if name != "best":
        for row in content["mechanisms"]:
            row["guarantee"]["sampling"] = name
    if random.random() < 0.7:
        content["run"]["sampling"] = name
    if random.random() < 0.3:
        content["run"]["promise"]["unit"] = "user"
    return json.dumps(content)


def _other_size(content: dict[str, Any], random: np.random.Generator) -> str:
    """More epochs, smaller batches, other participations: the same noise for a longer run."""
    run = content["run"]
    key = str(random.choice(["examples", "batch_size", "epochs", "separation", "participations"]))
    run[key] = max(1, int((run.get(key) or 3) * random.choice([0.5, 1.5, 2])) + int(random.integers(-1, 2)))
    return json.dumps(content)


def _other_coefficients(content: dict[str, Any], random: np.random.Generator) -> str:
    """The solution or a parameter of a mechanism, moved a little."""
    row = content["mechanisms"][int(random.integers(len(content["mechanisms"])))]
    given = row["parameters"]
    names = [key for key in ("bands", "lambda", "gamma", "buffers", "column_normalise") if key in given]
    names += ["solution"] if "solution" in row else []
    if not names:
        return _one_value(content, random)
    key = str(random.choice(names))
    if key == "solution":
        values = np.array(row[key], dtype=np.float64)
        values.flat[int(random.integers(values.size))] *= random.choice([0.5, 0.9, 0.999, 1.001, 1.5, -1.0, 0.0])
        row[key] = values.tolist()
    elif isinstance(given[key], bool):
        given[key] = not given[key]
    else:
        given[key] = type(given[key])(given[key] * random.choice([0.5, 0.9, 1.5])) + int(random.integers(0, 2))
    return json.dumps(content)


def _one_value(content: dict[str, Any], random: np.random.Generator) -> str:
    """Any one value, moved a little."""
    holder, key = _somewhere(content, random)
    value = holder[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        holder[key] = copy.deepcopy(_RUBBISH[int(random.integers(len(_RUBBISH)))])
    elif isinstance(value, int):
        holder[key] = value + int(random.choice([-2, -1, 1, 2]))
    else:
        holder[key] = value * float(1 + random.choice([-1, 1]) * 10 ** random.uniform(-12, 0))
    return json.dumps(content)


def _rubbish(content: dict[str, Any], random: np.random.Generator) -> str:
    """One to three values replaced by what does not belong there."""
    for _ in range(int(random.integers(1, 4))):
        holder, key = _somewhere(content, random)
        holder[key] = copy.deepcopy(_RUBBISH[int(random.integers(len(_RUBBISH)))])
    return json.dumps(content)


def _keys(content: dict[str, Any], random: np.random.Generator) -> str:
    """A key dropped, renamed, added or given twice; a row dropped, copied or put in another place."""
    holder, key = _somewhere(content, random)
    rows = content["mechanisms"]
    match int(random.integers(6)):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[f"{key} "] = holder.pop(key)
        case 2 if isinstance(holder, dict):
            holder["extra"] = holder[key]
        case 3:
            rows.insert(int(random.integers(len(rows) + 1)), copy.deepcopy(rows[0]))
        case 4:
            rows.pop(int(random.integers(len(rows))))
            content["recommended"] = 0
        case _:
            name = str(random.choice(["epsilon", "delta", "multiplier"]))
            return json.dumps(content).replace(f'"{name}"', f'"{name}": 1e-9, "{name}"', 1)
    return json.dumps(content)


def _damage(content: dict[str, Any], random: np.random.Generator) -> str:
    """Characters cut out, put in or exchanged."""
    text = json.dumps(content)
    for _ in range(int(random.integers(1, 4))):
        place, width = int(random.integers(len(text))), int(random.integers(0, 4))
        inserted = "".join(str(random.choice(list('0123456789.eE-+"{}[],:'))) for _ in range(int(random.integers(3))))
        text = text[:place] + inserted + text[place + width :]
    return text


_CHANGES: dict[Callable[[dict[str, Any], np.random.Generator], str], float] = {  # and how often each comes up
    _less_noise: 3,
    _stronger_promise: 3,
    _other_scheme: 0.1,  # amplified schemes take long to verify
    _other_size: 2,
    _other_coefficients: 3,
    _one_value: 4,
    _rubbish: 3,
    _keys: 3,
    _damage: 3,
}


def _somewhere(content: dict[str, Any], random: np.random.Generator) -> tuple[Any, Any]:
    """A random place in the file: a dictionary or list, and a key or index of it."""
    places = list(_places(content))
    return places[int(random.integers(len(places)))]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


class _Limited:
    """Ends what takes more than `SECONDS` of processor time, with an error."""

    def __enter__(self) -> None:
        def stop(number: int, frame: FrameType | None) -> None:
            raise TimeoutError(f"it took more than {SECONDS:g} s")

        self._before = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)

    def __exit__(self, *problem: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, self._before)
