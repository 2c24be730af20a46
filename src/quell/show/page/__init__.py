"""Plans and training results as pages: one self-contained HTML file each, made of plain data."""

from __future__ import annotations

import os
from pathlib import Path

from quell.errors import QuellError


def write(page: str, path: str | Path, owner_only: bool = False) -> None:
    """Write a page to a file, whole or not at all: a browser may be reading it."""
    path = Path(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        draft.unlink(missing_ok=True)
        draft.touch(0o600 if owner_only else 0o666)
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, path)
    except OSError as problem:
        raise QuellError(f"cannot write the page to {path}: {problem.strerror}") from problem
