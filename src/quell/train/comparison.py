"""Train the same model without privacy, with DP-SGD and as planned, each at its best of the same learning rates.

Learning rates are chosen on examples held out from training. Each private run is the best of a random number of trials
(`quell.tuning`), all of which its promise covers. The reported accuracies come from other test examples. DP-SGD uses
the allowed sampling scheme with which it needs the least noise, as everywhere else.

Every example is in one part: to train on, to choose on, or to test on. The promise holds for the last two because what
is asked of them is counted with noise. The best of a geometric number of trials, each with an ε-private score, is
3ε-private for the examples behind the scores (Proof 19, with a trial whose δ is 0 from ε on), so a score gets a third
of ε. The accuracy after the last epoch gets half of it, and those after the others share the rest.
"""

from __future__ import annotations

import secrets
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from quell.adapters.report import PrivacyReport
from quell.budget.claims import search_claim
from quell.noise import Key, SeededKeyWarning
from quell.planning import Mechanism, Plan, Prices
from quell.planning.search import Progress
from quell.run import Run
from quell.torch import make_private
from quell.train import counting
from quell.train.data import Data, Rows
from quell.train.models import build
from quell.tuning import Search, TuningPlan
from quell.tuning.plan import fitted

GRID = (0.5, 1.0, 2.0, 4.0, 8.0)  # learning rates to choose from, times 1 - momentum
TRIALS, LAW = 10.0, "geometric"  # of a private search: how many on average, and their law
_SEARCH_RUNS = 2  # per learning rate, without privacy
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
    search: TuningPlan | None = None  # how private runs choose their learning rate; None: it is given
    log: Path | None = None  # a folder with a log for every private run

    @property
    def run(self) -> Run:
        """The run with the promise of all of it, trials included."""
        return self.plan.run if self.search is None else self.plan.run.changed(epsilon=self.search.promise.epsilon)

    def epsilon_of_accuracy(self, epoch: int) -> float:
        """What the accuracy after an epoch (from 0) spends on the test examples."""
        epochs = self.plan.epochs
        shares = 1 if epochs == 1 else 2 if epoch == epochs - 1 else 2 * (epochs - 1)
        return self.run.epsilon / shares

    @property
    def epsilon_of_score(self) -> float:
        """What the score of one trial spends on the validation examples."""
        return self.run.epsilon / 3


@dataclass(frozen=True)
class Trained:
    """One trained model: its learning rate, accuracy after every epoch, the model itself, and its privacy report."""

    learning_rate: float
    accuracies: list[float]
    model: nn.Module
    report: PrivacyReport | None


@dataclass(frozen=True)
class Outcome:
    """All runs of one arm; `searched` maps learning rates to validation accuracy, where that need not stay secret."""

    arm: Arm
    runs: list[Trained]
    searched: dict[float, float] = field(default_factory=dict)

    @property
    def finals(self) -> list[float]:
        return [run.accuracies[-1] for run in self.runs]

    @property
    def rates(self) -> str:
        """The learning rates of the runs, in words."""
        return ", ".join(f"{rate:.3g}" for rate in sorted({run.learning_rate for run in self.runs}))

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


def arms_of(plan: Plan, search: TuningPlan | None) -> list[Arm]:
    """The three ways: without privacy, with DP-SGD, and with the recommended mechanism."""
    return [Arm("not private", None), Arm("DP-SGD", dpsgd(plan, search)), Arm("planned", plan.mechanism)]


def dpsgd(plan: Plan, search: TuningPlan | None = None) -> Mechanism:
    """DP-SGD with the same promise, certified, under the scheme by which the plan compares it.

    With a `search` its noise is that of a trial, so that the search has the promise.
    """

    def certified(prices: Prices) -> tuple[Prices, Mechanism]:
        about = prices.dpsgd
        return prices, prices.certify(about.strategy, about.scheme, near=about.noise_multiplier)

    if search is None:
        return certified(plan.prices)[1]
    trials, delta = search.trials, search.promise.delta
    return fitted(
        search.promise.epsilon,
        plan.run.epsilon,
        lambda epsilon: certified(Prices(plan.run.changed(epsilon=epsilon))),
        lambda kind: search_claim(trials, [kind], delta).epsilon,
    )[1]


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
    each = [runs if not rates or arm.mechanism is None else runs * TRIALS for arm in arms]
    total = round(
        (sum(each) + _SEARCH_RUNS * len(rates) * sum(arm.mechanism is None for arm in arms)) * recipe.plan.epochs
    )
    done = 0

    def trained(arm: Arm, rate: float, seed: int, doing: str) -> Trained:
        nonlocal done
        progress(min(done, total), total, f"{arm.name}: {doing}")
        accuracies, run = [], _Training(recipe, arm, rate, seed)
        for epoch in range(recipe.plan.epochs):
            run.epoch()
            accuracies.append(measured(run.model, recipe.data.test, recipe.epsilon_of_accuracy(epoch)))
            done += 1
            progress(min(done, total), total, f"{arm.name}: {doing}")
        return Trained(rate, accuracies, run.model, run.report())

    def measured(model: nn.Module, part: Rows, epsilon: float) -> float:
        """Accuracy, private for the examples of the part unless a seed voids all privacy."""
        right = correct(model, part)
        return (right if recipe.seed is not None else counting.noisy(right, len(part), epsilon)) / len(part)

    def validated(found: Trained) -> float:
        return measured(found.model, recipe.data.validation, recipe.epsilon_of_score)

    def best_of_trials(arm: Arm, number: int) -> Trained:
        """One private run: the best of its trials, with the promise of all of them in its report."""
        assert recipe.search is not None
        seed = None if recipe.seed is None else recipe.seed + number
        search = Search(recipe.search, {"lr": rates}, seed=seed)
        for place, trial in enumerate(search.trials()):
            found = trained(arm, trial.parameters["lr"], _SEARCH_SEEDS * (number + 1) + place, f"run {number + 1}")
            trial.report(validated(found), found)
        best: Trained = search.best.result
        return replace(best, report=recipe.search.covering(best.report))

    outcomes = []
    for arm in arms:
        searched: dict[float, float] = {}
        if rates and arm.mechanism is not None:
            kept = [best_of_trials(arm, number) for number in range(runs)]
        else:
            for rate in rates:
                tried = (trained(arm, rate, _SEARCH_SEEDS + i, f"trying lr {rate:g}") for i in range(_SEARCH_RUNS))
                searched[rate] = statistics.mean(map(validated, tried))
            best = learning_rate if learning_rate is not None else max(searched, key=lambda rate: searched[rate])
            kept = [trained(arm, best, i, f"run {i + 1} of {runs}") for i in range(runs)]
        outcomes.append(Outcome(arm, kept, searched))
        finished(outcomes[-1])
    return outcomes


def correct(model: nn.Module, part: Rows) -> int:
    """How many examples the model gets right."""
    with torch.no_grad():
        guesses = [model(batch).argmax(1) for batch in torch.from_numpy(part.x).split(1000)]
    return int((torch.cat(guesses) == torch.from_numpy(part.y)).sum())


class _Training:
    """One run, epoch by epoch; random unless a seed was asked for."""

    def __init__(self, recipe: Setting, arm: Arm, rate: float, number: int) -> None:
        plan, part = recipe.plan, recipe.data.train
        seed = None if recipe.seed is None else recipe.seed + number
        self._dice = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=self._dice)))
            self.model = build(recipe.model, recipe.data.shape, len(recipe.data.classes), recipe.data.columns)
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
                log=None if recipe.log is None else recipe.log / f"{arm.name.lower()}-{number + 1}",
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
