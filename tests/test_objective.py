"""The objectives: what they are, and that `training` gives the advice it is made for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quell import strategy, workload
from quell.analysis.error import error, query_variances
from quell.analysis.objective import training_error
from quell.analysis.sensitivity import sensitivity
from quell.participation import Participation

PATTERN = Participation(96, 24)
TASKS = [
    workload.prefix(96),
    workload.sgd(96, 0.9, 0.999),
    workload.sgd(96, 0.5, 1.0, workload.schedule("cosine", 96)),
    workload.toeplitz(1.0 / (1.0 + np.arange(96.0))),
]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", ["identity", "bisr", "bsr", "tree", "lambda_cgd"])
@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_training_by_dense_algebra(name, task, adaptive):
    parameters = {"bisr": {"bands": 4}, "bsr": {"bands": 4}, "lambda_cgd": {"lambda": 0.8}}.get(name, {})
    chosen = strategy.build(name, task, PATTERN, None, **parameters)
    step = np.arange(96)
    fading = np.tril((1 - 1 / (96 * (1 / 16 if adaptive else 1 / 9))) ** np.abs(step[:, None] - step))
    if task.given is not None:
        own = task.matrix() * fading
    else:  # decay α·f: A = P_{αf}·diag(η)·P_β
        momentum = np.tril(task.momentum ** np.abs(step[:, None] - step).astype(float))
        rates = np.ones(96) if task.rates is None else task.rates
        decay = np.tril((task.decay * fading[1, 0]) ** np.abs(step[:, None] - step).astype(float))
        own = decay @ np.diag(rates) @ momentum
    noising = chosen.noising_matrix()
    faded, sums, single = (np.linalg.norm(work @ noising) / math.sqrt(96) for work in (own, np.tri(96), np.eye(96)))
    right = faded
    if task.momentum:
        right = math.sqrt(faded * sums) if adaptive else faded * (faded / single) ** (1 / 9)
    assert training_error(chosen, task, adaptive) == pytest.approx(right, rel=1e-8)


def test_of_two_errors_alike_the_noisier_steps_win():
    """What trained networks showed at ε = 2: BandMF with 16 bands is better than its error says."""
    task = workload.sgd(970, 0.9)
    loud, quiet = (
        strategy.build("band_toeplitz", work, Participation(970, 97), None, bands=16)
        for work in (task, workload.prefix(970))
    )
    errors = {each: error(each, workload.forgetting(task, 970 / 9)).rmse for each in (loud, quiet)}
    steps = {each: error(each, workload.single_steps(970)).rmse for each in (loud, quiet)}
    assert steps[loud] > 2 * steps[quiet]
    assert training_error(loud, task) / training_error(quiet, task) < 0.95 * errors[loud] / errors[quiet]


def test_an_average_does_not_hide_what_shakes_the_weights():
    """Gradients are taken at the weights: noise that only the average takes back must not look good."""
    averaged, weights = workload.sgd(970, 0.9, 0.9999, ema=0.98), workload.sgd(970, 0.9, 0.9999)
    pattern = Participation(970, 97)
    wild = strategy.build("band_inv", averaged, pattern, None, bands=4, column_normalise=True)
    calm = strategy.build("lambda_cgd", averaged, pattern, None, **{"lambda": 0.97})
    sigma = {each: sensitivity(each, pattern).value for each in (wild, calm)}  # for the same promise
    shaken = {each: error(each, weights).rmse * sigma[each] for each in (wild, calm)}
    scores = {each: training_error(each, averaged) * sigma[each] for each in (wild, calm)}
    assert shaken[wild] > 2 * shaken[calm]
    assert scores[wild] > 2 * scores[calm]
    assert training_error(calm, averaged) == training_error(calm, weights)


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
