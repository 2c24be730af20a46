"""What is trained and what is promised: one `Run`, validated once, from data sizes or from steps.

Everything downstream may assume that a `Run` is sound: counts are whole and positive, (ε, δ) is a privacy level, the
optimizer's numbers describe an optimizer, and how often anyone takes part fits the epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from quell import workload
from quell.analysis.objective import DEFAULT_OBJECTIVE as DEFAULT_OBJECTIVE
from quell.analysis.objective import OBJECTIVES as OBJECTIVES
from quell.costs import USUAL, Limits, TimeLimit, copies_in
from quell.errors import QuellError, require_count, require_finite, require_privacy, short
from quell.participation import Participation
from quell.schemes import BEST, FIXED, Scheme, named

DECAY_RATE = 0.5  # a smaller "factor" is probably an optimizer's decay rate


@dataclass(frozen=True)
class Promise:
    """(epsilon, delta)-differential privacy for each `unit`: an example, or a user with all their examples."""

    epsilon: float
    delta: float
    unit: str = "example"

    def __post_init__(self) -> None:
        epsilon, delta = require_privacy(self.epsilon, self.delta)
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", delta)


@dataclass(frozen=True)
class Optimizer:
    """What the optimizer does with gradients, which decides how much of the noise stays in the model.

    `weight_decay` is the factor α that multiplies the weights at every step (1: none; 1 − lr·w for an optimizer's
    weight_decay=w). `learning_rates` is None for a constant rate, "cosine", "linear", or one positive number per step
    (only ratios matter). `adaptive`: it rescales gradients, as Adam does. `ema`: an average of the weights is used, in
    which the past has this share, such as 0.98.
    """

    momentum: float = 0.0
    weight_decay: float = 1.0
    learning_rates: str | Sequence[float] | None = None
    adaptive: bool = False
    ema: float | None = None

    def __post_init__(self) -> None:
        for name in ("momentum", "weight_decay", *(["ema"] if self.ema is not None else [])):
            object.__setattr__(self, name, require_finite(name, getattr(self, name)))
        if 0 <= self.weight_decay < DECAY_RATE:
            raise QuellError(
                f"weight_decay={self.weight_decay:g} must be the factor that multiplies the weights each step: give "
                f"1 - lr*{self.weight_decay:g} if that is the weight_decay of an optimizer with learning rate lr"
            )
        if not isinstance(self.adaptive, bool):
            raise QuellError(f"adaptive={short(self.adaptive)} must be True or False: is it an optimizer like Adam?")
        if self.learning_rates is not None and not isinstance(self.learning_rates, str):
            try:
                rates = tuple(float(rate) for rate in self.learning_rates)
            except (TypeError, ValueError, OverflowError):
                raise QuellError("learning_rates must be a schedule's name, or one number per step") from None
            object.__setattr__(self, "learning_rates", rates)

    def workload(self, steps: int) -> workload.Workload:
        """The workload A of so many steps."""
        given = self.learning_rates
        rates = workload.schedule(given, steps) if isinstance(given, str) else given
        return workload.sgd(steps, self.momentum, self.weight_decay, rates, self.ema)


@dataclass(frozen=True)
class Run:
    """A training run, its promise and its limits. Make one with `Run.from_data` or `Run.from_steps`.

    Args:
        participation: How often, and how far apart, one example or user can take part.
        epochs: Passes over the data.
        promise: (ε, δ), and for whom.
        optimizer: What the optimizer does with gradients.
        schemes: The ways of forming batches that the data pipeline can do; a plan takes the best.
        objective: What a plan minimises: "training" (predicted training error), "rmse", "maxse" or "loss".
        limits: What noise may cost in memory, draws and time.
        examples, batch_size: The data, counted in what batches are drawn of; None if the run was given by its steps.
        drawn: What batches are drawn of: "example", "user" where each user is one unit of a batch, or "group" where the
            users who share examples are.

    >>> Run.from_data(examples=50_000, batch_size=128, epochs=10, epsilon=8, delta=1e-5).steps
    3900
    """

    participation: Participation
    epochs: int
    promise: Promise
    optimizer: Optimizer = field(default_factory=Optimizer)
    schemes: tuple[type[Scheme], ...] = BEST
    objective: str = DEFAULT_OBJECTIVE
    limits: Limits = field(default_factory=Limits)
    examples: int | None = None
    batch_size: int | None = None
    drawn: str = "example"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise QuellError(f"there is no objective {short(self.objective)}: use {', '.join(OBJECTIVES)}")
        if self.drawn != "example" and not self.user_level:
            raise QuellError(f"batches drawn of {self.drawn}s promise privacy per user: make the promise's unit user")
        count, b = self.participation.count, self.participation.separation
        if not self.own_pattern and count < self.epochs:
            raise QuellError(
                f"separation={b} lets one {self.drawn} take part {count} times, but {self.epochs} epochs use it "
                f"more often: give a separation of at most {self.steps // self.epochs}"
            )
        assert self.workload  # which refuses momentum, weight decay and schedules that make no sense

    @classmethod
    def from_data(
        cls,
        *,
        examples: int | None = None,
        users: int | None = None,
        groups: int | None = None,
        batch_size: int,
        epochs: int,
        epsilon: float,
        delta: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 1.0,
        learning_rates: str | Sequence[float] | None = None,
        memory: float | str | None = USUAL,
        draws: int = 16,
        sampling: str = "best",
        objective: str = DEFAULT_OBJECTIVE,
        adaptive: bool = False,
        ema: float | None = None,
        time_limit: TimeLimit | None = None,
        parameters: int | None = None,
        separation: int | None = None,
        participations: int | None = None,
        optimizer: str = "sgd",
        betas: Sequence[float] = (0.9, 0.999),
    ) -> Run:
        """A run over a data set. If the batch size does not divide the examples, batches are a little larger.

        Args:
            examples, batch_size, epochs: The data; every epoch visits all examples.
            users: How many users there are, instead of `examples`, for privacy per *user*: batches are drawn of users
                (`make_private(..., users=ids)`), `batch_size` counts users, and an epoch visits each of them once.
            groups: The same where examples have several users: how many groups of users `quell.schemes.users.shared`
                finds. The promise is per user, if who owns which example is public (docs/users.md).
            epsilon, delta: The promise. Default of delta: `usual_delta`.
            momentum, weight_decay, learning_rates, adaptive, ema: The optimizer (see `Optimizer`).
            memory, draws, time_limit: What noise may cost (see `Limits`). Memory is a number of model copies, a size
                such as "8GB", or None for no limit. Default: four copies, or 1 GB if that is more.
            parameters: How many the model has, if memory is to be counted in bytes.
            sampling: The schemes of `quell.schemes` that the data pipeline can do, separated by commas, or "best".
            objective: What a plan minimises: "training", "rmse", "maxse" or "loss" (docs/planner.md).
            separation, participations: For privacy per user with batches of examples: the fewest steps between two
                batches with data of one user, and the most such batches. Your data pipeline has to make sure of both.
            optimizer, betas: "adam" or "adamw" with its betas, in place of `momentum` and `adaptive`.

        Returns:
            The run; raises `QuellError` if the numbers do not fit together.
        """
        if optimizer != "sgd":
            momentum, adaptive = workload.adam_momentum(optimizer, betas, momentum), True
        drawn, count = population(examples, users, groups)
        if drawn != "example" and (separation, participations) != (None, None):
            raise QuellError(f"{drawn}s= decides how often a {drawn} is used: leave separation and participations out")
        count, batch_size = require_count(f"{drawn}s", count), require_count("batch_size", batch_size)
        epochs = require_count("epochs", epochs)
        if batch_size > count:
            larger = f"batch_size={batch_size:,} is larger than the data set of {count:,} {drawn}s"
            raise QuellError(f"{larger}: use a smaller one", "batch_size")
        steps = count // batch_size * epochs
        allowed, unit = named(sampling), "example" if drawn == "example" else "user"
        pattern = Participation(steps, count // batch_size)
        if separation is not None or participations is not None:
            unit, usable = "user", tuple(kind for kind in allowed if kind.per_user)
            if not usable or (len(usable) < len(allowed) and allowed != BEST):
                raise QuellError(
                    f"sampling={sampling} is priced per example: per user only {FIXED.name} is (or use users=)"
                )
            allowed = usable
            least = 1 if separation is None else require_count("separation", separation)
            most = 0 if participations is None else require_count("participations", participations)
            pattern = Participation(steps, least, most)
        return cls(
            pattern,
            epochs,
            Promise(epsilon, usual_delta(count) if delta is None else delta, unit),
            Optimizer(momentum, weight_decay, learning_rates, adaptive, ema),
            allowed,
            objective,
            Limits(copies_in(memory, parameters), draws, time_limit),
            count,
            batch_size,
            drawn,
        )

    @classmethod
    def from_steps(
        cls,
        *,
        steps: int,
        epochs: int,
        epsilon: float,
        delta: float,
        separation: int | None = None,
        sampling: str = FIXED.name,
        objective: str = DEFAULT_OBJECTIVE,
        **optimizer: Any,
    ) -> Run:
        """A run given by its steps instead of its data.

        Args:
            steps, epochs: Optimizer steps and passes over the data.
            epsilon, delta: The promise.
            separation: Fewest steps between two uses of an example. Default: steps // epochs.
            sampling, objective: As in `from_data`.
            optimizer: The fields of `Optimizer`.

        Returns:
            The run; raises `QuellError` if the numbers do not fit together.

        >>> Run.from_steps(steps=781, epochs=10, epsilon=8, delta=1e-5).participation
        Participation(steps=781, separation=78, count=11)
        """
        if unknown := sorted(set(optimizer) - {each.name for each in fields(Optimizer)}):
            raise QuellError(f"a run from steps does not know {', '.join(unknown)}: see quell.Run.from_steps")
        steps, epochs = require_count("steps", steps), require_count("epochs", epochs)
        if epochs > steps:
            raise QuellError(f"epochs={epochs} do not fit into {steps} steps: an epoch needs at least one step")
        allowed, longest = named(sampling), steps // epochs
        pattern = Participation(steps, longest if separation is None else separation)
        if pattern.separation > longest and any(kind is not FIXED for kind in allowed):
            raise QuellError(
                f"separation={pattern.separation} is too long for {epochs} epochs in {steps} steps, which leave "
                f"{longest} steps for each: leave separation out, or make it smaller"
            )
        return cls(pattern, epochs, Promise(epsilon, delta), Optimizer(**optimizer), allowed, objective)

    def changed(self, **changes: Any) -> Run:
        """The same run with some arguments of `from_data` (or `from_steps`, if made by that) changed.

        >>> run = Run.from_data(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5)
        >>> run.changed(epochs=6, sampling="cyclic").steps
        60
        """
        make = Run.from_steps if self.examples is None else Run.from_data
        return make(**{**self.arguments, **changes})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that make this run."""
        given: dict[str, Any] = {
            "epochs": self.epochs,
            "epsilon": self.epsilon,
            "delta": self.delta,
            **vars(self.optimizer),
            "sampling": self.sampling,
            "objective": self.objective,
        }
        if self.examples is None:
            usual = self.participation.separation == self.steps // self.epochs  # then it follows the epochs
            return {"steps": self.steps, "separation": None if usual else self.participation.separation, **given}
        given |= {f"{self.drawn}s": self.examples, "batch_size": self.batch_size, **vars(self.limits)}
        if self.own_pattern:
            uncapped = Participation(self.steps, self.participation.separation).count
            count = None if self.participation.count == uncapped else self.participation.count
            given |= {"separation": self.participation.separation, "participations": count}
        return given

    def as_dict(self) -> dict[str, Any]:
        """Plain data: the part `run` of a plan file."""
        asked = self.arguments
        promise, optimizer = asdict(self.promise), {name: asked.pop(name) for name in vars(self.optimizer)}
        optimizer = {k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.items() if (k, v) != ("ema", None)}
        limits = {} if self.examples is None else {"limits": asdict(self.limits)}
        for name in ("epsilon", "delta", *vars(self.limits)):
            asked.pop(name, None)
        if self.examples is None or self.own_pattern:
            asked |= {"separation": self.participation.separation, "participations": self.participation.count}
        return {**asked, "promise": promise, "optimizer": optimizer, **limits}

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.participation.steps

    @property
    def epsilon(self) -> float:
        """ε of the promise."""
        return self.promise.epsilon

    @property
    def delta(self) -> float:
        """δ of the promise."""
        return self.promise.delta

    @property
    def user_level(self) -> bool:
        """Whether the promise is per user rather than per example."""
        return self.promise.unit == "user"

    @property
    def own_pattern(self) -> bool:
        """Whether separation and participations are those of users in batches of examples, and not the scheme's."""
        return self.user_level and self.drawn == "example"

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return self.steps // self.epochs

    @property
    def sampling(self) -> str:
        """The names of the schemes, as they are asked for."""
        return "best" if self.schemes == BEST else ",".join(kind.name for kind in self.schemes)

    @cached_property
    def designed_for(self) -> workload.Workload:
        """The workload that strategies are optimised for.

        Where an average of the weights is used, the objective says whether it is that average or the weights.
        """
        return self.workload if OBJECTIVES[self.objective].of_average else self.workload.without_average

    @cached_property
    def workload(self) -> workload.Workload:
        """The workload A: what the optimizer does with the gradients of the run."""
        return self.optimizer.workload(self.steps)


def usual_delta(count: int | None) -> float:
    """δ where none is given: the largest power of ten up to 1/(10·count), for so many examples (or users).

    >>> usual_delta(50_000), usual_delta(100_000)
    (1e-06, 1e-06)
    """
    return float(f"1e-{len(str(10 * require_count('examples', count) - 1))}")


def population(examples: int | None, users: int | None, groups: int | None) -> tuple[str, int | None]:
    """What batches are drawn of, and how many there are; refuses more than one of the three.

    >>> population(None, 20, None)
    ('user', 20)
    """
    given = {"example": examples, "user": users, "group": groups}
    known = [drawn for drawn, count in given.items() if count is not None] or ["example"]
    if len(known) > 1:
        raise QuellError(f"batches are drawn of {' or '.join(f'{each}s' for each in known)}, not both: give one")
    return known[0], given[known[0]]
