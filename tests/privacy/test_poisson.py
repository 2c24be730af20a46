"""Poisson and cyclic Poisson accounting: closed forms, and what composition must preserve."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quell import privacy, strategy, workload
from quell.errors import QuellError
from quell.privacy import gaussian_delta, gaussian_sigma
from quell.privacy.coins import coin_delta, coin_epsilon
from quell.privacy.poisson import PoissonAccountant
from quell.sampling import CyclicPoisson, Poisson


def identity(scheme):
    return strategy.build("identity", workload.prefix(scheme.steps), scheme.participation)


@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
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
        (3900, 1 / 390, 0.495, 8.0),
        (780, 5 / 390, 0.7, 4.0),
        (100, 0.3, 3.0, 2.0),
        (10, 1.0, 3.0, 4.0),
        (90, 0.1, 2, 0.5),
    ],
)
def test_estimates_for_searches_agree_with_the_library(rounds, rate, sigma, epsilon):
    careful, _ = PoissonAccountant(((rounds, 1.0),), rate).estimate(sigma, epsilon, careful=True)
    assert coin_delta([(rounds, sigma)], rate, epsilon) == pytest.approx(careful, rel=0.01)
    assert coin_epsilon([(rounds, sigma)], rate, careful) == pytest.approx(epsilon, rel=0.002)


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
