"""States in slices: every rank writes what it holds of sharded tensors, and any number of ranks can read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from quell.errors import QuellError
from quell.torch.distributed import decided, together, world
from quell.torch.folders import read_file, write_file
from quell.torch.sharding import Slices, is_sharded, local, shard_of

# In the first file's state a dictionary with one of these keys stands for a sharded tensor, or for a value that every
# rank has of its own. It holds the place of that in the lists `slices` and `own`, which every rank's file has.
_SLICED, _OWN = "quell: slices", "quell: every rank's"


@dataclass(frozen=True)
class EveryRanks:
    """A value that is another one on every rank; the list of all of them when it is read."""

    value: Any


def write_slices(state: Any, folder: Path) -> None:
    """Write a state into a folder, a file per rank; what is not sharded is the first rank's. Call it on all ranks."""
    slices: list[tuple[int, Any]] = []
    own: list[Any] = []

    def kept(leaf: Any) -> Any:
        if is_sharded(leaf):
            slices.append((shard_of(0, leaf).offset, local(leaf).detach().reshape(-1)))
            return {_SLICED: len(slices) - 1, "shape": list(leaf.shape)}
        if isinstance(leaf, EveryRanks):
            own.append(leaf.value)
            return {_OWN: len(own) - 1}
        return leaf

    tree, (rank, ranks) = pytree.tree_map(kept, state), world()
    part = {"state": None if rank else tree, "ranks": ranks, "slices": slices, "own": own}
    together(lambda: write_file(part, folder / _name(rank)))
    decided(lambda: _require_all(folder, ranks))


def read_slices(folder: Path) -> Any:
    """The state, sharded tensors as `Slices` of files that are read when they are used.

    The folder may also hold parts of ranks that an earlier run had beyond those of this one.
    """
    first = read_file(folder / _name(0))
    files = [first, *(read_file(folder / _name(rank)) for rank in range(1, first["ranks"]))]

    def filled(leaf: Any) -> Any:
        if _stands_in(leaf) and _SLICED in leaf:
            return Slices(torch.Size(leaf["shape"]), [file["slices"][leaf[_SLICED]] for file in files])
        return [file["own"][leaf[_OWN]] for file in files] if _stands_in(leaf) else leaf

    return pytree.tree_map(filled, first["state"], is_leaf=_stands_in)


def _require_all(folder: Path, ranks: int) -> None:
    missing = [rank for rank in range(ranks) if not (folder / _name(rank)).exists()]
    if missing:
        raise QuellError(f"rank 0 does not see what rank {missing[0]} wrote into {folder}: let all ranks share a disk")


def has_slices(folder: Path) -> bool:
    return (folder / _name(0)).exists()


def _stands_in(leaf: Any) -> bool:
    return isinstance(leaf, dict) and (_SLICED in leaf or _OWN in leaf)


def _name(rank: int) -> str:
    return f"rank-{rank}.pt"
