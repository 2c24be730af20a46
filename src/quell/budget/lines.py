"""A file of JSON lines that many processes append to, and that survives crashes.

Every line carries a checksum of itself and of all lines before it. A line is written at once and is on the disk before
`append` returns. A last line without its end was being written when a crash came: whoever wrote it had no answer yet,
so it counts for nothing and the next writer removes it. Any other damage is refused. A lock keeps writers apart. What
no file can tell is whether whole lines were taken off its end while nobody looked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from quell import files
from quell.errors import QuellError

try:
    import fcntl
except ImportError:  # Windows has no flock: there the lock is the operator's duty
    fcntl = None  # type: ignore[assignment]

MOST_BYTES = 1 << 30
_CHECK = "check"  # the key of a line's checksum


def create(path: Path, first: dict[str, Any]) -> None:
    """A new file with one line; an existing file is refused. A crash leaves the whole line or no file."""
    text = _line(first, b"")[0]
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(draft, "xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # unlike a rename, never in the place of a file that is there
        finally:
            os.unlink(draft)
        files.keep_name(path)
    except FileExistsError:
        raise QuellError(f"{path} exists already: go on with it, or choose another name for a new budget") from None
    except OSError as problem:
        raise QuellError(f"cannot write the budget {path}: {problem.strerror}") from problem


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines, without their checksums; raises `QuellError` if one of them is damaged."""
    return _parsed(path, _content(path)).lines


def append(path: Path, make: Callable[[list[dict[str, Any]]], dict[str, Any] | None]) -> bool:
    """Add the line that `make` answers to all lines so far, or none for None; nobody else writes meanwhile.

    Returns whether a line was added. It is on the disk then.
    """
    with _locked(path) as handle:
        found = _parsed(path, _content(path))
        size, added = found.size, make(found.lines)
        if added is None:
            return False
        text = found.ending + _line(added, found.check)[0]
        try:
            os.ftruncate(handle, size)  # what a crash left of a line
            if os.write(handle, text) < len(text):
                os.ftruncate(handle, size)
                raise OSError(28, "no space left on the disk")
            os.fsync(handle)
            _require_same(path, handle)  # else the line is in a file that nobody reads any more
        except OSError as problem:
            raise QuellError(f"cannot write the budget {path}: {problem.strerror}; nothing was charged") from problem
    return True


def _content(path: Path) -> bytes:
    try:
        return files.read(path, MOST_BYTES)
    except OSError as problem:
        raise QuellError(f"cannot read the budget {path}: {problem.strerror}; quell budget init makes one") from problem


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open for appending, while nobody else has it so."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError as problem:
        raise QuellError(f"cannot open the budget {path}: {problem.strerror}") from problem
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        _require_same(path, handle)
        yield handle
    finally:
        os.close(handle)


def _require_same(path: Path, handle: int) -> None:
    named, ours = os.stat(path), os.fstat(handle)
    if (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino):
        raise QuellError(f"the budget {path} was replaced while it was used: try again")


@dataclass
class _Parsed:
    """The lines of a file, the last checksum, how many bytes the lines take, and what the last one still needs."""

    lines: list[dict[str, Any]]
    check: bytes = b""
    size: int = 0
    ending: bytes = b""

    def take(self, text: bytes) -> bool:
        """Add a line, if it is sound."""
        try:
            line = json.loads(text)
            del line[_CHECK]
            again, check = _line(line, self.check)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        if again != text + b"\n":
            return False
        self.lines.append(line)
        self.check = check
        self.size += len(text)
        return True


def _parsed(path: Path, content: bytes) -> _Parsed:
    found = _Parsed([])
    *whole, last = content.split(b"\n")
    for number, text in enumerate(whole, start=1):
        if not found.take(text):
            if number == 1 and f'"{_CHECK}":"'.encode() not in text:
                raise _no_budget(path)
            raise QuellError(f"line {number:,} of the budget {path} is damaged: restore the file from a copy")
        found.size += 1
    if found.take(last):  # only its end is missing: it counts, for nobody knows whether its writer was answered
        found.ending = b"\n"
    elif found.take(last[:-1]):
        raise QuellError(f"the end of the budget {path} is damaged: restore the file from a copy")
    if not found.lines:
        raise _no_budget(path)
    return found


def _no_budget(path: Path) -> QuellError:
    return QuellError(f"{path} is not a budget: quell budget init makes one; if it was one, restore it from a copy")


def _line(content: dict[str, Any], before: bytes) -> tuple[bytes, bytes]:
    """A line with its checksum, and the checksum."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":"), sort_keys=True)
    check = sha256(before + body.encode()).hexdigest()[:32]
    return f'{body[:-1]}{"," if content else ""}"{_CHECK}":"{check}"}}\n'.encode(), check.encode()
