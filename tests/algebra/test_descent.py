"""L-BFGS on functions whose minimum is known, and on the ways an objective can misbehave."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quell.algebra.descent import minimise


def rosenbrock(x):
    bend = x[1:] - x[:-1] ** 2
    gradient = np.zeros_like(x)
    gradient[:-1] = -400.0 * x[:-1] * bend - 2.0 * (1.0 - x[:-1])
    gradient[1:] += 200.0 * bend
    return float(np.sum(100.0 * bend**2 + (1.0 - x[:-1]) ** 2)), gradient


def bowl(scales, centre):
    def objective(x):
        return 1.0 + 0.5 * float(np.sum(scales * (x - centre) ** 2)), scales * (x - centre)

    return objective


@pytest.mark.parametrize("size", [2, 5, 20])
def test_reaches_the_minimum_of_rosenbrocks_valley_to_machine_precision(size):
    x, how = minimise(rosenbrock, np.full(size, -1.2), max_iterations=2000)
    assert how.converged
    np.testing.assert_allclose(x, 1.0, atol=1e-12)


def test_converges_to_machine_precision_where_the_loss_is_not_zero():
    """The last digits of x are invisible in the loss: only the slope test of the line search finds them."""
    rng = np.random.default_rng(1)
    root = rng.standard_normal((12, 12))
    matrix, centre = root @ root.T + 0.1 * np.eye(12), rng.standard_normal(12)

    def objective(x):
        return 7.0 + 0.5 * float((x - centre) @ matrix @ (x - centre)), matrix @ (x - centre)

    x, how = minimise(objective, np.zeros(12), gradient_tolerance=0.0, improvement_tolerance=0.0, patience=30)
    assert how.converged
    np.testing.assert_allclose(x, centre, atol=1e-11)


@given(
    scales=st.lists(st.floats(1e-2, 1e2), min_size=1, max_size=8),
    magnitude=st.floats(1e-6, 1e6),
    history=st.integers(0, 12),
)
@settings(deadline=None, max_examples=50)
def test_does_not_mind_the_scale_of_loss_or_unknowns(scales, magnitude, history):
    centre = magnitude * np.linspace(-1.0, 2.0, len(scales))
    objective = bowl(np.array(scales) / magnitude**2, centre)
    x, how = minimise(objective, np.zeros(len(scales)), history=history, max_iterations=20000)
    assert how.converged
    np.testing.assert_allclose(x, centre, atol=1e-4 * magnitude)


@pytest.mark.parametrize("beyond", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_means_step_too_long(beyond):
    def barrier(x):  # minimum at 1e-3, next to the edge of where it is defined
        if (x <= 0.0).any():
            return beyond, np.full_like(x, np.nan)
        return float(np.sum(x - 1e-3 * np.log(x))), 1.0 - 1e-3 / x

    x, how = minimise(barrier, np.full(5, 100.0))
    assert how.converged
    np.testing.assert_allclose(x, 1e-3, rtol=1e-8)


def test_a_finite_loss_with_a_gradient_that_is_not_is_also_too_long():
    def objective(x):
        return float(x @ x), 2.0 * x if abs(x[0]) < 10.0 else np.full_like(x, np.nan)

    x, how = minimise(objective, np.array([9.0, -3.0]))
    assert how.converged
    np.testing.assert_allclose(x, 0.0, atol=1e-12)


def test_a_start_without_a_loss_is_refused():
    with pytest.raises(ValueError, match="no error to start from"):
        minimise(lambda x: (math.inf, x), np.ones(2))


def test_a_wrong_gradient_is_reported_not_returned_as_a_minimum():
    _, how = minimise(lambda x: (1.0 + float(x @ x), -x), np.ones(3))
    assert not how.converged
    assert "gradient" in how.reason


def test_says_when_the_iterations_ran_out_and_counts_them():
    seen = []
    x, how = minimise(rosenbrock, np.full(10, -1.2), max_iterations=7, on_iteration=seen.append)
    assert (how.iterations, how.converged, len(seen)) == (7, False, 7)
    assert [step.iterations for step in seen] == list(range(1, 8))
    assert how.loss == rosenbrock(x)[0] == seen[-1].loss
    assert how.gradient_norm == np.abs(rosenbrock(x)[1]).max()
    assert how.evaluations >= 8
    losses = [step.loss for step in seen]
    assert losses == sorted(losses, reverse=True)
    assert how.last_improvement == pytest.approx(1.0 - losses[-1] / losses[-2])


def test_keyboard_interrupt_passes_through():
    def impatient(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        minimise(rosenbrock, np.zeros(3), on_iteration=impatient)


def test_the_start_is_left_alone_unless_it_may_be_overwritten():
    start = np.full(4, -1.2)
    kept, how = minimise(rosenbrock, start)
    assert (start == -1.2).all()
    used, same = minimise(rosenbrock, start, overwrite_start=True)
    np.testing.assert_array_equal(used, kept)
    assert same == how


def test_an_objective_may_reuse_its_gradient_buffer_and_any_shape():
    buffer, centre = np.empty((3, 2)), np.arange(6.0).reshape(3, 2)

    def objective(x):
        np.subtract(x, centre, out=buffer)
        return 1.0 + 0.5 * float(np.sum(buffer**2)), buffer

    x, _ = minimise(objective, np.zeros((3, 2)))
    np.testing.assert_allclose(x, centre, atol=1e-10)


def test_long_vectors_a_preconditioner_and_a_single_precision_history():
    scales, centre = np.logspace(0.0, 4.0, 30000), np.linspace(-1.0, 1.0, 30000)
    objective = bowl(scales, centre)

    def precondition(vector):
        vector /= scales

    x, how = minimise(objective, np.zeros(30000), precondition=precondition, history_dtype=np.float32)
    assert how.converged
    assert how.iterations < 10
    np.testing.assert_allclose(x, centre, atol=1e-7)
    _, plain = minimise(objective, np.zeros(30000), history_dtype=np.float32, max_iterations=100)
    assert plain.loss > how.loss
