"""Workloads against the optimizers they describe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell import workload
from quell.algebra import streaming
from quell.errors import QuellError
from quell.run import Run


def run_sgd(gradients: np.ndarray, momentum: float, decay: float, rates: np.ndarray) -> np.ndarray:
    """The optimizer itself, with the sign flipped: θ ← α·θ + η·m, m ← β·m + g."""
    weights, buffer, path = 0.0, 0.0, []
    for gradient, rate in zip(gradients, rates, strict=True):
        buffer = momentum * buffer + gradient
        weights = decay * weights + rate * buffer
        path.append(weights)
    return np.array(path)


optimizers = st.tuples(st.floats(0, 0.95), st.floats(0.96, 1.0))


@given(optimizers, st.lists(st.floats(0.01, 2.0), min_size=2, max_size=12), st.booleans())
def test_the_workload_is_what_the_optimizer_does(optimizer, rates, scheduled):
    momentum, decay = optimizer
    rates = np.array(rates) if scheduled else np.ones(len(rates))
    gradients = np.random.default_rng(0).normal(size=len(rates))
    task = workload.sgd(len(rates), momentum, decay, rates if scheduled else None)
    path = run_sgd(gradients, momentum, decay, rates)
    np.testing.assert_allclose(task.apply(gradients), path, atol=1e-12)
    np.testing.assert_allclose(task.matrix() @ gradients, path, atol=1e-12)
    np.testing.assert_allclose(streaming.materialise(task.operator(), len(rates)), task.matrix(), atol=1e-9)


def test_without_momentum_the_schedule_weights_columns():
    rates = np.array([3.0, 2.0, 1.0])
    np.testing.assert_allclose(workload.sgd(3, learning_rates=rates).matrix(), np.tril(np.ones((3, 3))) * rates)


def test_toeplitz_workload_from_coefficients():
    task = workload.toeplitz([1.0, -0.5, 0.25])
    vectors = np.random.default_rng(1).normal(size=(3, 2))
    np.testing.assert_allclose(task.apply(vectors), task.matrix() @ vectors)
    assert task.inverse_bands is None
    np.testing.assert_allclose(streaming.materialise(task.operator(), 3), task.matrix())


def test_streaming_operators_compose_to_the_matrix_product():
    bands = np.array([[2.0, 0.0], [1.0, 0.5], [4.0, -1.0]])
    matrix = streaming.materialise(streaming.banded(bands), 3)
    both = streaming.compose(streaming.banded_inverse(bands), streaming.banded(bands))
    np.testing.assert_allclose(matrix, [[2, 0, 0], [0.5, 1, 0], [0, -1, 4]])
    np.testing.assert_allclose(streaming.materialise(both, 3), np.eye(3), atol=1e-15)
    assert both.buffers == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 0.9, "weight_decay": 0.9}, "momentum < weight_decay"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"weight_decay": 1.1}, "weight_decay=1.1"),
        ({"momentum": float("nan")}, "not a finite number"),
        ({"learning_rates": [1.0, 1.0]}, "2 values but the run has 3 steps"),
        ({"learning_rates": [1.0, 0.0, 1.0]}, "learning rate 0 at step 1"),
        ({"learning_rates": [1.0, float("nan"), 1.0]}, "learning rate nan at step 1"),
    ],
)
def test_impossible_optimizers_are_refused(arguments, message):
    with pytest.raises(QuellError, match=message):
        workload.sgd(3, **arguments)


@pytest.mark.parametrize("coefficients", [[], [0.0, 1.0], [1.0, float("nan")], [[1.0]]])
def test_impossible_coefficients_are_refused(coefficients):
    with pytest.raises(QuellError, match="workload coefficients"):
        workload.toeplitz(coefficients)


def test_adams_first_moment_is_momentum():
    """The weights after each step of Adam with constant second moments, by hand, are SGD's with β₁ up to a factor."""
    betas, steps = (0.8, 0.999), 12
    gradients = np.random.default_rng(0).normal(size=steps)
    moment, weight, weights = 0.0, 0.0, []
    for gradient in gradients:
        moment = betas[0] * moment + (1 - betas[0]) * gradient
        weight += moment
        weights.append(weight)
    sgd = workload.sgd(steps, momentum=workload.adam_momentum("adam", betas))
    np.testing.assert_allclose(sgd.matrix() @ gradients * (1 - betas[0]), weights, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimizer": "lion"}, "use sgd, adam or adamw"),
        ({"optimizer": "adamw", "betas": 0.9}, "two numbers"),
        ({"optimizer": "adamw", "betas": (0.9,)}, "two numbers"),
        ({"optimizer": "adam", "betas": (1.0, 0.9)}, "below 1"),
        ({"optimizer": "adam", "momentum": 0.5}, "leave momentum out"),
    ],
)
def test_optimizers_that_a_run_refuses(arguments, said):
    data = {"examples": 100, "batch_size": 10, "epochs": 1, "epsilon": 1, "delta": 1e-5}
    with pytest.raises(QuellError, match=said):
        Run.from_data(**data, **arguments)


def test_a_run_of_adam_is_one_of_momentum():
    data = {"examples": 100, "batch_size": 10, "epochs": 1, "epsilon": 1, "delta": 1e-5}
    run = Run.from_data(**data, optimizer="adamw", betas=(0.95, 0.99))
    assert run.optimizer == Run.from_data(**data, momentum=0.95, adaptive=True).optimizer
    assert run.changed(epochs=2).optimizer == run.optimizer
