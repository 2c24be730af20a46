"""Files that people hand to Quell: ordinary ones, of a bounded size. And files that are written whole or not at all.

A path can name a pipe that nobody writes to, or a device that never ends. Neither may hang a program or fill the
memory of a machine that only meant to check a plan.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quell.errors import QuellError

# What numpy.load and the zipfile module below it raise about an .npz file that is damaged, encrypted, of a future kind,
# or that states arrays beyond the memory of this machine.
DAMAGED_ARRAYS = (
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
)


@dataclass(frozen=True)
class Kind:
    """A kind of file that commands write, known by a mark in its first bytes that hardly any other file has."""

    name: str
    mark: str
    within: int = 1 << 24

    def holds(self, path: Path) -> bool:
        """Whether the file at `path` is of this kind, or empty: nobody misses it."""
        try:
            with open(path, "rb") as file:
                content = file.read(self.within)
        except OSError:  # it may be written and not be read
            return False
        return not content or self.mark.encode() in content


PLAN = Kind("a plan of Quell", '"format": "quell-plan"', within=40)
PAGE = Kind("a page of Quell", "Made by Quell")
PLOT = Kind("a plot of Quell", "Drawn by Quell")
PREDICTIONS = Kind("a table of predictions", "class,probability\r\n", within=19)


def require_writable(*wanted: tuple[Path | None, Kind]) -> None:
    """Refuse paths that cannot be written, before anything long is computed. None stands for a file nobody wants.

    A file that is there already is replaced only if it is of the same kind: everything else may be somebody's work.
    """
    for path, kind in wanted:
        if path is None:
            continue
        if path.is_dir():
            raise QuellError(f"cannot write {path}: it is a folder; give the name of a file")
        require_folder(path)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise QuellError(f"cannot write {path}: you have no permission; choose another folder")
        if path.exists() and not path.is_file():
            raise QuellError(f"cannot write {path}: it is a pipe or a device; give the name of a file")
        if path.exists() and not kind.holds(path):
            raise QuellError(
                f"cannot write {path}: it exists and is not {kind.name}, so it is not replaced: give another name"
            )


def require_folder(path: Path) -> None:
    """Refuse a file whose folder is not there."""
    if not path.parent.is_dir():
        raise QuellError(f"cannot write {path}: there is no folder {path.parent}; make it first")


@contextmanager
def opened(path: str | Path, most: int) -> Iterator[BinaryIO]:
    """An ordinary file of at most `most` bytes, open for reading.

    Pipes, devices and longer files raise `QuellError`; what the operating system refuses is an `OSError` as ever.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise QuellError(f"{path} is not an ordinary file but a pipe or a device: give the path of a file")
        if about.st_size > most:
            raise _too_long(path, most)
        yield file


def read(path: str | Path, most: int) -> bytes:
    """The content of an ordinary file of at most `most` bytes."""
    with opened(path, most) as file:
        content = file.read(most + 1)  # the size may be unknown, as under /proc, or grow
    if len(content) > most:
        raise _too_long(path, most)
    return content


@contextmanager
def whole(path: str | Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end of the block: a crash leaves the old one."""
    path = Path(path)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:  # Ctrl-C too must not leave the draft behind
        with suppress(OSError):
            os.unlink(draft)
        raise


def _too_long(path: str | Path, most: int) -> QuellError:
    return QuellError(f"{path} has more than the {most:,} bytes that a file of its kind may have: is it the right one?")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for someone to write


def keep_name(path: Path) -> None:
    """Let the name of a file that was just made or moved survive a crash, as what was synced inside of it does."""
    if os.name == "posix":
        onto_disk(path.parent)


def onto_disk(path: Path) -> None:
    """Let what was written to a file, or the names in a folder, survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
