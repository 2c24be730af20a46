"""Runs that are charged to a budget: before their first step, once, or not at all."""

from __future__ import annotations

import pytest
import torch

import quell
from quell.budget import Budget
from quell.errors import QuellError
from quell.noise import SeededKeyWarning
from quell.torch import make_private
from tests.pytorch.training import examples, network, train


@pytest.fixture(scope="module")
def plan():
    return quell.plan(
        examples=40, batch_size=8, epochs=2, epsilon=2.0, delta=1e-3, sampling="cyclic", memory=0, draws=1
    )


@pytest.fixture
def budget(tmp_path):
    return Budget.create(tmp_path / "b", name="x", epsilon=3.2, delta=1e-3)


def private(plan, **options):
    model = network()
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), plan, **options)


def test_a_run_is_charged_before_its_first_step_and_once_when_resumed(plan, budget, tmp_path):
    key = tmp_path / "key"
    model, optimizer, loader = private(plan, key=key, budget=budget.path)
    assert budget.spent().runs == 0  # nothing was released
    train(model, optimizer, loader, steps=1)
    assert budget.spent().runs == 1
    optimizer.close()
    model, optimizer, loader = private(plan, key=key, budget=budget.path)  # crashed before its first checkpoint
    train(model, optimizer, loader)
    assert budget.spent().runs == 1
    assert budget.entries[0].run == optimizer.run.noise.key.id
    assert all(check.holds for check in budget.verify())


def test_a_run_without_a_kept_key_is_charged_each_time_until_nothing_is_left(plan, budget):
    for _ in range(2):
        train(*private(plan, budget=budget.path), steps=1)
    with pytest.raises(QuellError, match="does not suffice: 2 runs spent"):
        private(plan, budget=budget.path)
    assert budget.spent().runs == 2


def test_runs_prepared_together_cannot_both_take_the_last_of_a_budget(plan, tmp_path):
    budget = Budget.create(tmp_path / "b", name="x", epsilon=2.0, delta=1e-3)
    first, second = (private(plan, budget=budget.path) for _ in range(2))
    train(*second, steps=1)
    weights = [each.clone() for each in first[0].parameters()]
    with pytest.raises(QuellError, match="does not suffice"):
        train(*first, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(weights, first[0].parameters(), strict=True))
    assert first[1].run.released == 0
    assert budget.spent().runs == 1


def test_a_seed_has_no_privacy_to_charge(plan, budget):
    with pytest.raises(QuellError, match="has no privacy that a budget could count"), pytest.warns(SeededKeyWarning):
        private(plan, seed=1, budget=budget.path)
