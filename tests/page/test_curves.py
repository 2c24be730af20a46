"""The curves against dense matrices, and what thinning must keep."""

from __future__ import annotations

import numpy as np
import pytest

from quell import privacy, workload
from quell.participation import Participation
from quell.planning import Prices, curves
from quell.run import Run
from quell.strategy import build

STEPS = 24
CASES = [
    ("lambda_cgd", {"lambda": 0.9}),
    ("bisr", {"bands": 4, "column_normalise": True}),
    ("bsr", {"bands": 4, "column_normalise": True}),
    ("band", {"bands": 3}),
    ("blt", {"buffers": 2}),
    ("tree", {}),
    ("diagonal", {}),
]


@pytest.mark.parametrize(("name", "parameters"), CASES)
@pytest.mark.parametrize("start", [0, 1, 11, 15, STEPS - 1])
def test_what_remains_is_a_column_of_the_decoder(name, parameters, start):
    task = workload.sgd(STEPS, 0.5, 0.99, workload.schedule("linear", STEPS))
    strategy = build(name, workload.sgd(STEPS, 0.5, 0.99), Participation(STEPS, 6), None, **parameters)
    dense = task.matrix() @ np.linalg.inv(strategy.matrix())
    remaining = curves.noise_remaining(strategy, task, start)
    np.testing.assert_allclose(remaining, dense[start:, start], rtol=1e-9, atol=1e-11)


def test_curves_start_at_one_and_differ_only_where_steps_do():
    sums, pattern = workload.prefix(STEPS), Participation(STEPS, 6)
    plain = curves.cancellation_curves(build("bisr", sums, pattern, bands=4), sums)
    assert [curve["start"] for curve in plain] == [1]
    tree = curves.cancellation_curves(build("tree", sums, pattern), sums)
    assert [curve["start"] for curve in tree] == [1, 12, 18]
    assert all(curve["x"][0] == 1 and curve["y"][0] == 1 for curve in [*plain, *tree])


def test_error_curve_is_the_root_of_the_row_norms(plan):
    mechanism, task = plan.mechanism, plan.run.workload
    decoder = task.matrix() @ np.linalg.inv(mechanism.strategy.matrix())
    curve = curves.error_curve(mechanism, task)
    expected = np.linalg.norm(decoder, axis=1) * mechanism.noise_multiplier
    np.testing.assert_allclose(curve["y"], expected, rtol=1e-4)
    assert curve["x"] == list(range(1, 81))


def test_long_curves_are_short_and_keep_their_extremes(random):
    values = random.standard_normal(100_003)
    for edges in (np.linspace(0, len(values), 101), np.geomspace(1, len(values) + 1, 101) - 1):
        kept = curves._extremes(values, edges)
        assert len(kept) <= 202
        assert {0, len(values) - 1, int(np.argmin(values)), int(np.argmax(values))} <= set(kept)
        assert kept == sorted(set(kept))


def test_a_million_steps_make_small_curves():
    task = workload.prefix(1_000_000)
    prices = Prices(Run.from_steps(steps=1_000_000, epochs=1000, epsilon=4.0, delta=1e-6))
    mechanism = prices.price("lambda_cgd", **{"lambda": 0.99})
    curve = curves.error_curve(mechanism, task)
    assert len(curve["x"]) <= 202
    assert max(curve["y"]) == pytest.approx(mechanism.maxse, rel=1e-4)
    assert all(len(part["x"]) <= 202 for part in curves.cancellation_curves(mechanism.strategy, task))


def test_every_point_of_a_guaranteed_curve_is_a_guarantee(plan):
    for mechanism in plan.mechanisms:
        curve = curves.epsilon_curve(plan.prices, mechanism, with_estimates=False)
        assert curve is not None
        assert curve["guaranteed"] is True
        for sigma, epsilon in zip(curve["x"][::8], curve["y"][::8], strict=True):
            assert privacy.certify(
                mechanism.strategy, plan.prices.scheme_of(mechanism), sigma, epsilon, plan.run.delta
            ).certified


def test_amplified_curves_are_estimates_and_made_only_on_request():
    prices = Prices(Run.from_steps(steps=20, epochs=4, epsilon=4.0, delta=1e-3, sampling="balls_in_bins"))
    mechanism = prices.price("identity")
    assert curves.epsilon_curve(prices, mechanism, with_estimates=False) is None
    curve = curves.epsilon_curve(prices, mechanism, with_estimates=True)
    assert curve is not None
    assert curve["guaranteed"] is False
    assert curve["x"] == sorted(curve["x"], reverse=True)
    assert curve["y"] == [1, 2, 4, 8, 16]
