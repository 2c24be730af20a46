"""Train the same model without privacy, with DP-SGD and as planned, each at its best of the same learning rates.

Learning rates are chosen on examples held out from training. The reported accuracies come from other test examples.
DP-SGD uses the allowed sampling scheme with which it needs the least noise, as everywhere else.
"""

from __future__ import annotations

import secrets
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from quell.adapters.report import PrivacyReport
from quell.noise import Key, SeededKeyWarning
from quell.planning import Mechanism, Plan
from quell.planning.search import Progress
from quell.torch import make_private
from quell.train.data import Data, Part
from quell.train.models import build

GRID = (0.5, 1.0, 2.0, 4.0, 8.0)  # learning rates to choose from, times 1 - momentum
SEARCH_RUNS = 2
_SEARCH_SEEDS = 1_000_000  # added to the seed, so that no searching run is repeated as a reported one


@dataclass(frozen=True)
class Arm:
    """One way of training: its name, and the mechanism whose noise it adds (None: not private)."""

    name: str
    mechanism: Mechanism | None


@dataclass(frozen=True)
class Setting:
    """What all ways of training have in common."""

    plan: Plan
    data: Data
    model: str = "auto"
    max_grad_norm: float = 1.0
    seed: int | None = None  # makes runs repeatable and voids their privacy


@dataclass(frozen=True)
class Trained:
    """One trained model: accuracy after every epoch, the model itself, and its privacy report."""

    accuracies: list[float]
    model: nn.Module
    report: PrivacyReport | None


@dataclass(frozen=True)
class Outcome:
    """All runs of one arm at one learning rate; `searched` maps each learning rate tried to validation accuracy."""

    arm: Arm
    learning_rate: float
    runs: list[Trained]
    searched: dict[float, float] = field(default_factory=dict)

    @property
    def finals(self) -> list[float]:
        return [run.accuracies[-1] for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.mean(self.finals)

    @property
    def deviation(self) -> float | None:
        """Standard deviation between runs; None for a single run."""
        return statistics.stdev(self.finals) if len(self.runs) > 1 else None

    @property
    def curve(self) -> list[float]:
        """Mean accuracy over the runs after each epoch."""
        return [statistics.mean(values) for values in zip(*(run.accuracies for run in self.runs), strict=True)]


def arms_of(plan: Plan) -> list[Arm]:
    """The three ways: without privacy, with DP-SGD, and with the recommended mechanism."""
    return [Arm("not private", None), Arm("DP-SGD", dpsgd(plan)), Arm("planned", plan.mechanism)]


def dpsgd(plan: Plan) -> Mechanism:
    """DP-SGD with the same promise, certified, under the scheme by which the plan compares it."""
    about = plan.prices.dpsgd
    return plan.prices.certify(about.strategy, about.scheme, near=about.noise_multiplier)


def compare(
    recipe: Setting,
    arms: Sequence[Arm],
    runs: int,
    learning_rate: float | None,
    progress: Progress,
    finished: Callable[[Outcome], None],
) -> list[Outcome]:
    """Train every arm `runs` times at the given learning rate, or each at its best one of the grid."""
    rates = [] if learning_rate is not None else [rate * (1 - recipe.plan.run.optimizer.momentum) for rate in GRID]
    total = len(arms) * (runs + SEARCH_RUNS * len(rates)) * recipe.plan.epochs
    done = 0

    def trained(arm: Arm, rate: float, seed: int, part: Part, doing: str) -> Trained:
        nonlocal done
        progress(done, total, f"{arm.name}: {doing}")
        accuracies, run = [], _Training(recipe, arm, rate, seed)
        for _ in range(recipe.plan.epochs):
            run.epoch()
            accuracies.append(accuracy(run.model, part))
            done += 1
            progress(done, total, f"{arm.name}: {doing}, {accuracies[-1]:.1%}")
        return Trained(accuracies, run.model, run.report())

    outcomes = []
    for arm in arms:
        searched = {
            rate: statistics.mean(
                trained(arm, rate, _SEARCH_SEEDS + i, recipe.data.validation, f"trying lr {rate:g}").accuracies[-1]
                for i in range(SEARCH_RUNS)
            )
            for rate in rates
        }
        best = learning_rate if learning_rate is not None else max(searched, key=lambda rate: searched[rate])
        kept = [trained(arm, best, i, recipe.data.test, f"run {i + 1} of {runs}") for i in range(runs)]
        outcomes.append(Outcome(arm, best, kept, searched))
        finished(outcomes[-1])
    return outcomes


def accuracy(model: nn.Module, part: Part) -> float:
    with torch.no_grad():
        guesses = [model(batch).argmax(1) for batch in torch.from_numpy(part.x).split(1000)]
    return float((torch.cat(guesses) == torch.from_numpy(part.y)).float().mean())


class _Training:
    """One run, epoch by epoch; random unless a seed was asked for."""

    def __init__(self, recipe: Setting, arm: Arm, rate: float, number: int) -> None:
        plan, part = recipe.plan, recipe.data.train
        seed = None if recipe.seed is None else recipe.seed + number
        self._dice = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=self._dice)))
            self.model = build(recipe.model, recipe.data.shape, recipe.data.classes)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=plan.run.optimizer.momentum)
        self._tensors = torch.from_numpy(part.x), torch.from_numpy(part.y)
        self._optimizer, self._loader, self._batches = optimizer, None, plan.run.steps_per_epoch
        if arm.mechanism is not None:
            self.model, self._optimizer, self._loader = make_private(
                self.model,
                optimizer,
                TensorDataset(*self._tensors),
                plan,
                recipe.max_grad_norm,
                mechanism=arm.mechanism,
                key=None if seed is None else _seeded(seed),
            )

    def epoch(self) -> None:
        for x, y in self._loader if self._loader is not None else self._shuffled():
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self._optimizer.step()

    def report(self) -> PrivacyReport | None:
        return None if self._loader is None else self._optimizer.privacy_report()

    def _shuffled(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self._tensors
        for chosen in torch.randperm(len(y), generator=self._dice).tensor_split(self._batches):
            yield x[chosen], y[chosen]


def _seeded(seed: int) -> Key:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SeededKeyWarning)  # notes and the report say it
        return Key.from_seed(seed)
