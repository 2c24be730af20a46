"""Bounds without draws for bins that overlap, against enumeration and quadrature."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from quell import privacy, strategy, workload
from quell.privacy import importance
from quell.privacy.bins import Bins
from quell.privacy.mixture import BinAccountant
from quell.privacy.shared import Shared, _log_triples
from quell.schemes import BallsInBins

TABLES = {
    "two": np.array([[1.0, 0.6], [0.6, 1.2]]),
    "two apart": np.array([[1.0, 0.05], [0.05, 1.0]]),
    "three": np.array([[1.0, 0.7, 0.5], [0.7, 0.9, 0.6], [0.5, 0.6, 1.1]]),
    "three alike": np.array([[1.0, 0.9, 0.9], [0.9, 1.0, 0.9], [0.9, 0.9, 1.0]]),
}


def by_quadrature(table, sigma, epsilon):
    """δ in both directions from the densities on a dense grid of outputs."""
    patterns = np.linalg.cholesky(table)  # row j is m_j
    axes = len(table)
    points = 700 if axes == 2 else 130
    edge = 8.5 * sigma + np.abs(patterns).max()
    line = np.linspace(-edge, edge, points)
    grid = np.stack(np.meshgrid(*[line] * axes, indexing="ij"), axis=-1).reshape(-1, axes)
    cell = ((line[1] - line[0]) / (sigma * math.sqrt(2 * math.pi))) ** axes
    without = np.exp(-0.5 * np.sum(grid**2, axis=1) / sigma**2) * cell
    ratio = np.mean([np.exp((grid @ m - 0.5 * m @ m) / sigma**2) for m in patterns], axis=0)
    scale = math.exp(epsilon)
    return [float(np.sum(without * np.maximum(gap, 0.0))) for gap in (ratio - scale, 1 - scale * ratio)]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("sigma", "epsilon", "loose"), [(3.0, 0.3, 1.004), (2.0, 1.5, 1.1), (0.7, 2.0, 1.04), (0.4, 5.0, 1.27)]
)
def test_between_the_bounds_by_quadrature(name, sigma, epsilon, loose):
    table = TABLES[name]
    exact = max(by_quadrature(table, sigma, epsilon))
    shared = Shared(Bins(table))
    assert shared.lower(sigma, epsilon) <= exact * 1.0005
    for about in (exact, 30 * exact, 0.01 * exact):  # a wrong idea of δ costs nothing but digits
        assert exact * 0.9995 <= shared.upper(sigma, epsilon, about)
        assert shared.upper(sigma, epsilon, about) <= exact * (3.4 if name == "two apart" else loose)
    if name == "three alike":
        assert shared.upper(sigma, epsilon, exact) < 1.003 * exact
        assert shared.lower(sigma, epsilon) > 0.97 * exact


@pytest.mark.parametrize("name", TABLES)
def test_moments_by_enumeration(random, name):
    """E T^q is the mean of exp(Σ R_jk/σ²) over all tuples of q bins; E T^−q from draws of r."""
    shared, sigma = Shared(Bins(TABLES[name])), 0.8
    rest = shared._rest.table / sigma**2
    assert np.linalg.eigvalsh(rest)[0] > -1e-12
    assert np.all(shared.energy + sigma**2 * rest >= TABLES[name])
    found = shared._log_moments(sigma)
    for order in (2, 3, 4, 6, 8):
        energies = [
            sum(rest[j, k] for j, k in itertools.combinations(bins, 2))
            for bins in itertools.product(range(len(rest)), repeat=order)
        ]
        exact = math.log(np.mean(np.exp(energies)))
        assert exact <= found[order]
        assert found[order] < exact + (1e-8 if order < 4 else 0.06 * order**2)
    own = random.multivariate_normal(np.zeros(len(rest)), rest, 200_000)
    mixed = np.exp(own - np.diag(rest) / 2).mean(axis=1)
    for order in (1, 2, 4):
        assert math.log(np.mean(mixed**-order)) < found[-order] + 0.01


def test_circulant_tables_have_the_bounds_of_full_ones():
    kernel = np.array([1.0, 0.8, 0.6, 0.5, 0.6, 0.8])
    circle = Bins(kernel)
    full = Bins(circle.rows(np.arange(6)))
    for sigma, epsilon in ((2.0, 1.0), (0.6, 4.0)):
        both = [
            (Shared(bins).lower(sigma, epsilon), Shared(bins).upper(sigma, epsilon, 0.01)) for bins in (circle, full)
        ]
        assert both[0] == pytest.approx(both[1], rel=1e-5)
    assert _log_triples(kernel) == pytest.approx(_log_triples(full.table), abs=1e-12)


def test_a_promise_without_draws_has_no_failure_probability_and_passes_again():
    accountant = BinAccountant(Bins(0.9 + 0.1 * np.eye(8)))
    sigma, certificate = accountant.certified_sigma(1.0, 1e-6)
    assert (certificate.failure, certificate.draws) == (0.0, 0)
    assert "no draws" in certificate.method
    assert 0.97e-6 < certificate.lower < certificate.upper < 1e-6
    assert accountant.certificate_for(sigma, 1.0, 1e-6) == certificate
    scheme = BallsInBins(32, 8)
    built = strategy.build("lambda_cgd", workload.prefix(32), scheme.participation, **{"lambda": 0.99})
    found = privacy.calibrate(built, scheme, 0.5, 1e-5)
    assert found.failure_probability == 0.0
    assert privacy.certify(built, scheme, found.noise_multiplier, 0.5, 1e-5).bracket == found.bracket


@pytest.mark.parametrize("claim", [{"upper": 1e-7}, {"lower": 1e-4}])
def test_draws_that_contradict_the_bounds_are_a_bug(monkeypatch, claim):
    accountant = BinAccountant(Bins(0.3 + 0.7 * np.eye(8)))
    sigma, _ = accountant.certified_sigma(4.0, 1e-5)
    assert accountant.certify(sigma, 4.0, 1e-8).failure == 1e-8
    certify = importance.certify
    monkeypatch.setattr(importance, "certify", lambda *arguments: replace(certify(*arguments), **claim))
    with pytest.raises(AssertionError, match="draws contradict the bounds"):
        accountant.certify(sigma, 4.0, 1e-8)
