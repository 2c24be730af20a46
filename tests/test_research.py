"""The general optimiser finds what the special ones find."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quell import research, strategy, workload
from quell.algebra import streaming
from quell.analysis.error import error
from quell.participation import Participation
from quell.strategy import ToeplitzStrategy
from quell.strategy.fractional import best_lambda

N = 30


def test_it_finds_the_best_lambda():
    def cgd(p):
        return streaming.banded(torch.stack([torch.ones(N, dtype=p.dtype), -p.expand(N)], dim=1))

    def energy(p):
        return torch.sum(p ** (2 * torch.arange(N)))

    found, how = research.optimise(cgd, workload.prefix(N).operator(), N, np.array([0.5]), torch.sum, energy)
    assert how.converged
    assert found[0] == pytest.approx(best_lambda(workload.prefix(N), Participation.single(N)), abs=1e-5)


def test_it_finds_the_optimal_banded_toeplitz_strategy_for_momentum():
    task = workload.sgd(N, momentum=0.9)

    def inverse_of_banded(p):
        coefficients = torch.cat([torch.ones(1, dtype=p.dtype), p])
        return streaming.banded_inverse(coefficients.expand(N, 3))

    def norm(p):
        return 1.0 + torch.sum(p * p)

    found, how = research.optimise(inverse_of_banded, task.operator(), N, np.array([0.4, 0.2]), torch.sum, norm)
    assert how.converged
    ours = strategy.build("band_toeplitz", task, Participation.single(N), bands=3, column_normalise=False)
    np.testing.assert_allclose(found, ours.coefficients[1:] / ours.coefficients[0], atol=1e-5)
    general = ToeplitzStrategy("found", N, np.array([1.0, *found]))
    assert error(general, task).rmse == pytest.approx(error(ours, task).rmse, rel=1e-8)


def test_any_aggregate_will_do():
    """A soft maximum over queries lands near the MaxSE optimum, above the RMSE one (Lemma 3)."""

    def cgd(p):
        return streaming.banded(torch.stack([torch.ones(N, dtype=p.dtype), -p.expand(N)], dim=1))

    def energy(p):
        return torch.sum(p ** (2 * torch.arange(N)))

    found, _ = research.optimise(
        cgd, workload.prefix(N).operator(), N, np.array([0.5]), lambda v: torch.logsumexp(50 * v, 0) / 50, energy
    )
    by_rmse = best_lambda(workload.prefix(N), Participation.single(N))
    by_maxse = best_lambda(workload.prefix(N), Participation.single(N), "maxse")
    assert by_rmse < found[0] < by_maxse + 0.01
