"""Banded recursions against dense algebra, gradients against finite differences, optima against published ones."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from quell.algebra import banded
from quell.algebra.dense import optimise_dense
from quell.errors import QuellError

PREFIX = np.array([1.0, -1.0])
MOMENTUM = np.array([1.0, -1.85, 0.855])

# Example B.1 of arXiv:2405.15913: the optimal 3-banded strategy for 9 steps, by column.
EXAMPLE_B1 = np.zeros((9, 9))
for _j, _column in enumerate(
    [
        [0.740, 0.500, 0.450],
        [0.822, 0.492, 0.286],
        [0.876, 0.395, 0.278],
        [0.821, 0.462, 0.335],
        [0.855, 0.442, 0.272],
        [0.882, 0.403, 0.243],
        [0.892, 0.409, 0.194],
        [0.936, 0.353],
        [1.000],
    ]
):
    EXAMPLE_B1[_j : _j + len(_column), _j] = _column


def repeat(row: np.ndarray, n: int) -> np.ndarray:
    return np.broadcast_to(row, (n, len(row)))


def square_root_start(n: int, p: int) -> np.ndarray:
    steps = np.arange(1, p)
    return repeat(np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)])), n)


def random_bands(rng: np.random.Generator, n: int, width: int, size: float = 0.8) -> np.ndarray:
    """A well-conditioned matrix; what lies outside it is filled with rubbish that must not be read."""
    bands = rng.uniform(-size, size, (n, width)) / width
    bands[:, 0] = rng.uniform(0.7, 1.3, n)
    bands[np.arange(n)[:, None] < np.arange(width)] = np.nan
    return bands


def loss_and_gradient(theta: np.ndarray, inverse: np.ndarray) -> tuple[float, np.ndarray]:
    return banded.Loss(theta.shape, inverse)(np.ascontiguousarray(theta))


def dense_loss(theta: np.ndarray, inverse: np.ndarray) -> float:
    c = banded.to_dense(theta)
    b = np.linalg.inv(banded.to_dense(inverse)) @ np.linalg.inv(c / np.linalg.norm(c, axis=0))
    return float(np.sum(b**2))


def inside(n: int, p: int) -> np.ndarray:
    return np.arange(n)[:, None] >= np.arange(p)


shapes = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**32 - 1))


@given(shapes)
def test_products_are_those_of_dense_matrices(shape):
    n, w1, w2, seed = shape
    rng = np.random.default_rng(seed)
    left, right = random_bands(rng, n, w1), random_bands(rng, n, w2)
    product = banded.multiply(left, right)
    assert product.shape == (n, w1 + w2 - 1)
    assert (product[~inside(n, w1 + w2 - 1)] == 0.0).all()
    expected = banded.to_dense(left) @ banded.to_dense(right)
    np.testing.assert_allclose(banded.to_dense(product), expected, atol=1e-14)


@pytest.mark.slow
@given(shapes, st.integers(1, 9))
def test_query_variances_are_those_of_dense_matrices(shape, terms):
    n, width, _, seed = shape
    rng = np.random.default_rng(seed)
    recursion, forcing = random_bands(rng, n, width), rng.standard_normal(terms)
    column = np.concatenate([forcing, np.zeros(n)])[:n]
    b = np.linalg.solve(banded.to_dense(recursion), toeplitz(column, np.zeros(n)))
    np.testing.assert_allclose(banded.query_variances(recursion, forcing), (b**2).sum(axis=1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("width", [9, 17, 30, 70, 140])
@pytest.mark.parametrize("n", [5, 95, 96, 97, 500])
def test_variances_of_wide_bands_do_not_depend_on_how_rows_are_grouped(n, width):
    rng = np.random.default_rng(n + width)
    recursion = random_bands(rng, n, width)
    variances = banded.query_variances(recursion, np.array([-2.0]))
    expected = 4.0 * (np.linalg.inv(banded.to_dense(recursion)) ** 2).sum(axis=1)
    np.testing.assert_allclose(variances, expected, rtol=1e-12)
    row_by_row = banded.query_variances(recursion, np.array([-2.0, 0.0]))
    np.testing.assert_allclose(row_by_row, expected, rtol=1e-12)


@pytest.mark.slow
def test_a_broadcast_view_is_priced_like_the_copy_and_costs_no_memory():
    n = 300
    for row, forcing in [(PREFIX, np.array([1.0, -0.5])), (np.linspace(1.0, 0.1, 12), np.ones(1))]:
        view = repeat(row, n)
        np.testing.assert_array_equal(
            banded.query_variances(view, forcing), banded.query_variances(view.copy(), forcing)
        )
    np.testing.assert_array_equal(
        banded.multiply(repeat(PREFIX, n), repeat(MOMENTUM, n)),
        banded.multiply(repeat(PREFIX, n).copy(), repeat(MOMENTUM, n).copy()),
    )


@given(shapes)
def test_loss_and_gradient_against_dense_algebra_and_central_differences(shape):
    n, p, r, seed = shape
    rng = np.random.default_rng(seed)
    _check_loss_and_gradient(rng, random_bands(rng, n, p), random_bands(rng, n, r))


@pytest.mark.parametrize(("n", "p", "row"), [(97, 3, PREFIX), (210, 8, MOMENTUM), (250, 20, PREFIX)])
def test_loss_and_gradient_over_several_segments(n, p, row, random):
    theta = square_root_start(n, p) * random.uniform(0.9, 1.1, (n, p))
    _check_loss_and_gradient(random, theta, repeat(row, n))


@pytest.mark.parametrize("p", [64, 65, 129])
def test_loss_and_gradient_with_wide_bands(p, random):
    _check_loss_and_gradient(random, random_bands(random, 400, p), repeat(PREFIX, 400))


def _check_loss_and_gradient(rng, theta, inverse):
    loss, gradient = loss_and_gradient(theta, inverse)
    assert loss == pytest.approx(dense_loss(theta, inverse), rel=1e-12)
    assert _disagreement(rng, theta, inverse, gradient) < 1e-7


def _disagreement(rng, theta, inverse, gradient) -> float:
    """Largest difference from central differences, relative to the gradient, along a few random directions."""
    n, p = theta.shape
    assert (gradient[~inside(n, p)] == 0.0).all()
    worst, scale = 0.0, np.linalg.norm(gradient) + 1e-6 * abs(loss_and_gradient(theta, inverse)[0])
    for _ in range(3):
        direction = rng.standard_normal((n, p)) * inside(n, p)
        direction /= np.linalg.norm(direction)
        ahead, behind = (dense_loss(theta + h * direction, inverse) for h in (1e-5, -1e-5))
        worst = max(worst, abs((ahead - behind) / 2e-5 - np.sum(gradient * direction)) / scale)
    return worst


def test_the_comparison_above_would_see_a_missing_term(random):
    """Drop, by hand, each term of the derivative in turn."""
    n, p = 60, 4
    theta, inverse = random_bands(random, n, p), repeat(PREFIX, n)
    a, c = np.tri(n), banded.to_dense(theta)
    norms = np.linalg.norm(c, axis=0)
    c = c / norms
    b = a @ np.linalg.inv(c)
    in_c = -2.0 * b.T @ b @ np.linalg.inv(c).T  # ∂‖AC⁻¹‖²/∂C
    along = (in_c * c).sum(axis=0)

    def to_bands(matrix):
        out = np.zeros((n, p))
        for d in range(p):
            out[d:, d] = np.diagonal(matrix, -d)
        return out

    right = to_bands((in_c - c * along) / norms)
    np.testing.assert_allclose(right, loss_and_gradient(theta, inverse)[1], atol=1e-10 * np.abs(right).max())
    assert _disagreement(random, theta, inverse, right) < 1e-7
    for wrong in [in_c / norms, in_c - c * along, in_c + c * along, 0.5 * (in_c - c * along) / norms]:
        assert _disagreement(random, theta, inverse, to_bands(wrong)) > 1e-3
    assert _disagreement(random, theta, inverse, np.where(np.arange(p) == p - 1, 0.0, right)) > 1e-3


def test_the_gradient_is_orthogonal_to_every_column(random):
    n, p = 120, 5
    theta = np.nan_to_num(random_bands(random, n, p))
    _, gradient = loss_and_gradient(theta, repeat(PREFIX, n))
    product = banded.to_dense(theta * gradient).sum(axis=0)
    np.testing.assert_allclose(product, 0.0, atol=1e-11 * np.abs(gradient).max())


@pytest.mark.parametrize("diagonal", [0.0, -1.0, np.nan])
def test_no_strategy_has_such_a_diagonal(diagonal):
    theta = square_root_start(20, 3).copy()
    theta[7, 0] = diagonal
    assert loss_and_gradient(theta, repeat(PREFIX, 20))[0] == np.inf
    with pytest.raises(QuellError, match="positive diagonal"):
        banded.normalise_columns(theta)


def test_an_inverse_that_explodes_has_infinite_loss_not_a_wrong_one():
    """C⁻¹ grows like 3^t: beyond 10³⁰⁸, and long before that rounding makes some variances negative."""
    for n in (60, 400, 2000):
        theta = repeat(np.array([1.0, 3.0, 1.0, 0.5]), n)
        loss, _ = loss_and_gradient(theta, repeat(PREFIX, n))
        assert loss > 9.0**50


@pytest.mark.parametrize("growth", [1.5, 1.7, 2.3])
def test_a_variance_lost_to_rounding_is_infinite_not_negative(growth):
    """θ grows like growth^t for 50 steps; then one query subtracts what cancels but for two of the z."""
    theta = np.zeros((80, 12))
    theta[:, 0], theta[:50, 1] = 1.0, -growth
    theta[57, 10:] = -1.0, growth
    assert loss_and_gradient(theta, np.ones((80, 1)))[0] == np.inf


def test_example_b1_of_the_paper():
    strategy, how = banded.optimise(square_root_start(9, 3), repeat(PREFIX, 9))
    assert how.converged
    c = banded.to_dense(strategy)
    np.testing.assert_allclose(np.linalg.norm(c, axis=0), 1.0, atol=1e-14)
    assert how.loss == pytest.approx(np.sum((np.tri(9) @ np.linalg.inv(c)) ** 2), rel=1e-12)
    printed = EXAMPLE_B1 / np.linalg.norm(EXAMPLE_B1, axis=0)
    assert how.loss <= np.sum((np.tri(9) @ np.linalg.inv(printed)) ** 2)
    assert how.loss == pytest.approx(np.sum((np.tri(9) @ np.linalg.inv(printed)) ** 2), rel=1e-5)
    np.testing.assert_allclose(c, EXAMPLE_B1, atol=1.1e-3)


@pytest.mark.parametrize(("row", "p"), [(PREFIX, 4), (PREFIX, 12), (MOMENTUM, 6)])
def test_the_optimum_beats_its_start_and_cannot_be_improved_nearby(row, p, random):
    n = 150
    start = banded.normalise_columns(square_root_start(n, p))
    before, _ = loss_and_gradient(start, repeat(row, n))
    strategy, how = banded.optimise(start, repeat(row, n))
    assert how.converged
    assert how.loss < before
    after, gradient = loss_and_gradient(strategy, repeat(row, n))
    assert after == pytest.approx(how.loss, rel=1e-12)
    assert np.abs(gradient).max() < 1e-4 * how.loss
    for _ in range(5):
        near = strategy * (1.0 + 0.01 * random.standard_normal((n, p)))
        assert loss_and_gradient(near, repeat(row, n))[0] > how.loss


def test_a_learning_rate_schedule_changes_the_optimum():
    n, p = 60, 5
    rates = np.linspace(1.0, 0.05, n)
    inverse = np.stack([1.0 / rates, -1.0 / rates], axis=1)  # (P·diag η)⁻¹ has its rows scaled by 1/η
    start = square_root_start(n, p)
    plain, _ = banded.optimise(start, repeat(PREFIX, n))
    strategy, how = banded.optimise(start, inverse)
    assert how.converged
    assert how.loss < loss_and_gradient(plain, inverse)[0] * (1.0 - 1e-4)
    assert how.loss == pytest.approx(dense_loss(strategy, inverse), rel=1e-11)


def test_more_bands_never_hurt_and_all_of_them_are_the_dense_optimum():
    n = 32
    losses = []
    for p in (1, 2, 4, 8, 16, 32):
        _, how = banded.optimise(square_root_start(n, p), repeat(PREFIX, n))
        assert how.converged
        losses.append(how.loss)
    assert losses == sorted(losses, reverse=True)
    _, dense = optimise_dense(np.tri(n))
    assert dense.loss <= losses[-1] * (1.0 + 1e-9)
    assert losses[-1] == pytest.approx(dense.loss, rel=1e-8)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(QuellError, match="4 rows by 5"):
        banded.multiply(repeat(PREFIX, 4), repeat(PREFIX, 5))
    with pytest.raises(QuellError, match="4 rows but the workload 5"):
        loss_and_gradient(np.ones((4, 1)), repeat(PREFIX, 5))


_SUM_UP = """
import hashlib, numpy as np
from quell.algebra import banded
start = np.broadcast_to(1.0 / np.arange(1.0, 9.0), (3000, 8))
strategy, how = banded.optimise(start, np.broadcast_to([1.0, -1.0], (3000, 2)), max_iterations=15)
print(hashlib.sha256(strategy.tobytes() + str(how.loss).encode()).hexdigest())
"""


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_threads():
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    answers = {
        subprocess.run(
            [sys.executable, "-c", _SUM_UP],
            env=os.environ | dict.fromkeys(names, threads),
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for threads in ("1", "2", "4")
    }
    assert len(answers) == 1
