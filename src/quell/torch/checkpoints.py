"""Checkpoints that a crash cannot spoil: written whole or not at all, the one before kept beside the newest.

A file, or a folder with a file per rank, is written under another name, forced onto the disk and renamed. What it
replaces stays as `NAME.before`, so that a checkpoint that was damaged later, or cut off by a copy, costs one checkpoint
and not the run: the steps in between come again and are compared with the ledger. The first checkpoint is that of step
0, so a crash has always one to go back to.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from quell.errors import QuellError
from quell.files import keep_name, require_folder
from quell.torch.distributed import decided, world
from quell.torch.folders import is_whole, mark_whole, read_file, write_file
from quell.torch.loader import PlannedLoader
from quell.torch.optimizer import PrivateOptimizer
from quell.torch.sharding import dealt, whole
from quell.torch.shards import read_slices, write_slices


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: PrivateOptimizer,
    loader: PlannedLoader,
    *,
    sharded: bool = False,
    **others: Any,
) -> None:
    """Save everything that a private run needs to go on, so that a crash at any moment leaves a whole checkpoint.

    It has the model's weights, the optimizer's state, the noise's and the loader's position. Call it on all ranks. Keep
    the checkpoint as secret as the key, and publish the model's state alone.

    Args:
        path: The file, which rank 0 writes. The one that it replaces becomes `path.before`.
        model: The model that is trained.
        optimizer: What `make_private` or `attach` returned.
        loader: What `make_private` or `attach` returned.
        sharded: Make `path` a folder into which every rank writes its part of a model of `fully_shard`, so that no rank
            needs memory for the whole. All ranks must see the folder.
        others: Whatever else has `state_dict` and `load_state_dict`, by name: `scheduler=scheduler`.
    """
    path = Path(path)
    decided(lambda: _require_kept_key(optimizer))
    state = {
        "model": state_of_model(model, sharded),
        "optimizer": optimizer.sharded_state_dict() if sharded else optimizer.state_dict(),
        "loader": loader.state_dict(),
        "others": {name: other.state_dict() for name, other in others.items()},
    }
    write_whole(state, path, sharded)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: PrivateOptimizer,
    loader: PlannedLoader,
    *,
    sharded: bool = False,
    **others: Any,
) -> int:
    """Go on from a checkpoint, or write the first one, of step 0, where there is none yet.

    Call it once, after `make_private` with the key of the run, on all ranks (which may be more or fewer than before).
    Steps that were released after the checkpoint come again, and are refused unless they are the same to the last bit.

    Args:
        path: The file or folder that `save_checkpoint` writes. Where it is damaged, `path.before` is taken, with a
            warning.
        model: The model, built as before.
        optimizer: What `make_private` or `attach` returned.
        loader: What `make_private` or `attach` returned.
        sharded: How to write the first checkpoint, as in `save_checkpoint`. Both kinds are read at any number of ranks.
        others: The others that were saved, by the same names.

    Returns:
        The step that is due, 0 for a new run.
    """
    path = Path(path)
    if not decided(lambda: any(each.exists() for each in (path, _before(path)))):
        if optimizer.run.released:
            raise QuellError(
                f"there is no checkpoint {path}, but {optimizer.run.released:,} steps were released with this key: "
                "pass the path of that run's checkpoint, or start a new run with a new key"
            )
        save_checkpoint(path, model, optimizer, loader, sharded=sharded, **others)
        return 0
    state = read(decided(lambda: newest_whole(path)))
    if state["others"].keys() != others.keys():
        found, given = (", ".join(sorted(names)) or "nothing" for names in (state["others"], others))
        raise QuellError(
            f"{path} has the states of {found} beside model and optimizer, and {given} was given to load: name the "
            "same as in save_checkpoint"
        )
    model.load_state_dict(dealt(state["model"], model.state_dict()))
    for name, other in others.items():
        other.load_state_dict(state["others"][name])
    optimizer.load_state_dict(state["optimizer"], replay=True)
    loader.load_state_dict(state["loader"])
    return optimizer.run.step


def write_whole_file(state: Any, path: Path) -> None:
    """Write a state into a file, or leave everything as it was."""
    require_folder(path)
    new = path.with_name(path.name + ".new")
    write_file(state, new)
    _replace(path, new)


def write_whole(state: Any, path: Path, sharded: bool) -> None:
    """The same from all ranks: a file, which rank 0 writes, or a folder into which every rank writes its part."""
    if not sharded:
        decided(lambda: write_whole_file(state, path))
        return
    new = path.with_name(path.name + ".new")

    def empty() -> None:
        require_folder(path)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)

    def finish() -> None:
        mark_whole(new)
        _replace(path, new)

    decided(empty)
    write_slices(state, new)
    decided(finish)


def _replace(path: Path, new: Path) -> None:
    before = _before(path)
    if path.exists():
        if before.is_dir():
            shutil.rmtree(before)
        elif path.is_dir():
            before.unlink(missing_ok=True)
        os.replace(path, before)
    os.replace(new, path)
    keep_name(path)


def newest_whole(path: Path) -> Path:
    """The checkpoint, or the one before it where it is missing or damaged."""
    older = _before(path)
    if is_whole(path):
        return path
    if not path.exists() and not older.exists():
        raise QuellError(f"there is no checkpoint {path}: pass the path of one that is there")
    if not is_whole(older):
        raise QuellError(
            f"{path} is damaged or no checkpoint, and there is no whole {older.name} beside it: pass the path of one "
            "that save_checkpoint wrote, or start a new run with a new key"
        )
    if path.exists():
        warnings.warn(f"{path} is damaged: going on from the checkpoint before it, {older.name}", stacklevel=4)
    return older


def read(path: Path) -> dict[str, Any]:
    """The state in a whole checkpoint, its tensors read from the disk when they are used."""
    state: dict[str, Any] = read_slices(path) if path.is_dir() else read_file(path)
    if not isinstance(state, dict) or not {"model", "optimizer", "loader", "others"} <= state.keys():
        raise QuellError(f"{path} is not a checkpoint of save_checkpoint: pass the path of one")
    return state


def _require_kept_key(optimizer: PrivateOptimizer) -> None:
    if not optimizer.run.key_kept:
        raise QuellError(
            "this run's key is not kept, so no checkpoint of it could ever be loaded: pass key='run.key' to "
            "make_private, which makes that file and reads it when the run goes on"
        )


def state_of_model(model: nn.Module, sharded: bool) -> dict[str, Any]:
    """Sharded tensors as they are, or else whole, one after the other; only rank 0, which writes them, keeps those."""
    state = model.state_dict()
    if sharded:
        return dict(state)
    kept: dict[str, Any] = {}
    for name, value in state.items():
        full = whole(value)
        if world()[0] == 0:
            kept[name] = full if full is value else full.cpu()
    return kept


def _before(path: Path) -> Path:
    return path.with_name(path.name + ".before")
