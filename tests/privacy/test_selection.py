"""The best of a random number of trials, against enumeration of everything that toys can release."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
import pytest

from quell.errors import QuellError
from quell.privacy import gaussian_epsilon, gaussian_sigma
from quell.privacy.coins import coin_delta
from quell.privacy.composition import Charge, Together
from quell.privacy.profile import CoinProfile, GaussianProfile, PointProfile
from quell.privacy.selection import LAWS, Trials, delta_of, selected, selected_epsilon, worst_of

MOST = 1500  # trials that are enumerated


@lru_cache
def chances_of(trials):
    return np.array([trials.probability(k) for k in range(1, MOST)])


def released(law, order, trials):
    """The law of the best outcome: `order` lists outcomes from the worst to the best, `law` their probabilities."""
    chances = chances_of(trials)
    counts = np.arange(1, MOST)
    found, below = np.zeros(len(law)), 0.0
    for outcome in order:
        upto = below + law[outcome]
        found[outcome] = chances @ (upto**counts - below**counts)
        below = upto
    return found


def hockey_stick(ours, theirs, epsilon):
    return float(np.maximum(ours - math.exp(epsilon) * theirs, 0).sum())


def profile_of(p, q):
    """The exact curve of one trial, as points at all its losses."""
    epsilons = sorted({0.0, *(abs(math.log(a / b)) for a, b in zip(p, q, strict=True) if a > 0 and b > 0)})
    return PointProfile(tuple((e, max(hockey_stick(p, q, e), hockey_stick(q, p, e))) for e in epsilons))


# With the example the middle outcome is likelier, and what beats it less likely: both count, the second one twice.
CROWDED = np.array([0.7865, 0.0135, 0.2]), np.array([0.72, 0.01, 0.27])


def toys():
    random = np.random.default_rng(3)
    yield CROWDED
    yield np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.3, 0.2])
    yield np.array([0.7, 0.299, 0.001, 0.0]), np.array([0.6, 0.4, 0.0, 0.0])  # one outcome gives everything away
    for _ in range(2):
        p, noise = random.dirichlet(np.ones(5)), random.dirichlet(np.ones(5))
        yield p, 0.8 * p + 0.2 * noise


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [1.5, 5.0, 50.0])
def test_no_score_releases_more_than_is_promised(law, mean):
    """All orders of all outcomes, both directions, many ε."""
    trials = Trials(mean, law)
    tightest = math.inf
    for p, q in toys():
        profile = profile_of(p, q)
        known = delta_of([profile])
        more = trials.loss(known)
        for order in itertools.permutations(range(len(p))):
            ours, theirs = (released(each, order, trials) for each in (p, q))
            assert ours.sum() == pytest.approx(1.0, abs=1e-9)
            for epsilon in (0.0, 0.1, math.log(1.35), 0.7, 1.2):
                truth = max(hockey_stick(ours, theirs, more + epsilon), hockey_stick(theirs, ours, more + epsilon))
                bound = mean * known(epsilon)
                assert truth <= bound * (1 + 1e-9) + 1e-12
                if truth > 1e-9:
                    tightest = min(tightest, bound / truth)
    assert tightest < 8  # the bound is about something


def test_mutations_of_the_bound_would_be_caught():
    """Without the cost of the random number, or without the mean, a toy releases more than promised."""
    trials = Trials(5.0)
    answers = np.array([0.6, 0.4]), np.array([0.4, 0.6])  # randomised response: no δ beyond ε = ln 1.5
    known = delta_of([profile_of(*answers)])
    ours, theirs = (released(each, (1, 0), trials) for each in answers)
    assert hockey_stick(theirs, ours, math.log(1.5)) > 5.0 * known(math.log(1.5)) + 0.01  # ρ left out
    crowd = Trials(50.0)
    known = delta_of([profile_of(*CROWDED)])
    ours, theirs = (released(each, (0, 1, 2), crowd) for each in CROWDED)
    once = 0.5 * crowd.loss(known)
    assert hockey_stick(ours, theirs, math.log(1.35) + once) > 50.0 * known(math.log(1.35)) + 1e-4  # R instead of R²
    rare = np.array([0.999, 0.001]), np.array([1.0, 0.0])
    known = delta_of([profile_of(*rare)])
    ours, theirs = (released(each, (0, 1), trials) for each in rare)
    assert hockey_stick(ours, theirs, trials.loss(known) + 0.1) > 4 * known(0.1)  # the mean left out


@pytest.mark.parametrize("law", LAWS)
def test_numbers_of_trials_have_their_law(law):
    trials = Trials(4.0, law)
    chances = [trials.probability(k) for k in range(1, 300)]
    assert sum(chances) == pytest.approx(1.0)
    assert sum(k * chance for k, chance in enumerate(chances, 1)) == pytest.approx(4.0)
    assert trials.missed(5) == pytest.approx(sum(chance * 0.8**k for k, chance in enumerate(chances, 1)))
    assert 0 <= Trials(1e4, law).missed(5) < 1e-3  # and no overflow
    drawn = [trials.draw() for _ in range(2000)]
    assert np.mean(drawn) == pytest.approx(4.0, abs=0.5)
    assert np.mean([each == 1 for each in drawn]) == pytest.approx(chances[0], abs=0.05)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_five_learning_rates_cost_less_than_sixteen_tenths(epsilon):
    """Five trials on average of a Gaussian run, at δ = 10⁻⁵; five that are all released cost 2.4 to 2.8 times one."""
    profile = GaussianProfile(1 / gaussian_sigma(epsilon, 1e-5))
    assert selected_epsilon([profile], Trials(5.0), 1e-5) < 1.5 * epsilon
    assert selected_epsilon([profile], Trials(5.0, "truncated-poisson"), 1e-5) < 1.7 * epsilon
    assert Together((Charge(profile, epsilon, 1e-5),) * 5).epsilon(1e-5) > 2.4 * epsilon


def test_it_costs_less_than_the_theorem_for_renyi_divergences():
    """Theorem 2 of arXiv:2110.03620 for a Gaussian run, minimised over both orders."""
    mu, mean, delta = 0.5, 5.0, 1e-5
    orders = np.linspace(1.05, 300, 3000)
    extra = min(2 * ((1 - 1 / o) * o * mu**2 / 2 + math.log(mean) / o) for o in np.linspace(1, 300, 3000))
    renyi = orders * mu**2 / 2 + extra + math.log(mean) / (orders - 1)
    published = np.min(renyi + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))
    assert gaussian_epsilon(1 / mu, delta) < selected_epsilon([GaussianProfile(mu)], Trials(mean), delta) < published


@pytest.mark.parametrize("profile", [GaussianProfile(0.8), CoinProfile(((50, 1.0),), 0.1)])
def test_points_of_a_selection_say_what_it_costs(profile):
    trials = Trials(5.0)
    exact = selected_epsilon([profile], trials, 1e-5)
    points = selected([profile], trials, 1e-5)
    found = Together((Charge(points, math.inf, 1e-5),)).epsilon(1e-5)
    assert exact * (1 - 1e-9) <= found <= 1.01 * exact


def test_the_worst_of_several_mechanisms_counts():
    small, large = GaussianProfile(0.3), GaussianProfile(0.6)
    trials = Trials(3.0)
    assert selected_epsilon([small, large], trials, 1e-5) == selected_epsilon([large], trials, 1e-5)
    assert selected_epsilon([PointProfile(((1.0, 1e-3),), 1e-5)], trials, 1e-5) == math.inf
    lossy = selected([PointProfile(((1.0, 1e-4),))], trials, 1e-5)  # more is always given away than δ allows
    assert Together((Charge(lossy, math.inf, 1e-5),)).epsilon(1e-5) == math.inf
    assert worst_of([small, large], 1e-5) == large
    coin, points = CoinProfile(((1, 0.35),), 0.6), PointProfile(((0.5, 0.4), (2.0, 1e-3), (4.0, 1e-8)))
    together, known = worst_of([coin, points], 1e-5), delta_of([coin])
    for epsilon in (0.1, 0.5, 1.0, 2.0, 3.0):
        exact = coin_delta(coin.rounds, coin.rate, epsilon)  # the larger of both directions
        assert exact <= known(epsilon) <= exact * 1.001 + 1e-9
        for each in (coin, points):
            assert delta_of([each])(epsilon) <= delta_of([together])(epsilon) + 1e-12


def test_the_failure_probabilities_of_all_kinds_of_trials_count():
    """A trial may be of any kind, so every certificate has to hold (found by a review)."""
    kinds = [GaussianProfile(0.5, 2e-6), GaussianProfile(0.5, 3e-6)]
    sure, trials = GaussianProfile(0.5), Trials(3.0)
    assert selected_epsilon(kinds, trials, 1e-5) == pytest.approx(selected_epsilon([sure], trials, 5e-6))
    for found in (selected(kinds, trials, 1e-5), worst_of(kinds, 1e-5)):
        assert found.failure == pytest.approx(5e-6)
    points = [PointProfile(((1.0, 1e-3),), 2e-6), PointProfile(((1.1, 1e-3),), 3e-6)]
    assert worst_of(points, 1e-5).failure == pytest.approx(5e-6)


@pytest.mark.parametrize("wrong", [{"mean": 1.0}, {"mean": math.nan}, {"mean": 1e9}, {"mean": 5, "law": "fixed"}])
def test_other_numbers_of_trials_are_refused(wrong):
    with pytest.raises(QuellError):
        Trials(**wrong)
