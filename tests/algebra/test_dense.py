"""The dense optimum: convexity gives a certificate, duality a bound, and both must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell.algebra import dense
from quell.algebra.dense import optimise_dense
from quell.errors import QuellError


def loss_of(workload: np.ndarray, strategy: np.ndarray) -> float:
    return float(np.sum((workload @ np.linalg.inv(strategy)) ** 2))


def lower_bound(workload: np.ndarray, strategy: np.ndarray) -> float:
    """A value no strategy with unit columns can beat: 2·tr √(Λ^½ AᵀA Λ^½) - tr Λ for any diagonal Λ > 0.

    It is attained at the optimum, where Λ is the diagonal of X⁻¹ AᵀA X⁻¹.
    """
    gram = workload.T @ workload
    x_inverse = np.linalg.inv(strategy.T @ strategy)
    roots = np.sqrt(np.diagonal(x_inverse @ gram @ x_inverse))
    eigenvalues = np.linalg.eigvalsh(roots[:, None] * gram * roots)
    return float(2.0 * np.sqrt(eigenvalues).sum() - (roots**2).sum())


def sgd(n: int, momentum: float, rates: np.ndarray) -> np.ndarray:
    powers = np.subtract.outer(np.arange(n), np.arange(n))
    decay = np.tril(momentum ** np.maximum(powers, 0)) if momentum else np.eye(n)
    return np.tri(n) @ np.diag(rates) @ decay


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 31, 32, 33, 70])
def test_no_strategy_can_beat_it(n):
    strategy, how = optimise_dense(np.tri(n))
    assert how.converged
    assert (np.triu(strategy, 1) == 0.0).all()
    assert (np.diagonal(strategy) > 0.0).all()
    np.testing.assert_allclose(np.linalg.norm(strategy, axis=0), 1.0, atol=1e-13)
    assert how.loss == pytest.approx(loss_of(np.tri(n), strategy), rel=1e-12)
    assert how.loss == pytest.approx(lower_bound(np.tri(n), strategy), rel=1e-12)


@given(st.integers(2, 20), st.floats(0.0, 0.95), st.integers(0, 2**32 - 1))
def test_no_strategy_can_beat_it_for_other_workloads(n, momentum, seed):
    workload = sgd(n, momentum, np.random.default_rng(seed).uniform(0.1, 2.0, n))
    strategy, how = optimise_dense(workload)
    assert how.loss == pytest.approx(loss_of(workload, strategy), rel=1e-11)
    assert how.loss == pytest.approx(lower_bound(workload, strategy), rel=1e-9)


def test_gradient_and_newtons_step_equal_central_differences(random):
    n = 12
    workload = np.tril(random.uniform(0.5, 1.5, (n, n)))
    gram = workload.T @ workload
    logs = 0.5 * np.log(np.diagonal(gram)) + random.uniform(0.5, 1.0, n)  # Λ > diag M: the model is the whole Hessian

    def at(logs):
        return dense._at(workload, gram, logs)

    def slope(logs):
        return at(logs).diagonal - at(logs).multipliers

    steps = 1e-6 * np.eye(n)
    numeric = np.array([(at(logs + h).value - at(logs - h).value) / 2e-6 for h in steps])
    np.testing.assert_allclose(slope(logs), numeric, rtol=1e-6)
    assert (slope(logs) < 0.0).all()
    hessian = np.array([(slope(logs + h) - slope(logs - h)) / 2e-6 for h in steps])
    np.testing.assert_allclose(dense._newton(at(logs)), -np.linalg.solve(hessian, slope(logs)), rtol=2e-3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_schedules_that_fall_by_orders_of_magnitude_are_solved_as_well(momentum):
    workload = sgd(120, momentum, np.logspace(0.0, -5.0, 120))
    strategy, how = optimise_dense(workload)
    assert how.converged
    assert how.iterations < 30
    assert how.loss == pytest.approx(loss_of(workload, strategy), rel=1e-9)
    assert "lower by more than" in how.reason


def test_units_of_the_workload_do_not_matter():
    strategy, how = optimise_dense(np.tri(30))
    scaled, far = optimise_dense(1e60 * np.tri(30))
    np.testing.assert_allclose(scaled, strategy, rtol=1e-9)
    assert far.loss == pytest.approx(1e120 * how.loss, rel=1e-9)


def test_signs_of_the_workloads_rows_do_not_matter(random):
    workload = np.tril(random.uniform(0.5, 1.5, (12, 12)))
    strategy, _ = optimise_dense(workload)
    flipped, _ = optimise_dense(np.where(np.arange(12)[:, None] % 2, -workload, workload))
    np.testing.assert_allclose(flipped, strategy, atol=1e-6)


@pytest.mark.parametrize("workload", [np.ones((3, 2)), np.ones((3, 3)), np.tril(np.ones((3, 3)), -1)])
def test_workloads_that_are_not_triangular_and_invertible_are_refused(workload):
    with pytest.raises(QuellError, match="lower triangular"):
        optimise_dense(workload)
