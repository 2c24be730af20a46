"""What the user knows about a training run, validated once.

Everything downstream may assume that a `Setup` is sound: counts are whole and positive, (ε, δ) is a privacy
level, the optimizer's numbers describe an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quell import workload
from quell.costs import Noise, TimeLimit
from quell.errors import QuellError, require_count, require_finite, require_privacy, short
from quell.objective import OBJECTIVES
from quell.sampling import Cyclic, scheme_names


def refuse_decay_rate(weight_decay: float) -> None:
    """Refuse what is likely an optimizer's decay rate where the factor α on the weights is meant."""
    if 0 <= require_finite("weight_decay", weight_decay) < 0.5:
        raise QuellError(
            f"weight_decay={weight_decay:g} must be the factor that multiplies the weights each step, such as "
            f"0.9999: for an optimizer with learning rate lr and that weight_decay, 1 - lr*{weight_decay:g}"
        )


@dataclass(frozen=True)
class Setup:
    """A training run: data, optimizer, privacy budget, and what its noise may cost.

    `weight_decay` is the factor α that multiplies the weights at every step (1: none; 1 − lr·w for an
    optimizer's weight_decay=w). `learning_rates` is None for a constant rate, "cosine", "linear", or one
    positive number per step (only ratios matter). `memory` is how many model-sized vectors may be kept for
    noise (None: no limit), `draws` how many noise vectors may be generated per step.
    `sampling` names the schemes of `quell.sampling` that the data pipeline can do, separated by commas, or "best" for
    all of them; the plan takes the one with the least error. `objective` is what the plan makes small
    (`quell.objective`), `adaptive` whether the optimizer rescales gradients, as Adam does. `time_limit` says how long
    noise may take (`quell.costs`). For privacy per *user*, whose data may take part in several batches, give the least
    `separation` in steps between two of them and the most `participations`: both are promises that the data pipeline
    has to keep, and only "cyclic" accounting, which needs no more than them, is available.

    >>> Setup(examples=50_000, batch_size=128, epochs=10, epsilon=8, delta=1e-5).steps
    3900
    """

    examples: int
    batch_size: int
    epochs: int
    epsilon: float
    delta: float
    momentum: float = 0.0
    weight_decay: float = 1.0
    learning_rates: str | Sequence[float] | None = None
    memory: float | None = 4.0
    draws: int = 16
    sampling: str = "best"
    objective: str = "training"
    adaptive: bool = False
    time_limit: TimeLimit | None = None
    separation: int | None = None
    participations: int | None = None

    def __post_init__(self) -> None:
        for name in ("examples", "batch_size", "epochs", "draws"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        if self.batch_size > self.examples:
            raise QuellError(
                f"batch_size={self.batch_size:,} is larger than the data set of {self.examples:,} examples"
            )
        epsilon, delta = require_privacy(self.epsilon, self.delta)
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", delta)
        refuse_decay_rate(self.weight_decay)
        for name in ("momentum", "weight_decay", *(() if self.memory is None else ("memory",))):
            object.__setattr__(self, name, require_finite(name, getattr(self, name)))
        object.__setattr__(
            self, "sampling", self.sampling if self.sampling == "best" else ",".join(scheme_names(self.sampling))
        )
        if self.objective not in OBJECTIVES:
            raise QuellError(f"there is no objective {short(self.objective)}: use {', '.join(OBJECTIVES)}")
        if self.memory is not None and self.memory < 0:
            raise QuellError(
                f"memory={self.memory:g} model copies must not be negative: 0 allows only mechanisms without buffers"
            )
        if not isinstance(self.adaptive, bool):
            raise QuellError(f"adaptive={short(self.adaptive)} must be True or False: whether the optimizer is")
        if self.time_limit is not None and not isinstance(self.time_limit, TimeLimit):  # from a plan file
            object.__setattr__(self, "time_limit", TimeLimit.of_plain(self.time_limit))
        for name in ("separation", "participations"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_count(name, getattr(self, name)))
        if self.user_level:
            if self.sampling not in ("best", Cyclic.name):
                raise QuellError(f"sampling={self.sampling} is priced per example: per user only cyclic is")
            object.__setattr__(self, "sampling", Cyclic.name)
            self.cycle.participation  # noqa: B018 - validates the pattern
        if self.learning_rates is not None and not isinstance(self.learning_rates, str):
            try:
                rates = tuple(float(rate) for rate in self.learning_rates)
            except (TypeError, ValueError, OverflowError):
                raise QuellError("learning_rates must be a schedule's name, or one number per step") from None
            object.__setattr__(self, "learning_rates", rates)
        self.workload  # noqa: B018 - validates momentum, weight decay and schedule

    @property
    def steps_per_epoch(self) -> int:
        """Every epoch visits all examples; what a batch size does not divide makes the batches a little larger."""
        return self.examples // self.batch_size

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    @property
    def user_level(self) -> bool:
        """Whether the promise is per user rather than per example."""
        return self.separation is not None or self.participations is not None

    @property
    def cycle(self) -> Cyclic:
        """The epochs of the run: how its batches follow each other, whichever scheme fills them."""
        if not self.user_level:
            return Cyclic(self.steps, self.steps_per_epoch)
        return Cyclic(self.steps, self.separation or 1, participations=self.participations or 0)

    @cached_property
    def workload(self) -> workload.Workload:
        given = self.learning_rates
        rates = workload.schedule(given, self.steps) if isinstance(given, str) else given
        return workload.sgd(self.steps, self.momentum, self.weight_decay, rates)

    @property
    def buffer_limit(self) -> float:
        return math.inf if self.memory is None else self.memory

    def fits(self, noise: Noise) -> bool:
        """Whether noise stays within the limits on memory, draws and time."""
        in_time = self.time_limit is None or self.time_limit.allows(noise.buffers, noise.draws)
        return noise.buffers <= self.buffer_limit and noise.draws <= self.draws and in_time

    @property
    def notes(self) -> tuple[str, ...]:
        """What a careful colleague would point out before the run."""
        found = []
        if self.delta * self.examples > 1:
            found.append(
                f"delta={self.delta:g} is above 1/examples={1 / self.examples:.2g}: "
                "a guarantee with such a delta would allow an example to be published outright"
            )
        if left := self.examples % self.batch_size:
            found.append(
                f"{self.examples:,} examples do not divide into batches of {self.batch_size:,}: an epoch has "
                f"{self.steps_per_epoch:,} steps, and the {left:,} left over make some batches larger"
            )
        return tuple(found)
