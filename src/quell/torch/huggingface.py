"""Hugging Face's `Trainer` under a plan: same arguments, the plan's batches and noise.

The loss is computed outside the model, from one number per example. The losses that models compute themselves are
means over the *tokens* of a batch, so an example's share would depend on the others' lengths, and clipping would bound
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from quell.adapters.report import PrivacyReport
from quell.errors import QuellError
from quell.schemes import FIXED
from quell.torch.loader import PlannedLoader
from quell.torch.private import make_private

try:
    from transformers import Trainer, TrainingArguments
except ImportError as missing:
    raise QuellError(
        "quell.torch.huggingface needs transformers and accelerate: pip install 'quell[trainers]'"
    ) from missing

if TYPE_CHECKING:
    from quell.planning import Plan

ExampleLosses = Callable[[Any, Tensor], Tensor]


class PrivateTrainer(Trainer):
    """A `Trainer` that keeps a plan's promise; `args.max_grad_norm` is what every example's gradient is clipped to.

    Batches are the plan's, whatever `args.per_device_train_batch_size`. `example_losses` turns the model's outputs and
    the labels into one loss per example. `private` goes to `make_private`: clipping, mechanism, key and so on.
    `replay` is for `train(resume_from_checkpoint=...)` after a crash; see `PrivateOptimizer.load_state_dict`.
    """

    def __init__(
        self,
        *arguments: Any,
        plan: Plan,
        example_losses: ExampleLosses | None = None,
        private: dict[str, Any] | None = None,
        replay: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.plan, self.example_losses = plan, example_losses or token_losses
        self._private, self._replay = dict(private or {}), replay
        self._planned: PlannedLoader | None = None
        self._refuse_what_would_break_the_promise(self.args)
        self.args.ignore_data_skip = True  # the plan's loader knows by itself where a resumed run stands

    def get_train_dataloader(self) -> PlannedLoader:
        """The plan's batches; the optimizer becomes private with them, before Trainer goes on to use it."""
        if self._planned is None:
            _, self.optimizer, self._planned = make_private(
                self.model,
                self.create_optimizer(),
                super().get_train_dataloader(),
                self.plan,
                self.args.max_grad_norm,
                **self._private,
            )
            self.optimizer.load_state_dict = partial(self.optimizer.load_state_dict, replay=self._replay)  # type: ignore[method-assign]
            self.optimizer._is_accelerate_prepared = True  # else accelerate would wrap it, and load a state to move it
            self.optimizer.step_was_skipped = False  # what Trainer asks of an optimizer that accelerate has prepared
        return self._planned

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        self.optimizer.zero_grad()  # Trainer zeroes the model's gradients, not the optimizer's sums
        return super().training_step(*arguments, **options)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean of the examples' own losses, 0 for a batch of nobody."""
        if "labels" not in inputs:
            raise QuellError(f"the batch has {', '.join(inputs)} but no labels: let the data collator make them")
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        losses = self.example_losses(outputs, inputs["labels"])
        if losses.shape != inputs["labels"].shape[:1]:
            raise QuellError(
                f"example_losses gave shape {tuple(losses.shape)} for {len(inputs['labels'])} examples: return one "
                "loss for each"
            )
        loss = losses.sum() / max(len(losses), 1)
        return (loss, outputs) if return_outputs else loss

    def privacy_report(self) -> PrivacyReport:
        if self._planned is None:
            raise QuellError("nothing was trained yet: call train() first")
        report: PrivacyReport = self.optimizer.privacy_report()
        return report

    def _clip_grad_norm(self, model: Any) -> None:
        """Every example's gradient is clipped by the optimizer; clipping their mean again would be for nothing."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Not logged: the norm before noise is private."""

    def _refuse_what_would_break_the_promise(self, args: TrainingArguments) -> None:
        epochs = self.plan.epochs
        several = args.world_size > 1 or args.n_gpu > 1 or self.is_deepspeed_enabled or self.is_fsdp_enabled
        problems = {
            "Trainer on several devices is not supported: set CUDA_VISIBLE_DEVICES to one, or write your own loop with "
            "make_private, which supports DDP and FSDP2": several,
            "physical_batch_size and fixed_shape split batches of random size into more or fewer parts; Trainer has "
            f"to know how many: leave them out, plan with sampling={FIXED.name!r}, or write your own loop with "
            "make_private": (
                self.plan.mechanism.scheme.amplifies
                and bool(self._private.get("physical_batch_size") or self._private.get("fixed_shape"))
            ),
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} must be 1: batches are the plan's; for "
            f"less memory turn gradient_checkpointing on, or plan with sampling={FIXED.name!r} and pass "
            "private={'physical_batch_size': 8}": args.gradient_accumulation_steps != 1,
            "fp16 scales the loss, and with it what clipping sees: use bf16": args.fp16,
            f"num_train_epochs={args.num_train_epochs:g} but the plan covers {epochs}: pass num_train_epochs={epochs}, "
            "or make a plan for more": args.max_steps < 0 and args.num_train_epochs > epochs,
            f"max_steps={args.max_steps:,} but the plan covers {self.plan.steps:,} steps": args.max_steps
            > self.plan.steps,
            "label smoothing and compute_loss_func look at a whole batch: pass example_losses": bool(
                args.label_smoothing_factor or self.compute_loss_func
            ),
        }
        for problem, found in problems.items():
            if found:
                raise QuellError(problem)


def token_losses(outputs: Any, labels: Tensor) -> Tensor:
    """(examples,) the cross-entropy of (examples, classes) logits, or its mean over each example's labelled tokens.

    Labels of -100 do not count. Logits predict the label at their own position; for causal language models use
    `next_token_losses`.
    """
    logits = outputs["logits"]
    each = functional.cross_entropy(logits.movedim(-1, 1).float(), labels, reduction="none")
    if each.dim() == 1:
        return each
    counted = (labels != -100).flatten(1)
    return each.flatten(1).sum(1) / counted.sum(1).clamp(min=1)


def next_token_losses(outputs: Any, labels: Tensor) -> Tensor:
    """(examples,) each sequence's mean loss in predicting its next token."""
    return token_losses({"logits": outputs["logits"][:, :-1]}, labels[:, 1:])
