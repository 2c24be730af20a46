"""What the best attacker can do, against tests of the likelihood ratio that are computed cell by cell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from quell import privacy, strategy, workload
from quell.privacy.meaning import FALSE_POSITIVES, GROUPS, meaning, strongest_test
from quell.privacy.profile import Atoms, CoinProfile, GaussianProfile, PointProfile, of_plain, plain
from quell.schemes import BallsInBins, Cyclic, Poisson
from quell.show import words


def best_test(laws, false_positives):
    """Neyman and Pearson: accuse the outcomes with the largest ratios until `false_positives` of the absent are."""
    present, absent = laws
    order = np.argsort(-present / np.maximum(absent, 1e-300))
    accused, found = np.cumsum(absent[order]), np.cumsum(present[order])
    return float(np.interp(false_positives, accused, found))


def cells(rate, sigma, shifts=(0.0, 1.0)):
    """Probabilities of fine cells of one round's output, with the example (or a group's many) and without."""
    edges = np.linspace(-8 * sigma, max(shifts) + 8 * sigma, 40_001)
    absent, *entered = (np.diff(norm.cdf(edges, shift, sigma)) for shift in shifts)
    weights = [(1 - rate) ** 2, 2 * rate * (1 - rate), rate**2] if len(shifts) == 3 else [1 - rate, rate]
    present = sum(weight * each for weight, each in zip(weights, (absent, *entered), strict=True))
    return present, absent


@pytest.mark.parametrize("rate", FALSE_POSITIVES)
@pytest.mark.parametrize(("share", "sigma"), [(1.0, 0.7), (0.1, 1.0), (0.3, 0.5)])
def test_the_bound_is_what_the_best_test_of_one_round_attains(share, sigma, rate):
    found = meaning(CoinProfile(((1, sigma),), share)).true_positives[1][rate]
    assert found == pytest.approx(best_test(cells(share, sigma), rate), rel=2e-4)


def test_two_rounds_are_tested_together():
    present, absent = cells(0.3, 0.8)
    coarse = [each.reshape(-1, 40).sum(axis=1) for each in (present, absent)]
    both = [np.outer(each, each).ravel() for each in coarse]
    found = strongest_test(CoinProfile(((2, 0.8),), 0.3))(0.01)
    assert found == pytest.approx(best_test(both, 0.01), rel=2e-3)


def test_gaussian_runs_have_the_textbook_curve():
    """And a test of simulated outputs comes close to it, from below."""
    mu = 1.3
    found = meaning(GaussianProfile(mu))
    assert found.mu == mu
    for size in GROUPS:
        for rate in FALSE_POSITIVES:
            assert found.true_positives[size][rate] == pytest.approx(norm.cdf(norm.ppf(rate) + size * mu), rel=1e-9)
    random = np.random.default_rng(1)
    absent, present = random.normal(size=400_000), random.normal(mu, size=400_000)
    hits = float(np.mean(present > np.quantile(absent, 0.99)))
    assert hits == pytest.approx(found.true_positives[1][0.01], abs=0.006)


def test_a_group_is_found_no_more_often_than_its_members_one_after_the_other():
    """Two examples that each join at random move the output by 0, 1 or 2."""
    test = strongest_test(CoinProfile(((1, 0.7),), 0.4))
    for rate in FALSE_POSITIVES:
        truth = best_test(cells(0.4, 0.7, shifts=(0.0, 1.0, 2.0)), rate)
        assert truth <= test(test(rate)) < 3 * truth


def test_points_say_as_much_as_they_know():
    """One point is the classical bound; many points of a Gaussian curve are nearly the curve."""
    epsilon, delta, rate = 1.0, 0.01, 0.001
    one = strongest_test(PointProfile(((epsilon, delta),)))(rate)
    assert one == pytest.approx(np.exp(epsilon) * rate + delta, rel=1e-3)
    assert one >= np.exp(epsilon) * rate + delta
    curve = [(float(e), privacy.gaussian_delta(1.0, float(e))) for e in np.linspace(0, 8, 65)]
    exact = meaning(GaussianProfile(1.0)).true_positives[1][0.01]
    assert exact <= strongest_test(PointProfile(tuple(curve)))(0.01) <= 1.01 * exact


@pytest.mark.parametrize("profile", [GaussianProfile(0.5), PointProfile(((1.0, 0.01),)), CoinProfile(((2, 1.0),), 0.2)])
def test_certificates_may_fail(profile):
    sure, unsure = (strongest_test(replace(profile, failure=failure))(0.01) for failure in (0.0, 1e-3))
    assert unsure == pytest.approx(sure + 1e-3, rel=1e-12)


def test_atoms_reproduce_their_points_in_both_directions():
    points = ((0.0, 0.3), (1.0, 0.1), (2.5, 1e-3), (2.0, 0.9))  # the last is above the chord and says nothing
    pair = Atoms.of(points)
    assert sum(pair.mass) + pair.infinite == pytest.approx(1.0)
    losses, ours = np.array(pair.losses), np.array(pair.mass)
    theirs = ours * np.exp(-losses)
    assert theirs.sum() <= 1.0 + 1e-12
    for epsilon, delta in points[:3]:
        assert np.maximum(ours - np.exp(epsilon) * theirs, 0).sum() + pair.infinite == pytest.approx(delta)
        reverse = np.maximum(theirs - np.exp(epsilon) * ours, 0).sum() + 1 - theirs.sum()
        assert reverse == pytest.approx(delta)


@pytest.mark.parametrize("scheme", [Cyclic(40, 8), Poisson(40, 0.125), BallsInBins(40, 8)])
def test_guarantees_of_every_kind_say_what_they_mean(scheme):
    """Amplified runs with the same promise let an attacker find no more than the Gaussian mechanism does, about."""
    built = strategy.build("identity", workload.prefix(40), scheme.participation)
    guarantee = privacy.calibrate(built, scheme, 3.0, 1e-5)
    found = privacy.meaning(built, scheme, guarantee)
    gaussian = meaning(GaussianProfile(1 / privacy.gaussian_sigma(3.0, 1e-5)))
    assert (found.mu is None) == scheme.amplifies
    for rate in FALSE_POSITIVES:
        assert rate < found.true_positives[1][rate] < 1.05 * gaussian.true_positives[1][rate]
    text = words.attacker(found, "example")
    assert words.percent(found.true_positives[1][0.01]) in text
    assert ("Gaussian DP" in text) != scheme.amplifies


@pytest.mark.parametrize(
    "profile", [GaussianProfile(0.5), CoinProfile(((3, 1.0), (2, 0.5)), 0.1), PointProfile(((1.0, 0.1),), 1e-9)]
)
def test_profiles_survive_as_plain_data(profile):
    assert of_plain(plain(profile)) == profile
    for name in plain(profile):
        damaged = {**plain(profile), name: None}
        with pytest.raises(privacy.pricing.QuellError, match="not a privacy profile"):
            of_plain(damaged)
