"""Lower bounds: closed forms against singular values, and no mechanism below them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell import strategy, workload
from quell.analysis import bounds
from quell.analysis.error import error
from quell.analysis.sensitivity import sensitivity
from quell.participation import Participation
from tests.enumeration import by_enumeration

tasks = st.sampled_from([(0.0, 1.0), (0.9, 1.0), (0.0, 0.95), (0.9, 0.999)])


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_prefix_nuclear_norm_in_closed_form(n):
    assert bounds.nuclear_norm(workload.prefix(n)) == pytest.approx(np.linalg.norm(np.tril(np.ones((n, n))), "nuc"))


@pytest.mark.slow
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 1.0), (0.0, 0.99), (0.9, 0.9999), (0.95, 0.99999)])
def test_fast_nuclear_norm_is_a_close_lower_bound(momentum, decay):
    n = 1500
    task = workload.sgd(n, momentum, decay)
    truth = np.linalg.svd(task.matrix(), compute_uv=False).sum()
    fast = bounds.nuclear_norm(task)
    assert 0.99 * truth <= fast <= truth * (1 + 1e-9)


@pytest.mark.slow
def test_nuclear_norm_of_schedules_and_given_workloads_stays_below_the_truth():
    n = 1200
    for task in (
        workload.sgd(n, 0.9, 1.0, workload.schedule("cosine", n)),
        workload.toeplitz(1.0 / np.sqrt(np.arange(1, n + 1))),
    ):
        truth = np.linalg.svd(task.matrix(), compute_uv=False).sum()
        assert 0.2 * truth <= bounds.nuclear_norm(task) <= truth * (1 + 1e-9)


def test_full_batch_bound_of_theorem_4():
    n = 50
    bound = bounds.participation_bound(workload.prefix(n), Participation(n, 1))
    assert bound == pytest.approx(math.sqrt((n + 1) * (2 * n + 1) / 6))


@given(tasks, st.integers(2, 12), st.integers(1, 12), st.integers(0, 2**31))
def test_no_random_factorisation_beats_the_bound(task, n, b, seed):
    a = workload.sgd(n, *task)
    participation = Participation(n, min(b, n))
    generator = np.random.default_rng(seed)
    c = np.tril(generator.normal(size=(n, n)))
    np.fill_diagonal(c, np.abs(np.diag(c)) + 0.5)
    rmse = np.linalg.norm(a.matrix() @ np.linalg.inv(c)) / math.sqrt(n)
    assert rmse * by_enumeration(c, participation) >= bounds.lower_bound(a, participation) * (1 - 1e-9)


@given(tasks, st.integers(10, 80), st.integers(1, 20), st.sampled_from(["identity", "square_root", "bisr", "bsr"]))
def test_no_mechanism_beats_the_bound(task, n, b, name):
    a, participation = workload.sgd(n, *task), Participation(n, b if b <= n else n)
    tested = strategy.build(name, a, participation, **({"bands": 8} if name in ("bisr", "bsr") else {}))
    found = error(tested, a).rmse * sensitivity(tested, participation).value
    assert found >= bounds.lower_bound(a, participation) * (1 - 1e-9)


def test_square_root_is_within_a_few_percent_of_the_single_participation_bound():
    n = 4096
    sums, once = workload.prefix(n), Participation.single(n)
    tested = strategy.build("square_root", sums, once)
    found = error(tested, sums).rmse * sensitivity(tested, once).value
    assert 1.0 <= found / bounds.lower_bound(sums, once) < 1.25
