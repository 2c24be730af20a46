"""A search: so many trials, each with settings and a plan, and one of them to keep.

Under a random number of trials every trial must be an independent draw from the same law. So the settings are drawn
here, uniformly and from the operating system's entropy, and never by anything that has seen a score. How many trials
there were, their scores, and everything about the losing ones must stay secret: the promise covers the best trial only.
Under a fixed number (`law="all"`) everything may be looked at and released, and a sampler may learn from scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from secrets import SystemRandom, token_hex
from typing import Any

from quell.budget import Budget
from quell.budget.entry import entry_of
from quell.errors import QuellError, short
from quell.planning import Plan
from quell.privacy.selection import Trials
from quell.tuning.plan import TuningPlan

BATCH_SIZE = "batch_size"


@dataclass(eq=False)
class Trial:
    """One trial: train with `parameters` as `plan` says, then `report` a score."""

    parameters: dict[str, Any]
    plan: Plan
    score: float | None = None
    result: Any = None
    _told: list[Any] = field(default_factory=list, repr=False)  # Optuna's study and trial, if there are such

    def report(self, score: float, result: Any = None) -> None:
        """Say how good the trial was, and what to keep of it: the model, a report, a path.

        The score must be computed from what the trial released (its model) and from data that the promise does not
        cover. A score that is not a number counts as the worst.
        """
        self.score = -math.inf if math.isnan(float(score)) else float(score)
        self.result = result
        if self._told:
            study, asked = self._told
            study.tell(asked, self.score)


class Search:
    """The trials of a tuning plan.

    Args:
        plan: From `quell.tuning.tune`.
        space: Values to choose from, by name, such as {"lr": [0.1, 0.5], "max_grad_norm": [0.5, 1.0]}. Batch sizes are
            those of the plan.
        budget: A budget that the whole search is charged to before its first trial, as one run.
        study: An Optuna study that trials are written to. Under `law="all"` its sampler proposes the settings; under a
            random number of trials they are drawn here, and the study has to stay secret.
        seed: Makes the number of trials and their settings repeatable and voids the privacy of the search: for tests.

    >>> from quell.tuning import tune
    >>> plan = tune(examples=1000, batch_size=100, epochs=3, epsilon=4, delta=1e-5, sampling="cyclic", trials=5)
    >>> search = Search(plan, {"lr": [0.1, 0.3, 1.0]})
    >>> for trial in search.trials():
    ...     trial.report(score=-abs(trial.parameters["lr"] - 0.3), result="a model")
    >>> search.best.result
    'a model'
    """

    def __init__(
        self,
        plan: TuningPlan,
        space: Mapping[str, Sequence[Any]],
        *,
        budget: str | Path | None = None,
        study: Any = None,
        seed: int | None = None,
    ) -> None:
        if BATCH_SIZE in space:
            raise QuellError("batch sizes are those of the tuning plan: give them to tune, and leave them out here")
        for name, values in space.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise QuellError(f"{name}={short(values)} must be a list of values to choose from")
        if study is not None and study.direction.name != "MAXIMIZE":
            raise QuellError("the Optuna study looks for low scores, and a search for high ones: direction='maximize'")
        self.plan = plan
        self._sizes = {int(each.run.batch_size or 0): each for each in plan.plans}
        self._space = {name: list(values) for name, values in space.items()}
        if len(self._sizes) > 1:
            self._space[BATCH_SIZE] = list(self._sizes)
        self._budget, self._study = budget, study
        self._random = SystemRandom() if seed is None else Random(seed)
        if seed is not None and budget is not None:
            raise QuellError("a search with a seed has no privacy that a budget could count: leave out seed, or budget")
        self._made: list[Trial] | None = None
        self._finished = False

    def trials(self) -> Iterator[Trial]:
        """All trials, one after the other. Each has to report a score before the next one comes.

        Once only: a search that was stopped must not be continued or repeated until it comes out well.
        """
        if self._made is not None:
            raise QuellError("the trials of a search are made once: plan a new search, which costs as much again")
        if self._budget is not None:
            Budget(self._budget).add(entry_of(self.plan.claim, f"search {token_hex(8)}"))
        self._made = []
        count = self.plan.trials.draw(self._random) if isinstance(self.plan.trials, Trials) else self.plan.trials
        for _ in range(count):
            trial = self._next()
            self._made.append(trial)
            yield trial
            if trial.score is None:
                raise QuellError("a trial ended without a score: call trial.report(score, result) for each of them")
        self._finished = True

    @property
    def best(self) -> Trial:
        """The trial with the highest score, the first of equals: what may be released."""
        if not self._finished or not self._made:
            raise QuellError("the search is not finished: go through all of its trials first")
        return max(self._made, key=lambda trial: trial.score if trial.score is not None else -math.inf)

    def _next(self) -> Trial:
        adaptive = self._study is not None and not isinstance(self.plan.trials, Trials)
        drawn = {} if adaptive else {name: self._random.choice(values) for name, values in self._space.items()}
        told: list[Any] = []
        if self._study is not None:
            if not adaptive:
                self._study.enqueue_trial(drawn)
            asked = self._study.ask()
            taken = {name: asked.suggest_categorical(name, values) for name, values in self._space.items()}
            if not adaptive and taken != drawn:
                raise QuellError("the Optuna study did not take the settings that were drawn: give it a new study")
            drawn, told = taken, [self._study, asked]
        size = int(drawn.get(BATCH_SIZE, next(iter(self._sizes))))
        return Trial(drawn, self._sizes[size], _told=told)
