"""Tasks that train in seconds on a CPU: which of 16 mechanisms is best at which ε, and what do recipes bring?

    PYTHONPATH=src python experiments/small_tasks.py words sgd IMDB        # folders with load_imdb.py, load_cifar10.py
    PYTHONPATH=src python experiments/small_tasks.py patches adamw CIFAR10 # half an hour of a core, or an hour
    PYTHONPATH=src python experiments/small_tasks.py words averaged IMDB   # other recipes: a few minutes

The mechanisms, their noise and their (970, 97) steps are those of the CIFAR-10 study (`plans.WIDE`), so nothing here
was used to shape an objective: `objective.py` only judges by it. Other recipes than "sgd" and "adamw" have BandMF with
16 bands under cyclic Poisson sampling alone, at ε = 2 and 9.
  words    IMDB: bags of hashed words (`imdb_users.py`), then a network with one hidden layer
  patches  CIFAR-10: responses to random filters, which see no data, averaged over quarters; then the same network
For each mechanism and ε the learning rate is climbed to in steps of two, by the mean of two seeds on a fifth of the
training data; then three seeds on all of them, judged by the test set. Every run is the README's loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import RESULTS, Entry, Results, plan_of, read_imdb, seeded_key
from imdb_users import features
from plans import EPSILONS, PLANNED, STUDIED, WIDE, plan_name, small_lines
from published import Data, adamw, images, parts_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from training import accuracy, sgd

from quell.torch import make_private

WORDS, HIDDEN = 1024, 32
FILTERS, PATCH, LENGTH = 64, 6, 4.0
TRIAL_SEEDS, SEEDS = (0, 10), (1, 2, 3)


@dataclass(frozen=True)
class Task:
    """Where the data come from, how many features and classes they have, and the clip norm."""

    data: Callable[[Path], Data]
    inputs: int
    classes: int
    clip: float


@dataclass(frozen=True)
class Recipe:
    """An optimizer, where its learning rates start, and what else `make_private` is told."""

    optimizer: Callable[..., torch.optim.Optimizer]
    start: float
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One training run; on four fifths of the training data, judged by the rest, where its size is "held-out"."""

    plan: str  # without its size
    size: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.plan} | {self.size} | lr {self.rate:.4g} | seed {self.seed}"


def words_data(folder: Path) -> Data:
    train, test = (TensorDataset(features(texts, WORDS), torch.from_numpy(y)) for texts, y in read_imdb(folder))
    return train, test


def patches_data(folder: Path) -> Data:
    train, test = (TensorDataset(responses(x), y) for x, y in images(folder, torch.device("cpu")))
    return train, test


def responses(pixels: Tensor) -> Tensor:
    """(images, 8·FILTERS): rectified responses to random filters and to their negatives, averaged over quarters.

    They are centred for each image, and as long for each.
    """
    weight = torch.randn(FILTERS, 3, PATCH, PATCH, generator=torch.Generator().manual_seed(0))
    weight -= weight.mean((2, 3), keepdim=True)
    weight /= weight.flatten(1).norm(dim=1)[:, None, None, None]
    found = []
    for part in pixels.split(500):
        seen = functional.conv2d(part, weight)
        both = torch.cat([seen.relu(), (-seen).relu()], 1)
        pooled = functional.adaptive_avg_pool2d(both, 2).flatten(1)
        found.append(functional.layer_norm(pooled, pooled.shape[1:]) * (LENGTH / pooled.shape[1] ** 0.5))
    return torch.cat(found)


TASKS = {
    "words": Task(words_data, WORDS, 2, 0.5),
    "patches": Task(patches_data, 8 * FILTERS, 10, 1.0),
}
RECIPES = {
    "sgd": Recipe(sgd, 4.0),
    "adamw": Recipe(adamw, 0.032),
    "automatic": Recipe(sgd, 4.0, {"max_grad_norm": "automatic"}),
    "averaged": Recipe(sgd, 4.0, {"ema": 0.98}),
    "scaled": Recipe(adamw, 0.064, {"scale_gradients": True}),
    "corrected": Recipe(adamw, 0.032, {"correct_moments": True}),
}
# What recipes have that are not studied with all mechanisms.
ONE, TWO_EPSILONS = ("BandMF p=16", "cyclic_poisson"), (2.0, 9.0)


def network(task: Task, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(task.inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, task.classes))


def train(job: Job, task: Task, recipe: str, line: Entry, data: Data) -> float:
    """The accuracy of one run; that of the averaged weights where there are such."""
    told, plan, model = RECIPES[recipe], plan_of(line, len(data[0])), network(task, job.seed)
    options = {"max_grad_norm": task.clip, "key": seeded_key(f"{recipe} {job.name}"), **told.options}
    wrapped = told.optimizer(model, plan, job.rate)
    model, private, loader = make_private(model, wrapped, data[0], plan, **options)
    for _ in range(plan.epochs):
        for x, y in loader:
            private.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            private.step()
    with private.averaged() if "ema" in options else nullcontext():
        found = accuracy(model, data[1])
    private.close()
    return found


def mechanisms(recipe: str) -> Iterator[tuple[str, Entry, Entry]]:
    """The name of each, and its lines for all data and for four fifths; the planner's choice comes last."""
    lines = small_lines(recipe)
    known = [(label, sampling) for sampling, choices in WIDE.items() for label in choices]
    for epsilon in EPSILONS if recipe in STUDIED else TWO_EPSILONS:
        planned = [(PLANNED, s) for s in WIDE if plan_name(PLANNED, epsilon, s, "full") in lines]
        for label, sampling in [*known, *planned] if recipe in STUDIED else [ONE]:
            full, held_out = (plan_name(label, epsilon, sampling, size) for size in ("full", "held-out"))
            yield full.removesuffix(" | full"), lines[full], lines[held_out]


def climbed(start: float, height: Callable[[float], float]) -> float:
    """The best rate among start·2^k, k = 0, ±1, …, walked to from `start` until both neighbours are lower."""
    best = start
    for factor in (2.0, 0.5):
        while height(best * factor) > height(best):
            best *= factor
    return best


def experiment(name: str, recipe: str, folder: Path, output: Path) -> None:
    task, results = TASKS[name], Results(output / f"small_{name}_{recipe}.json")
    parts = parts_of(task.data(folder))
    data = {"full": parts[False], "held-out": parts[True]}
    torch.set_num_threads(1)

    def result(job: Job, line: Entry) -> float:
        if job.name not in results.runs:
            started = time.time()
            found = train(job, task, recipe, line, data[job.size])
            stated = {key: line[key] for key in ("label", "epsilon", "sampling", "noise_multiplier")}
            seconds = round(time.time() - started, 2)
            results.add(job.name, **asdict(job), **stated, accuracy=found, seconds=seconds)
            print(f"{found:6.2f}%  {seconds:5.1f} s  {job.name}", flush=True)
        return float(results.runs[job.name]["accuracy"])

    rate = RECIPES[recipe].start
    for plan, full, held_out in mechanisms(recipe):
        rate = climbed(
            rate,
            lambda rate, plan=plan, line=held_out: mean(
                result(Job(plan, "held-out", rate, seed), line) for seed in TRIAL_SEEDS
            ),
        )
        for seed in SEEDS:
            result(Job(plan, "full", rate, seed), full)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    experiment(given.task, given.recipe, given.folder, given.results)
