"""Bounds without draws for bins that overlap, against enumeration and quadrature."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from quell import privacy, strategy, workload
from quell.planning import Plan, file
from quell.planning.planner import COMPARISONS
from quell.planning.prices import Prices
from quell.privacy import importance
from quell.privacy import shared as module
from quell.privacy.bins import Bins
from quell.privacy.mixture import BinAccountant
from quell.privacy.shared import Shared, _call, _log_chords, _log_triples, _most, _put
from quell.run import Run
from quell.schemes import BallsInBins

TABLES = {
    "two": np.array([[1.0, 0.6], [0.6, 1.2]]),
    "two apart": np.array([[1.0, 0.05], [0.05, 1.0]]),
    "two unlike": np.array([[1.0, 0.3], [0.3, 4.0]]),
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
        if name in ("two", "three"):
            assert shared.upper(sigma, epsilon, about) <= exact * loose
    if name == "three alike":
        assert shared.upper(sigma, epsilon, exact) < 1.003 * exact
        assert shared.lower(sigma, epsilon) > 0.97 * exact


@pytest.mark.parametrize("name", TABLES)
def test_moments_by_enumeration(random, name):
    """E T^q is the mean of exp(Σ R_jk/σ²) over all tuples of q bins; E T^−q from draws of r."""
    shared, sigma = Shared(Bins(TABLES[name])), 0.8
    rest = shared._rest.table / sigma**2
    assert np.linalg.eigvalsh(rest)[0] > -1e-12
    assert np.all(shared.energy + sigma**2 * rest >= TABLES[name] * (1 - 1e-14))
    found = shared._log_moments(sigma)
    for order in (2, 3, 4, 6, 8):
        energies = [
            sum(rest[j, k] for j, k in itertools.combinations(bins, 2))
            for bins in itertools.product(range(len(rest)), repeat=order)
        ]
        exact = math.log(np.mean(np.exp(energies)))
        assert exact <= found[order]
        assert found[order] < exact + (1e-7 if order < 4 else 0.06 * order**2)
    own = random.multivariate_normal(np.zeros(len(rest)), rest, 400_000)
    geometric = np.mean(own - np.diag(rest) / 2, axis=1)  # ln of the geometric mean, which is below that of T
    for order in (1, 2):
        assert math.log(np.mean(np.exp(-order * geometric))) == pytest.approx(found[-order], abs=0.05 * order**2)


@pytest.mark.parametrize("far", [1e6, 1e-2])  # where the grid ends: far beyond the values that matter, or among them
@pytest.mark.parametrize(("order", "log_moment"), [(2, 0.3), (6, 1.2), (16, 3.0)])
def test_the_bound_is_the_most_that_a_law_with_these_moments_reaches(monkeypatch, far, order, log_moment):
    """One moment beside the mean: the best law has two values, of which one follows from the other."""
    monkeypatch.setattr(module, "_FAR", far)
    logs = {order: log_moment, -32: 32 * 2.0}  # the second hardly binds
    high = np.exp(np.linspace(0.01, 6.0, 3000))
    below, above = np.full(high.shape, math.exp(-1.9)), np.ones(high.shape)
    for _ in range(60):
        low = 0.5 * (below + above)
        chance = (1 - low) / (high - low)
        too_much = np.log((1 - chance) * low**order + chance * high**order) > log_moment
        below, above = np.where(too_much, low, below), np.where(too_much, above, low)
    for scale in (1.0, 1.5, 4.0):
        prices = {
            (0.0, 1.0): lambda s, k=scale: _call(s, k, 0.05),
            (1.0, 0.0): lambda s, k=scale: k * _put(s, 1 / k, 0.05),
        }
        for (at_zero, steepest), price in prices.items():
            reached = float(np.max((1 - chance) * price(above) + chance * price(high)))
            bound = _most(logs, price, at_zero, steepest, reached)
            assert reached <= bound
            assert bound < 1.02 * reached or far < 1 or at_zero


def test_chords_exceed_powers_by_what_is_paid_for():
    between = np.exp(np.linspace(0, 0.3, 10_001))
    orders = np.array([2, 3, 16, 96, -1, -4, -64])
    for order, paid in zip(orders, _log_chords(orders, 0.3), strict=True):
        chord = 1 + (between - 1) * (between[-1] ** order - 1) / (between[-1] - 1)
        assert np.max(np.log(chord) - order * np.log(between)) == pytest.approx(paid, rel=1e-6)


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
    scheme = BallsInBins(400, 8)
    built = strategy.build("lambda_cgd", workload.prefix(400), scheme.participation, **{"lambda": 0.9})
    found = privacy.calibrate(built, scheme, 2.0, 1e-5)
    assert found.failure_probability == 0.0
    assert privacy.certify(built, scheme, found.noise_multiplier, 2.0, 1e-5).bracket == found.bracket


def test_plans_that_were_certified_by_draws_stay_true(tmp_path):
    """As files have it that were written before there were bounds without draws; more is not believed."""
    run = Run.from_data(examples=400, batch_size=50, epochs=50, epsilon=2.0, delta=1e-5, sampling="balls_in_bins")
    prices = Prices(run)
    mechanism = prices.certify(prices.build("lambda_cgd", None, **{"lambda": 0.9}), BallsInBins, COMPARISONS)
    assert mechanism.guarantee.failure_probability == 0.0
    plan, path = Plan(run, (mechanism,), 0), tmp_path / "plan.json"
    by_draws = {"method": "importance sampling in both directions", "failure_probability": 1e-5 * 0.01}
    for changes, false in (({}, 0), (by_draws, 0), ({**by_draws, "failure_probability": 1e-8}, 2)):
        content = plan.as_dict()
        content["mechanisms"][0]["guarantee"] |= changes
        file.write(content, path)
        assert sum(not check.holds for check in file.verify(path)) == false


@pytest.mark.parametrize("claim", [{"upper": 0.5}, {"lower": 1.05}])
def test_draws_that_contradict_the_bounds_are_a_bug(monkeypatch, claim):
    """Claims relative to the bounds."""
    accountant, sigma, epsilon, failure = BinAccountant(Bins(0.1 + 0.9 * np.eye(6))), 0.6, 4.0, 1e-3
    assert accountant.certify(sigma, epsilon, failure).failure == failure  # by draws
    scouted = accountant._scouted(sigma, epsilon, failure)
    bounds = {
        "lower": accountant._proven(sigma, epsilon, scouted),
        "upper": accountant._at_least(sigma, epsilon),
    }
    claimed = {end: share * bounds[end] for end, share in claim.items()}
    certify = importance.certify
    monkeypatch.setattr(importance, "certify", lambda *arguments: replace(certify(*arguments), **claimed))
    with pytest.raises(AssertionError, match="draws contradict the bounds"):
        accountant.certify(sigma, epsilon, failure)
