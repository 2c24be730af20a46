"""What the privacy report says, and whether its number for the steps done so far is true."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import quell
from quell.adapters.report import leading_block
from quell.participation import Participation
from quell.privacy import gaussian_epsilon
from quell.show import words
from quell.torch import make_private
from tests.enumeration import by_enumeration

from .conftest import MECHANISMS, small_plan, unpriced_poisson_plan
from .training import examples, network, seeded, train


def started(plan, steps, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, examples(plan.run.examples), plan, 0.5, **options)
    train(model, optimizer, loader, steps=steps)
    return optimizer


@pytest.mark.parametrize("name", MECHANISMS)
def test_epsilon_so_far_is_never_understated(name):
    """Against the dense leading block of C and every participation pattern there is."""
    plan = small_plan(name)
    matrix = plan.mechanism.strategy.matrix()
    shown = []
    for steps in (1, 4, 6, 9):
        report = started(plan, steps, clipping="microbatch").privacy_report()
        block = np.abs(matrix[:steps, :steps])  # one example can point anywhere, so signs may be the worst ones
        worst = by_enumeration(block, Participation(steps, min(plan.run.steps_per_epoch, steps)))
        exact = gaussian_epsilon(plan.mechanism.noise_multiplier / worst, plan.run.delta)
        assert report.epsilon_so_far_is == "certified for these steps"
        assert exact * (1 - 1e-9) <= report.epsilon_so_far <= report.epsilon_at_the_end
        shown.append(report.epsilon_so_far)
    assert shown == sorted(shown)
    assert shown[0] < 0.9 * plan.run.epsilon  # it is worth having


def test_the_leading_block_is_the_leading_block(plan):
    normalised = plan.price("bisr", bands=4, column_normalise=True)
    assert normalised.strategy.column_scale is not None
    for mechanism in (*plan.mechanisms, normalised):
        matrix = mechanism.strategy.matrix()
        for steps in (1, 3, 7):
            block = leading_block(mechanism.strategy, steps).matrix()
            np.testing.assert_allclose(block, matrix[:steps, :steps], atol=1e-12)


def test_the_report_says_what_the_promise_rests_on(plan):
    optimizer = started(plan, 3)
    report = optimizer.privacy_report()
    data = json.loads(report.json())
    assert (data["unit"], data["adjacency"], data["sampling"]) == ("one example", "zero-out", "cyclic")
    assert data["steps_done"] == 3
    assert data["steps"] == 10
    assert data["epsilon_at_the_end"] == 8.0
    assert data["delta"] == 1e-5
    assert data["bound"] == "analytic Gaussian mechanism, exact sensitivity"
    assert data["max_grad_norm"] == 0.5
    assert data["key"].endswith("256 bits from the operating system")
    assert data["versions"]["quell"] == quell.__version__
    assert {"torch", "python"} <= set(data["versions"])
    text = str(report)
    for piece in ("# Privacy report", "(8, 10⁻⁵)-DP after 10 steps", "one example", "Batches are fixed", data["key"]):
        assert piece in text
    secret = optimizer.run.noise.key.reveal().hex()
    assert secret not in text
    assert secret not in report.json()


def test_the_report_says_against_whom_the_generator_is_secure(plan):
    for generator, security in (
        ("chacha20", "everyone who cannot break ChaCha20"),
        ("chacha8", "a smaller security margin"),
        ("philox", "NOT secure: the promise holds only against people who do not try to find the key"),
    ):
        report = started(plan, 0, generator=generator).privacy_report()
        assert security in report.markdown()
        assert json.loads(report.json())["generator"].startswith(generator)


def test_a_run_from_a_seed_says_first_that_it_promises_nothing(plan):
    report = started(plan, 1, key=seeded(4)).privacy_report()
    assert report.seeded
    assert re.search(r"-\|\n\| warning \| .* NO privacy guarantee\. \|\n\| promise", report.markdown())
    assert "warning" not in started(plan, 0).privacy_report().markdown()


def test_a_delta_that_lets_whole_examples_out_is_said_first():
    plan = quell.plan(examples=40, batch_size=8, epochs=1, epsilon=8, delta=0.1, sampling="cyclic", memory=0, draws=1)
    report = started(plan, 0).privacy_report()
    assert "| warning | δ = 0.1 is above 1/examples = 0.025: such a guarantee would allow" in report.markdown()
    assert words.notes(plan.run)[0] in report.markdown()


def test_before_the_first_step_nothing_is_spent_and_after_the_last_everything(plan):
    model = network()
    _, optimizer, _ = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), plan)
    assert optimizer.privacy_report().epsilon_so_far == 0.0
    report = started(plan, None).privacy_report()
    assert (report.epsilon_so_far, report.epsilon_so_far_is) == (8.0, "the whole run's")


def test_where_a_prefix_is_not_priced_the_whole_run_is_the_bound():
    report = started(unpriced_poisson_plan(), 3).privacy_report()
    assert (report.epsilon_so_far, report.epsilon_so_far_is) == (8.0, "the whole run's, an upper bound")
