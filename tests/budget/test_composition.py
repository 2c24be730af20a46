"""ε of several runs: against brute force, closed forms and one long run; never below, within 2% where runs repeat."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from quell import privacy, strategy, workload
from quell.privacy import composition, gaussian_delta, gaussian_epsilon
from quell.privacy.coins import coin_delta, coin_epsilon
from quell.privacy.composition import Charge, Together, changed, dominating_gaussian
from quell.privacy.profile import CoinProfile, GaussianProfile, PointProfile, both_ways
from quell.schemes import BallsInBins, Cyclic


def charged(profile, epsilon=1.0, delta=1e-5):
    return Charge(profile, epsilon, delta)


def curve_of(mu, points=23, smallest=1e-8):
    """As many points of a Gaussian curve as a certificate has."""
    top = gaussian_epsilon(1 / mu, smallest)
    known = [float(e) for e in (*np.linspace(0, top, points), 1.5 * top, 2 * top, 3 * top)]
    return PointProfile(tuple((e, gaussian_delta(1 / mu, e)) for e in known))


@pytest.mark.parametrize("runs", [1, 2, 12])
def test_gaussian_runs_add_in_squares(runs):
    mus = np.linspace(0.2, 1.0, runs)
    found = Together(tuple(charged(GaussianProfile(float(mu))) for mu in mus))
    exact = gaussian_epsilon(1 / math.sqrt(np.sum(mus**2)), 1e-6)
    assert exact <= found.epsilon(1e-6) <= exact * (1 + 1e-7)
    left = 1e-6 if runs == 1 else 0.9e-6  # a tenth of δ is kept for what other runs may lose
    reserved = gaussian_epsilon(1 / math.sqrt(np.sum(mus**2)), left)
    assert reserved <= found.adaptive_epsilon(1e-6) <= reserved * (1 + 1e-7)


def test_how_delta_is_shared_cannot_depend_on_earlier_results():
    """What certificates may lose is counted against a share of its own, however little noise the other runs have."""
    loose = charged(GaussianProfile(1e-3, failure=0.06e-6))
    assert Together((loose,)).adaptive_epsilon(1e-6) < 0.1
    assert Together((loose, loose)).adaptive_epsilon(1e-6) == math.inf
    assert Together((loose, loose)).epsilon(1e-6) < 0.1


def brute_force(laws, epsilon):
    """δ of independent runs with few outcomes each, over all combinations; laws list (P, Q) arrays."""
    total = 0.0
    for outcome in itertools.product(*(range(len(p)) for p, _ in laws)):
        ours = math.prod(p[i] for (p, _), i in zip(laws, outcome, strict=True))
        theirs = math.prod(q[i] for (_, q), i in zip(laws, outcome, strict=True))
        total += max(0.0, ours - math.exp(epsilon) * theirs)
    return total


def responses(epsilon, delta):
    """Randomised response that gives everything away with probability δ: the worst (ε, δ)-DP mechanism."""
    yes, no = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon)), (1 - delta) / (1 + math.exp(epsilon))
    return np.array([yes, no, delta, 0.0]), np.array([no, yes, 0.0, delta])


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.2])
def test_promises_alone_compose_as_randomised_response_does(epsilon):
    """All that (ε, δ) says, in every combination of outcomes, with different runs."""
    promises = [(0.4, 1e-3), (0.4, 1e-3), (1.0, 1e-2), (0.7, 0.0)]
    found = Together(tuple(charged(PointProfile((each,)), *each) for each in promises))
    exact = brute_force([responses(*each) for each in promises], epsilon)
    assert exact <= found.delta(epsilon) <= exact * 1.001 + 1e-10


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_runs_of_all_kinds_compose_as_their_outcomes_do(epsilon):
    """A Gaussian run, a run of coins and a promise, on fine cells of their outputs."""
    edges = np.linspace(-8, 9, 400)
    with_, without = (np.diff(norm.cdf(edges, mean)) for mean in (1.0, 0.0))
    coin = 0.3 * with_ + 0.7 * without, without
    promise = responses(0.5, 0.01)
    ours, theirs = (
        np.multiply.outer(np.multiply.outer(g, c), r).ravel()
        for g, c, r in zip((with_, without), coin, promise, strict=True)
    )
    exact = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((ours, theirs), (theirs, ours)))
    kinds = GaussianProfile(1.0), CoinProfile(((1, 1.0),), 0.3), PointProfile(((0.5, 0.01),))
    found = Together(tuple(charged(kind) for kind in kinds)).delta(epsilon)
    assert exact * (1 - 1e-9) <= found <= exact * 1.01  # cells hide a little of what the outputs tell


@pytest.mark.parametrize("runs", [2, 10])
def test_poisson_runs_are_one_longer_run(runs):
    profile = CoinProfile(((200, 0.8),), 0.02)
    together = Together((charged(profile, coin_epsilon(profile.rounds, profile.rate, 1e-5)),) * runs)
    found, exact = together.epsilon(1e-5), coin_epsilon(((200 * runs, 0.8),), 0.02, 1e-5)
    assert exact * (1 - 1e-9) <= found <= 1.001 * exact
    assert found < together.adaptive_epsilon(1e-5) < 1.7 * found  # heavy tails cost most


@pytest.mark.parametrize("mu", [0.3, 1.7])
@pytest.mark.parametrize("runs", [2, 5, 30])
def test_certified_points_cost_at_most_two_percent(mu, runs):
    """For runs whose truth is known: points of a Gaussian curve."""
    together = Together((charged(curve_of(mu)),) * runs)
    exact = gaussian_epsilon(1 / (mu * math.sqrt(runs)), 1e-5)
    assert exact <= together.epsilon(1e-5) <= 1.02 * exact
    assert together.epsilon(1e-5) <= together.adaptive_epsilon(1e-5) <= 1.03 * exact


@pytest.mark.parametrize(
    ("family", "options"),
    [pytest.param("identity", {}, marks=pytest.mark.slow), pytest.param("bsr", {"bands": 4}, marks=pytest.mark.slow)],
)
def test_balls_in_bins_compose_within_two_percent_of_their_own_losses(family, options):
    """Two bins: the losses of one run from cells of its output, along both bins, and those of four by sums.

    Independent noise has an exact curve; the bins of bsr overlap, and its points are certified by draws.
    """
    scheme, runs = BallsInBins(20, 2), 4
    built = strategy.build(family, workload.prefix(20), scheme.participation, **options)
    guarantee = privacy.calibrate(built, scheme, 1.5, 1e-5)
    found = Together((charged(privacy.profile(built, scheme, guarantee), 1.5, 1e-5),) * runs).epsilon(1e-5)
    moved = np.array([built.matrix()[:, bin::2].sum(axis=1) for bin in (0, 1)]) / guarantee.noise_multiplier
    first, second = np.linalg.cholesky(moved @ moved.T)  # the two bins in the plane that they span
    x, y = np.meshgrid(*(np.linspace(-8, 8 + abs(first).max() + abs(second).max(), 801),) * 2)
    ratio = sum(0.5 * np.exp(m[0] * x + m[1] * y - 0.5 * m @ m) for m in (first, second))
    without = np.exp(-0.5 * (x**2 + y**2))
    without /= without.sum()
    loss = np.log(ratio)
    truth = max(_epsilon(without * ratio, loss, runs), _epsilon(without, -loss, runs))
    assert truth * (1 - 1e-3) <= found <= 1.02 * truth  # losses are rounded to a grid


def _epsilon(mass, loss, runs, width=1e-3, delta=1e-5):
    """ε of runs whose loss has this law, by convolving it with itself."""
    places = np.rint(loss / width).astype(int).ravel()
    once = np.bincount(places - places.min(), mass.ravel())
    size = runs * len(once)
    total = np.maximum(np.fft.irfft(np.fft.rfft(once, size) ** runs, size), 0.0)
    losses = width * (runs * places.min() + np.arange(size))
    epsilons = np.arange(1.5, 5.0, 0.002)
    deltas = np.array([-np.expm1(e - losses[losses > e]) @ total[losses > e] for e in epsilons])
    return float(epsilons[np.argmax(deltas <= delta)])


def test_a_dominating_gaussian_dominates():
    profile, slack = CoinProfile(((300, 0.9),), 0.05), 1e-8
    mu, lost = dominating_gaussian(profile, slack)
    assert lost == slack
    gaps = [
        slack + gaussian_delta(1 / mu, e) - coin_delta(profile.rounds, profile.rate, e) for e in np.linspace(0, 12, 40)
    ]
    assert min(gaps) >= -1e-12
    smaller = [
        slack + gaussian_delta(1 / (0.99 * mu), e) - coin_delta(profile.rounds, profile.rate, e)
        for e in np.linspace(0, 12, 40)
    ]
    assert min(smaller) < 0
    _, lost = dominating_gaussian(PointProfile(((1.0, 1e-3),)), 1e-9)
    assert lost >= 1e-3  # what is given away whatever ε is, no Gaussian has
    assert dominating_gaussian(PointProfile(((50.0, 1e-6),)), 1e-9)[0] == math.inf  # no μ is known to be enough


def test_losses_beyond_all_numbers_are_infinite():
    found = Together((charged(PointProfile(((1e4, 1e-6),)), 1e4, 1e-6),) * 2)
    assert found.delta(500.0) == 1.0
    assert found.epsilon(1e-5) == 2e4  # by adding up promises
    assert found.adaptive_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("epsilon", [0.5, 40.0, 300.0])
def test_losses_that_are_almost_one_number_compose(epsilon):
    """At large ε a promise alone means a loss of ε almost surely."""
    together = Together((charged(PointProfile(((epsilon, 1e-6),)), math.inf, 1e-6),) * 2)
    assert 2 * epsilon * (1 - 1e-3) <= together.epsilon(1e-5) <= 2 * epsilon * (1 + 1e-3)
    assert together.adaptive_epsilon(1e-5) > 2 * epsilon
    mu, _ = dominating_gaussian(PointProfile(((epsilon, 1e-6),)), 1e-9)
    assert math.isinf(mu) or gaussian_delta(1 / mu, epsilon) >= 1e-6


def test_plans_chosen_by_earlier_losses_can_cost_more_than_any_fixed_order():
    """Why there are two answers: after a lucky first run a gambler takes the mechanism that is worse there.

    Two curves that cross, and a first run of randomised response; δ of the best choice for each outcome.
    """
    first, flat, steep = (0.5, 0.0), (0.3, 0.02), (1.0, 0.0)
    (p, q), epsilon = responses(*first), 0.9

    def second(choice, at):
        ours, theirs = responses(*choice)
        return sum(max(0.0, a - math.exp(at) * b) for a, b in zip(ours, theirs, strict=True))

    losses = [math.log(a / b) for a, b in zip(p[:2], q[:2], strict=True)]
    gambled = sum(a * max(second(c, epsilon - x) for c in (flat, steep)) for a, x in zip(p[:2], losses, strict=True))
    fixed = [
        Together((charged(PointProfile((first,))), charged(PointProfile((choice,))))).delta(epsilon)
        for choice in (flat, steep)
    ]
    assert gambled > 1.01 * max(fixed)


@pytest.mark.parametrize(
    "profile",
    [
        PointProfile(((0.5, 1e-9),)),  # nothing happens beyond ε = 0.5
        CoinProfile(((1, 0.35),), 0.6),
        CoinProfile(((40, 2.0),), 0.5),
    ],
)
def test_a_dominating_gaussian_dominates_in_both_directions_from_the_start(profile):
    mu, lost = dominating_gaussian(profile, 1e-8)
    for epsilon in np.linspace(0, 3, 60):
        needed = max(each.delta(float(epsilon)) for each in both_ways(profile))
        assert needed <= lost + gaussian_delta(1 / mu, float(epsilon)) + 1e-12


@pytest.mark.parametrize("epsilon", [1.0, 2.5])
def test_two_steps_between_neighbours(epsilon):
    """A chain of three laws, by outcomes: each step keeps a promise, both steps together what `changed` says."""
    mu = 0.6
    edges = np.linspace(-9, 9, 4000)
    first, _, last = (np.diff(norm.cdf(edges, place * mu)) for place in range(3))
    exact = np.maximum(last - math.exp(epsilon) * first, 0).sum()
    gaussian = changed(charged(GaussianProfile(mu)))
    assert Together((gaussian,)).delta(epsilon) == pytest.approx(exact, rel=1e-3)
    points = changed(charged(curve_of(mu, points=65), 3.0, 1e-5))
    assert exact <= Together((points,)).delta(epsilon) <= 1.05 * exact  # chords between points
    assert points.epsilon == 6.0
    assert points.delta == pytest.approx((1 + math.exp(3.0)) * 1e-5)
    assert changed(charged(PointProfile(((1.0, 1e-3),), 1e-7))).profile.failure == 1e-7


def test_failure_probabilities_are_part_of_the_total():
    points = curve_of(1.0).points
    sure, unsure = (Together((charged(PointProfile(points, failure)),) * 3) for failure in (0.0, 1e-6))
    assert unsure.delta(3.0) == pytest.approx(sure.delta(3.0) + 3e-6)
    assert unsure.epsilon(1e-5) > sure.epsilon(1e-5)
    assert unsure.adaptive_epsilon(1e-5) > sure.adaptive_epsilon(1e-5)
    normal = Together((charged(GaussianProfile(0.5, 1e-6)), charged(GaussianProfile(0.3, 2e-6))))
    assert normal.epsilon(1e-5) == pytest.approx(gaussian_epsilon(1 / math.hypot(0.5, 0.3), 7e-6), rel=1e-7)
    assert normal.epsilon(3e-6) == math.inf
    hopeless = Together((charged(PointProfile(points, 1e-5)),) * 3)
    assert hopeless.epsilon(1e-5) == hopeless.adaptive_epsilon(1e-5) == math.inf


def test_one_run_is_its_promise_and_none_is_nothing():
    built = strategy.build("identity", workload.prefix(20), Cyclic(20, 10).participation)
    guarantee = privacy.calibrate(built, Cyclic(20, 10), 2.0, 1e-5)
    profile = privacy.profile(built, Cyclic(20, 10), guarantee)
    assert Together((charged(profile, 2.0, 1e-5),)).epsilon(1e-5) == pytest.approx(2.0, rel=1e-8)
    assert Together((charged(profile, 2.0, 1e-5),)).epsilon(1e-5) <= 2.0
    assert Together(()).epsilon(1e-5) == Together(()).delta(0.0) == 0.0
    hopeless = PointProfile(((1.0, 1e-3),))
    assert Together((charged(hopeless, 1.0, 1e-3),) * 2).epsilon(1e-5) == math.inf
    assert composition.dominating_gaussian(GaussianProfile(2.0), 0.1) == (2.0, 0.0)
