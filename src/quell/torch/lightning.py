"""Lightning under a plan: a callback that makes the module's optimizer private, and the loader to fit on.

Only public hooks are used: `configure_optimizers` is called through the callback, and the loader, which exists once
the optimizer does, is handed to `trainer.fit` as something to iterate over.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from quell.adapters.report import PrivacyReport
from quell.errors import QuellError
from quell.torch.checkpoints import newest_whole, state_of_model, write_whole, write_whole_file
from quell.torch.checks import PlanMismatchWarning, require_plan
from quell.torch.clip_norms import ClipNorm
from quell.torch.distributed import decided
from quell.torch.loader import PlannedSteps
from quell.torch.nested import mapped
from quell.torch.optimizer import PrivateOptimizer
from quell.torch.private import make_private
from quell.torch.sharding import dealt
from quell.torch.shards import read_slices

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
except ImportError:
    try:
        from pytorch_lightning import Callback
        from pytorch_lightning.plugins.io import TorchCheckpointIO
        from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
    except ImportError as missing:
        raise QuellError("quell.torch.lightning needs Lightning: pip install 'quell[trainers]'") from missing

if TYPE_CHECKING:
    from quell.planning import Plan

__all__ = ["Private"]


class Private(Callback):
    """`trainer = Trainer(callbacks=[private]); trainer.fit(module, private.loader)`.

    `data` is a Dataset or DataLoader; the options are `make_private`'s. `training_step` computes its loss from
    `self(...)`, with one row of output per example; with `physical_batch_size` it is called for every part of a batch,
    and all parts are one step. `fit(..., ckpt_path=...)` resumes: steps that were released after the checkpoint come
    again, and are refused unless they are the same to the last bit.

    Attributes:
        loader: What to pass to `fit`: the plan's batches.
        optimizer: The private optimizer, once `fit` has made it.
    """

    def __init__(self, plan: Plan, data: Any, max_grad_norm: ClipNorm = 1.0, **options: Any) -> None:
        require_plan(plan)
        self.plan, self.data, self.max_grad_norm = plan, data, max_grad_norm
        self.loader = LaterLoader(plan)
        self.optimizer: PrivateOptimizer | None = None
        self._options = options

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or self.optimizer is not None:
            return
        for problem in _problems(trainer, pl_module, self.plan):
            raise QuellError(problem)
        configure, training_step = pl_module.configure_optimizers, pl_module.training_step

        @wraps(configure)
        def privately() -> Any:
            """What `configure_optimizers` returns, with the private optimizer in the place of the plain one."""

            def swapped(part: Any) -> Any:
                if isinstance(part, LRScheduler):
                    part.optimizer = self._private(part.optimizer, pl_module)
                return self._private(part, pl_module) if isinstance(part, Optimizer) else part

            return mapped(swapped, configure())

        @wraps(training_step)
        def in_parts(batch: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(batch, Parts):
                return training_step(batch, *arguments, **options)
            return self._all_parts(lambda part: training_step(part, *arguments, **options), batch, trainer)

        pl_module.configure_optimizers, pl_module.training_step = privately, in_parts
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            setattr(pl_module, name, _but_not_for_parts(getattr(pl_module, name)))
        if isinstance(trainer.strategy, DDPStrategy):
            trainer.strategy.configure_ddp = lambda: None  # gradients are added up after clipping, by the optimizer
        if isinstance(trainer.strategy, ModelParallelStrategy):
            ShardedStates(trainer.strategy).take_over()
        elif type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeFiles()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.train_dataloader is not self.loader:
            raise QuellError(
                "the module is being fitted on other data than planned: trainer.fit(module, private.loader)"
            )
        assert self.optimizer is not None
        home, run = getattr(trainer.checkpoint_callback, "dirpath", None), self.optimizer.run
        if home is not None and run.step == 0 and decided(lambda: run.key_kept):
            trainer.save_checkpoint(Path(home) / "start.ckpt")  # a crash before the first checkpoint goes back to it

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.optimizer is not None
        planned = min((trainer.max_epochs or 0) * self.plan.run.steps_per_epoch, self.plan.steps)
        taken = self.optimizer.run.step
        if taken < planned and trainer.max_steps < 0 and not trainer.should_stop:
            warnings.warn(
                f"{taken:,} of {planned:,} planned steps were taken: the trainer went on from a checkpoint in the "
                "middle of an epoch, which it took for its end; to take the others, go on from its last checkpoint "
                f"with max_steps={planned}, max_epochs=-1",
                PlanMismatchWarning,
                stacklevel=2,
            )

    def _all_parts(self, training_step: Any, parts: Parts, trainer: Any) -> Any:
        """Run `training_step` on every part of a planned batch; Lightning goes on with the result of the last."""
        assert self.optimizer is not None
        for part, last in parts.due:
            part = trainer.precision_plugin.convert_input(part)  # as Lightning does with a batch
            part = trainer.lightning_module.on_before_batch_transfer(part, 0)
            part = trainer.strategy.batch_to_device(part)
            if last:
                return training_step(part)
            self.optimizer.zero_grad()
            result = training_step(part)
            loss = result["loss"] if isinstance(result, dict) else result
            loss.backward()
            self.optimizer.pre_step()
        return None

    def privacy_report(self) -> PrivacyReport:
        """What the run promises, has spent so far, and rests on."""
        if self.optimizer is None:
            raise QuellError("nothing was trained yet: call trainer.fit first")
        return self.optimizer.privacy_report()

    def _private(self, optimizer: Optimizer, module: Any) -> PrivateOptimizer:
        if self.optimizer is None:
            _, made, planned = make_private(
                module, optimizer, self.data, self.plan, self.max_grad_norm, **self._options
            )
            self.loader.planned = PlannedSteps(planned)
            made.load_state_dict = partial(made.load_state_dict, replay=True)  # type: ignore[method-assign]
            made.step = _counted(made)  # type: ignore[method-assign]
            self.optimizer = made
        if optimizer not in (self.optimizer, self.optimizer.original_optimizer):
            raise QuellError(
                "configure_optimizers returned several optimizers, and Lightning steps one: return one, with parameter "
                "groups, or write your own loop, where make_private takes a list of optimizers"
            )
        return self.optimizer


class Parts:
    """A planned batch that is taken in parts, as Lightning hands it around; only `training_step` gets them."""

    def __init__(self, due: Iterator[tuple[Any, bool]]) -> None:
        self.due = due

    def _refuse(self, *arguments: Any) -> Any:
        raise QuellError(
            "this batch comes in parts (physical_batch_size, or fixed_shape on a GPU), and only training_step and the "
            "hooks that transfer batches get them, one by one: in other hooks leave the batch alone, and pass "
            "batch_size= to self.log"
        )

    __iter__ = __len__ = __getitem__ = _refuse


class LaterLoader:
    """The plan's loader, once there is one."""

    def __init__(self, plan: Plan) -> None:
        self._length = plan.run.steps_per_epoch
        self.planned: PlannedSteps | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        planned = self._ready()
        return iter(planned.loader) if planned.loader.most_rows is None else map(Parts, planned)

    def state_dict(self) -> dict[str, Any]:
        return self._ready().loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ready().loader.load_state_dict(state)

    def _ready(self) -> PlannedSteps:
        if self.planned is None:
            raise QuellError("this loader works inside trainer.fit, with its callback in Trainer(callbacks=[...])")
        return self.planned


class WholeFiles(TorchCheckpointIO):
    """Checkpoints that are written whole or not at all; see `quell.torch.checkpoints`."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole_file(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> Any:
        return super().load_checkpoint(newest_whole(Path(path)), *arguments, **options)


class ShardedStates:
    """What ModelParallelStrategy saves and loads, in the place of torch's functions for plain optimizers.

    With `save_distributed_checkpoint`, its default, a checkpoint is a folder into which every process writes its part,
    else one file. Both are loaded at any number of processes.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy, self.sliced = strategy, strategy._save_distributed_checkpoint

    def take_over(self) -> None:
        self.strategy.lightning_module_state_dict = self.model_state
        self.strategy.optimizer_state = self.optimizer_state
        self.strategy.save_checkpoint, self.strategy.load_checkpoint = self.save, self.load

    def model_state(self) -> dict[str, Any]:
        return state_of_model(self.strategy.model, self.sliced)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        plain: PrivateOptimizer = getattr(optimizer, "_optimizer", optimizer)
        return plain.sharded_state_dict() if self.sliced else plain.state_dict()

    def save(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        path = Path(self.strategy.broadcast(filepath))
        decided(lambda: path.parent.mkdir(parents=True, exist_ok=True))
        write_whole(checkpoint, path, self.sliced)

    def load(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        path = decided(lambda: newest_whole(Path(checkpoint_path)))
        found = read_slices(path) if path.is_dir() else TorchCheckpointIO().load_checkpoint(path, weights_only=True)
        module = self.strategy.lightning_module
        module.load_state_dict(dealt(found["state_dict"], module.state_dict()), strict=module.strict_loading)
        for optimizer, state in zip(self.strategy.optimizers, found["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        return found


def _but_not_for_parts(hook: Any) -> Any:
    """A hook that transfers batches; Lightning calls it for a planned batch, and `_all_parts` for every part of it."""

    @wraps(hook)
    def called(batch: Any, *arguments: Any, **options: Any) -> Any:
        return batch if isinstance(batch, Parts) else hook(batch, *arguments, **options)

    return called


def _counted(optimizer: PrivateOptimizer) -> Any:
    """`step`, marked as torch marks it when a scheduler is made, so that schedulers know that it was called."""
    step = optimizer.step

    @wraps(step)
    def counted(*arguments: Any, **options: Any) -> Any:
        optimizer._opt_called = True
        return step(*arguments, **options)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted


def _problems(trainer: Any, module: Any, plan: Plan) -> Iterator[str]:
    """What would break the promise, each in a sentence."""
    strategy, epochs = trainer.strategy, plan.epochs
    if trainer.world_size > 1 and not isinstance(strategy, (DDPStrategy, ModelParallelStrategy)):
        yield (
            f"Lightning's {type(strategy).__name__} on several devices is not supported: pass strategy='ddp', or "
            "ModelParallelStrategy and fully_shard in configure_model"
        )
    if isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh["tensor_parallel"].size() > 1:
        yield (
            "tensor parallelism is not supported: pass ModelParallelStrategy("
            f"data_parallel_size={trainer.world_size}, tensor_parallel_size=1)"
        )
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} must be 1: batches are the plan's; for less "
            "memory pass physical_batch_size to Private"
        )
    if trainer.gradient_clip_val:
        yield (
            "gradient_clip_val clips the noisy mean: leave it out, every example's gradient is clipped to max_grad_norm"
        )
    if trainer.limit_train_batches not in (1.0, None):
        yield f"limit_train_batches={trainer.limit_train_batches} would skip batches of the plan: leave it out"
    if not (0 <= (trainer.max_epochs or -1) <= epochs or 0 <= trainer.max_steps <= plan.steps):
        yield (
            f"the trainer's max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps} allow more than the "
            f"plan: pass max_epochs={epochs}"
        )
    if not module.automatic_optimization:
        yield "manual optimization is your own loop: use make_private there"
