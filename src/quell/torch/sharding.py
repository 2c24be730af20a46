"""Which slice of a parameter this rank holds: everything, or its rows of an FSDP2 DTensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quell.errors import QuellError
from quell.noise import Shard
from quell.torch.engine.bounds import norm_of


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; torch.distributed is not loaded to find out."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def any_sharded(tensors: Iterable[Any]) -> bool:
    return any(map(is_sharded, tensors))


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


@dataclass(frozen=True, eq=False)
class Slices:
    """A tensor that ranks have saved in slices of its elements in C order, each with where it begins."""

    shape: torch.Size
    parts: Sequence[tuple[int, Tensor]]

    def cut(self, offset: int, length: int) -> Tensor:
        """(length,) the elements from `offset` on; nothing else is read from the disk."""
        found, missing = torch.empty(length, dtype=self.parts[0][1].dtype), length
        for begin, held in {begin: held for begin, held in self.parts if len(held)}.items():  # one of each replica
            start, stop = max(offset, begin), min(offset + length, begin + len(held))
            if start < stop:
                found[start - offset : stop - offset] = held[start - begin : stop - begin]
                missing -= stop - start
        if missing:
            raise QuellError(f"{missing:,} elements of a tensor of shape {tuple(self.shape)} were not saved")
        return found


def dealt(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Whole tensors, or saved slices of them, each dealt out over the ranks as the tensor of that name is."""
    return {name: dealt_like(value, like.get(name)) for name, value in values.items()}


def dealt_like(value: Any, like: Any) -> Any:
    """A whole tensor, or saved slices of it, dealt out as the tensor `like` is; anything else as it is."""
    dealt_out = isinstance(value, (Slices, Tensor)) and is_sharded(like) and value.shape == like.shape
    if isinstance(value, Slices) and not dealt_out:
        full = value.cut(0, value.shape.numel()).view(value.shape)
        return full.to(like.device) if isinstance(like, Tensor) else full
    if not dealt_out:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(value, Tensor):
        return distribute_tensor(value, like.device_mesh, like.placements)
    shard = shard_of(0, like)
    held = value.cut(shard.offset, shard.length).view(local(like).shape).to(like.device)
    return DTensor.from_local(held, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def own_share(total: Tensor, parameter: Any) -> Tensor:
    """This rank's part of a sum over all ranks, where the parameter is sharded; each rank gives its own sum, whole."""
    if not is_sharded(parameter):
        return total
    torch.distributed.all_reduce(total)
    shard = shard_of(0, parameter)
    return total.view(-1)[shard.offset : shard.offset + shard.length].reshape(local(parameter).shape).clone()


def _copies(tensor: Any) -> int:
    """On how many ranks each element of a sharded tensor lies."""
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, placed in enumerate(tensor.placements) if placed.is_replicate())


def own_square(parameters: Sequence[Any], sums: Sequence[Tensor]) -> Tensor:
    """() float64, what this rank adds to the squared norm of sharded sums, of which it holds its own slices."""
    squares = [
        norm_of([held]).to(held.device, torch.float64).square() / _copies(parameter)
        for parameter, held in zip(parameters, sums, strict=True)
    ]
    return torch.stack(squares).sum()


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
    """Deal tensors of a loaded state out again, as the parameters they belong to are."""
    for parameter, held in optimizer.state.items():
        held.update({name: dealt_like(value, parameter) for name, value in held.items()})
