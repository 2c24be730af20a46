"""The lines that a plan is printed with, pasted into a program."""

from __future__ import annotations

import textwrap

import pytest
import torch

from quell.show.lines import next_lines, python_lines
from tests.pytorch.conftest import small_plan
from tests.pytorch.test_huggingface import Sentences, arguments, bert
from tests.pytorch.training import examples, network


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_plan("identity", alone=True).save("plan.json")
    return tmp_path / "plan.json"


def test_a_loop_of_ones_own(saved):
    model = network()
    names = {"model": model, "data": examples(), "criterion": torch.nn.functional.cross_entropy}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    exec("\n".join(python_lines(saved.name)), names)
    assert names["optimizer"].privacy_report().steps_done == small_plan().steps
    names["optimizer"].close()
    assert (saved.parent / "run.pt").exists()


def test_the_trainer_of_hugging_face(saved):
    said = next_lines(saved)
    lines = [*said[1:3], *said[next(i for i, line in enumerate(said) if line.startswith("With Hugging")) + 1 :]]
    model = bert()
    before = model.classifier.weight.detach().clone()
    exec(textwrap.dedent("\n".join(lines)), {"model": model, "data": Sentences(False), "args": arguments("out")})
    assert not torch.equal(model.classifier.weight, before)
