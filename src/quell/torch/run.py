"""What loader and optimizer share: the plan, the noise, and which batch is due.

The optimizer's noise counts the steps; the loader hands out the batch of that step and notes what it handed out, so
that a step can be refused when its gradients come from anything else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quell.errors import QuellError
from quell.privacy import certify
from quell.sampling import Batches, Cyclic, Scheme
from quell.torch.noise import CorrelatedNoise

if TYPE_CHECKING:
    from quell.mechanism import Mechanism
    from quell.planning import Plan


@dataclass(frozen=True)
class Portion:
    """What one item of the loader holds: so many of this rank's examples of a step; `last` closes the step."""

    step: int
    examples: int
    last: bool


@dataclass(eq=False)
class Run:
    """One private training run of a plan on this rank."""

    plan: Plan
    mechanism: Mechanism
    batches: Batches
    noise: CorrelatedNoise
    rank: int
    world: int
    handed_out: deque[Portion] = field(default_factory=deque)

    @property
    def step(self) -> int:
        """The step that is due, counted from 0."""
        return self.noise.step

    @property
    def expected_batch_size(self) -> float:
        """What gradient sums are divided by; the size that came up is private."""
        return self.batches.expected_size

    @property
    def epoch_end(self) -> int:
        """The first step after the epoch that the due step is in."""
        length = self.plan.setup.steps_per_epoch
        return min((self.step // length + 1) * length, self.noise.steps)

    def require_steps_left(self) -> None:
        if self.step >= self.noise.steps:
            raise QuellError(
                f"the plan's {self.noise.steps:,} steps ({self.plan.epochs} epochs) are done: stop here, or make a new "
                "plan for a longer run"
            )

    def settle(self, examples: int) -> bool:
        """Check that a step's gradients are those of the batch that is due; whether this closes the step."""
        if not self.handed_out:
            raise QuellError(
                "optimizer.step() was called without a batch of the plan: iterate over the loader that make_private "
                "returned, and take one step per batch"
            )
        due = self.handed_out[0]
        if due.step != self.step:
            raise QuellError(
                f"the batch is that of step {due.step:,}, but step {self.step:,} is due: call optimizer.step() once "
                "for every batch of the loader, also when the loss looks wrong"
            )
        if examples != due.examples:
            raise QuellError(
                f"the gradients are those of {examples:,} examples, but the plan's batch of step {due.step:,} has "
                f"{due.examples:,}: train on the loader that make_private returned, one step per batch, with the model "
                "in train mode and no forward pass without a backward pass outside torch.no_grad()"
            )
        self.handed_out.popleft()
        return due.last

    def name(self) -> dict[str, Any]:
        """What a checkpoint must have in common with the run that loads it."""
        return {"scheme": repr(self.batches.scheme), "examples": self.batches.examples, "key_id": self.noise.key.id}


def scheme_of(plan: Plan, mechanism: Mechanism) -> Scheme:
    """The sampling scheme that the mechanism's guarantee is about; refused where it does not hold under the plan's.

    Fixed batches are cut from a random order, drawn once: privacy is the same, and data that is sorted by label would
    otherwise make batches of one label.
    """
    promised = mechanism.guarantee
    scheme = plan.problem.scheme_of(mechanism.strategy, promised.sampling)
    if all(mechanism is not row for row in plan.mechanisms):  # priced elsewhere, perhaps for fewer participations
        certify(mechanism.strategy, scheme, mechanism.noise_multiplier, promised.epsilon, promised.delta)
    return replace(scheme, shuffle=True) if isinstance(scheme, Cyclic) else scheme
