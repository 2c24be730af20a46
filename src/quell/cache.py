"""Optimised strategies on disk, so that the second call is instant.

An entry is one `.npz` file named by the SHA-256 of the exact problem it solves. It holds that problem in words,
the array, and the array's own hash; an entry that does not match all three is ignored and made anew, so a
damaged or foreign file costs time, never correctness. Files are written under a temporary name and renamed:
concurrent writers and interrupted runs leave whole entries or none.

The folder is `$QUELL_CACHE`, or `quell` under `$XDG_CACHE_HOME` (`~/.cache`). `QUELL_CACHE=off` disables it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from quell import files
from quell._types import Array

Entry = tuple[Array, dict[str, Any]]
_MOST_BYTES = 1 << 30  # of an entry; the largest that Quell makes, `band` of a million steps, has 128 MB


def folder() -> Path | None:
    """Where entries live, or None when caching is off."""
    chosen = os.environ.get("QUELL_CACHE")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quell"


def remember(
    problem: Mapping[str, Any], solve: Callable[[], Entry], is_sound: Callable[[Entry], bool] = lambda _: True
) -> Entry:
    """The stored solution of `problem` (plain data that determines it), or `solve()`, stored for the next time.

    A solution is an array and a few plain facts about how it was found; an unsound one is neither used nor stored.
    """
    home = folder()
    if home is None:
        return solve()
    question = json.dumps(problem, sort_keys=True)
    path = home / f"{hashlib.sha256(question.encode()).hexdigest()}.npz"
    stored = _load(path, question)
    if stored is None or not is_sound(stored):
        stored = solve()
        if is_sound(stored):
            with suppress(OSError):  # a full or read-only disk costs the next caller time, nothing else
                _store(path, question, *stored)
    return stored


def digest(array: Array) -> str:
    """The SHA-256 of an array's shape and float64 bytes: its name in problems and plan files."""
    flat = np.ascontiguousarray(array, dtype="<f8")
    return hashlib.sha256(repr(flat.shape).encode() + flat.tobytes()).hexdigest()


def _load(path: Path, question: str) -> Entry | None:
    try:
        with files.opened(path, _MOST_BYTES) as file, np.load(file, allow_pickle=False) as entry:
            array, facts = entry["array"], json.loads(str(entry["facts"]))
            intact = str(entry["question"]) == question and str(entry["digest"]) == digest(array)
    except (OSError, *files.DAMAGED_ARRAYS):
        return None
    return (array, facts) if intact and np.all(np.isfinite(array)) else None


def _store(path: Path, question: str, array: Array, facts: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(path, 0o600) as file:
        np.savez(file, array=array, question=question, facts=json.dumps(facts), digest=digest(array))
