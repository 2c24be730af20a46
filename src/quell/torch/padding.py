"""Does an example's loss depend on how long the others are?

A collator pads the examples of a batch to the longest of them. That is harmless where padding counts for nothing, and
breaks the promise where it does not: learned positions with padding on the left, a mean over padded places, a norm over
time. Then one long example changes everybody's gradient before it is clipped. `coupling.py` cannot see it, because it
replaces rows after they were padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from quell.errors import QuellError
from quell.torch.coupling import differ, in_eval_mode
from quell.torch.random_states import kept_states
from quell.torch.writes import restored_buffers

EXAMPLES = 32  # whose lengths are looked at, from the whole data set
COMPARED = 8  # of those that are shorter than the longest

Batch = Mapping[str, Any]


def refuse_padding_that_counts(
    model: nn.Module,
    losses: Callable[[Batch], Tensor],
    collate: Callable[[list[Any]], Batch],
    dataset: Any,
    tolerance: float,
) -> None:
    """Compare the losses of a few examples as they are with those that they have beside the longest of them.

    Weights, buffers, modes and random states are left as they were.
    """
    with torch.no_grad(), in_eval_mode(model), restored_buffers(model), kept_states():
        found = [tuple(losses(batch)[0] for batch in both) for both in _both_ways(collate, dataset)]
    if not found:
        return
    alone, beside = map(torch.stack, zip(*found, strict=True))
    if bool((changed := differ(alone, beside, tolerance)).any()):
        raise QuellError(
            f"the loss of an example is {float(alone[changed][0]):.5g} alone and {float(beside[changed][0]):.5g} where "
            "the collator pads it to the length of a longer one, so examples change each other's gradients and "
            "clipping would bound nobody's influence: pad on the right (tokenizer.padding_side='right'), give the "
            "model the attention mask, or pad all examples to one length (padding='max_length')"
        )


def _both_ways(collate: Callable[[list[Any]], Batch], dataset: Any) -> list[tuple[Batch, Batch]]:
    """Each example without the padding that comes from the longest, and with it."""
    count = min(EXAMPLES, len(dataset))
    examples = [dataset[index * (len(dataset) - 1) // max(count - 1, 1)] for index in range(count)]
    alone = [collate(deepcopy([example])) for example in examples]  # some collators write into what they are given
    sizes = [sum(value.numel() for value in batch.values() if isinstance(value, Tensor)) for batch in alone]
    longest = examples[sizes.index(max(sizes))]
    found: list[tuple[Batch, Batch]] = []
    for example, single in zip(examples, alone, strict=True):
        pair = collate(deepcopy([example, longest]))
        cut = {name: _cut(value, single.get(name), _on_the_left(pair)) for name, value in pair.items()}
        if any(isinstance(value, Tensor) and value.shape[1:] != pair[name].shape[1:] for name, value in cut.items()):
            found.append((cut, pair))
        if len(found) == COMPARED:
            break
    return found


def _cut(value: Any, single: Any, left: bool) -> Any:
    """The first row of a pair, as wide as it is alone; cut and not collated again, which may mask other words."""
    if not isinstance(value, Tensor) or not isinstance(single, Tensor):
        return value
    if value.dim() != single.dim() or not value.dim() or (len(value), len(single)) != (2, 1):
        return single  # no row per example, such as patches of images one after the other
    value = value[:1]
    for dim, width in enumerate(single.shape[1:], 1):
        value = value.narrow(dim, value.shape[dim] - width if left else 0, width)
    return value


def _on_the_left(pair: Batch) -> bool:
    mask = pair.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[0, 0])
