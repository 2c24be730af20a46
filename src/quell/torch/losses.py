"""One loss per example, from a Hugging Face model's outputs.

The losses that such models compute themselves are means over the *tokens* of a batch, so an example's share would
depend on the others' lengths, and clipping would bound nothing. These are means over each example's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quell.errors import QuellError

__all__ = ["class_losses", "losses_for", "next_token_losses", "span_losses", "token_losses"]

ExampleLosses = Callable[[Any, Any], Tensor]  # outputs and labels to (examples,)

_IGNORED = -100  # what labels that do not count are marked with


def losses_for(model: Any) -> ExampleLosses:
    """The function of outputs and labels that fits the task of a Hugging Face model, which `PrivateTrainer` takes.

    `next_token_losses` for causal language models, `span_losses` for question answering, `class_losses` for classes
    of texts and images, and `token_losses` for all others.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    generates = getattr(base, "can_generate", lambda: False)()
    if generates and not getattr(config, "is_encoder_decoder", False):
        return next_token_losses
    names = [kind.__name__ for kind in type(base).__mro__]
    if any(name.endswith("ForQuestionAnswering") for name in names):
        return span_losses
    if any(name.endswith(("ForSequenceClassification", "ForImageClassification")) for name in names):
        return partial(class_losses, problem_type=getattr(config, "problem_type", None))
    return token_losses


def token_losses(outputs: Any, labels: Tensor) -> Tensor:
    """(examples,) the cross-entropy of (examples, classes) logits, or its mean over each example's own labelled tokens.

    Labels of -100 do not count. Logits predict the label at their own position; for causal language models use
    `next_token_losses`.
    """
    logits = _logits(outputs)
    if logits.shape[:-1] != labels.shape:
        raise QuellError(
            f"the model's logits have shape {tuple(logits.shape)} and the labels {tuple(labels.shape)}: give one label "
            "to each, or pass example_losses=, a function from outputs and labels to one loss per example"
        )
    flat = functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    each = flat.view(labels.shape)
    if each.dim() == 1:
        return each
    counted = (labels != _IGNORED).flatten(1).sum(1)
    return each.flatten(1).sum(1) / counted.clamp(min=1)


def next_token_losses(outputs: Any, labels: Tensor) -> Tensor:
    """(examples,) for causal language models: the mean cross-entropy over each example's own tokens.

    Labels are the tokens themselves: they are shifted by one here, as inside of Hugging Face's models. Labels of -100
    (padding, a question) do not count, and an example that has no others has a loss of 0. So the loss of an example
    depends on its own tokens alone, and a loop trains on the mean over examples: `losses.mean()`. Logits of learned
    prompts may come first.
    """
    nobody = labels.new_full((len(labels), 1), _IGNORED)
    prompts = _logits(outputs).shape[1] - labels.shape[1]
    return token_losses(outputs, torch.cat([nobody.expand(-1, prompts), labels, nobody], dim=1)[:, 1:])


def without_tokens_after_padding(labels: Tensor, mask: Tensor | None) -> Tensor:
    """A sequence's first token is predicted by none of its own; padding on the left, if others are longer, must not."""
    if mask is None or mask.shape != labels.shape:
        return labels
    follows = functional.pad(mask[:, :-1] == 0, (1, 0))
    return labels.masked_fill(follows & (mask != 0), _IGNORED)


def class_losses(outputs: Any, labels: Tensor, problem_type: str | None = None) -> Tensor:
    """(examples,) cross-entropy of one class, binary cross-entropy of each class alone, or mean squared error.

    `problem_type` is that of a Hugging Face configuration. By default one output is regression, and labels that are
    fractions are for each class alone.
    """
    logits = _logits(outputs)
    if problem_type is None and logits.shape[-1] == 1:
        problem_type = "regression"
    alone = problem_type == "multi_label_classification" or (problem_type is None and labels.is_floating_point())
    if not alone and problem_type != "regression":
        return token_losses(outputs, labels)
    if labels.numel() != logits.numel():
        raise QuellError(
            f"the model's logits have shape {tuple(logits.shape)} and the labels {tuple(labels.shape)}: give one "
            "number to each logit, or integers if each example has one class"
        )
    criterion = functional.binary_cross_entropy_with_logits if alone else functional.mse_loss
    return criterion(logits.float(), labels.view_as(logits).float(), reduction="none").flatten(1).mean(1)


def span_losses(outputs: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """(examples,) for answers that are spans: the mean cross-entropy of their start and their end."""
    found = []
    for end in ("start", "end"):
        logits, places = outputs[f"{end}_logits"], labels[f"{end}_positions"].view(-1)
        outside = (places < 0) | (places >= logits.shape[1])  # cut off: does not count
        found.append(token_losses({"logits": logits}, places.masked_fill(outside, _IGNORED)))
    return (found[0] + found[1]) / 2


def _logits(outputs: Any) -> Tensor:
    with suppress(KeyError, TypeError, IndexError):
        if not isinstance(outputs, Tensor):
            logits: Tensor = outputs["logits"]
            return logits
    raise QuellError(
        "the model's outputs have no logits: give this loss {'logits': ...}, or PrivateTrainer example_losses=, a "
        "function from outputs and labels to one loss per example"
    )
