"""Losses of Toeplitz strategies: closed tails equal plain sums, hand-written gradients equal finite differences."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell import workload
from quell.algebra.decoder import Decoder
from quell.algebra.toeplitz import curvature_of_inverse, energy_of_inverse, leftmost_energy
from quell.participation import Participation
from quell.strategy.optimised import decoder

tails = st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=4)
tasks = st.sampled_from([(0.0, 1.0), (0.9, 1.0), (0.0, 0.98), (0.8, 0.99)])


def slopes(function, point: np.ndarray) -> np.ndarray:
    """Central differences."""
    steps = 1e-6 * np.eye(len(point))
    return np.array([(function(point + h) - function(point - h)) / 2e-6 for h in steps])


@given(tasks, tails, st.booleans(), st.booleans())
def test_losses_are_plain_sums_and_gradients_finite_differences(task, tail, last_only, quotient):
    n = 120
    a, factor = workload.sgd(n, *task), np.array([1.0, *tail])
    loss = decoder(a, 1, last_only=last_only)
    evaluate = loss.of_quotient if quotient else loss.of_product
    value, gradient, covered = evaluate(factor)
    column = np.concatenate([factor, np.zeros(n)])[:n]
    toeplitz = np.array([[column[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])
    decoded = a.matrix() @ (np.linalg.inv(toeplitz) if quotient else toeplitz)
    rows = np.sum(np.square(decoded), axis=1)
    assert covered
    assert value == pytest.approx(rows[-1] if last_only else rows.sum(), rel=1e-9)
    np.testing.assert_allclose(gradient, slopes(lambda c: evaluate(c)[0], factor), rtol=1e-4, atol=1e-5 * abs(value))


@given(tasks, tails, st.booleans(), st.booleans())
def test_the_closed_tail_beyond_the_horizon_changes_nothing(task, tail, last_only, quotient):
    n = 4000
    a, factor = workload.sgd(n, *task), np.array([1.0, *tail])
    short = Decoder(n, np.ones(1), a.inverse_series, last_only, 900, a.decay, a.decay / (a.decay - a.momentum))
    full = Decoder(n, np.ones(1), a.inverse_series, last_only)
    near = short.of_quotient(factor) if quotient else short.of_product(factor)
    far = full.of_quotient(factor) if quotient else full.of_product(factor)
    assert short.length == 900
    assert near[2]
    assert near[0] == pytest.approx(far[0], rel=1e-9)
    np.testing.assert_allclose(near[1], far[1], rtol=1e-6, atol=1e-9 * abs(far[0]))


def test_a_horizon_that_is_too_short_says_so():
    slow = np.array([1.0, -0.999])
    cut = Decoder(10_000, np.ones(1), np.array([1.0, -1.0, 0.0]), False, 50, 1.0, 1.0)
    assert not cut.of_quotient(slow)[2]


def test_an_inverse_that_explodes_has_infinite_energy():
    columns = partial(leftmost_energy, steps=10_000, separation=1000, count=10)
    energy, gradient = energy_of_inverse(np.array([1.0, -2.0, 0.5]), columns, 10_000)
    assert energy == np.inf
    np.testing.assert_array_equal(gradient, np.zeros(3))


@given(st.floats(0.1, 0.97), tails)
def test_the_curvature_is_the_hessian_where_the_inverse_is_positive_and_dies_out(slowest, tail):
    n = 6000
    theta = np.convolve([1.0, -slowest], [1.0, *(-abs(each) / len(tail) for each in tail)])
    columns = partial(leftmost_energy, steps=n, separation=n // 3, count=3)

    def slope(theta: np.ndarray) -> np.ndarray:
        energy, gradient = energy_of_inverse(theta, columns, n)
        return gradient / energy

    numeric = np.array([(slope(theta + h) - slope(theta - h)) / 2e-6 for h in 1e-6 * np.eye(len(theta))])
    found = curvature_of_inverse(theta, columns, n)
    np.testing.assert_allclose(found, numeric, rtol=1e-3, atol=1e-5 * np.abs(found).max())


@given(tasks, tails, st.booleans())
def test_the_loss_of_a_product_is_its_quadratic_form(task, tail, last_only):
    theta = np.array([1.0, *tail])
    loss = decoder(workload.sgd(5000, *task), len(theta), last_only=last_only)
    assert theta @ loss.product_form(len(theta)) @ theta == pytest.approx(loss.of_product(theta)[0], rel=1e-9)


@given(tails, st.integers(1, 40), st.integers(1, 6))
def test_leftmost_energy_is_that_of_the_columns(tail, separation, count):
    n = 60
    pattern = Participation(n, separation, min(count, -(-n // separation)))
    theta = np.array([1.0, *tail])
    columns = partial(leftmost_energy, steps=n, separation=separation, count=pattern.count)
    energy, gradient = energy_of_inverse(theta, columns, n)
    inverse = np.linalg.inv(
        np.array([[theta[i - j] if 0 <= i - j < len(theta) else 0.0 for j in range(n)] for i in range(n)])
    )
    total = np.abs(inverse)[:, pattern.first_steps()].sum(axis=1)
    assert energy == pytest.approx(total @ total, rel=1e-9)
    if np.abs(inverse[:, 0]).min() > 1e-4 or np.all(inverse >= 0):  # |c| has a kink where a coefficient vanishes
        numeric = slopes(lambda t: energy_of_inverse(t, columns, n)[0], theta)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-3, atol=1e-4 * energy)
