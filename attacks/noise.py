"""The noise that `make_private` really adds, whitened by C: is it the noise that was promised, at every step?

A model is trained on a loss of zero, so what the wrapped optimizer gets is noise alone. Times the expected batch size,
multiplied by C (in float64) and divided by σ·clip, the rows must be independent standard normals. Two runs under two
fresh keys are tested together: the energy of each step of each run (chi-square), the product of each pair of rows
(normal), of the two runs as well. Some strategies are hostile: solutions as a plan file could carry them. All tests
of a full run together accuse honest noise with a probability of one in a million.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from scipy.stats import chi2
from torch import nn
from torch.utils.data import TensorDataset

from attacks.cases import random_parameters
from attacks.outcome import Outcome, Trial, spread, summed
from quell import strategy
from quell.errors import QuellError
from quell.planning import Mechanism, Plan, Prices
from quell.run import Run
from quell.torch import make_private

FALSE_ALARM = 1e-6  # of a full run
_RUNS, _TESTS = 10_000, 4_000  # more than a full run has, and more tests than one case has
_LIMIT = FALSE_ALARM / (_RUNS * _TESTS)
_WIDTH = 3000  # parameters
GENERATORS = ("chacha20", "philox")


def attack(count: int, seed: int, workers: int = 1) -> list[Outcome]:
    """So many pairs of runs; every family and both generators come up in turn."""
    return [summed("noise whitened by C", spread(one, [(number, seed) for number in range(count)], workers))]


def one(case: tuple[int, int]) -> Trial:
    number, seed = case
    torch.set_num_threads(1)
    random = np.random.default_rng([seed, number, 5])
    names = [*strategy.FAMILIES, "hostile"]
    family, generator = names[number % len(names)], GENERATORS[number // len(names) % 2]
    label = f"{family} with {generator}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan, mechanism = _mechanism(family, random)
            label = f"{mechanism.strategy!r} with {generator}"
            clip = float(random.choice([0.1, 1.0, 7.0]))
            memory = float(random.choice([0, 20]))
            rows = [_released(plan, clip, generator, memory) for _ in range(2)]
    except QuellError:
        return Trial("noise", refused=True)
    except Exception as problem:
        return Trial("noise", flaw=f"{label} raised {type(problem).__name__}: {problem}")
    return judged(rows, mechanism, clip, label)


def judged(rows: list[Any], mechanism: Mechanism, clip: float, label: str) -> Trial:
    """The two runs against the promise. The ratio is the promised deviation over the most that the quietest step can
    have, given what was measured."""
    matrix = mechanism.strategy.matrix()
    white = np.concatenate([matrix @ part / (clip * mechanism.noise_multiplier) for part in rows])
    width = white.shape[1]
    energy = np.sum(white**2, axis=1)
    least, most = chi2.ppf(_LIMIT / 2, width), chi2.isf(_LIMIT / 2, width)
    ratio = float(np.sqrt(least / energy.min())) if energy.min() > 0 else float("inf")
    outside = ~((least <= energy) & (energy <= most))
    if np.any(outside):
        row = int(np.flatnonzero(outside)[0])
        found, step = float(np.sqrt(energy[row] / width)), row % len(matrix)
        return Trial("noise", ratio, f"{label}: at step {step} the noise has {found:.6g} of the promised deviation")
    products = np.tril(white @ white.T, -1) / np.sqrt(np.outer(energy, energy) / width)
    if np.abs(products).max() > -ndtri(_LIMIT / 2) * (1 + 0.1):  # the row norms are measured as well: 10% on top
        first, second = np.unravel_index(np.abs(products).argmax(), products.shape)
        return Trial("noise", ratio, f"{label}: rows {first} and {second} of two runs are correlated")
    return Trial("noise", ratio)


def _mechanism(family: str, random: np.random.Generator) -> tuple[Plan, Mechanism]:
    epochs = {"dense": 1, "hostile": 4}.get(family, int(random.integers(1, 4)))
    run = Run.from_data(
        examples=int(random.integers(8, 13)) * 4,
        batch_size=4,
        epochs=epochs,
        epsilon=4.0,
        delta=1e-3,
        sampling="cyclic",
        momentum=float(random.choice([0.0, 0.9])),
    )
    prices = Prices(run)
    if family == "hostile":
        bands = int(random.integers(2, 4))
        solution = np.concatenate([[1.0], random.choice([-1, 1], bands - 1) * random.uniform(1, 3, bands - 1)])
        built = prices.build("band_toeplitz", solution, bands=bands)
        mechanism = prices.certify(built)
    else:
        mechanism = prices.price(family, **random_parameters(random, family, 6))
    return Plan(run, (mechanism,), 0), mechanism


def _released(plan: Plan, clip: float, generator: str, memory: float) -> Any:
    """(steps, parameters) what the wrapped optimizer gets in each step, times the expected batch size, in float64."""
    model = nn.Sequential(nn.Linear(58, 50), nn.Linear(50, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[Any] = []

    def note(stepping: Any, args: Any, kwargs: Any) -> None:
        grads = [p.grad.double().flatten() for group in stepping.param_groups for p in group["params"]]
        seen.append(torch.cat(grads).numpy())

    optimizer.register_step_pre_hook(note)
    data = TensorDataset(torch.zeros(plan.run.examples, 58))
    private, optimizer, loader = make_private(
        model, optimizer, data, plan, clip, generator=generator, noise_memory=memory
    )
    for _ in range(plan.epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            (private(x) * 0.0).sum().backward()
            optimizer.step()
    assert seen[0].size == _WIDTH
    return np.stack(seen) * optimizer.expected_batch_size
