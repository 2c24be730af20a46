"""The few things ranks must agree on. A single process is a world of one, and torch.distributed stays untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from quell.errors import QuellError
from quell.noise import Key

Made = TypeVar("Made")


def world() -> tuple[int, int]:
    """(this rank, number of ranks)."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def share_key(key: Key | None) -> Key:
    """Rank 0's key on every rank: noise and batches are functions of it. The process group must be trusted."""
    rank, size = world()
    if size > 1:
        message: list[Any] = [(key.reveal(), key.seeded) if rank == 0 and key is not None else None]
        torch.distributed.broadcast_object_list(message, src=0)
        if rank:
            secret, seeded = message[0]
            return Key(secret, _seeded=seeded)
    assert key is not None
    return key


def require_agreement(settings: Mapping[str, Any]) -> None:
    """Refuse, on every rank, to start a run whose settings are not the same everywhere."""
    for rank, other in enumerate(gather(dict(settings))):
        for name, value in settings.items():
            if other[name] != value:
                raise QuellError(
                    f"rank {rank} has {name} {other[name]}, rank {world()[0]} has {value}: pass the same arguments "
                    "on every rank"
                )


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Add up the tensors of all ranks, in place."""
    if world()[1] > 1:
        for waiting in [torch.distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
            waiting.wait()


def copy_from_first_rank(tensors: Sequence[Tensor]) -> None:
    """Start every replica from the same weights."""
    if world()[1] > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), src=0)


def agree(own: bytes, note: Callable[[bytes], None]) -> None:
    """Release together: rank 0, which keeps the ledger, notes the fingerprints of all ranks, or all refuse."""
    everyone = b"".join(gather(own))
    decided(lambda: note(everyone))


def decided(work: Callable[[], Made]) -> Made:
    """What rank 0 made, on every rank; where it failed, all fail."""
    rank, size = world()
    made, failed = (None, None) if rank else _tried(work)
    message: list[Any] = [made, None if failed is None else f"rank 0 failed: {failed}"]
    if size > 1:
        torch.distributed.broadcast_object_list(message, src=0)
    if message[1] is not None:
        raise failed or QuellError(message[1])
    return cast(Made, message[0])


def together(work: Callable[[], Made]) -> Made:
    """What each rank made itself; where it failed on one, as on rank 0 that opens the files, all fail."""
    made, failed = _tried(work)
    for rank, problem in enumerate(gather(None if failed is None else str(failed))):
        if problem is not None:
            raise failed or QuellError(f"rank {rank} failed: {problem}")
    return cast(Made, made)


def _tried(work: Callable[[], Made]) -> tuple[Made | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in their order."""
    size = world()[1]
    if size == 1:
        return [value]
    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, value)
    return found
