"""The Gram matrix of the bins against dense algebra, its circulant domination, and the sign of C."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell import strategy, workload
from quell.errors import QuellError
from quell.privacy import bins as module
from quell.privacy.bins import Bins, bins_of, negative_slack
from quell.schemes import BallsInBins
from quell.strategy.structure import BandedStrategy, ToeplitzStrategy

FAMILIES = [
    ("identity", {}),
    ("bisr", {"bands": 4}),
    ("bsr", {"bands": 3}),
    ("bsr", {"bands": 3, "column_normalise": True}),
    ("lambda_cgd", {"lambda": 0.9, "column_normalise": True}),
    ("square_root", {}),
    ("diagonal", {}),
    ("tree", {}),
]


def dense_gram(built, b):
    matrix = built.matrix()
    moved = np.stack([matrix[:, j::b].sum(axis=1) for j in range(b)], axis=1)
    return moved.T @ moved


def build(name, n, b, **parameters):
    scheme = BallsInBins(n, b)
    return strategy.build(name, workload.prefix(n), scheme.participation, **parameters), scheme


@pytest.mark.parametrize(("n", "b"), [(24, 6), (23, 6), (19, 7), (5, 5), (6, 1)])
@pytest.mark.parametrize(("name", "parameters"), FAMILIES)
def test_gram_equals_dense_algebra_and_is_rounded_up(name, parameters, n, b):
    built, scheme = build(name, n, b, **parameters)
    expected, found = dense_gram(built, b), bins_of(built, scheme).table
    np.testing.assert_allclose(found, expected, atol=2e-12 * expected.max())
    assert np.all(found >= expected)


@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_gram_of_any_non_negative_toeplitz_and_banded_strategy(n, b, seed):
    random, b = np.random.default_rng(seed), min(b, n)
    leading = np.eye(1, n)[0] * n  # so that C^-1 does not grow beyond what float32 noise can follow
    toeplitz = ToeplitzStrategy("any", n, (random.random(n) + leading)[: random.integers(1, n + 1)] + 0.01)
    entries = random.random((n, min(n, 3))) + 0.01
    entries[:, 0] += 3.0
    entries[np.arange(n)[:, None] < np.arange(entries.shape[1])] = 0.0
    for built in (toeplitz, BandedStrategy("any", entries)):
        expected = dense_gram(built, b)
        np.testing.assert_allclose(bins_of(built, BallsInBins(n, b)).table, expected, atol=3e-12 * expected.max())


@pytest.mark.parametrize(("name", "parameters"), FAMILIES)
def test_the_circulant_for_many_bins_dominates(monkeypatch, name, parameters):
    built, scheme = build(name, 47, 9, **parameters)
    exact = bins_of(built, scheme).table
    monkeypatch.setattr(module, "_DENSE", 4)
    circle = bins_of(built, scheme)
    assert not circle.exact
    full = circle.rows(np.arange(9))
    assert np.all(full >= exact)
    np.testing.assert_allclose(full, full.T)
    assert np.linalg.eigvalsh(full)[0] > -1e-9 * full.max()


@pytest.mark.parametrize("count", [8, 9])
def test_draws_have_the_covariance(random, count):
    kernel = np.array([3.0, 1.0, 0.5, 0.2, 0.1, 0.2, 0.5, 1.0])[:count]
    kernel = kernel if count == 8 else np.array([3.0, 1.0, 0.5, 0.2, 0.1, 0.1, 0.2, 0.5, 1.0])
    circle = Bins(kernel)
    table = circle.rows(np.arange(count))
    for bins in (circle, Bins(table)):
        noise = bins.noise(random, 200_000)
        np.testing.assert_allclose(noise.T @ noise / len(noise), table, atol=0.04)


def test_negative_strategies_are_refused_with_the_reason():
    negative = ToeplitzStrategy("odd", 12, np.array([1.0, -0.2, 0.1]))
    with pytest.raises(QuellError, match=r"negative entries in C \(down to -0.2\).*C >= 0: use cyclic sampling"):
        bins_of(negative, BallsInBins(12, 4))
    entries = np.array([[1.0, 0.0], [1.0, -0.5], [1.0, 0.2]])
    with pytest.raises(QuellError, match="negative entries"):
        bins_of(BandedStrategy("odd", entries), BallsInBins(3, 1))


def test_rounding_below_zero_is_priced_not_ignored():
    almost = ToeplitzStrategy("almost", 12, np.array([1.0, 0.5, -3e-13]))
    assert negative_slack(almost, participations=3) == pytest.approx(9e-13)
    assert bins_of(almost, BallsInBins(12, 4)).slack == pytest.approx(9e-13)


def test_one_heavy_bin_does_not_hide_the_overlap_of_the_others():
    """Eleven bins share a row, the twelfth is a million times heavier."""
    rows = np.zeros((12, 12))
    rows[:, 0] = 1.0
    rows[0, 0] = 1e6
    rows[11, :11] = 1.0
    found = bins_of(BandedStrategy("made up", rows), BallsInBins(12, 12))
    assert found.table[1, 2] > 0.9
    assert not found.is_orthogonal
    assert bins_of(BandedStrategy("made up", np.eye(12, 1) + 1.0), BallsInBins(12, 12)).is_orthogonal


def test_negative_rounding_errors_count_without_amplification_too():
    coefficients = np.full(10_000, -0.99e-9)
    coefficients[0] = 1.0
    c = ToeplitzStrategy("rounded", 10_000, coefficients)
    moved = np.ones(10_000)
    moved[:5_000] = -1.0
    reached = np.linalg.norm(moved + np.concatenate([[0.0], -0.99e-9 * np.cumsum(moved)[:-1]]))  # C·x
    assert BallsInBins(10_000, 1).account(c).reach >= reached
