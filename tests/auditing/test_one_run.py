"""What guesses of coins prove: never more than is true, and as much as theorems, programs and exact tails allow."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.stats import binom, norm

from quell.auditing import independent_bound, lower_bound, one_run
from quell.auditing.one_run import too_many
from quell.privacy import gaussian_epsilon, gaussian_sigma


def toy_scores(random, coins, epsilon, delta):
    """The worst (ε, δ)-DP answers: the coin itself with probability δ, else randomised response; their evidence."""
    told = np.where(random.random(len(coins)) < 1 / (1 + math.exp(-epsilon)), coins, ~coins)
    given_away = random.random(len(coins)) < delta
    return np.where(np.where(given_away, coins, told), 1.0, -1.0) * np.where(given_away, 50.0, epsilon)


def test_an_independent_bound_is_true_as_often_as_it_says():
    """For a mechanism that attains its promise nothing is proven beyond it, however scores choose the guesses."""
    random, times = np.random.default_rng(1), 1000
    for count, delta, epsilon in ((100, 0.02, 1.0), (400, 0.0, 0.5)):
        wrong = 0
        for _ in range(times):
            coins = random.random(count) < 0.5
            wrong += independent_bound(toy_scores(random, coins, epsilon, delta), coins, delta, 0.8).epsilon > epsilon
        assert wrong <= 0.2 * times + 3 * math.sqrt(times * 0.2 * 0.8)
        assert wrong > 0.02 * times  # and hardly anything is wasted


@pytest.mark.parametrize("delta", [0.0, 0.02, 0.1])
def test_an_independent_bound_uses_up_its_failure_probability_and_no_more(delta):
    """Exactly: under the ε that so many correct guesses of thirty prove, so many have a probability of 5% at most."""
    count, failure = 30, 0.05
    for correct in range(24, count + 1):
        coins = np.arange(count) < correct
        found = independent_bound(np.full(count, 1.0), coins, delta, 1 - failure)
        assert (found.guesses, found.correct) == (count, correct)
        rate, given_away = 1 / (1 + math.exp(-found.epsilon)), np.arange(count + 1)
        tails = binom.sf(correct - given_away - 1, count - given_away, rate)
        chance = float(binom.pmf(given_away, count, delta) @ tails)
        assert chance <= failure * (1 + 1e-9)
        assert delta or not found.epsilon or chance > 0.89 * failure


def test_scores_choose_the_surest_guesses():
    """Half of ε = 8 from 50,000 canaries whose scores are the logarithms of likelihood ratios."""
    random, mu = np.random.default_rng(2), 1 / gaussian_sigma(8.0, 1e-5)
    coins = random.random(50_000) < 0.5
    found = independent_bound(mu * (random.normal(size=50_000) + mu * coins) - mu**2 / 2, coins, 1e-5)
    assert 4.0 < found.epsilon < 8.0
    assert 400 < found.guesses < 1000


@pytest.mark.slow
@pytest.mark.parametrize("gaussian", [False, True])
def test_a_bound_is_true_as_often_as_it_says(gaussian):
    """Randomised response with ε = 1, or normal noise with μ = 0.7: the attacker cannot do better than that."""
    random, wrong, times = np.random.default_rng(1), 0, 300
    delta = 1e-3 if gaussian else 0.0
    truth = gaussian_epsilon(1 / 0.7, delta) if gaussian else 1.0
    for _ in range(times):
        coins = random.random(200) < 0.5
        told = random.normal(size=200) + 0.7 * coins if gaussian else toy_scores(random, coins, 1.0, 0.0)
        ties = 1e-3 * random.random(200)
        wrong += lower_bound(told + ties, coins, delta, 0.8, gaussian=gaussian).epsilon > truth
    assert wrong <= 0.2 * times + 3 * math.sqrt(times * 0.2 * 0.8)


def most_likely(canaries, guesses, correct, epsilon, delta):
    """The largest P[at least so many are right] under all constraints of Proof 20, by linear programming."""
    law = np.arange(guesses + 1)
    rows, limits = [], []
    for first in range(1, guesses + 1):
        hits = np.where(law >= first, law, 0) / canaries
        alarms = np.where(law >= first - 1, guesses - law, 0) / canaries
        rows += [hits - math.exp(epsilon) * alarms, hits - math.exp(-epsilon) * alarms]
        limits += [delta, 1 - math.exp(-epsilon) * (1 - delta)]
    found = linprog(-(law >= correct).astype(float), rows, limits, np.ones((1, guesses + 1)), [1.0], method="highs")
    return -found.fun


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "epsilon", "delta"),
    [(20, 20, 17, 0.7, 0.0), (50, 20, 18, 1.0, 1e-3), (30, 30, 27, 1.5, 1e-2), (12, 6, 6, 0.3, 0.1)],
)
def test_correct_guesses_are_as_unlikely_as_a_linear_program_says(canaries, guesses, correct, epsilon, delta):
    exact = most_likely(canaries, guesses, correct, epsilon, delta)
    test = one_run._promise_test(epsilon, delta)
    assert not too_many(canaries, guesses, correct, exact * (1 - 1e-5), test)
    assert too_many(canaries, guesses, correct, exact * (1 + 1e-5), test)


def best_mechanism(canaries, guesses, correct, epsilon, delta):
    """The largest P[at least so many are right] of any mechanism with any attacker, by a linear program over both.

    Released is the attacker's answer: which coins are guessed, and how. Every coin that is turned over changes the law
    of answers by (ε, δ) at most; t is what exceeds e^ε.
    """
    coins = list(itertools.product((0, 1), repeat=canaries))
    answers = [
        dict(zip(chosen, guess, strict=True))
        for chosen in itertools.combinations(range(canaries), guesses)
        for guess in itertools.product((0, 1), repeat=guesses)
    ]
    pairs = [(a, b) for a in coins for b in coins if sum(x != y for x, y in zip(a, b, strict=True)) == 1]
    size = len(coins) * len(answers)
    at = {(x, g): place for place, (x, g) in enumerate(itertools.product(coins, range(len(answers))))}
    rows, limits = [], []
    for number, (ours, theirs) in enumerate(pairs):
        beyond = size + number * len(answers)
        for g in range(len(answers)):
            rows.append({at[ours, g]: 1.0, at[theirs, g]: -math.exp(epsilon), beyond + g: -1.0})
            limits.append(0.0)
        rows.append(dict.fromkeys(range(beyond, beyond + len(answers)), 1.0))
        limits.append(delta)
    width = size + len(pairs) * len(answers)
    places = [(row, column, value) for row, each in enumerate(rows) for column, value in each.items()]
    row, column, value = zip(*places, strict=True)
    bounded = coo_array((value, (row, column)), shape=(len(rows), width))
    whole = np.zeros((len(coins), width))
    gain = np.zeros(width)
    for (x, g), place in at.items():
        whole[coins.index(x), place] = 1.0
        gain[place] = -(sum(x[j] == told for j, told in answers[g].items()) >= correct) / len(coins)
    return -linprog(gain, A_ub=bounded, b_ub=limits, A_eq=whole, b_eq=np.ones(len(coins))).fun


@pytest.mark.parametrize(("canaries", "guesses", "correct"), [(1, 1, 1), (2, 2, 2), (3, 3, 2), (3, 3, 3), (3, 2, 2)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 0.05), (0.1, 0.2)])
def test_no_mechanism_and_no_attacker_do_better(canaries, guesses, correct, epsilon, delta):
    most = best_mechanism(canaries, guesses, correct, epsilon, delta)
    assert not too_many(canaries, guesses, correct, most * (1 - 1e-6), one_run._promise_test(epsilon, delta))
    assert most > 0.7 or too_many(canaries, guesses, correct, 1.35 * most, one_run._promise_test(epsilon, delta))


def critical(canaries, guesses, failure, test):
    return next((c for c in range(1, guesses + 1) if too_many(canaries, guesses, c, failure, test)), guesses + 1)


@pytest.mark.parametrize("failure", [0.1, 0.01])
def test_true_promises_are_refuted_as_seldom_as_stated(failure):
    """Laws of the number of correct guesses that are known: coins one by one, all at once, and under normal noise."""
    epsilon, delta, count = 0.8, 5e-3, 40
    answers, rate = np.arange(count + 1), 1 / (1 + math.exp(-epsilon))
    single = binom.pmf(answers, count, delta + (1 - delta) * rate)
    at_once = (1 - delta) * binom.pmf(answers, count, rate) + delta * (answers == count)
    limit = critical(count, count, failure, one_run._promise_test(epsilon, delta))
    for law in (single, at_once):
        assert law[limit:].sum() <= failure
    assert at_once[limit - 2 :].sum() > failure  # two guesses fewer would be too few
    for mu in (0.3, 1.5):
        test = one_run._gaussian_test(gaussian_epsilon(1 / mu, 1e-5), 1e-5)
        normal = binom.pmf(answers, count, norm.cdf(mu / 2))
        limit = critical(count, count, failure, test)
        assert normal[limit:].sum() <= failure
        assert normal[limit - 7 :].sum() > failure


def test_a_gaussian_curve_proves_more():
    """As docs/auditing.md says, for 1,000 canaries at ε = 8."""
    random, found = np.random.default_rng(3), []
    for _ in range(3):
        coins = random.random(1000) < 0.5
        scores = random.normal(size=1000) + coins / gaussian_sigma(8.0, 1e-5)
        found.append([lower_bound(scores, coins, 1e-5, gaussian=each).epsilon for each in (False, True)])
    plain, curved = np.mean(found, axis=0)
    assert 1.3 * plain < curved < 1.5 * plain < 8.0


def test_black_box_scores_of_a_model_that_remembers():
    """Losses of canaries that were trained on, against those that were not, from any model at all."""
    random = np.random.default_rng(0)
    coins = random.random(1000) < 0.5
    losses = random.normal(size=1000) - 3.0 * coins
    assert lower_bound(-losses, coins, 1e-5).epsilon > 1.5
