"""The objectives: what they are, and that `training` gives the advice it is made for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quell import strategy, workload
from quell.analysis.error import error, query_variances
from quell.analysis.objective import FORGETTING, training_error
from quell.participation import Participation

PATTERN = Participation(96, 24)
TASKS = [
    workload.prefix(96),
    workload.sgd(96, 0.9, 0.999),
    workload.sgd(96, 0.5, 1.0, workload.schedule("cosine", 96)),
    workload.toeplitz(1.0 / (1.0 + np.arange(96.0))),
]


@pytest.mark.parametrize("name", ["identity", "bisr", "bsr", "tree", "lambda_cgd"])
@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_training_is_the_geometric_mean_of_two_dense_errors(name, task):
    parameters = {"bisr": {"bands": 4}, "bsr": {"bands": 4}, "lambda_cgd": {"lambda": 0.8}}.get(name, {})
    chosen = strategy.build(name, task, PATTERN, None, **parameters)
    step = np.arange(96)
    fading = np.tril((1 - 1 / (96 * FORGETTING)) ** np.abs(step[:, None] - step))
    if task.given is not None:
        own = task.matrix() * fading
    else:  # decay α·f: A = P_{αf}·diag(η)·P_β
        momentum = np.tril(task.momentum ** np.abs(step[:, None] - step).astype(float))
        rates = np.ones(96) if task.rates is None else task.rates
        decay = np.tril((task.decay * fading[1, 0]) ** np.abs(step[:, None] - step).astype(float))
        own = decay @ np.diag(rates) @ momentum
    second = own if task.is_prefix else np.tri(96)
    both = [np.linalg.norm(matrix @ chosen.noising_matrix()) / math.sqrt(96) for matrix in (own, second)]
    assert training_error(chosen, task) == pytest.approx(math.sqrt(both[0] * both[1]), rel=1e-8)


def best_memory(score) -> float:
    memories = np.geomspace(1.5, 200, 300)
    return float(memories[np.argmin([score(1 - 1 / memory) for memory in memories])])


@pytest.mark.parametrize("adaptive", [False, True])
def test_training_cancels_two_to_four_times_less_than_rmse(adaptive):
    """The advice of arXiv:2601.22334, §5.1, on its own setting."""
    task, pattern = workload.prefix(3900), Participation(3900, 390)

    def moved(lambda_):
        chosen = strategy.build("lambda_cgd", task, pattern, None, **{"lambda": lambda_})
        return chosen, strategy.fractional.lambda_cgd_sensitivity(lambda_, pattern)

    def rmse(lambda_):
        chosen, sensitivity = moved(lambda_)
        return sensitivity * error(chosen, task).rmse

    def training(lambda_):
        chosen, sensitivity = moved(lambda_)
        return sensitivity * training_error(chosen, task, adaptive)

    shrunk = best_memory(rmse) / best_memory(training)
    assert 2 <= shrunk <= 4.2
    assert (shrunk > 3.3) is adaptive


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.3, 0.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 64, 100])
def test_tree_errors_with_decay_are_those_of_dense_algebra(decay, steps):
    tree = strategy.build("tree", workload.prefix(steps), Participation.single(steps))
    task = workload.forgetting(workload.prefix(steps), 1 / (1 - decay) if decay < 1 else math.inf)
    dense = np.sum(np.square(task.matrix() @ tree.noising_matrix()), axis=1)
    np.testing.assert_allclose(query_variances(tree, task), dense, rtol=1e-9)
