"""Hugging Face's `Trainer` under a plan: same arguments, the plan's batches and noise.

Trainer sees one item per planned step, a whole batch, so its schedules, logs and checkpoints count planned steps.
`training_step` takes that batch in parts of `per_device_train_batch_size`. The loss is computed outside the model, from
one number per example (`losses.py`).
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from quell.adapters.report import PrivacyReport
from quell.adapters.secrets import require_there, set_aside
from quell.errors import QuellError
from quell.noise import Key
from quell.torch.checks import PlanMismatchWarning, require_plan
from quell.torch.distributed import decided
from quell.torch.folders import mark_whole, newest_whole_folder, read_file, require_whole_folder
from quell.torch.loader import PlannedLoader, PlannedSteps
from quell.torch.losses import ExampleLosses, losses_for, next_token_losses, without_tokens_after_padding
from quell.torch.padding import refuse_padding_that_counts
from quell.torch.private import make_private
from quell.torch.sharding import dealt
from quell.torch.shards import has_slices, read_slices, write_slices

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import rotate_checkpoints
except ImportError as missing:
    raise QuellError(
        "quell.torch.huggingface needs transformers and accelerate: pip install 'quell[trainers]'"
    ) from missing

if TYPE_CHECKING:
    from quell.planning import Plan

__all__ = ["PrivateTrainer"]

_PUBLISHES = (
    "push_to_hub publishes the output folder, with training losses in its model card and logs, which are not private: "
    "leave it out, and push what is private, the model: trainer.model.push_to_hub(name)"
)


class PrivateTrainer(Trainer):
    """A `Trainer` that keeps a plan's promise; `args.max_grad_norm` is what every example's gradient is clipped to.

    Batches are the plan's; `args.per_device_train_batch_size` examples of them are on a device at a time.
    `example_losses` turns the model's outputs and the labels into one loss per example; by default it fits the model's
    task (`quell.torch.losses`). `private` goes to `make_private`: clipping, mechanism, key and so on, also a
    `max_grad_norm` that is no number. Where checkpoints are saved, the key is kept in `OUTPUT_DIR.key` unless it is
    given. For other trainers with that loss put it first among the bases:
    `class PrivateSFTTrainer(PrivateTrainer, SFTTrainer)`.
    """

    model: Any
    is_fsdp_enabled: bool

    def __init__(
        self,
        *arguments: Any,
        plan: Plan,
        example_losses: ExampleLosses | None = None,
        private: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        require_plan(plan)
        super().__init__(*arguments, **options)
        self.plan, self.example_losses = plan, example_losses
        self._private = {"physical_batch_size": self.args.per_device_train_batch_size, **(private or {})}
        self._planned: PlannedSteps | None = None
        self._resuming = False
        for problem in self._problems(self.args):
            raise QuellError(problem)
        self._take_accumulation_as_parts(self.args)
        self.args.ignore_data_skip = True  # the plan's loader knows by itself where a resumed run stands
        self.add_callback(_PlannedProgress(self))
        # Gradients are added up after clipping, by the optimizer: accelerate need not wrap the model in DDP.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare = partial(_prepared_once, self.accelerator.prepare)

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """As `Trainer.train`. A checkpoint that was cut off by a crash is passed over for the one before it.

        Steps that were released after the checkpoint come again, and are refused unless they are the same to the last
        bit.
        """
        if self._planned is not None and not resume_from_checkpoint and self.optimizer.run.step >= self.plan.steps:
            raise QuellError(
                f"this trainer has taken all {self.plan.steps:,} steps of its plan: make a new trainer, with a new "
                "model, for another run"
            )
        if resume_from_checkpoint is True:
            folder = Path(self.args.output_dir)
            resume_from_checkpoint = decided(lambda: str(newest_whole_folder(folder, self._is_own)))
        elif resume_from_checkpoint:
            given = Path(resume_from_checkpoint)
            decided(lambda: require_whole_folder(given))
        if resume_from_checkpoint and (Path(resume_from_checkpoint) / "adapter_config.json").exists():
            self._require_adapters(resume_from_checkpoint)
        self._resuming = bool(resume_from_checkpoint)
        if resume_from_checkpoint and self.is_fsdp_enabled and not has_slices(Path(resume_from_checkpoint)):
            self._load_from_checkpoint(str(resume_from_checkpoint))  # whole weights, before the model is sharded
        return super().train(resume_from_checkpoint=resume_from_checkpoint or None, **options)

    def _require_adapters(self, checkpoint: str | Path) -> None:
        if not hasattr(self.model, "peft_config"):
            raise QuellError(
                f"{checkpoint} has adapters (LoRA), and the model has none: add them first, as that run did "
                "(peft.get_peft_model)"
            )

    def get_train_dataloader(self) -> PlannedSteps:
        """The plan's batches; the optimizer becomes private with them, before Trainer goes on to use it."""
        if self._planned is None:
            given = super().get_train_dataloader()
            # Without the sampler that deals examples out over processes, and what seeds workers by 32 bits.
            names = ("dataset", "collate_fn", "num_workers", "pin_memory", "prefetch_factor")
            given = DataLoader(**{name: getattr(given, name) for name in names})
            optimizer = self.create_optimizer()
            if self.is_fsdp_enabled:  # accelerate shards the model first, and gives the optimizer its parameters
                self.model, optimizer = self.accelerator.prepare(self.model, optimizer)
                self.model_wrapped, optimizer = self.model, optimizer.optimizer
            with self._key_to_keep() as key:
                private = {"max_grad_norm": self.args.max_grad_norm, **key, **self._private}
                _, self.optimizer, loader = make_private(self.model, optimizer, given, self.plan, **private)
                self._refuse_padding_that_counts(loader)
            self._planned = PlannedSteps(loader)
            self.optimizer.load_state_dict = partial(self.optimizer.load_state_dict, replay=True)  # type: ignore[method-assign]
            self.optimizer._is_accelerate_prepared = True  # else accelerate would wrap it, and load a state to move it
            self.optimizer.step_was_skipped = False  # what Trainer asks of an optimizer that accelerate has prepared
        return self._planned

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The next planned step; how many tokens it has is not asked for, because the loss does not depend on it."""
        return list(islice(epoch_iterator, 1)), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """All parts of a planned batch; Trainer's own `optimizer.step()` comes after the last."""
        total, seen = torch.zeros((), device=self.args.device), 0
        for part, last in inputs:
            self.optimizer.zero_grad()  # Trainer zeroes the model's gradients, not the optimizer's sums
            due = self.optimizer.run.unfinished.received
            assert due is not None
            if len(next(value for value in part.values() if isinstance(value, Tensor))):  # most models need a row
                total += due.examples * super().training_step(model, part)
                seen += due.examples
            if not last:
                self.optimizer.step()
        return total / max(seen, 1)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean of the examples' own losses."""
        losses, outputs = self._losses(model, inputs)
        loss = losses.sum() / max(len(losses), 1)
        return (loss, outputs) if return_outputs else loss

    def _losses(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """(examples,) and the model's outputs."""
        names = [name for name in self.label_names if name in inputs] or ["labels"]
        if names[0] not in inputs:
            raise QuellError(
                f"the batch has {', '.join(inputs)} but no labels: call the data set's column of them 'labels', with "
                "numbers in it (the collator leaves texts out), or for language models pass "
                "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), which makes them"
            )
        given = {name: inputs[name] for name in names}
        labels = given if len(names) > 1 else inputs[names[0]]
        inputs = {name: value for name, value in inputs.items() if name not in names}
        plain = self.accelerator.unwrap_model(model)
        if "decoder_input_ids" not in inputs and hasattr(plain, "prepare_decoder_input_ids_from_labels"):
            inputs["decoder_input_ids"] = plain.prepare_decoder_input_ids_from_labels(labels=labels)
        outputs = model(**inputs)
        losses_of = self.example_losses or losses_for(plain)
        if losses_of is next_token_losses:
            labels = without_tokens_after_padding(labels, inputs.get("attention_mask"))
        losses = losses_of(outputs, labels)
        examples = len(given[names[0]])
        if losses.shape != (examples,):
            raise QuellError(
                f"example_losses gave shape {tuple(losses.shape)} for {examples} examples: return one loss for each"
            )
        return losses, outputs

    def _refuse_padding_that_counts(self, loader: PlannedLoader) -> None:
        """Where examples are taken one by one, nobody is padded to another's length. Autocast is not yet on."""
        if loader.most_rows != 1:
            halves = any(parameter.element_size() < 4 for parameter in self.model.parameters())
            refuse_padding_that_counts(
                self.model,
                lambda batch: self._losses(self.model, self._prepare_inputs(dict(batch)))[0],
                loader.collate,
                loader.dataset,
                1e-2 if halves or self.is_fsdp_enabled or self.args.tf32 else 1e-4,
            )

    def privacy_report(self) -> PrivacyReport:
        """What the run promises, has spent so far, and rests on."""
        if self._planned is None:
            raise QuellError("nothing was trained yet: call train() first")
        report: PrivacyReport = self.optimizer.privacy_report()
        return report

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """For the logs: how many examples a planned batch has on average."""
        return round(self.plan.run.batch_size or 0)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: how many tokens a batch has is private."""
        return 0

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> Any:
        raise QuellError(
            "every trial of a search is a run on the private data, and the plan's promise is for one: search on public "
            "data, or plan each trial and add the promises up"
        )

    def push_to_hub(self, *arguments: Any, **options: Any) -> Any:
        raise QuellError(_PUBLISHES)

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        raise QuellError("Trainer's model card lists training losses, which are not private: write one of your own")

    @contextmanager
    def _key_to_keep(self) -> Iterator[dict[str, Any]]:
        """A key file beside the output folder, so that checkpoints can be resumed; a new run makes a new one."""
        given = {"key", "seed"} & self._private.keys()
        if given or self.args.save_strategy == "no":
            yield {}
            return
        path = self._key_path
        if self._resuming:
            decided(lambda: require_there(path))
        with ExitStack() as stack:  # rank 0's, on which the files are moved
            if not self._resuming:
                decided(lambda: stack.enter_context(set_aside(path)))
            yield {"key": path}

    @property
    def _key_path(self) -> Path:
        return Path(str(Path(self.args.output_dir)) + ".key")

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether a checkpoint was written with the key of this run, as far as the key is there."""
        key = None if "seed" in self._private else self._private.get("key", self._key_path)
        if not isinstance(key, Key):
            if key is None or not Path(key).exists():
                return True
            key = Key.load(key)
        sliced = has_slices(checkpoint)
        state = read_slices(checkpoint)["optimizer"] if sliced else read_file(checkpoint / "optimizer.pt")
        return bool(state["quell"]["key_id"] == key.id)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        home = self._get_output_dir(trial=trial)
        folder = Path(home) / f"checkpoint-{self.state.global_step}"
        decided(lambda: shutil.rmtree(folder, ignore_errors=True))  # files of an earlier run would pass for this one's
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # each process saves its random numbers
        decided(lambda: mark_whole(folder))
        if self.args.should_save:  # older ones go when there is a whole one to go back to
            rotate_checkpoints(home, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._saves_slices:
            decided(lambda: Path(output_dir).mkdir(parents=True, exist_ok=True))
            state = {"model": dict(self.model.state_dict()), "scheduler": self.lr_scheduler.state_dict()}
            write_slices({**state, "optimizer": self.optimizer.sharded_state_dict()}, Path(output_dir))
            return
        if not self.args.should_save:
            self.optimizer.state_dict()  # gathered from all processes: the one that saves waits for it
        with self._as_without_fsdp():  # whose files are for its own optimizers
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        is_sharded = self.is_fsdp_enabled and self._planned is not None
        if has_slices(Path(resume_from_checkpoint)):
            if is_sharded or not self.is_fsdp_enabled:  # otherwise Trainer calls this again, when the model is sharded
                saved, target = read_slices(Path(resume_from_checkpoint))["model"], model or self.model
                target.load_state_dict(dealt(saved, target.state_dict()))
        elif not is_sharded:  # otherwise `train` loaded the weights before the model was sharded
            with self._as_without_fsdp():
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and has_slices(Path(checkpoint)):
            state = read_slices(Path(checkpoint))
            self.optimizer.load_state_dict(state["optimizer"])
            self.lr_scheduler.load_state_dict(state["scheduler"])
            return
        with self._as_without_fsdp():
            super()._load_optimizer_and_scheduler(checkpoint)

    @property
    def _saves_slices(self) -> bool:
        return self.is_fsdp_enabled and "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type)

    @contextmanager
    def _as_without_fsdp(self) -> Iterator[None]:
        """Trainer writes and reads what it does in one process: states are whole, and fit any number of processes."""
        before, self.is_fsdp_enabled = self.is_fsdp_enabled, False
        try:
            yield
        finally:
            self.is_fsdp_enabled = before

    def _clip_grad_norm(self, model: Any) -> None:
        """Every example's gradient is clipped by the optimizer; clipping their mean again would be for nothing."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Not logged: the norm before noise is private."""

    def _take_accumulation_as_parts(self, args: TrainingArguments) -> None:
        asked = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        planned = self.get_total_train_batch_size(args)
        if args.gradient_accumulation_steps != 1 and asked != planned:
            warnings.warn(
                f"per_device_train_batch_size × gradient_accumulation_steps × processes is {asked:,}, but the plan's "
                f"batches have {planned:,} examples: a step is a batch of the plan, taken in parts of "
                f"{args.per_device_train_batch_size:,}",
                PlanMismatchWarning,
                stacklevel=3,
            )
        args.gradient_accumulation_steps = 1

    def _problems(self, args: TrainingArguments) -> Iterator[str]:
        """What would break the promise, or the run, each in a sentence."""
        epochs, steps = self.plan.epochs, self.plan.steps
        own_loss = [
            kind.__name__
            for kind in type(self).__mro__
            if "compute_loss" in vars(kind) and not issubclass(kind, PrivateTrainer) and kind is not Trainer
        ]
        if own_loss not in ([], ["SFTTrainer"]):
            yield (
                f"{', '.join(own_loss)} computes a loss of its own, which PrivateTrainer would replace by that of the "
                "model's task: write your own loop with make_private (docs/trainers.md has one for DPO)"
            )
        if type(self).compute_loss is not PrivateTrainer.compute_loss:
            yield (
                f"{type(self).__name__} overrides compute_loss, and what that does to a batch cannot be known: pass "
                "example_losses=, a function from outputs and labels to one loss per example, and put PrivateTrainer "
                "first among the bases"
            )
        if getattr(args, "packing", False) or getattr(args, "padding_free", False):
            yield (
                "packing and padding_free put several examples into one row, so no example's gradient can be clipped: "
                "pass packing=False and padding_free=False"
            )
        if (loss_type := getattr(args, "loss_type", "nll")) not in ("nll", "chunked_nll"):
            yield f"loss_type={loss_type!r} is not supported: PrivateTrainer computes 'nll', one loss per example"
        if args.save_only_model and args.save_strategy != "no":
            yield "save_only_model=True saves checkpoints from which the run cannot go on: leave it out"
        if args.n_gpu > 1:
            yield (
                "several GPUs in one process (DataParallel) are not supported: launch one process per GPU with "
                "torchrun, or set CUDA_VISIBLE_DEVICES to one"
            )
        if self.is_deepspeed_enabled:
            yield "DeepSpeed is not supported: use FSDP2 (fsdp=True), or DDP (torchrun)"
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            yield (
                "FSDP1 puts parameters of several layers into one tensor, so no layer can be followed: pass "
                "fsdp_config={'version': 2}"
            )
        if self.is_fsdp_enabled and args.load_best_model_at_end:
            yield (
                "load_best_model_at_end is not supported with FSDP: load the best checkpoint after training, with "
                "from_pretrained"
            )
        if getattr(self, "is_distributed_loading_by_transformers", False):  # which older versions do not have
            yield ("the model was sharded when it was loaded (DistributedConfig): load it whole, and pass fsdp=True")
        if args.fp16:
            yield "fp16 scales the loss, and with it what clipping sees: use bf16"
        if "loss_reduction" in self._private:
            yield "private={'loss_reduction': ...} is PrivateTrainer's own matter: pass example_losses"
        if args.max_steps <= 0 and args.num_train_epochs > epochs:
            yield (
                f"num_train_epochs={args.num_train_epochs:g} but the plan covers {epochs}: pass "
                f"num_train_epochs={epochs}, or make a plan for more"
            )
        if args.max_steps > steps:
            yield (
                f"max_steps={args.max_steps} but the plan covers {steps} steps: pass max_steps={steps}, or make a plan "
                "for more"
            )
        if args.label_smoothing_factor or self.compute_loss_func:
            yield "label smoothing and compute_loss_func look at a whole batch: pass example_losses"
        if args.neftune_noise_alpha is not None:
            yield (
                "neftune_noise_alpha makes noise by the length of a batch's longest example, so examples change each "
                "other's gradients: leave it out"
            )
        if args.auto_find_batch_size:
            yield (
                "auto_find_batch_size starts the run again when memory runs out: set per_device_train_batch_size, "
                "which changes neither promise nor result"
            )
        if args.include_num_input_tokens_seen not in (False, "no"):
            yield "include_num_input_tokens_seen logs how long the private examples are: leave it out"
        if args.push_to_hub:
            yield _PUBLISHES


def _prepared_once(prepare: Any, *given: Any, **options: Any) -> Any:
    """What accelerate has prepared already stays as it is."""
    if all(getattr(each, "_is_accelerate_prepared", False) for each in given):
        return given if len(given) > 1 else given[0]
    return prepare(*given, **options)


class _PlannedProgress(TrainerCallback):
    """The state of step 0 is saved, so that a crash before the first checkpoint can be resumed; epochs are planned."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.trainer.plan.run
        if args.max_steps <= 0 and state.max_steps < run.steps:  # a number of steps was given on purpose
            warnings.warn(
                f"training ends after {state.max_steps:,} of the {run.steps:,} planned steps, with noise for all of "
                f"them: set num_train_epochs={run.epochs}, or plan for fewer",
                PlanMismatchWarning,
                stacklevel=2,
            )
        if args.save_strategy != "no" and state.global_step == 0 and not self.trainer._resuming:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step / self.trainer.plan.run.steps_per_epoch  # also after a resume within an epoch
