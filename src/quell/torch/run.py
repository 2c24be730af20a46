"""What loader and optimizer share: the plan, the noise, and which batch is due.

The optimizer's noise counts the steps. The loader notes every batch that the loop receives, so that a step can be
refused when its gradients come from anything else, or when a batch was passed over. What a step has gathered before its
noise is added lies in one place, `TrainingRun.unfinished`, and is dropped as a whole: half of it must never be
released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quell.adapters.users import Owned
from quell.errors import QuellError
from quell.schemes import Batches
from quell.torch.distributed import gather
from quell.torch.noise import CorrelatedNoise
from quell.torch.random_states import seed_all

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan
    from quell.torch.canaries import PlantedCanaries
    from quell.torch.probe import Probe
    from quell.torch.watch import Watch


@dataclass(frozen=True)
class Portion:
    """What one item of the loader holds: so many of this rank's examples of a step, its part `number` of `parts`."""

    step: int
    number: int
    parts: int
    examples: int
    rows_per_example: int = 1
    filled_to: int | None = None  # with examples of zeros, which count for nobody, behind the real ones

    @property
    def rows(self) -> int:
        """Of the batch's tensors."""
        return (self.filled_to or self.examples) * self.rows_per_example

    @property
    def last(self) -> bool:
        return self.number == self.parts - 1


@dataclass(eq=False)
class Unfinished:
    """What the due step has gathered so far, and none of which is released yet."""

    received: Portion | None = None  # the loop has it, and has not stepped on it
    parts: int = 0  # how many portions were stepped on
    examples: int = 0  # clipped since the last of those
    units: int = 0  # seen since the last of those, fillings included
    sums: list[Tensor] | None = None  # of clipped gradients, over all portions
    rates: list[float] | None = None  # the learning rates, which are the same for all portions
    skips: list[bool] = field(default_factory=list)  # what Opacus's BatchMemoryManager has announced
    norms: list[Tensor] = field(default_factory=list)  # of single gradients, where the log asks for them
    known: Any = None  # the sums of real gradients at the canaries' coordinates


@dataclass(eq=False)
class TrainingRun:
    """One private training run of a plan on this rank."""

    plan: Plan
    mechanism: Mechanism
    batches: Batches
    noise: CorrelatedNoise
    rank: int
    world: int
    key_kept: bool = False  # whether the key outlives this process, as rank 0 knows
    owned: Owned | None = None  # the rows of users, where batches are drawn of users
    spent: int = 0  # how many steps rank 0's ledger knew at the start, or when a state was loaded
    unfinished: Unfinished = field(default_factory=Unfinished)
    forget_gradients: Callable[[], None] = lambda: None  # what backward passes have left; set by the optimizer
    charge: Callable[[], object] | None = None  # charges the run to its budget, which the first step does
    guard: Probe | None = None  # what looks at the loop's batches and steps; set by make_private
    planted: PlantedCanaries | None = None  # whose traces an audit looks for; set by make_private
    watch: Watch | None = None  # what tells the log; set by make_private

    @property
    def step(self) -> int:
        """The step that is due, counted from 0."""
        return self.noise.step

    @property
    def released(self) -> int:
        """How many steps count as released, also those after the one that a checkpoint went back to."""
        return max(self.step, self.noise.released, self.spent)

    def share_released(self) -> None:
        """Let every rank know what the ledger knows, which rank 0 keeps. Call it on all ranks."""
        self.spent = max(gather(self.noise.released))

    @property
    def max_grad_norm(self) -> float:
        """The most that one example, or user, moves the sums of a step: what the noise is for."""
        bound = self.noise.max_grad_norm
        assert bound is not None  # which only the noise of a bare NoiseSpec lacks
        return bound

    @property
    def expected_batch_size(self) -> float:
        """What gradient sums are divided by; the size that came up is private."""
        return self.batches.expected_size

    @property
    def epoch_end(self) -> int:
        """The first step after the epoch that the due step is in."""
        length = self.plan.run.steps_per_epoch
        return min((self.step // length + 1) * length, self.noise.steps)

    def require_steps_left(self) -> None:
        if self.step >= self.noise.steps:
            raise QuellError(
                f"the plan's {self.noise.steps:,} steps ({self.plan.epochs} epochs) are done: stop here, or make a new "
                "plan for a longer run"
            )

    def require_ready(self) -> None:
        """Before a step: there is one left, and nothing speaks against it."""
        self.require_steps_left()
        if self.guard is not None:
            self.guard.settle(last=self.step == self.noise.steps - 1)

    def charge_once(self) -> None:
        """Before the first step: charge the run to its budget, or refuse. Call it on all ranks."""
        if self.charge is not None:
            self.charge()
            self.charge = None

    def release(self, sums: list[Tensor], gathered: Unfinished) -> None:
        """Add the due step's row of noise to the sums over all ranks, and tell those who look at releases.

        Then random numbers begin anew: where they stand tells how many rows the step had, and what a loop saves or
        publishes of them must not.
        """
        step = self.step
        if self.watch is not None:
            self.watch.before_noise()
        self.noise.add_(sums)
        if self.watch is not None:
            self.watch.after_noise(sums, gathered.norms)
        if self.planted is not None:
            self.planted.find(step, sums, gathered)
        self.seed(f"after step {step}")

    def seed(self, use: str) -> None:
        """Let all random numbers follow from the key: nobody knows them, and no earlier batch's size moves them."""
        seed_all(self.noise.key.derive(f"quell random numbers {use}"))

    def close(self) -> None:
        """Let go of the ledger, the log and what an unfinished step holds; no more steps are released."""
        self.noise.close()
        if self.guard is not None:
            self.guard.close()
        self.restart_step()
        if self.watch is not None:
            self.watch.close()

    def restart_step(self) -> None:
        """Drop everything that the due step has gathered; its batch comes again, from its first part."""
        self.unfinished = Unfinished()
        self.forget_gradients()

    def receive(self, portion: Portion) -> None:
        """Note that the loop has this portion now, and seed what it draws; refused where one before it was passed over.

        If an example is not in the data, those after it move to other places of the batch, which then have other random
        numbers. Numbers of all places are alike, and nobody knows them, so that tells nothing.
        """
        waiting = self.unfinished.received
        if waiting is not None and waiting != portion:  # the same one again is only another look at it
            self.restart_step()
            raise QuellError(
                f"{_named(portion)} was asked for before optimizer.step() was called for {_named(waiting)}: take one "
                "step for every batch, in order, also when the loss looks wrong. To evaluate, use a DataLoader of your "
                "own over the data. list(loader), prefetching and accumulating over batches do not work. "
                f"{_SMALLER_PARTS}"
            )
        if (portion.step, portion.number) != (self.step, self.unfinished.parts):
            due = f"part {self.unfinished.parts + 1} of step {self.step:,}"
            self.restart_step()
            raise QuellError(
                f"{_named(portion)} comes from the loader, but {due} is due: start the loader again (`for ... in "
                "loader`), which then goes on with the step that is due"
            )
        self.unfinished.received = portion
        self.seed(f"of step {portion.step}, part {portion.number}, rank {self.rank}")

    def require_same_rates(self, rates: list[float]) -> None:
        """Refuse a learning rate that changes between the parts of a batch: a schedule counts steps, not parts."""
        if self.unfinished.rates is not None and self.unfinished.rates != rates:
            raise QuellError(
                "the learning rate changed between the parts of one batch: call the scheduler when a step was taken, "
                "`if optimizer.acted: scheduler.step()`"
            )
        self.unfinished.rates = rates

    def settle(self, nothing_came: str) -> bool:
        """Check that a step's gradients are those of the batch that is due; whether this closes the step.

        `nothing_came` says what to do if there are none.
        """
        due, examples = self.unfinished.received, self.unfinished.examples
        if due is None:
            raise QuellError(
                "optimizer.step() was called without a batch of the plan: iterate over the loader that make_private "
                "returned, and call step() once for each of its batches"
            )
        if examples != due.examples:
            raise QuellError(_other_examples(examples, due, self.batches.unit, nothing_came))
        if due.filled_to is not None and due.examples and self.unfinished.units != due.filled_to:
            raise QuellError(
                f"the gradients are those of {self.unfinished.units:,} rows, but {_named(due)} was filled up to "
                f"{due.filled_to:,}, of which the first are the examples: train on every row of it, in order, or pass "
                "fixed_shape=False"
            )
        self.unfinished.received, self.unfinished.examples, self.unfinished.units = None, 0, 0
        self.unfinished.parts += 1
        return due.last

    def present(self, units: int) -> int:
        """How many of the next units of the portion are examples; they come first, what fills it up comes after."""
        due, before = self.unfinished.received, self.unfinished.units
        if due is None or due.filled_to is None:
            return units
        if not due.examples:
            return 0
        if before or units != due.filled_to:
            raise QuellError(
                f"a backward pass came for {units:,} of the {due.filled_to:,} places of a filled batch: which are "
                "examples is only known of the whole, so take it in one pass, or pass fixed_shape=False"
            )
        self.unfinished.units += units
        return due.examples

    def settings(self) -> dict[str, Any]:
        """What all ranks must have in common."""
        return {**self.name(), "steps": self.noise.steps}

    def name(self) -> dict[str, Any]:
        """What a checkpoint must have in common with the run that loads it."""
        promised = self.mechanism.guarantee
        return {
            "key_id": self.noise.key.id,
            "promise": "(ε, δ, noise multiplier) = "
            f"{tuple(map(float, (promised.epsilon, promised.delta, promised.noise_multiplier)))}",
            "scheme": repr(self.batches.scheme),
            "examples": self.batches.examples,
            **({} if self.owned is None else self.owned.name),
            **self.noise.settings(),
        }

    def require_own(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another run."""
        for what, value in self.name().items():
            if state.get(what) != value:
                instead = "resume with exactly the plan, max_grad_norm, parameters, data and key of that run"
                if what == "key_id":
                    instead = self._key_instead()
                raise QuellError(f"the state has {what} {state.get(what)}, this run has {value}: {instead}")

    def _key_instead(self) -> str:
        if not self.key_kept:
            return 'pass the key of that run, such as make_private(..., key="run.key"), which keeps it in a file'
        made = (
            ", best an absolute one: this key has released nothing, and was made just now if there was no such file in "
            "the folder from which the script was started"
        )
        return f"pass the path of that run's key{'' if self.released else made}"


def _named(portion: Portion) -> str:
    part = "" if portion.parts == 1 else f", part {portion.number + 1} of {portion.parts}"
    return f"the batch of step {portion.step:,}{part}"


def _other_examples(examples: int, due: Portion, unit: str, nothing_came: str) -> str:
    found = f"the gradients are those of {examples:,} {unit}s, but {_named(due)} has {due.examples:,}: "
    if not examples:
        return found + nothing_came
    if examples > due.examples:
        return found + (
            "take one backward pass per step, on the batch from make_private's loader (compute accuracies under "
            "torch.no_grad()). A collate function must return one row per item: for several rows of an example pass "
            f"rows_per_example= to make_private. {_SMALLER_PARTS}"
        )
    return found + "train on the loader that make_private returned, one step per batch, with every row of it"


_SMALLER_PARTS = "For batches too large for the memory pass physical_batch_size= to make_private"
