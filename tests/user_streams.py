"""Rows of users as a run draws them, against the laws that accountants mix over: for every framework's batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from quell.noise import Key
from quell.planning import Plan, Prices
from quell.run import Run
from quell.schemes import SCHEMES

from .privacy.simulation import Patterns

ROWS = (1, 3, 4, 7, 2, 5, 1, 9, 4, 4)  # of ten users: 40 rows
IDS = np.repeat([f"user {number}" for number in range(10)], ROWS)[np.random.default_rng(3).permutation(40)]


@cache
def user_plan(sampling: str = "cyclic", **changes) -> Plan:
    """A small plan per user. With random batches its noise is not calibrated for them, and it promises nothing."""
    run = Run.from_data(
        **{"users": 10, "batch_size": 2, "epochs": 2, "epsilon": 8.0, "delta": 1e-5, "sampling": "cyclic", **changes}
    )
    mechanism = Prices(run).price("bsr", bands=2)
    scheme = Prices(run).scheme(mechanism.strategy, SCHEMES[sampling])
    return Plan(run, (replace(mechanism, claim=replace(mechanism.guarantee, sampling=sampling, scheme=scheme)),), 0)


def keys(count):
    return (Key(blake2b(number.to_bytes(4, "little"), digest_size=32).digest()) for number in range(count))


def goodness(counts: Counter, probabilities: dict) -> float:
    """The p-value of Pearson's test; 0 if something came that cannot."""
    total = sum(counts.values())
    if set(counts) - {each for each, p in probabilities.items() if p > 0}:
        return 0.0
    statistic = sum((counts[each] - total * p) ** 2 / (total * p) for each, p in probabilities.items() if p > 0)
    return float(chi2.sf(statistic, sum(p > 0 for p in probabilities.values()) - 1))


def law(scheme) -> dict:
    """Every participation pattern with its probability, by enumeration."""
    n = scheme.steps
    if scheme.name in ("cyclic", "balls_in_bins"):
        found = Patterns.of_bins(n, scheme.separation)
    elif scheme.name == "b_min_sep":
        found = Patterns.of_chain(n, scheme.separation, scheme.rate)
    else:
        rows, chances = [], []
        for group in range(scheme.groups):
            own = [step for step in range(n) if step % scheme.groups == group]
            for choice in range(2 ** len(own)):
                taken = [step for place, step in enumerate(own) if choice >> place & 1]
                rows.append([float(step in taken) for step in range(n)])
                chance = scheme.rate ** len(taken) * (1 - scheme.rate) ** (len(own) - len(taken))
                chances.append(chance / scheme.groups)
        found = Patterns(np.array(rows), np.array(chances))
    together: dict = {}
    for row, chance in zip(found.rows, found.probabilities, strict=True):
        key = tuple(row.astype(int).tolist())
        together[key] = together.get(key, 0.0) + float(chance)
    return together


def require_accounted(sampling: str, count: int, drawn: Callable[[Plan, Any, int, Key], list[list[int]]]) -> None:
    """Over many keys a user's patterns have the law that the accountant mixes over, and no two users' depend.

    `drawn` gives the rows of every step for a plan, the users of rows, rows per user and a key.
    """
    plan = user_plan(sampling, users=6, batch_size=2)
    scheme, most = plan.mechanism.guarantee.scheme, 2
    sizes = np.array([1, 2, 5, 2, 1, 3])
    numbers = np.repeat(np.arange(6), sizes)
    patterns: Counter[Any] = Counter()
    pairs: Counter[Any] = Counter()
    firsts: Counter[int] = Counter()
    for key in keys(count):
        taken = np.zeros((6, plan.steps), dtype=int)
        for step, rows in enumerate(drawn(plan, numbers, most, key)):
            blocks = np.array(rows, dtype=int).reshape(-1, most)
            owners = numbers[blocks]
            assert np.all(owners == owners[:, :1])  # a unit is one user's
            assert len(set(owners[:, 0])) == len(owners)  # and nobody is two units
            taken[owners[:, 0], step] = 1
            for block, owner in zip(blocks, owners[:, 0], strict=True):
                assert len(set(block)) == min(most, sizes[owner])  # no row twice that need not come twice
                if owner == 2 and step < 3 and not taken[2, :step].any():
                    firsts[int(block[0])] += 1
        patterns[tuple(taken[2].tolist())] += 1
        pairs[tuple(taken[1].tolist()), tuple(taken[2].tolist())] += 1
    exact = law(scheme)
    assert sum(exact.values()) == pytest.approx(1.0)
    assert goodness(patterns, exact) > 1e-3
    assert goodness(firsts, dict.fromkeys(np.flatnonzero(numbers == 2).tolist(), 0.2)) > 1e-3
    if sampling != "cyclic":  # whose batches have a fixed size, and are not amplified
        assert goodness(pairs, {(a, b): p * q for a, p in exact.items() for b, q in exact.items()}) > 1e-3
