"""The predicted loss against dumb computations: dense matrices, and a run simulated step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quell import strategy, workload
from quell.algebra.feedback import left_over
from quell.analysis.error import error
from quell.analysis.landscape import Landscape
from quell.participation import Participation
from quell.privacy import gaussian_sigma

N, PATTERN = 60, Participation(60, 20)
CHOICES = [
    ("identity", {}),
    ("bisr", {"bands": 4}),
    ("tree", {}),
    ("bisr", {"bands": 4, "column_normalise": True}),
    ("bsr", {"bands": 3, "column_normalise": True}),
    ("band", {"bands": 3}),
]
RUNS = [(0.0, 1.0, None, None), (0.8, 0.99, None, None), (0.8, 0.99, "cosine", None), (0.5, 1.0, "cosine", 0.9)]


def landscape(momentum, decay, schedule, ema) -> Landscape:
    rates = None if schedule is None else 3.0 * workload.schedule(schedule, N)
    return Landscape(workload.sgd(N, momentum, decay, rates, ema), 20, 50)


def closed_loop(momentum, decay, schedule, ema, feedback):
    """(A⁻¹ + q·S)⁻¹, averaged, as dense matrices."""
    lag = np.arange(N)[:, None] - np.arange(N)
    rates = np.ones(N) if schedule is None else workload.schedule(schedule, N)

    def powers(share):
        return np.tril(np.where(lag >= 0, share ** np.maximum(lag, 0).astype(float), 0.0))

    open_loop = powers(decay) @ np.diag(rates) @ powers(momentum)
    closed = np.linalg.inv(np.linalg.inv(open_loop) + feedback * np.eye(N, k=-1))
    return closed if ema is None else (1 - ema) * powers(ema) @ closed


@pytest.mark.parametrize("run", RUNS)
def test_final_variances_are_those_of_dense_algebra(run):
    land = landscape(*run)
    loops = [closed_loop(*run, q) for q in land.feedback[::2]]
    for name, parameters in CHOICES:
        chosen = strategy.build(name, land.workload, PATTERN, None, **parameters)
        dense = [np.sum(np.square((loop @ chosen.noising_matrix())[-1])) for loop in loops]
        np.testing.assert_allclose(land.final_variances(chosen), dense, rtol=1e-8)


@pytest.mark.parametrize("run", RUNS)
def test_what_is_left_without_noise_is_what_training_leaves(run):
    momentum, decay, schedule, ema = run
    rates = np.ones(N) if schedule is None else workload.schedule(schedule, N)
    found = left_over(rates, decay, momentum, ema or 0.0, np.array([0.0, 0.02, 0.3]))
    for q, left in zip((0.0, 0.02, 0.3), found, strict=True):
        start = distance = average = 1.0  # to the optimum; decay pulls back to the start
        moved = 0.0
        for rate in rates:
            moved = momentum * moved + q * distance
            distance = start + decay * (distance - start) - rate * moved
            average = distance if ema is None else ema * average + (1 - ema) * distance
        assert left == pytest.approx(average, rel=1e-12)


def test_the_loss_is_the_least_over_learning_rates_of_bias_and_noise():
    run, sigma = RUNS[1], 3.0
    land = landscape(*run)
    chosen = strategy.build("bisr", land.workload, PATTERN, None, bands=4)
    curvatures = 10.0 ** (-np.arange(19) / 6)  # 1, …, 1/1000: 20 batches of 50 examples
    share = np.full(19, math.log(10) / 6)
    share[0], share[-1] = share[0] / 2 + 0.5, share[-1] / 2
    start = 1 / np.sum(share * curvatures)  # squared distance at which Σ (λ·distance)² over 1/λ directions is 1
    losses = []
    for rate in land.rates[:30]:
        loops = [closed_loop(*run, rate * curvature) for curvature in curvatures]
        noise = [np.sum(np.square((loop @ chosen.noising_matrix())[-1])) * rate**2 for loop in loops]
        bias = left_over(np.ones(N), run[1], run[0], 0.0, rate * curvatures) ** 2
        per_direction = 0.5 * (start * bias + (sigma / 50) ** 2 * np.array(noise))  # times λ, and 1/λ directions
        losses.append(np.sum(share * per_direction) / np.sum(share * 0.5 * start))
    loss, rate = land.noise(chosen).best(sigma)
    least = int(np.argmin(losses))
    assert 0 < least < 29
    assert 0.98 * losses[least] < loss <= losses[least]
    assert land.rates[least + 1] < rate < land.rates[least - 1]


def test_independent_noise_is_as_bad_as_itself_and_more_noise_is_worse():
    land = landscape(*RUNS[1])
    for sigma in (1e-3, 0.7, 40.0, 1e4):
        assert land.independent.equivalent(sigma) == pytest.approx(sigma, rel=1e-6)
    noise = land.noise(strategy.build("bisr", land.workload, PATTERN, None, bands=4))
    scores = [noise.equivalent(sigma) for sigma in np.geomspace(1e-3, 1e5, 20)]
    assert scores == sorted(scores)
    assert noise.equivalent(0.0) == 0.0


def test_what_is_forgotten_may_be_left_out():
    """Of a long run only the end is computed for a strong feedback: the same as all of it."""
    work = workload.sgd(20_000, 0.9, learning_rates=workload.schedule("cosine", 20_000))
    land = Landscape(work, 2000, 100)
    assert min(land._lengths) < 10_000
    chosen = strategy.build("lambda_cgd", work, Participation(20_000, 2000), None, **{"lambda": 0.9})
    ends = land.final_variances(chosen)
    object.__setattr__(land, "_lengths", [20_000] * len(ends))
    del land.__dict__["_rows"]
    np.testing.assert_allclose(land.final_variances(chosen), ends, rtol=1e-9)


@pytest.mark.parametrize(("epsilon", "least", "most"), [(8.0, 1.5, 4.2), (0.5, 1.0, 2.0)])
def test_training_wants_less_cancelling_than_rmse_where_noise_is_small(epsilon, least, most):
    """The advice of arXiv:2601.22334, §5.1, on its own setting: λCGD's memory 1/(1−λ), two to four times smaller."""
    task, pattern = workload.prefix(3900), Participation(3900, 390)
    land, memories = Landscape(task, 390, 128), np.geomspace(1.5, 200, 40)
    rmse, loss = [], []
    for memory in memories:
        chosen = strategy.build("lambda_cgd", task, pattern, None, **{"lambda": 1 - 1 / memory})
        moved = strategy.fractional.lambda_cgd_sensitivity(1 - 1 / memory, pattern)
        rmse.append(moved * error(chosen, task).rmse)
        loss.append(land.noise(chosen).best(moved * gaussian_sigma(epsilon, 1e-5))[0])
    assert least <= memories[np.argmin(rmse)] / memories[np.argmin(loss)] <= most
