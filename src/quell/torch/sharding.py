"""Which slice of a parameter this rank holds: everything, or its rows of an FSDP2 DTensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quell.errors import QuellError
from quell.noise import Shard


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; torch.distributed is not loaded to find out."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, as a view."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        held: Tensor = tensor.to_local()
    return held


def whole(value: Any) -> Any:
    """A sharded tensor put together on every rank; anything else as it is."""
    return value.full_tensor() if is_sharded(value) else value


def dealt(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Whole tensors, each dealt out over the ranks as the tensor of that name is."""
    return {name: _dealt(value, like.get(name)) for name, value in values.items()}


def _dealt(value: Any, like: Any) -> Any:
    if not is_sharded(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)


def own_share(total: Tensor, parameter: Any) -> Tensor:
    """This rank's part of a sum over all ranks, where the parameter is sharded; each rank gives its own sum, whole."""
    if not is_sharded(parameter):
        return total
    torch.distributed.all_reduce(total)
    shard = shard_of(0, parameter)
    return total.view(-1)[shard.offset : shard.offset + shard.length].reshape(local(parameter).shape).clone()


def copies(tensor: Any, world: int) -> int:
    """On how many ranks each element lies."""
    if not is_sharded(tensor):
        return world
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, placed in enumerate(tensor.placements) if placed.is_replicate())


def shard_of(number: int, tensor: Any) -> Shard:
    """Where this rank's part of parameter `number` lies, its elements counted in C order over the whole tensor.

    Rows that are dealt out along the first dimension, as `fully_shard` does, are one contiguous slice; replicas hold
    the same slice and so draw the same noise.
    """
    if not is_sharded(tensor):
        return Shard(number, 0, math.prod(tensor.shape))
    start, stop = 0, int(tensor.shape[0]) if tensor.dim() else 1
    row = math.prod(tensor.shape[1:])
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard(0) or type(placement).__name__ != "Shard":
            raise QuellError(
                f"parameter {number} is placed as {tensor.placements}: noise is made for rows sharded along dimension "
                "0, which is what fully_shard does by default"
            )
        parts, mine = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
        chunk = -(-(stop - start) // parts)  # the rule of torch.chunk: equal parts, the last ones short or empty
        start, stop = min(stop, start + mine * chunk), min(stop, start + (mine + 1) * chunk)
    held = tensor.to_local().numel()
    if held != (stop - start) * row:
        raise QuellError(
            f"parameter {number} holds {held:,} elements here where {(stop - start) * row:,} were expected"
        )
    return Shard(number, start * row, held)


def set_gradient(parameter: nn.Parameter, total: Tensor) -> None:
    """Let a sum, or this rank's share of it, be the gradient of a parameter of any dtype."""
    if is_sharded(parameter) or parameter.dtype != total.dtype:
        gradient = torch.empty_like(parameter, requires_grad=False)
        local(gradient).copy_(total)
        parameter.grad = gradient
    else:
        parameter.grad = total


def shard_state(optimizer: Optimizer) -> None:
    """Deal whole tensors of a loaded state out again, as the parameters they belong to are."""
    for parameter, held in optimizer.state.items():
        held.update(dealt(held, dict.fromkeys(held, parameter)))
