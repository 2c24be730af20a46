"""Poisson and cyclic Poisson accounting: closed forms, and what composition must preserve."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quell import privacy, strategy, workload
from quell.errors import QuellError
from quell.privacy import gaussian_delta, gaussian_sigma
from quell.privacy.coins import coin_bound, coin_delta, coin_epsilon
from quell.privacy.subsampled import CoinAccountant, _columns
from quell.schemes import CyclicPoisson, Poisson


def identity(scheme):
    return strategy.build("identity", workload.prefix(scheme.steps), scheme.participation)


@pytest.mark.parametrize("rate", [0.01, pytest.param(0.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("epsilon", [pytest.param(0.05, marks=pytest.mark.slow), 0.5])
def test_one_step_has_a_closed_form(rate, epsilon):
    """δ_remove(ε) = rate·δ_Gauss(ln(1 + (e^ε − 1)/rate)) for one subsampled step, the larger direction."""
    scheme = Poisson(1, rate)
    found = privacy.delta(identity(scheme), scheme, 1.0, epsilon)
    exact = rate * gaussian_delta(1.0, math.log1p(math.expm1(epsilon) / rate))
    assert found.bracket[0] <= exact * (1 + 1e-6)
    assert exact * (1 - 1e-9) <= found.delta <= exact * 1.001 + 1e-12


def test_rate_one_is_the_gaussian_mechanism():
    scheme = Poisson(9, 1.0)
    assert privacy.delta(identity(scheme), scheme, 4.0, 1.0).delta == pytest.approx(
        gaussian_delta(4 / 3, 1.0), rel=1e-3
    )


def test_groups_cost_what_fewer_rounds_at_a_higher_rate_cost():
    """Columns scaled by 1/2 need half the noise: the accountant knows only noise over column norm."""
    scheme = CyclicPoisson.of_fraction(20, groups=2, fraction=0.05)
    built = strategy.build("bsr", workload.prefix(20), scheme.participation, bands=2)
    norm = float(built.column_norms.max())
    same = Poisson(10, 0.1)
    assert privacy.delta(built, scheme, 2 * norm, 1.0).delta == pytest.approx(
        privacy.delta(identity(same), same, 2.0, 1.0).delta, rel=1e-6
    )


def test_calibration_is_tight():
    scheme = Poisson(50, 0.05)
    found = privacy.calibrate(identity(scheme), scheme, 1.0, 1e-6)
    assert found.failure_probability == 0
    assert found.bracket[1] <= 1e-6
    assert privacy.delta(identity(scheme), scheme, found.noise_multiplier * 0.998, 1.0).delta > 1e-6
    assert privacy.epsilon(identity(scheme), scheme, found.noise_multiplier, 1e-6).epsilon == pytest.approx(
        1.0, rel=5e-3
    )


@pytest.mark.parametrize(("rounds", "epsilon", "wanted"), [(20_000, 8.0, 1e-11), (4_000, 8.0, 1e-9)])
def test_rounding_of_many_rounds_never_understates(rounds, epsilon, wanted):
    """At rate 1 the exact answer is known, and dp-accounting's own comes out below it where δ is tiny."""
    sigma = gaussian_sigma(epsilon, wanted) * math.sqrt(rounds)
    scheme = Poisson(rounds, 1.0)
    assert privacy.delta(identity(scheme), scheme, sigma, epsilon).delta >= wanted * (1 - 1e-8)
    with pytest.raises(QuellError, match="not certified"):
        privacy.certify(identity(scheme), scheme, sigma * 0.9995, epsilon, wanted)


@pytest.mark.parametrize(
    ("rounds", "rate", "sigma", "epsilon"),
    [
        pytest.param(3900, 1 / 390, 0.495, 8.0, marks=pytest.mark.slow),
        pytest.param(780, 5 / 390, 0.7, 4.0, marks=pytest.mark.slow),
        (100, 0.3, 3.0, 2.0),
        (10, 1.0, 3.0, 4.0),
        (90, 0.1, 2, 0.5),
    ],
)
def test_estimates_for_searches_agree_with_the_library(rounds, rate, sigma, epsilon):
    accountant = CoinAccountant(((rounds, 1.0),), rate)
    library = accountant.certify(sigma, epsilon, 0.0)
    assert library.lower > 0  # only the library gives one
    assert library.lower <= accountant.estimate(sigma, epsilon, careful=True)[0] <= library.upper * 1.001
    assert coin_delta([(rounds, sigma)], rate, epsilon) == pytest.approx(library.upper, rel=0.01)
    assert coin_epsilon([(rounds, sigma)], rate, library.upper) == pytest.approx(epsilon, rel=0.002)


@pytest.mark.parametrize("sigma", [pytest.param(0.3, marks=pytest.mark.slow), 0.03, 1e-3, 1e-6, 1e6])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_any_noise_is_priced_within_bounded_work(sigma, rate, monkeypatch):
    """Little noise makes losses large: the library's grid had a billion cells at 0.03, and took minutes at 0.3."""
    asked, composed = [], CoinAccountant._composed
    monkeypatch.setattr(CoinAccountant, "_composed", lambda *given: (asked.append(given), composed(*given))[1])
    scheme = Poisson(60, rate)
    found = privacy.delta(identity(scheme), scheme, sigma, 2.0)
    assert bool(asked) == (sigma >= 0.3)
    present = 1 - (1 - rate) ** 60  # who was there in any step is seen, where there is no noise
    assert found.delta >= (0.9 * present if sigma < 0.1 else 0.0)
    assert found.delta <= gaussian_delta(sigma / math.sqrt(60), 2.0) * (1 + 1e-6)


def test_estimates_for_searches_see_both_directions():
    """Enumerated: one round, where losses need no composition."""
    sigma, rate, epsilon = 1.0, 0.5, 0.3
    y = np.linspace(-12, 13, 400_001)
    without = np.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)
    present = (1 - rate) * without + rate * np.exp(-((y - 1) ** 2) / 2) / math.sqrt(2 * math.pi)
    both = (
        np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), y) for p, q in ((present, without), (without, present))
    )
    assert coin_delta([(1, sigma)], rate, epsilon) == pytest.approx(max(both), rel=1e-3)


UNLIKE = [(40, 1.0), (60, 2.0), (30, 0.8)]  # rounds, and their noise in units of what an example adds


def library(rounds, rate, epsilon, pessimistic, spacing=1e-3):
    """The same composition by dp-accounting."""
    from dp_accounting.pld import privacy_loss_distribution

    together = None
    for count, sigma in rounds:
        once = privacy_loss_distribution.from_gaussian_mechanism(
            sigma,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=spacing,
            sampling_prob=rate,
            use_connect_dots=pessimistic,
        ).self_compose(count)
        together = once if together is None else together.compose(once)
    return together.get_delta_for_epsilon(epsilon)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_unlike_rounds_agree_with_the_library(epsilon):
    found = coin_bound(UNLIKE, 0.05, epsilon)
    assert library(UNLIKE, 0.05, epsilon, False) <= found <= library(UNLIKE, 0.05, epsilon, True) * (1 + 1e-4)


@pytest.mark.parametrize(("rate", "epsilon"), [(0.2, 0.1), (0.2, 1.0), (0.9, 1.0), (0.01, 0.3)])
def test_unlike_rounds_are_never_below_an_integral(rate, epsilon):
    """Two rounds of different noise, δ integrated over their outputs on a fine grid, in both directions."""
    densities = []
    for sigma in (0.7, 1.9):
        y = np.linspace(-10 * sigma, 1 + 10 * sigma, 3001)
        step = y[1] - y[0]
        without, entered = (
            np.exp(-(((y - mean) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi)) for mean in (0, 1)
        )
        densities.append((step * without, step * ((1 - rate) * without + rate * entered)))
    without, ours = (np.outer(densities[0][i], densities[1][i]) for i in (0, 1))
    exact = max(
        np.maximum(ours - math.exp(epsilon) * without, 0).sum(), np.maximum(without - math.exp(epsilon) * ours, 0).sum()
    )
    found = coin_bound([(1, 0.7), (1, 1.9)], rate, epsilon)
    assert exact * (1 - 1e-6) <= found <= exact * (1 + 1e-4) + 1e-12


@pytest.mark.parametrize(("rounds", "epsilon"), [([(4, 2.0), (3, 5.0)], 1.0), ([(900, 60.0), (50, 9.0)], 4.0)])
def test_unlike_rounds_that_are_always_entered_are_one_gaussian(rounds, epsilon):
    exact = gaussian_delta(1 / math.sqrt(sum(count / sigma**2 for count, sigma in rounds)), epsilon)
    assert exact <= coin_bound(rounds, 1.0, epsilon) <= exact * 1.001 + 1e-10


@pytest.mark.parametrize(
    ("rate", "sigma", "epsilon"), [(1e-3, 0.3, 4.0), (0.5, 3.0, 0.2), (0.01, 1.0, 0.05), (1.0, 1.0, 2)]
)
def test_one_round_has_a_closed_form(rate, sigma, epsilon):
    exact = rate * gaussian_delta(sigma, math.log1p(math.expm1(epsilon) / rate))
    assert exact <= coin_bound([(1, sigma)], rate, epsilon) <= exact * 1.0001 + 1e-12


def test_what_falls_off_the_grid_is_part_of_the_bound(monkeypatch):
    """With a grid that ends far too early the bound says so."""
    from quell.privacy import losses

    monkeypatch.setattr(losses, "_TAIL", 0.3)
    exact = gaussian_delta(1.0, 3.0)
    assert coin_delta([(4, 2.0)], 1.0, 3.0) < exact < coin_bound([(4, 2.0)], 1.0, 3.0)


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_columns_of_an_accountant_are_at_least_those_of_every_group(groups):
    norms = np.random.default_rng(0).uniform(0.1, 2.0, 50)
    columns = _columns(norms, groups)
    priced = np.sort(np.concatenate([np.full(count, norm) for count, norm in columns]))[::-1]
    for group in range(groups):
        own = np.sort(norms[group::groups])[::-1]
        assert np.all(own <= priced[: len(own)])
    assert len(columns) <= 24
    assert priced[0] == norms.max()


@pytest.mark.slow
def test_a_diagonal_strategy_is_priced_column_by_column():
    """Priced at its largest column it would need a sixth more noise."""
    scheme = Poisson(40, 0.1)
    built = strategy.build("diagonal", workload.prefix(40), scheme.participation)
    found = privacy.calibrate(built, scheme, 2.0, 1e-5)
    exact = [(1, found.noise_multiplier / norm) for norm in built.column_norms]
    assert 0.8e-5 < coin_delta(exact, 0.1, 2.0) <= 1e-5
    largest = CoinAccountant(((40, float(built.column_norms.max())),), 0.1)
    assert largest.estimate(found.noise_multiplier, 2.0, False)[0] > 4e-5
    assert privacy.estimate(built, scheme, 2.0, 1e-5, effort=1).noise_multiplier == pytest.approx(
        found.noise_multiplier, rel=3e-3
    )
    with pytest.raises(QuellError, match="is not certified"):
        privacy.certify(built, scheme, found.noise_multiplier * 0.99, 2.0, 1e-5)


def test_columns_that_hardly_differ_count_as_equal():
    scheme = CyclicPoisson.of_fraction(200, groups=2, fraction=0.05)
    built = strategy.build("bsr", workload.prefix(200), scheme.participation, bands=2)
    assert np.ptp(built.column_norms) > 0
    assert scheme.account(built).columns == ((100, pytest.approx(built.column_norms.max())),)
