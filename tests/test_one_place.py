"""A scheme is decided in `quell.schemes`, a family in `quell.strategy`: nothing else asks which one it has.

And a new one of either is one file: `made_up_family.py` and `made_up_scheme.py` beside this test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quell
from quell.cli import HELP
from quell.schemes import SCHEMES, Batches
from quell.serve.desk import draft_plan
from quell.show import tables
from quell.strategy import FAMILIES
from tests import made_up_family, made_up_scheme

SOURCE = Path(quell.__file__).parent
SMALL = {"examples": 200, "batch_size": 20, "epochs": 2, "epsilon": 4.0, "delta": 1e-4}


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What code compares with, looks up or says; docstrings are for readers of the code."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    documented = (node for node in ast.walk(tree) if isinstance(node, kinds))
    prose = {id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def names_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, each.name) for each in node.names)


@pytest.mark.parametrize(
    ("room", "names", "classes"),
    [
        ("schemes", set(SCHEMES), {kind.__name__ for kind in SCHEMES.values()}),
        ("strategy", set(FAMILIES), set()),
    ],
)
def test_names_appear_in_one_room_only(room, names, classes):
    unmistakable = [
        name for name in names if "_" in name or name in ("bisr", "bsr")
    ]  # no words of English, or matrices
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, unmistakable))})\b")
    found = []
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE)
        if place.parts[0] == room:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, text in strings(tree):
            if text != HELP and (text in names or pattern.search(text)):  # the help shows examples to type
                found.append(f"{place}:{line}: {text}")
        found += [f"{place}:{line}: {name}" for line, name in names_of(tree) if name in classes]
    assert found == []


@pytest.mark.slow
def test_a_made_up_family_takes_one_file(monkeypatch, tmp_path):
    monkeypatch.setitem(FAMILIES, "echo", made_up_family.ECHO)
    plan = quell.plan(**SMALL, objective="rmse")
    (row,) = [m for m in plan.alternatives if m.name == "echo" and m.sampling != "cyclic"][:1]
    assert "echo" in str(plan)
    assert "echo is Repeated Noise" in tables.mechanism_table([row], 1.0).caption
    assert any(row["family"] == "echo" for row in plan.page_content["mechanisms"])
    assert any(m.name == "echo" for m in draft_plan(plan.run).mechanisms)
    priced = plan.price("echo", echo=0.3)
    own = quell.Plan(plan.run, (priced,), 0)
    own.save(tmp_path / "plan.json")
    assert quell.Plan.load(tmp_path / "plan.json").mechanism.strategy.parameters["echo"] == 0.3


def test_a_made_up_scheme_takes_one_file(monkeypatch, tmp_path):
    monkeypatch.setitem(SCHEMES, "halves", made_up_scheme.Halves)
    plan = quell.plan(**SMALL, sampling="halves")
    assert plan.mechanism.sampling == "halves"
    assert {m.sampling for m in plan.alternatives} == {"halves"}
    assert plan.prices.dpsgd.sampling == "halves"
    assert "by halves sampling" in plan.explain()
    assert made_up_scheme.Halves.words in str(plan.page_content["privacy"])
    plan.save(tmp_path / "plan.json")
    assert quell.Plan.load(tmp_path / "plan.json").mechanism.sampling == "halves"
    stream = Batches(plan.prices.scheme_of(plan.mechanism), 200, bytes(32))
    batches = [set(batch.tolist()) for batch in stream]
    assert all(first <= set(range(100)) for first in batches[::2])
    assert np.mean([len(batch) for batch in batches]) == pytest.approx(stream.expected_size, rel=0.3)
