"""Questions around a plan, and privacy per user."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import quell
from quell.errors import QuellError
from quell.participation import Participation
from quell.planning import Prices, questions
from quell.privacy import gaussian_sigma
from quell.run import Run
from quell.schemes import Batches, Cyclic
from tests.enumeration import by_enumeration

SMALL = {"examples": 1000, "batch_size": 50, "epochs": 4, "epsilon": 4.0, "delta": 1e-5}


@pytest.mark.parametrize("target", [2.0, 8.0, 40.0])
def test_the_least_epsilon_for_an_error(target):
    plan = questions.plan_for_rmse(Run.from_data(**SMALL, objective="rmse", sampling="cyclic"), target)
    assert 0.98 * target <= plan.mechanism.rmse <= target
    assert plan.mechanism.guarantee.epsilon == plan.run.epsilon


@pytest.mark.slow
def test_the_least_epsilon_for_an_error_amplified():
    target = 6.0
    plan = questions.plan_for_rmse(Run.from_data(**SMALL, objective="rmse"), target)
    assert 0.95 * target <= plan.mechanism.rmse <= target
    assert (
        plan.run.epsilon
        < questions.plan_for_rmse(Run.from_data(**SMALL, objective="rmse", sampling="cyclic"), target).run.epsilon
    )


@pytest.mark.parametrize("target", [1e-9, 1e12])
def test_errors_out_of_reach_are_refused(target):
    with pytest.raises(QuellError, match="out of reach"):
        questions.plan_for_rmse(Run.from_data(**SMALL, objective="rmse", sampling="cyclic"), target)


def test_a_target_rmse_refuses_another_objective():
    with pytest.raises(QuellError, match="minimises the rmse, not the objective training"):
        questions.plan_for_rmse(Run.from_data(**SMALL), 2.0)


@pytest.mark.slow
def test_more_epochs_in_the_same_steps_lower_the_error_per_example():
    known = {"examples": 1000, "epsilon": 4.0, "delta": 1e-5, "sampling": "cyclic", "memory": 0, "draws": 1}
    choices = questions.choices_for_steps(100, **known)
    assert [choice.run.epochs for choice in choices][:3] == [1, 2, 4]
    assert all(90 <= choice.run.steps <= 110 for choice in choices)
    assert choices[1].error < choices[0].error
    with pytest.raises(QuellError, match="more than Quell can plan for"):
        questions.choices_for_steps(10**9, **known)


@pytest.mark.slow
def test_more_steps_than_examples_are_spent_on_many_epochs():
    known = {"epsilon": 4.0, "delta": 1e-3, "sampling": "cyclic", "memory": 0, "draws": 1}
    first = questions.choices_for_steps(1000, examples=10, **known)[0].run
    assert (first.batch_size, first.epochs, first.steps) == (1, 100, 1000)


def test_every_number_of_steps_can_be_spent():
    for steps, examples in product(range(1, 60), range(1, 60)):
        ways = questions._batches_and_epochs(steps, examples)
        assert (examples, steps) in ways
        assert len({examples // size for size, _ in ways}) == len(ways)  # no way stands there twice
        assert all(epochs >= 1 and abs(epochs * (examples // size) - steps) <= 0.1 * steps for size, epochs in ways)


@pytest.mark.slow
def test_more_examples_than_steps_can_be_planned_for_are_no_obstacle():
    """A fake run with batches of one example was refused: 200 million steps."""
    known = {"examples": 200_000_000, "epsilon": 4.0, "delta": 1e-9, "sampling": "cyclic", "memory": 0, "draws": 1}
    choices = questions.choices_for_steps(200, **known)
    assert choices[0].run.batch_size == 1_000_000


def test_changes_are_no_more_than_a_new_plan_would_say():
    plan = quell.plan(**SMALL, sampling="cyclic", memory=0, draws=1, objective="rmse")
    found = {change.what: change for change in questions.changes(plan)}
    more = found["memory"]
    assert more.ratio < 0.97
    richer = quell.plan(**SMALL, sampling="cyclic", memory=more.mechanism.buffers, draws=1, objective="rmse")
    assert richer.mechanism.rmse <= more.mechanism.rmse * (1 + 1e-9)
    longer = quell.plan(**{**SMALL, "epochs": 8}, sampling="cyclic", memory=0, draws=1, objective="rmse")
    change = found["epochs"]
    same = longer.price(plan.mechanism.name, **plan.mechanism.strategy.parameters)
    assert change.ratio == pytest.approx(same.rmse / 2 / plan.mechanism.rmse, rel=1e-6)
    assert longer.mechanism.rmse <= change.mechanism.rmse * (1 + 1e-9)  # a new plan may find better still


@pytest.mark.slow
def test_a_loaded_plan_names_no_best_among_mechanisms_that_its_file_does_not_hold(tmp_path):
    plan = quell.plan(examples=200, batch_size=20, epochs=2, epsilon=8, delta=1e-3, memory=0, draws=1)
    assert plan.estimates
    assert "Best without extra memory" in plan.explain()
    plan.save(tmp_path / "plan.json")
    loaded = quell.Plan.load(tmp_path / "plan.json")
    assert "Best with" not in loaded.explain()
    assert "Use " in loaded.explain()
    fixed = quell.plan(**SMALL, sampling="cyclic", memory=0, draws=1)  # its file holds every mechanism
    fixed.save(tmp_path / "plan.json")
    assert quell.Plan.load(tmp_path / "plan.json").explain() == fixed.explain()


def test_privacy_per_user_counts_the_users_own_pattern(tmp_path):
    """A user takes part at most three times, at least ten steps apart: the noise follows from that alone."""
    plan = quell.plan(**{**SMALL, "examples": 200, "epochs": 5}, separation=5, participations=3, draws=2, memory=1)
    assert plan.run.sampling == "cyclic"
    pattern = Participation(20, 5, 3)
    for mechanism in plan.mechanisms:
        matrix = mechanism.strategy.matrix()
        needed = by_enumeration(matrix, pattern) * gaussian_sigma(4.0, 1e-5)
        assert mechanism.noise_multiplier >= needed * (1 - 1e-9)
    assert "per user" in plan.explain()
    assert "per example" not in plan.explain()
    plan.save(tmp_path / "plan.json")
    assert quell.Plan.load(tmp_path / "plan.json").run.promise.unit == "user"


def test_more_participations_need_more_noise():
    runs = (Run.from_data(**SMALL, separation=4, participations=k) for k in (1, 2, 8))
    noises = [Prices(run).dpsgd.noise_multiplier for run in runs]
    assert np.allclose(noises, [gaussian_sigma(4.0, 1e-5) * k**0.5 for k in (1, 2, 8)])


def test_capped_participations_cannot_be_run_on_batches_that_exceed_them():
    with pytest.raises(QuellError, match="bring your own batches"):
        Batches(Cyclic(20, 5, participations=3), 100, bytes(32))
    assert len(Batches(Cyclic(20, 5, participations=4), 100, bytes(32))) == 20


def test_amplification_is_not_promised_per_user():
    with pytest.raises(QuellError, match="priced per example: per user only cyclic is"):
        Run.from_data(**SMALL, participations=2, sampling="balls_in_bins")
