"""Plans and training results as pages: one self-contained HTML file each, made of plain data."""

from __future__ import annotations

from pathlib import Path

from quell.errors import QuellError


def write(page: str, path: str | Path) -> None:
    """Write a page to a file."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as problem:
        raise QuellError(f"cannot write the page to {path}: {problem.strerror}") from problem
