"""Checkpoints that a crash cannot spoil: written whole or not at all, the one before kept beside the newest.

A file is written under another name, forced onto the disk and renamed. What it replaces stays as `NAME.before`, so that
a file that was damaged later, or cut off by a copy, costs one checkpoint and not the run: the steps in between come
again and are compared with the ledger. The first checkpoint is that of step 0, so a crash has always one to go back to.
"""

from __future__ import annotations

import os
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quell.errors import QuellError
from quell.files import keep_name
from quell.torch.distributed import decided, world
from quell.torch.loader import PlannedLoader
from quell.torch.optimizer import PrivateOptimizer
from quell.torch.sharding import dealt, whole


def save_checkpoint(
    path: str | Path, model: nn.Module, optimizer: PrivateOptimizer, loader: PlannedLoader, **others: Any
) -> None:
    """Save everything that a private run needs to go on, so that a crash at any moment leaves a whole checkpoint.

    The file has the model's weights, the optimizer's state, the noise's, the loader's position and the random numbers
    of torch (CPU and GPU), NumPy and Python on every rank. Call it on all ranks; rank 0 writes. Keep the file as secret
    as the key, and publish the model's state alone.

    Args:
        path: The file. The one that it replaces becomes `path.before`.
        model: The model that is trained.
        optimizer: What `make_private` or `attach` returned.
        loader: What `make_private` or `attach` returned.
        others: Whatever else has `state_dict` and `load_state_dict`, by name: `scheduler=scheduler`.
    """
    path = Path(path)
    state = {
        "model": _whole_on_first_rank(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
        "others": {name: other.state_dict() for name, other in others.items()},
    }

    def write() -> None:
        if not optimizer.run.key_kept:
            raise QuellError(
                "this run's key is not kept, so no checkpoint of it could ever be loaded: pass key='run.key' to "
                "make_private, which makes that file and reads it when the run goes on"
            )
        write_whole(state, path)

    decided(write)


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: PrivateOptimizer, loader: PlannedLoader, **others: Any
) -> int:
    """Go on from a checkpoint, or write the first one, of step 0, where there is none yet.

    Call it once, after `make_private` with the key of the run, on all ranks (which may be more or fewer than before).
    Steps that were released after the checkpoint come again, and are refused unless they are the same to the last bit.

    Args:
        path: The file that `save_checkpoint` writes. Where it is damaged, `path.before` is taken, with a warning.
        model: The model, built as before.
        optimizer: What `make_private` or `attach` returned.
        loader: What `make_private` or `attach` returned.
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
        save_checkpoint(path, model, optimizer, loader, **others)
        return 0
    state = read(decided(lambda: newest_whole(path)))
    if state["others"].keys() != others.keys():
        found, given = (", ".join(sorted(names)) or "nothing" for names in (state["others"], others))
        raise QuellError(f"{path} has the states of {found} beside model and optimizer, and {given} was given to load")
    model.load_state_dict(dealt(state["model"], model.state_dict()))
    for name, other in others.items():
        other.load_state_dict(state["others"][name])
    optimizer.load_state_dict(state["optimizer"], replay=True)
    loader.load_state_dict(state["loader"])
    return optimizer.run.step


def write_whole(state: Any, path: Path) -> None:
    """Write a state, or leave everything as it was."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb", opener=_for_owner) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        os.replace(path, _before(path))
    os.replace(new, path)
    keep_name(path)


def newest_whole(path: Path) -> Path:
    """The file, or the one before it where the file is missing or damaged; one of them is there."""
    older = _before(path)
    if is_whole(path):
        return path
    if not is_whole(older):
        raise QuellError(
            f"{path} is damaged, and there is no whole {older.name} beside it: start a new run with a new key"
        )
    if path.exists():
        warnings.warn(f"{path} is damaged: going on from the checkpoint before it, {older.name}", stacklevel=4)
    return older


def is_whole(path: Path) -> bool:
    """Whether every byte of a file of torch.save is there and matches its checksum."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError):
        return False


def read(path: Path) -> dict[str, Any]:
    """The state in a whole file, its tensors read from the disk when they are used."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch's many, about objects that are not plain data
        reason = " ".join(str(error).split())[:200]
        raise QuellError(f"{path} cannot be loaded on rank {world()[0]} ({type(error).__name__}: {reason})") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "loader", "others"} <= state.keys():
        raise QuellError(f"{path} is not a checkpoint of save_checkpoint: pass the path of one")
    return state


def _whole_on_first_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """Sharded tensors whole, one after the other; only rank 0, which writes them, keeps them."""
    kept: dict[str, Any] = {}
    for name, value in state.items():
        full = whole(value)
        if world()[0] == 0:
            kept[name] = full if full is value else full.cpu()
    return kept


def _before(path: Path) -> Path:
    return path.with_name(path.name + ".before")


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # optimizer states can hold noise
