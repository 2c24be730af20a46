"""Workloads against the optimizers they describe."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell import strategy, workload
from quell.algebra import streaming
from quell.analysis.bounds import nuclear_norm
from quell.analysis.error import query_variances
from quell.errors import QuellError
from quell.participation import Participation
from quell.run import Run
from quell.strategy.optimised import decoder


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


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("named", [None, "cosine"])
def test_averaged_weights_are_the_average_of_the_weights(momentum, named):
    """e_t = ρ·e_{t−1} + (1−ρ)·θ_t, step by step, for every unit gradient."""
    n, rho = 40, 0.9
    rates = None if named is None else workload.schedule(named, n)
    plain, averaged = (workload.sgd(n, momentum, 0.99, rates, ema) for ema in (None, rho))
    dense = np.zeros((n, n))
    for t, weights in enumerate(plain.matrix()):
        dense[t] = rho * (dense[t - 1] if t else 0.0) + (1 - rho) * weights
    np.testing.assert_allclose(averaged.matrix(), dense, rtol=1e-12, atol=1e-15)
    inverse = sum(np.diag(averaged.inverse_bands[d:, d], -d) for d in range(4))
    np.testing.assert_allclose(inverse @ dense, np.eye(n), atol=1e-10)
    if rates is None:
        np.testing.assert_allclose(averaged.coefficients, dense[:, 0], rtol=1e-12)
    for name, parameters in (("identity", {}), ("bisr", {"bands": 4}), ("band_toeplitz", {"bands": 3}), ("tree", {})):
        chosen = strategy.build(name, averaged, Participation(n, 10), None, **parameters)
        by_hand = np.sum(np.square(dense @ chosen.noising_matrix()), axis=1)
        np.testing.assert_allclose(query_variances(chosen, averaged), by_hand, rtol=1e-8)
    assert nuclear_norm(averaged) == pytest.approx(np.linalg.svd(dense, compute_uv=False).sum(), rel=1e-9)


@pytest.mark.parametrize("ema", [0.0, 1.0, 0.99, -0.5, math.nan])
def test_an_average_that_is_none_is_refused(ema):
    with pytest.raises(QuellError, match="ema"):
        workload.sgd(10, weight_decay=0.99, ema=ema)


def test_losses_of_averaged_weights_are_summed_in_closed_form_beyond_a_horizon():
    n, theta = 9000, np.array([1.0, -0.5, -0.1, -0.05])
    averaged = workload.sgd(n, 0.9, 0.9999, ema=0.98)
    task = decoder(averaged, 4, last_only=False)
    assert task.length < n
    loss, _, settled = task.of_product(theta)
    filtered = np.convolve(averaged.coefficients, theta)[:n]
    assert settled
    assert loss == pytest.approx(np.sum((n - np.arange(n)) * filtered**2), rel=1e-8)
