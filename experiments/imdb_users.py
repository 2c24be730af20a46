"""Sentiment of film reviews (IMDB) written by made-up users: (8, 1e-5)-DP per example and per user, on a CPU.

    PYTHONPATH=src python experiments/imdb_users.py IMDB       # a folder with load_imdb.py; about five minutes

A review is a bag of hashed words; a linear classifier is trained on it by `quell.torch.make_private`. IMDB does not say
who wrote what, so the 25,000 training reviews are dealt to users whose numbers of reviews are as uneven as in real
communities, and whose taste makes most of their reviews good ones or bad ones. A fifth of the users is held out to
choose learning rates with one seed; then three seeds, judged by the 25,000 test reviews.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from common import RESULTS, Results, read_imdb, seeded_key
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quell
from quell.planning import Plan
from quell.torch import make_private

WORDS, CLIP, EPOCHS, STEPS = 2048, 0.1, 20, 20  # steps of an epoch
EPSILON, DELTA, MOMENTUM = 8.0, 1e-5, 0.9
RATES, SEEDS = (1.0, 3.0, 10.0, 30.0, 100.0), (1, 2, 3)
MEAN_REVIEWS, MOST_REVIEWS = 12, 400


@dataclass(frozen=True)
class Setting:
    """What a promise is about (None: no promise), and how many reviews a user brings to a step."""

    unit: str | None
    rows: int = 1

    @property
    def name(self) -> str:
        return "no privacy" if self.unit is None else f"per {self.unit}" + f", {self.rows} a step" * (self.rows > 1)


SETTINGS = (Setting(None), Setting("example"), *(Setting("user", rows) for rows in (1, 4, 16)))


def made_up_users(labels: NDArray[np.int64], seed: int = 0) -> NDArray[np.int64]:
    """The user of each review: many with a few, few with hundreds; each likes most films, or few."""
    random = np.random.default_rng(seed)
    piles = [list(random.permutation(np.flatnonzero(labels == label))) for label in (0, 1)]
    users, user = np.empty(len(labels), dtype=np.int64), 0
    while piles[0] or piles[1]:
        leaning = random.beta(1, 1)
        for _ in range(min(MOST_REVIEWS, int(random.pareto(1.1) * MEAN_REVIEWS / 4) + 1)):
            pile = piles[int(random.random() < leaning)] or piles[0] or piles[1]
            if pile:
                users[pile.pop()] = user
        user += 1
    return users


def features(texts: list[str], hashes: int = WORDS) -> Tensor:
    """(reviews, hashes) logarithms of how often each hashed word comes, scaled to norm 1."""
    counts = np.zeros((len(texts), hashes), dtype=np.float32)
    for row, text in zip(counts, texts, strict=True):
        words = [crc32(word.encode()) % hashes for word in re.findall(r"[a-z']+", text.lower())]
        row += np.bincount(words, minlength=hashes)
    return functional.normalize(torch.from_numpy(counts).log1p())


def plan_for(setting: Setting, reviews: int, users: int, **changes: object) -> Plan:
    """As many steps for everybody: batches are a twentieth of the reviews, or of the users."""
    population = {"examples": reviews} if setting.unit == "example" else {"users": users}
    options = {"epochs": EPOCHS, "epsilon": EPSILON, "delta": DELTA, "momentum": MOMENTUM, "memory": 0, **changes}
    return quell.plan(**population, batch_size=next(iter(population.values())) // STEPS, **options)


def train(setting: Setting, plan: Plan | None, data: TensorDataset, users: object, rate: float, seed: int) -> nn.Module:
    """The classifier after a run; without a plan by plain SGD."""
    model = nn.Linear(WORDS, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    if plan is None:
        order = torch.Generator().manual_seed(seed)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(data), generator=order).tensor_split(STEPS):
                x, y = (part[batch] for part in data.tensors)
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return model
    whose = {"users": users, "rows_per_user": setting.rows} if setting.unit == "user" else {}
    key = seeded_key(f"imdb users {setting.name} {rate} {seed}")
    model, private, planned = make_private(model, optimizer, data, plan, CLIP, key=key, **whose)
    assert private.privacy_report().unit == f"one {setting.unit}"
    for _ in range(plan.epochs):
        for x, y in planned:
            private.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            private.step()
    private.close()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    return round(100 * float((model(x).argmax(1) == y).double().mean()), 2)


def experiment(imdb: Path, output: Path) -> None:
    torch.set_num_threads(1)
    (texts, labels), (test_texts, test_labels) = read_imdb(imdb)
    users = made_up_users(labels)
    held_out = users % 5 == 0  # whole users
    x, y = features(texts), torch.from_numpy(labels)
    data, validation = (TensorDataset(x[part], y[part]) for part in (~held_out, held_out))
    test = TensorDataset(features(test_texts), torch.from_numpy(test_labels))
    ids, people = users[~held_out], len(np.unique(users[~held_out]))
    results = Results(output / "imdb_users.json")
    plans: dict[str | None, Plan | None] = {None: None}
    for setting in SETTINGS:
        if setting.unit not in plans:
            plans[setting.unit] = plan_for(setting, len(data), people)
        runs = Runs(results, setting, plans[setting.unit], data, ids)
        best = max(RATES, key=lambda rate: runs.judged(rate, 0, validation))
        for seed in SEEDS:
            runs.judged(best, seed, test)


@dataclass(frozen=True)
class Runs:
    """The runs of one setting, each made once."""

    results: Results
    setting: Setting
    plan: Plan | None
    data: TensorDataset
    users: NDArray[np.int64]

    def judged(self, rate: float, seed: int, judge: TensorDataset) -> float:
        """The accuracy of a run."""
        name, started = f"{self.setting.name} | lr {rate:g} | seed {seed}", time.time()
        if name not in self.results.runs:
            found = accuracy(train(self.setting, self.plan, self.data, self.users, rate, seed), judge)
            used = None if self.plan is None else self.plan.mechanism
            self.results.add(
                name,
                setting=self.setting.name,
                rate=rate,
                seed=seed,
                users=len(np.unique(self.users)),
                reviews=len(self.data),
                noise_multiplier=None if used is None else used.noise_multiplier,
                mechanism=None if used is None else f"{used.name}, {used.sampling}",
                accuracy=found,
                seconds=time.time() - started,
            )
            print(f"{found:6.2f}%  {time.time() - started:5.1f} s  {name}", flush=True)
        return float(self.results.runs[name]["accuracy"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("imdb", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    experiment(given.imdb, given.results)
