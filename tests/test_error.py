"""Per-query errors: every fast path against dense algebra."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell import strategy, workload
from quell.analysis.error import error, query_variances
from quell.errors import QuellError
from quell.participation import Participation
from quell.strategy import ToeplitzStrategy

N = 24
WORKLOADS = {
    "prefix": workload.prefix(N),
    "momentum": workload.sgd(N, momentum=0.9),
    "decay": workload.sgd(N, weight_decay=0.97),
    "both": workload.sgd(N, momentum=0.8, weight_decay=0.99),
    "cosine": workload.sgd(N, 0.9, 0.99, workload.schedule("cosine", N)),
    "given": workload.toeplitz(1.0 / np.arange(1, N + 1)),
}
MECHANISMS = [
    ("identity", {}),
    ("lambda_cgd", {"lambda": 0.9}),
    ("bisr", {"bands": 5}),
    ("fractional", {"bands": 4, "gamma": 0.7, "lambda": 0.95}),
    ("bsr", {"bands": 5}),
    ("square_root", {}),
    ("diagonal", {}),
    ("tree", {}),
]


@pytest.mark.parametrize("task", WORKLOADS.values(), ids=WORKLOADS.keys())
@pytest.mark.parametrize(("name", "parameters"), MECHANISMS)
@pytest.mark.parametrize("normalise", [False, True])
def test_fast_errors_equal_dense(task, name, parameters, normalise):
    family = strategy.find(name)
    if (normalise and not family.normalisable) or (family.constant_rate_only and not task.is_toeplitz):
        return
    options = {**parameters, **({"column_normalise": True} if normalise else {})}
    tested = strategy.build(name, task, Participation(N, 6), **options)
    np.testing.assert_allclose(tested.matrix() @ tested.noising_matrix(), np.eye(N), atol=1e-10)
    dense = np.sum(np.square(task.matrix() @ np.linalg.inv(tested.matrix())), axis=1)
    np.testing.assert_allclose(query_variances(tested, task), dense, rtol=1e-9)
    assert error(tested, task).rmse == pytest.approx(math.sqrt(dense.mean()), rel=1e-10)
    assert error(tested, task).maxse == pytest.approx(math.sqrt(dense.max()), rel=1e-10)


@given(st.floats(0, 1), st.integers(2, 60))
def test_lambda_cgd_closed_forms(lambda_, n):
    sums = workload.prefix(n)
    tested = strategy.build("lambda_cgd", sums, Participation.single(n), **{"lambda": lambda_})
    found = error(tested, sums)
    grown = (1 - lambda_) ** 2 * (n - 1)
    assert found.maxse == pytest.approx(math.sqrt(1 + grown), rel=1e-10)  # eq. 15 of the paper, at the last step
    assert found.rmse == pytest.approx(math.sqrt(1 + grown / 2), rel=1e-10)  # eq. 50


def test_full_batch_errors_of_theorem_4():
    n = 200
    pattern, sums = Participation(n, 1), workload.prefix(n)
    from quell.analysis.sensitivity import sensitivity

    def total(name: str) -> float:
        tested = strategy.build(name, sums, pattern)
        return error(tested, sums).rmse * sensitivity(tested, pattern).value

    assert total("identity") == pytest.approx(math.sqrt(n * (n + 1) / 2), rel=1e-11)
    assert total("diagonal") == pytest.approx(np.sqrt(np.arange(1, n + 1)).sum() / math.sqrt(n), rel=1e-11)


def test_overflow_and_mismatch_are_refused():
    with pytest.raises(QuellError, match="grows to inf times a step's fresh noise"):
        ToeplitzStrategy("test", 2000, np.array([1.0, 3.0]))
    with pytest.raises(QuellError, match="2,000 steps but the workload"):
        error(ToeplitzStrategy("test", 2000, np.array([1.0, 0.5])), workload.prefix(3))
    with pytest.raises(QuellError, match="not finite"):
        ToeplitzStrategy("test", 4, np.array([1.0, np.nan]))
    with pytest.raises(QuellError, match="overflows"):
        ToeplitzStrategy("test", 5000, given_noising=np.array([1.0, -2.0]))


def test_what_has_no_fast_formula_is_refused_beyond_dense_sizes():
    n = 5000
    root = strategy.build("square_root", workload.prefix(n), Participation(n, 500), column_normalise=True)
    with pytest.raises(QuellError, match=r"at most 4,096 steps"):
        error(root, workload.prefix(n))


@pytest.mark.parametrize("ratio", [1e-3, 1e-5, 1e-8])
def test_rates_that_jump_are_priced_right_or_not_at_all(ratio):
    rates = np.where(np.arange(60) % 2, 1.0, ratio)
    task = workload.sgd(60, 0.9, 1.0, rates)
    for name, parameters in (("identity", {}), ("bsr", {"bands": 7}), ("bisr", {"bands": 4})):
        tested = strategy.build(name, task, Participation(60, 6), **parameters)
        dense = np.sum(np.square(task.matrix() @ np.linalg.inv(tested.matrix())), axis=1)
        np.testing.assert_allclose(query_variances(tested, task), dense, rtol=1e-6)
    long = workload.sgd(6000, 0.9, 1.0, np.tile(rates, 100))
    with pytest.raises(QuellError, match="a learning rate that does not jump"):
        error(strategy.build("identity", long, Participation(6000, 60)), long)


def test_strategies_whose_two_sides_disagree_cannot_be_built():
    with pytest.raises(QuellError, match="not inverse to each other"):
        ToeplitzStrategy("test", 10, np.array([1.0, 0.0]), np.array([1.0, -0.5]))
