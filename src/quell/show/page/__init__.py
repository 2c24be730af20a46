"""Plans and training results as pages: one self-contained HTML file each, made of plain data."""

from __future__ import annotations

from pathlib import Path

from quell import files
from quell.errors import QuellError


def write(page: str, path: str | Path, owner_only: bool = False) -> None:
    """Write a page to a file, whole or not at all: a browser may be reading it."""
    try:
        with files.whole(path, 0o600 if owner_only else 0o644) as file:
            file.write(page.encode())
    except OSError as problem:
        raise QuellError(f"cannot write the page to {path}: {problem.strerror}") from problem
