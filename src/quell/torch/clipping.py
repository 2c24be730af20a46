"""Clip every example's gradient and add them up, one micro-batch at a time.

What privacy rests on here: no example moves the sum by more than `max_grad_norm`. So norms and sums are taken in
float32 or better whatever the model's dtype, and an example whose gradient is not finite (which no factor would tame)
counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from quell.adapters.choice import require_clip_norm
from quell.errors import QuellError, require_count
from quell.torch.clip_norms import Bounds, Measured
from quell.torch.engine.bounds import full_precision
from quell.torch.engine.pieces import Rows
from quell.torch.engine.together import clipped

ExampleLoss = Callable[..., Tensor]
Gradients = Mapping[str, Tensor]  # per-example: (micro-batch, *shape of the parameter)


class Clipped(NamedTuple):
    """Sums of clipped gradients by parameter, and the gradients' norms before clipping, micro-batch by micro-batch."""

    sums: Mapping[str, Tensor]
    measured: Sequence[Measured]


def clipped_sum(
    loss: ExampleLoss,
    params: Mapping[str, Tensor],
    batch: tuple[Any, ...],
    max_grad_norm: float,
    *,
    micro_batch: int = 64,
) -> dict[str, Tensor]:
    """Clip every example's gradient to `max_grad_norm` and add them up, in float32.

    No example moves the result by more than `max_grad_norm`. A gradient that is not finite counts as zero.

    Args:
        loss: Maps the parameters and *one* example (the tensors of `batch` without their first dimension) to its loss.
        params: The parameters by name.
        batch: Tensors with one row per example.
        max_grad_norm: The norm to clip each example's gradient to, over all parameters together.
        micro_batch: How many per-example gradients to hold in memory at once.

    Returns:
        The clipped sum for each parameter by name; zeros for an empty batch.

    >>> weights = {"w": torch.tensor([0.0, 0.0])}
    >>> x, y = torch.eye(2), torch.tensor([0.1, 3.0])
    >>> def squared(p, x, y):
    ...     return (p["w"] @ x - y) ** 2 / 2
    >>> clipped_sum(squared, weights, (x, y), max_grad_norm=1.0)["w"]
    tensor([-0.1000, -1.0000])
    """
    per_example = vmap(grad(loss), in_dims=(None,) + (0,) * len(batch), randomness="different")
    plain = {name: value.detach() for name, value in params.items()}
    examples = _examples(batch)

    def micro_batches() -> Iterator[Gradients]:
        for first in range(0, examples, require_count("micro_batch", micro_batch)):
            part = (tensor[first : first + micro_batch] for tensor in batch)
            yield per_example(plain, *part)

    bounds = Bounds.of(require_clip_norm(max_grad_norm), plain)
    return dict(sum_clipped(micro_batches(), plain, bounds).sums)


def sum_clipped(micro_batches: Iterable[Gradients], params: Mapping[str, Tensor], bounds: Bounds) -> Clipped:
    """The clipped sum of per-example gradients that come in micro-batches."""
    totals = {n: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for n, p in params.items()}
    seen = []
    for gradients in micro_batches:
        with torch.no_grad(), full_precision():
            made, measured = clipped({(name,): [Rows(gradients[name])] for name in params}, bounds)
            for (name,), total in made.items():
                totals[name].view(-1).add_(total)
        seen.append(measured)
    return Clipped({name: total.float() for name, total in totals.items()}, seen)


def _examples(batch: tuple[Any, ...]) -> int:
    sizes = {len(tensor) for tensor in batch}
    if len(sizes) != 1:
        raise QuellError(f"the tensors of a batch have {sorted(sizes)} examples: they must all have the same number")
    return int(sizes.pop())
