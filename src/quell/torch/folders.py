"""Checkpoints on the disk, files or folders: how they are written and read, and which of them are whole?

A file of torch.save has checksums. Folders, as Trainer and ranks write them, get a list of their files with the sizes
when all are written, whole or not at all. A folder without the list, or with other files than it names, was cut off by
a crash or a copy.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quell.errors import QuellError
from quell.files import keep_name, onto_disk
from quell.torch.distributed import world

_LIST = "quell.json"


def write_file(state: Any, path: Path) -> None:
    """Write plain data and tensors, and force them onto the disk."""
    try:
        with open(path, "wb", opener=_for_owner) as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise QuellError(f"{path} could not be written: {error}") from error


def read_file(path: Path) -> Any:
    """The state in a whole file, its tensors read from the disk when they are used."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch's many, about objects that are not plain data
        reason = " ".join(str(error).split())[:200]
        raise QuellError(f"{path} cannot be loaded on rank {world()[0]} ({type(error).__name__}: {reason})") from error


def is_whole(path: Path) -> bool:
    """Whether a folder has all of its files, or every byte of a file of torch.save matches its checksum."""
    if path.is_dir():
        return is_whole_folder(path)
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError):
        return False


def mark_whole(folder: Path) -> None:
    """All files of a checkpoint are written."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _LIST]
    for path in files:
        onto_disk(path)
    new = folder / f"{_LIST}.new"
    new.write_text(json.dumps({str(path.relative_to(folder)): path.stat().st_size for path in files}), encoding="utf-8")
    onto_disk(new)
    os.replace(new, folder / _LIST)
    keep_name(folder / _LIST)


def is_whole_folder(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _LIST).read_text(encoding="utf-8"))
        sound = [(folder / name).stat().st_size == size for name, size in sizes.items()]
    except (OSError, ValueError):
        return False
    return all(sound) and all(is_whole(folder / name) for name in sizes if name.endswith((".pt", ".pth")))


def require_whole_folder(folder: Path) -> None:
    if not folder.exists():
        raise QuellError(
            f"there is no checkpoint {folder}: pass resume_from_checkpoint=True, which takes the newest of the output "
            "folder"
        )
    if not is_whole_folder(folder):
        raise QuellError(
            f"{folder} is not a whole checkpoint of PrivateTrainer: pass resume_from_checkpoint=True, which takes the "
            "newest that is"
        )


def newest_whole_folder(home: Path, own: Callable[[Path], bool] = lambda path: True) -> Path:
    """The last `checkpoint-STEP` that is whole, of those that are the run's `own`."""
    found = [(int(match[1]), path) for path in home.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    others = []
    for _, path in sorted(found, reverse=True):
        if not is_whole_folder(path):
            told = f"{path} was not written to its end, or not by PrivateTrainer: looking for an earlier checkpoint"
            warnings.warn(told, stacklevel=4)
        elif own(path):
            return path
        else:
            others.append(path)
            warnings.warn(f"{path} is of a run with another key, and is passed over", stacklevel=4)
    if others:
        raise QuellError(
            f"{home} has no whole checkpoint of this key, and those of another run: to go on with that one, pass the "
            f"file of its key, private={{'key': ...}}; its newest checkpoint is {others[0].name}"
        )
    raise QuellError(
        f"{home} has no whole checkpoint of PrivateTrainer: call train() without resume_from_checkpoint to start a new "
        "run, with a new key"
    )


_NAME = re.compile(r"checkpoint-(\d+)")


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # optimizer states can hold noise
