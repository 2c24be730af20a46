"""What can be known before the first step: is this model, optimizer and data what the plan is about?

What concerns privacy is an error. What concerns only how good the noise is for this optimizer is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from quell.errors import QuellError, short
from quell.planning import Mechanism, Plan
from quell.torch.joined import parts_of


class PlanMismatchWarning(UserWarning):
    """Something is not as planned, or not as asked: the promise holds, the result may be worse."""


def refuse_wrong_arguments(optimizer: Any, data: Any, plan: Any, noise_memory: float) -> None:
    """Say which argument is not what it should be, before anything is made of it."""
    if not isinstance(noise_memory, Real) or not noise_memory >= 0:  # infinity is welcome
        raise QuellError(f"noise_memory={short(noise_memory)} must be a number of model copies, 0 or more")
    if isinstance(data, Plan):
        raise QuellError("data and plan are swapped: the data comes before the plan")
    require_plan(plan)
    if isinstance(optimizer, LRScheduler):
        raise QuellError("optimizer is a scheduler: pass its optimizer; schedulers work on what make_private returns")
    if not isinstance(optimizer, Optimizer):
        raise QuellError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim optimizer, or a list of them")
    if isinstance(optimizer, LBFGS):
        raise QuellError(
            "LBFGS looks at a batch several times per step, and a plan has noise for once: use SGD or Adam"
        )


def require_plan(plan: Any) -> None:
    if isinstance(plan, Mechanism):
        raise QuellError("plan is a Mechanism: pass the plan itself, and mechanism= to choose one")
    if not isinstance(plan, Plan):
        raise QuellError(f"plan is a {type(plan).__name__}: pass what quell.plan(...) or quell.Plan.load(...) returned")


def warn_about_sampler(data: Any) -> None:
    """The plan draws the batches: say so where the loader that was given has its own idea of them."""
    if not isinstance(data, DataLoader):
        return
    own_samplers = []
    if not isinstance(data.sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        own_samplers.append(data.sampler)
    if type(data.batch_sampler) is not BatchSampler:
        own_samplers.append(data.batch_sampler)
    for own in own_samplers:
        warnings.warn(
            f"the loader's {type(own).__name__} is not used: who is in a batch is decided by the plan, whose promise "
            "is about its own sampling",
            PlanMismatchWarning,
            stacklevel=5,  # the caller of make_private or attach
        )


def refuse_repeated_rows(dataset: Any) -> None:
    """A Subset that names an example several times would have each of them clipped as an example of its own."""
    rows: Any = slice(None)
    while isinstance(dataset, Subset):
        own = np.asarray(dataset.indices)
        if own.ndim != 1 or own.dtype.kind not in "iu":
            return
        rows, dataset = np.where(own < 0, own + len(dataset.dataset), own)[rows], dataset.dataset
        if (different := len(np.unique(rows))) < len(rows):
            raise QuellError(
                f"the Subset has {len(rows):,} items, but only {different:,} different ones: an example that is in it "
                "k times would be clipped k times where the plan counts once, so the promise would not hold for it: "
                "give each example once, and weigh rare ones in the loss (a sum of one loss per example)"
            )


def trainable_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that will be trained, by name, in the optimizer's order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise QuellError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not have: "
                    "make the optimizer from model.parameters()"
                )
            if parameter.requires_grad and parameter.is_complex():
                raise QuellError(
                    f"{names[id(parameter)]} is complex, and gradients are clipped as real numbers: keep its real and "
                    "imaginary parts as one real parameter, torch.view_as_real(...), and use "
                    "torch.view_as_complex(parameter) in forward; or freeze it"
                )
            if parameter.requires_grad:
                found[names[id(parameter)]] = parameter
    if not found:
        raise QuellError("the optimizer has no trainable parameters: unfreeze some before make_private")
    refuse_unprotected(model, found.values())
    return found


def refuse_unprotected(model: nn.Module, protected: Iterable[nn.Parameter]) -> None:
    """All that can be trained is private, or the run is refused: another optimizer would use gradients as they are."""
    held = {id(parameter) for parameter in protected}
    outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        are, were, its, it = ("are", "were", "their", "them") if more else ("is", "was", "its", "it")
        raise QuellError(
            f"{outside[0]}{more} can be trained, but {are} not in the private optimizer, or {were} frozen when it was "
            f"made: nothing would clip {its} gradients or add noise; freeze {it} "
            f"(requires_grad_(False)), or put {it} into the optimizer that make_private is given "
            "(with parameter groups, or as a list of optimizers)"
        )


def refuse_leaking_layers(model: nn.Module) -> None:
    """Batch norm and other layers that mix rows, and layers whose forward pass writes what it saw into the weights."""
    for name, module in model.named_modules():
        mixes = isinstance(module, nn.modules.batchnorm._BatchNorm)
        tracks = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if (mixes or tracks) and _is_fixed(module):
            module.register_forward_pre_hook(_refuse_training)
        elif mixes or tracks:
            raise QuellError(
                f"{name or 'the model'} is a {type(module).__name__}, which mixes the examples of a batch, so no "
                "example's gradient can be clipped: quell.torch.replace_batch_norm(model) puts GroupNorm there, or "
                "freeze it and put it into eval mode"
            )
        if type(module).__name__ == "Linear8bitLt" and getattr(module, "state", None) and module.state.threshold > 0:
            raise QuellError(
                f"{name or 'the model'} is a Linear8bitLt that decides by all rows of a batch which columns are not "
                "rounded to 8 bits, so examples change each other's gradients: pass llm_int8_threshold=0.0 to "
                "BitsAndBytesConfig"
            )
        if (most := _fixed_frequencies(module)) is not None:
            module.register_forward_pre_hook(partial(_refuse_longer, most), with_kwargs=True)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise QuellError(
                f"{name or 'the model'} has max_norm, which changes the weights of the tokens that it sees in the "
                "forward pass, without noise: make it without"
            )


def _is_fixed(module: nn.Module) -> bool:
    """Whether statistics and weights of a batch norm are constants: then each row is transformed alone."""
    frozen = not any(parameter.requires_grad for parameter in module.parameters())
    return frozen and not module.training and getattr(module, "running_mean", None) is not None


def _refuse_training(module: nn.Module, args: Any) -> None:
    if module.training:
        raise QuellError(
            f"a frozen {type(module).__name__} was put into train mode, where it mixes the examples of a batch: call "
            "its eval() after every model.train()"
        )


def _fixed_frequencies(module: nn.Module) -> int | None:
    """Up to which length of a batch rotary positions are the same for all batches; None where they always are."""
    config: Any = getattr(module, "config", None)
    if not hasattr(module, "rope_type"):
        return None
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given] if "rope_type" in given else [value for value in given.values() if isinstance(value, Mapping)]
    limits = [getattr(module, "original_max_seq_len", 0) for kind in kinds if "dynamic" in kind.get("rope_type", "")]
    for kind in kinds:
        if kind.get("rope_type") == "longrope" and kind.get("short_factor") != kind.get("long_factor"):
            named = "original_max_position_embeddings"
            limits.append(kind.get(named) or getattr(config, named, None) or 0)
    return min(limits, default=None)


def _refuse_longer(most: int, module: nn.Module, args: Any, kwargs: Any) -> None:
    places = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if torch.is_grad_enabled() and int(places.max()) >= most:
        raise QuellError(
            f"{type(module).__name__} has other frequencies for all examples of a batch where the longest has more "
            f"than {most:,} tokens, so examples change each other's gradients: truncate examples to {most:,} tokens; "
            "or, for longrope, make the model with short_factor=long_factor in its rope_parameters"
        )


@contextmanager
def in_a_sentence(what: str, advice: str) -> Iterator[None]:
    """Errors that torch raises inside, about layers that it cannot handle, say which and what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError, AttributeError, IndexError) as error:  # NotImplementedError is a RuntimeError
        reason = " ".join(str(error).split())[:200]
        raise QuellError(f"{what} failed with {type(error).__name__} ({reason}): {advice}") from error


def warn_about_optimizer(plan: Plan, optimizer: Optimizer) -> None:
    """Say where momentum and weight decay are not the plan's, and what to plan instead."""
    for message in dict.fromkeys(_mismatches(plan.run.optimizer, optimizer)):
        warnings.warn(message, PlanMismatchWarning, stacklevel=5)  # the caller of make_private or attach


def _mismatches(planned: Any, optimizer: Optimizer) -> Iterator[str]:
    for part in parts_of(optimizer):
        if not isinstance(part, SGD) and not planned.adaptive:
            instead = "optimizer='adamw'" if isinstance(part, (Adam, AdamW)) else "adaptive=True"
            yield (
                f"the plan's noise is shaped for SGD, and {type(part).__name__} is not: privacy holds, but plan with "
                f"{instead}, and compare with DP-SGD: mechanism=plan.price('identity')"
            )
            continue
        for group in part.param_groups:
            if isinstance(part, (Adam, AdamW)) and abs(group["betas"][0] - planned.momentum) > 1e-9:
                yield (
                    f"the optimizer has betas={group['betas']} and the plan momentum {planned.momentum:g}: plan with "
                    f"optimizer='adamw', betas={group['betas']} for noise that fits"
                )
            if not isinstance(part, SGD):
                continue
            if abs(group["momentum"] - planned.momentum) > 1e-9:
                yield (
                    f"the optimizer has momentum {group['momentum']:g} and the plan {planned.momentum:g}: plan with "
                    f"momentum={group['momentum']:g} for noise that fits"
                )
            factor = 1 - group["lr"] * group["weight_decay"]
            if abs(factor - planned.weight_decay) > 1e-7:
                yield (
                    f"the optimizer multiplies the weights by {factor:.8g} at every step (1 - lr*weight_decay) and the "
                    f"plan by {planned.weight_decay:.8g}: plan with weight_decay={factor:.8g} for noise that fits"
                )


def schedule_mismatch(plan: Plan, step: int, first: int, first_rate: float, rate: float) -> str | None:
    """Whether the learning rate has moved otherwise than planned since step `first`."""
    rates = plan.run.workload.rates
    planned = 1.0 if rates is None else float(rates[step] / rates[first])
    real = rate / first_rate
    if abs(real - planned) <= 0.01 * planned:
        return None
    return (
        f"at step {step:,} the learning rate is {real:.4g} times that of step {first:,}, where the plan has "
        f"{planned:.4g}: plan with learning_rates= your schedule (one number per step) for noise that fits"
    )
