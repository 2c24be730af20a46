"""The private optimizer: collect clipped sums, add the step's row of noise, divide by the expected batch size, step.

It wraps any `torch.optim` optimizer and keeps its parameter groups and state, so schedulers work as usual. What could
break the promise is refused: gradients of anything but the plan's batch, a clip norm or a set of parameters that
changes during the run, gradients used twice, a step past the plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from quell.adapters.report import PrivacyReport, privacy_report
from quell.auditing import Audit
from quell.errors import QuellError
from quell.noise.secrecy import never_copied
from quell.torch.averages import AveragedWeights
from quell.torch.checks import PlanMismatchWarning, schedule_mismatch
from quell.torch.distributed import gather, sum_over_ranks, together
from quell.torch.engine.base import Engine
from quell.torch.joined import parts_of
from quell.torch.replay import Start, digest, options
from quell.torch.run import TrainingRun, Unfinished
from quell.torch.sharding import set_gradient, shard_state, whole
from quell.torch.shards import EveryRanks


class PrivateOptimizer(Optimizer):
    """Your optimizer, private: what `make_private` and `attach` return.

    Its parameter groups, options and state are your optimizer's, so schedulers work on it as usual. The `.grad` of
    a parameter is None before `step`. After it, and until `zero_grad`, it is the noisy mean gradient.

    Attributes:
        acted: Whether the last call of `step` took a step. It is False where `physical_batch_size` cuts batches into
            parts and this was not the last part: then schedulers wait too.
        max_grad_norm: The most that one example, or user, moves the sum of a step.
        noise_multiplier: The plan's: noise has this standard deviation, times `max_grad_norm`, before it is correlated.
        expected_batch_size: What sums are divided by. The size of a batch is private.
        original_optimizer: Your optimizer.
    """

    _step_supports_amp_scaling = True  # so that a GradScaler hands its scale over, and can be refused

    def __init__(self, optimizer: Optimizer, run: TrainingRun, engine: Engine, ema: float | None = None) -> None:
        self.original_optimizer = optimizer
        self.run = run
        self.noise_multiplier = run.mechanism.noise_multiplier
        self.expected_batch_size = run.expected_batch_size
        self._kind = ", ".join(type(part).__name__ for part in parts_of(optimizer))
        self.step_hook: Callable[[PrivateOptimizer], None] | None = None
        self._engine = engine
        self._trained = list(engine.params.values())
        self.acted = False  # whether the last `step` took one, and did not only gather a part of its batch
        self._used = False  # whether p.grad still holds the gradients of the last step
        self._first_rate: tuple[int, float] | None = None  # a step, and the learning rate that it was taken with
        self._warns_of_schedule = True  # until it has warned once
        self._noised: set[Optimizer] = set()  # the wrapped ones that have not used a step's noisy gradient yet
        self._to_replay: Start | None = None
        self._averages = None if ema is None else AveragedWeights(self._trained, ema)
        run.forget_gradients = engine.discard
        for name, held in list(vars(optimizer).items()):
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                setattr(self, name, held)  # hooks registered here run when the wrapped optimizer steps, saves and loads
        for part in parts_of(optimizer):
            part.register_step_pre_hook(self._require_noise)
            part.register_step_post_hook(self._average)

    @property
    def param_groups(self) -> Any:
        return self.original_optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.original_optimizer.state

    @property
    def defaults(self) -> Any:
        return self.original_optimizer.defaults

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that get gradients and noise."""
        return list(self._trained)

    @property
    def cuda_graphs(self) -> str:
        """Whether the model's passes are recorded as CUDA graphs now; if not, why not."""
        return self._engine.cuda_graphs()

    @property
    def max_grad_norm(self) -> float:
        return self.run.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        raise QuellError(
            f"max_grad_norm cannot become {value} during a run: the noise of past and coming steps is for "
            f"{self.max_grad_norm:g}; call make_private again for a new run"
        )

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Opacus's BatchMemoryManager says whether the next `step` only accumulates."""
        self.run.unfinished.skips.append(do_skip)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise QuellError(f"parameters cannot join during a run: {_SAME_PARAMETERS}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; clipped sums of a batch that is still being accumulated are kept."""
        self._engine.discard()
        if self.run.guard is not None:
            self.run.guard.forget()
        self.original_optimizer.zero_grad(set_to_none=True)
        self._used, self._noised = False, set()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Add up clipped gradients, add the step's noise, divide, and let your optimizer step; once for each batch.

        If the loader hands out batches in parts, call it for each part: it acts after the last (`acted`).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
        return loss

    def pre_step(self) -> bool:
        """Everything but the wrapped optimizer's own step; False where the batch is not complete yet.

        A step that is refused, or interrupted, leaves nothing behind: its batch has to come again, from its first part.
        """
        self.acted = False
        try:
            self._require_sound()
            self.run.require_same_rates([_rate(group) for group in self.param_groups])
            self.clip_and_accumulate()
            skips = self.run.unfinished.skips
            if (skips and skips.pop(0)) or not self.run.settle(self._engine.if_none_came):
                return False
            self._warn_about_schedule()
            if self.run.step == self.run.noise.steps - 1:
                self._engine.require_bounded()  # no later step will look at this sum
            self.add_noise()
            self.scale_grad()
            if self.step_hook is not None:
                self.step_hook(self)
            self._noised, self.acted = set(parts_of(self.original_optimizer)), True
            return True
        except BaseException:
            self._noised = set()
            self.run.restart_step()
            raise

    def clip_and_accumulate(self) -> None:
        """Add the clipped gradients that backward passes have left to the sums of this step."""
        examples, sums = self._engine.collect()
        unfinished = self.run.unfinished
        if self.run.planted is not None:
            self.run.planted.plant(sums, unfinished, self._engine.max_grad_norm)
        unfinished.examples += examples
        unfinished.norms += self._engine.take_norms()
        if unfinished.sums is None:
            unfinished.sums = sums
        else:
            # In float64, and rounded once: added up in float32, one part would change how all later ones round.
            unfinished.sums = [total.double().add_(part) for total, part in zip(unfinished.sums, sums, strict=True)]

    def add_noise(self) -> None:
        """The step's one row of noise, added to the sums over all ranks."""
        unfinished, self.run.unfinished = self.run.unfinished, Unfinished()
        assert unfinished.sums is not None
        sums = [total.float() for total in unfinished.sums]
        if not self._engine.sharded:
            sum_over_ranks(sums)
        self.run.release(sums, unfinished)
        self._engine.unscale_(sums)
        for parameter, total in zip(self._trained, sums, strict=True):
            set_gradient(parameter, total)
        self._used = True

    def scale_grad(self) -> None:
        """From sums to means, by the *expected* batch size."""
        torch._foreach_div_([parameter.grad for parameter in self._trained], self.expected_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and the noise's, of all ranks: call it on all of them."""
        state: dict[str, Any] = pytree.tree_map(whole, self.sharded_state_dict())
        noise = state["quell"]["noise"]
        state["quell"]["noise"] = gather(noise.value) if isinstance(noise, EveryRanks) else noise
        return state

    def sharded_state_dict(self) -> dict[str, Any]:
        """The same, but each rank has its own slices of what is sharded, and noise for them."""
        if self.run.unfinished.sums is not None:
            raise QuellError("the batch of this step is not complete: save after optimizer.step() has closed it")
        self._require_training_weights()
        if self.run.guard is not None:
            self.run.guard.require_protected()
        self._engine.require_bounded()
        noise = self.run.noise.state_dict()
        own = {
            "optimizer": self._kind,
            "weights": digest(self._trained),
            "gradients": self._engine.settings(),
            "averages": None if self._averages is None else self._averages.state_dict(),
            "canaries": None if self.run.planted is None else self.run.planted.state_dict(),
            "noise": EveryRanks(noise) if self._engine.sharded and noise["buffers"] is not None else [noise],
        }
        return {**self.original_optimizer.state_dict(), "quell": {**own, **self.run.name()}}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, replay: bool = False) -> None:
        """Go on from a checkpoint of the same plan, data and key, at any world size.

        After a crash the checkpoint is older than the steps that were released. `replay=True` lets them come again, and
        checks that they are the same: batches and random numbers (torch's, NumPy's, Python's) are; the model's state is
        yours to load, before the next step.
        """
        if "quell" not in state_dict:
            raise QuellError("this is not the state of a private optimizer: pass what its state_dict() returned")
        own = state_dict["quell"]
        self.run.require_own(own)
        planted = self.run.planted
        averages, canaries = own.get("averages") or {"rate": None}, own.get("canaries") or {"count": 0}
        rate, count = self._averages and self._averages.rate, planted.watched.count if planted else 0
        compared = (
            ("ema", averages["rate"], rate),
            ("canaries", canaries["count"], count),
            ("optimizer", own.get("optimizer", self._kind), self._kind),
        )
        for name, saved, now in compared:
            if saved != now:
                raise QuellError(
                    f"the state was saved with {name}={saved} and this run has {name}={now}: pass what that run was "
                    "given"
                )
        together(lambda: self.run.noise.load_state_dict(own["noise"], replay=replay))
        self._to_replay = None
        self.run.share_released()
        if replay and self.run.released > self.run.step:
            groups = [options(group) for group in state_dict["param_groups"]]
            self._to_replay = Start(own["weights"], own.get("gradients", {}), groups)
        plain = {name: value for name, value in state_dict.items() if name != "quell"}
        self.original_optimizer.load_state_dict(plain)
        shard_state(self.original_optimizer)
        if self._averages is not None:
            self._averages.load_state_dict(averages)
        if planted is not None:
            planted.load_state_dict(canaries)
        self.run.restart_step()
        self._used, self._noised = False, set()

    def close(self) -> None:
        """Let go of the ledger and the log, so that another run of this process can go on with the key."""
        self.run.close()
        self._engine.require_bounded()

    def averaged(self) -> AbstractContextManager[None]:
        """Inside `with optimizer.averaged():` the model has the averaged weights, to be evaluated, saved or copied.

        For a run of `make_private(..., ema=0.98)`. Before the first step the average is the weights as they are.
        """
        if self._averages is None:
            raise QuellError("this run averages no weights: pass ema=0.98 to make_private, before the first step")
        return self._averages.in_place() if self.run.step else nullcontext()

    def privacy_report(self) -> PrivacyReport:
        """What this run promises, has spent so far, and rests on."""
        run = self.run
        return privacy_report(
            run.mechanism,
            run.batches,
            run.noise.key,
            run.noise.generator,
            self.max_grad_norm,
            self._engine.clips,
            run.step,
            run.released,
            ("torch", str(torch.__version__)),
        )

    def audit(self, confidence: float = 0.95) -> Audit:
        """What an attacker can tell about this run's canaries, once it is finished: ε is at least so much.

        Args:
            confidence: Probability that the lower bound is true.

        Returns:
            The lower bound beside the promise; print it, or `plot` it.
        """
        if self.run.planted is None:
            raise QuellError("this run has no canaries: pass canaries=1000 to make_private, before the first step")
        return self.run.planted.watched.audit(confidence)

    def __repr__(self) -> str:
        return f"<private {self.original_optimizer!r}, step {self.run.step:,} of {self.run.noise.steps:,}>"

    __reduce_ex__ = never_copied("a private optimizer is never pickled or copied: save optimizer.state_dict()")

    def _require_noise(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Runs before every step of the wrapped optimizer: it may use a noisy gradient, once."""
        if optimizer not in self._noised:
            raise QuellError(
                "this optimizer was made private, and its own step has no noise: call step() of the one that "
                "make_private returned"
            )
        self._noised.discard(optimizer)
        self._require_no_other_gradients()

    def _require_no_other_gradients(self) -> None:
        trained = {id(parameter) for parameter in self._trained}
        for group in self.param_groups:
            if any(id(p) not in trained and p.grad is not None for p in group["params"]):
                raise QuellError(
                    f"a parameter that was frozen when make_private was called has a gradient, without clipping and "
                    f"noise: {_SAME_PARAMETERS}"
                )

    def _average(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Runs after every step of a wrapped optimizer."""
        if self._averages is not None:
            self._averages.update((p for group in optimizer.param_groups for p in group["params"]), self.run.step)

    def _require_training_weights(self) -> None:
        if self._averages is not None:
            self._averages.require_training_weights()

    def _require_same_start(self) -> None:
        """Before the first step that comes again: are weights, clipping and options those of the checkpoint?"""
        if self._to_replay is not None:
            groups = [options(group) for group in self.param_groups]
            self._to_replay.require_same(Start(digest(self._trained), self._engine.settings(), groups))
            self._to_replay = None

    def _require_sound(self) -> None:
        self.run.require_ready()
        self._require_training_weights()
        if getattr(self, "grad_scale", None) is not None:  # set by GradScaler.step
            raise QuellError(
                "a GradScaler scales the loss, and with it what clipping sees: use bfloat16 autocast, which needs no "
                "scaler"
            )
        if self._used and self.run.unfinished.received is None:
            raise QuellError(
                "optimizer.step() was called twice for one batch: call it once for each batch of the loader"
            )
        if self._used:
            raise QuellError(
                "optimizer.zero_grad() was not called since the last step, whose gradients would count twice: call it "
                "once per step, before or after it (model.zero_grad() does not do the same)"
            )
        now = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if len(now) != len(self._trained) or any(a is not b for a, b in zip(now, self._trained, strict=True)):
            raise QuellError(f"the trainable parameters are not those of make_private any more: {_SAME_PARAMETERS}")
        self._require_no_other_gradients()
        self._require_same_start()
        self.run.charge_once()

    def _warn_about_schedule(self) -> None:
        if not self._warns_of_schedule:
            return
        rate = _rate(self.param_groups[0])
        if self._first_rate is None and rate > 0:  # not before: schedulers set it when they are made
            self._first_rate = self.run.step, rate
        if self._first_rate is not None:
            mismatch = schedule_mismatch(self.run.plan, self.run.step, *self._first_rate, rate)
            if mismatch is not None:
                told = (
                    "; if it follows the training loss (ReduceLROnPlateau), the promise does not cover what that tells"
                )
                warnings.warn(mismatch + told, PlanMismatchWarning, stacklevel=4)
                self._warns_of_schedule = False


_SAME_PARAMETERS = "freeze, unfreeze and add layers before calling it"


def _rate(group: Mapping[str, Any]) -> float:
    return float(group.get("lr", 1.0))
