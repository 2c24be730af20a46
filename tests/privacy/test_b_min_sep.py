"""The backward recursion of b-min-sep against enumeration of all patterns."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import logsumexp

from quell import QuellError, strategy, workload
from quell.privacy.chain import ChainPair
from quell.schemes import BMinSep
from quell.strategy.structure import ToeplitzStrategy
from tests.privacy.simulation import Patterns


@pytest.mark.parametrize(("n", "b", "rate"), [(7, 3, 0.4), (9, 4, 0.8), (6, 6, 0.3), (5, 1, 0.5), (8, 3, 0.01)])
def test_likelihood_equals_enumeration(random, n, b, rate):
    scheme = BMinSep(n, b, rate)
    for name, parameters in (("bsr", {"bands": min(b, 2)}), ("bsr", {"bands": min(b, 3), "column_normalise": True})):
        built = strategy.build(name, workload.prefix(n), scheme.participation, **parameters)
        pair = ChainPair(built, scheme, sigma=0.7)
        patterns = Patterns.of_chain(n, b, rate)
        output = 2 * random.standard_normal((50, n))
        u = output @ built.matrix() / pair.sigma**2
        np.testing.assert_allclose(pair._inner(output) / pair.sigma**2, u, atol=1e-10)
        for theta in (1.0, 2.5):
            means = theta * patterns.rows @ built.matrix().T
            exact = logsumexp(
                (output @ means.T - np.sum(means**2, axis=1) / 2) / pair.sigma**2, axis=1, b=patterns.probabilities
            )
            found = pair._log_likelihood(theta * u - theta**2 * pair.alpha)
            np.testing.assert_allclose(found, exact, atol=1e-9)
        energy = np.sum((patterns.rows @ built.matrix().T) ** 2, axis=1) / (2 * pair.sigma**2)
        assert pair.heaviest == pytest.approx(energy.max())
        assert pair.average == pytest.approx(patterns.probabilities @ energy)
        centre = patterns.probabilities @ patterns.rows @ built.matrix().T
        assert pair.centre == pytest.approx(centre @ centre / (2 * pair.sigma**2))


def test_large_factors_do_not_overflow():
    scheme = BMinSep(40, 5, 0.5)
    built = strategy.build("bsr", workload.prefix(40), scheme.participation, bands=2)
    pair = ChainPair(built, scheme, sigma=1.0)
    values = pair._log_likelihood(np.vstack([np.full((1, 40), 500.0), np.full((1, 40), -500.0)]))
    assert np.all(np.isfinite(values))
    assert values[0] > 8 * 499


def test_patterns_follow_the_chain(random):
    scheme = BMinSep(9, 3, 0.4)
    built = strategy.build("bsr", workload.prefix(9), scheme.participation, bands=2)
    drawn = ChainPair(built, scheme, 1.0)._patterns(200_000, random)
    exact = Patterns.of_chain(9, 3, 0.4)
    assert sum(exact.probabilities) == pytest.approx(1)
    np.testing.assert_allclose(drawn.mean(axis=0), scheme.fraction, atol=0.005)
    for row, probability in zip(exact.rows[:20], exact.probabilities[:20], strict=True):
        assert np.mean(np.all(drawn == row, axis=1)) == pytest.approx(probability, abs=0.004)


def test_rounding_errors_below_zero_are_cut_off_and_paid_for():
    coefficients = np.array([1.0, 0.5, -1e-10])
    accountant = BMinSep(30, 3, 0.2).account(ToeplitzStrategy("rounded", 30, coefficients))
    assert accountant.slack > 0
    assert float(accountant.strategy.coefficients.min()) == 0.0


def test_a_separation_of_one_step_is_poisson_sampling():
    """The same law, priced by the accountant that does not draw."""

    from quell.schemes import Poisson

    scheme = BMinSep(20, 1, 0.1)
    built = strategy.build("identity", workload.prefix(20), scheme.participation)
    assert scheme.account(built) == Poisson(20, 0.1).account(built)


def test_a_tree_over_few_steps_is_refused():
    scheme = BMinSep(2, 2, 0.5)
    with pytest.raises(QuellError, match="trees are not priced under b_min_sep"):
        scheme.account(strategy.build("tree", workload.prefix(2), scheme.participation))
