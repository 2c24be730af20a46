"""Clip every example's gradient and add them up, one micro-batch at a time.

What privacy rests on here: no example moves the sum by more than `max_grad_norm`. So norms and sums are taken in
float32 whatever the model's dtype, and an example whose gradient is not finite (which no factor would tame) counts
as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from quell.adapters.choice import require_clip_norm
from quell.errors import QuellError, require_count
from quell.torch.clip_norms import Bounds, Measured, clip_factors

ExampleLoss = Callable[..., Tensor]
Gradients = Mapping[str, Tensor]  # per-example: (micro-batch, *shape of the parameter)


IN_A_ROW = 128  # examples whose gradients are added up in float32: 2·128² roundings of 2⁻²³ are 0.004 of a clip norm


class Clipped(NamedTuple):
    """Clipped gradients, added up: how many they are, and the norm that their sum has (sharded: over all ranks)."""

    sums: Mapping[str, Tensor]
    examples: int
    norm: float
    measured: Sequence[Measured] = ()  # the gradients before clipping, where they were seen


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
    return dict(sum_clipped(micro_batches, plain, bounds).sums)


def sum_clipped(
    micro_batches: Callable[[], Iterator[Gradients]],
    params: Mapping[str, Tensor],
    bounds: Bounds,
) -> Clipped:
    """The clipped sum of per-example gradients that come in micro-batches; `micro_batches` may be started twice."""
    found = _sum(micro_batches(), params, bounds, cautious=False)
    # The one look at the device. Gradients that are not finite spoil the sum: rare enough to be paid for apart.
    return found if math.isfinite(found.norm) else _sum(micro_batches(), params, bounds, cautious=True)


def example_norms(gradients: Mapping[str, Tensor]) -> Tensor:
    """(examples,) the norm of each example's whole gradient, in float32."""
    norms = [row_norms(_rows(gradient)).double() for gradient in gradients.values()]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0).float()


def row_norms(rows: Tensor) -> Tensor:
    """(rows,) norms, in float32 or better, less than 5·10⁻⁶ too small.

    A float32 norm of ten million elements can come out a percent too small, because late squares are rounded away
    against the sum of the early ones; clipping would then let a percent too much through. So rows are cut into blocks,
    float32 within and float64 over them. A CPU adds up eight sums at once or more, a GPU two thousand: of a block, 128
    squares in a row, each of which loses 2⁻²⁴ of the sum at most.
    """
    block = 1 << (18 if rows.is_cuda else 10)
    if rows.shape[1] <= block or rows.dtype == torch.float64:
        kept = torch.float64 if rows.dtype == torch.float64 else torch.float32
        return torch.linalg.vector_norm(rows, dim=1, dtype=kept)
    whole = rows.shape[1] // block * block
    blocks = rows[:, :whole].unflatten(1, (-1, block))
    parts = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in (blocks, rows[:, None, whole:])]
    return torch.linalg.vector_norm(torch.cat(parts, dim=1), dim=1, dtype=torch.float64)


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """() the norm of all tensors together."""
    held = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not held:
        return torch.zeros(())
    if held[0].is_cuda:
        norms = list(torch._foreach_norm(held))  # a few launches, however many tensors
    else:
        norms = [row_norms(tensor.reshape(1, -1))[0] for tensor in held]
    return torch.linalg.vector_norm(torch.stack(norms))


def weighted_sum(weights: Tensor, gradient: Tensor) -> Tensor:
    """Σ_i weights_i · gradient_i in float64, of which a few examples at a time are added up in float32."""
    few = zip(_rows(gradient).float().split(IN_A_ROW), weights.split(IN_A_ROW), strict=True)
    first, *others = (torch.mv(rows.t(), own) for rows, own in few)
    total = first.double()
    for other in others:
        total.add_(other)
    return total.view(gradient.shape[1:])


def _sum(
    micro_batches: Iterator[Gradients],
    params: Mapping[str, Tensor],
    bounds: Bounds,
    cautious: bool,
) -> Clipped:
    totals: dict[str, Tensor] = {}
    examples, seen = 0, []
    for gradients in micro_batches:
        examples += len(next(iter(gradients.values())))
        measured: Measured = []
        for bound in bounds.groups:
            own = {name: gradients[name] for name in params if name in bound.names}
            norms = example_norms(own)
            measured.append((norms, bound))
            weights = clip_factors(norms, bound)
            for name, gradient in own.items():
                if cautious:
                    spoiled = ~torch.isfinite(norms)
                    gradient = gradient.masked_fill(spoiled.view(-1, *[1] * (gradient.dim() - 1)), 0.0)
                made = weighted_sum(weights, gradient)
                totals[name] = totals[name].add_(made) if name in totals else made
        seen.append(measured)
    if not totals:
        totals = {name: torch.zeros(value.shape, device=value.device) for name, value in params.items()}
    totals = {name: total.float() for name, total in totals.items()}
    return Clipped(totals, examples, float(norm_of(totals.values())), seen)


def _rows(gradient: Tensor) -> Tensor:
    """(examples, elements), also for a parameter without dimensions and for no examples at all."""
    return gradient.unsqueeze(1) if gradient.dim() == 1 else gradient.flatten(1)


def _examples(batch: tuple[Any, ...]) -> int:
    sizes = {len(tensor) for tensor in batch}
    if len(sizes) != 1:
        raise QuellError(f"the tensors of a batch have {sorted(sizes)} examples: they must all have the same number")
    return int(sizes.pop())
