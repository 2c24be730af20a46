"""Hölder's bound on the weights of a tilt, against enumeration of all patterns."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quell import strategy, workload
from quell.privacy.bin_pair import BinPair
from quell.privacy.bins import bins_of
from quell.privacy.chain import ChainPair
from quell.schemes import BallsInBins, BMinSep
from tests.privacy.simulation import Patterns, log_sum


def smallest_margin(pair, matrix, patterns, theta, log_moment):
    """ln ρ_θ − θ·L + (θ−1)·ln M(θ) over many outputs, by enumeration; where u_π = (θ+1)·α_π it should be 0."""
    random = np.random.default_rng(3)
    means, logs = patterns.rows @ matrix.T, np.log(patterns.probabilities)
    alpha = np.sum(means**2, axis=1) / (2 * pair.sigma**2)
    worst = np.linalg.lstsq(means, pair.sigma**2 * (theta + 1) * alpha, rcond=None)[0]
    outputs = np.vstack([worst, pair.sigma * random.standard_normal((2000, len(matrix))), theta * means])
    u = outputs @ means.T / pair.sigma**2
    loss, power = log_sum(u - alpha + logs), log_sum(theta * u - theta**2 * alpha + logs)
    return float(np.min(power - theta * loss + (theta - 1) * log_moment))


@pytest.mark.parametrize("theta", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("scheme", [BallsInBins(24, 6), BMinSep(12, 3, 0.4)])
def test_a_tilt_is_bounded_by_the_moment_of_the_energies(scheme, theta):
    """Hölder's bound against enumeration, and with a moment that is too small (mutation) it does not hold."""
    built = strategy.build("bsr", workload.prefix(scheme.steps), scheme.participation, bands=3)
    if isinstance(scheme, BallsInBins):
        pair, patterns = BinPair(bins_of(built, scheme), 2.0), Patterns.of_bins(24, 6)
    else:
        pair, patterns = ChainPair(built, scheme, 2.0), Patterns.of_chain(12, 3, 0.4)
    alpha = np.sum((patterns.rows @ built.matrix().T) ** 2, axis=1) / (2 * pair.sigma**2)
    exact = math.log(patterns.probabilities @ np.exp(theta * alpha))
    assert pair.log_moment(theta) == pytest.approx(exact, abs=1e-8)
    assert pair.log_moment(theta) <= theta * pair.heaviest + 1e-9
    assert smallest_margin(pair, built.matrix(), patterns, theta, exact) == pytest.approx(0, abs=1e-9)
    assert smallest_margin(pair, built.matrix(), patterns, theta, theta * pair.average) < -1e-5
