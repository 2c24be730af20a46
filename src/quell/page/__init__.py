"""The plan as a page: one self-contained HTML file, a picture of the same, or live on localhost (`quell serve`)."""

from __future__ import annotations

from pathlib import Path

from quell.errors import QuellError
from quell.page.content import content_of
from quell.page.document import document
from quell.planning import Plan
from quell.report import plan_text

__all__ = ["content_of", "render", "write"]


def render(plan: Plan) -> str:
    """The plan as one HTML page that needs no network.

    >>> import quell
    >>> page = render(quell.plan(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5))
    >>> page.startswith("<!doctype html>") and "://" not in page.replace("http://www.w3.org/2000/svg", "")
    True
    """
    return document(content_of(plan), plan_text(plan)).html


def write(plan: Plan, path: str | Path) -> None:
    """Write the page to a file."""
    try:
        Path(path).write_text(render(plan), encoding="utf-8")
    except OSError as problem:
        raise QuellError(f"cannot write the page to {path}: {problem.strerror}") from problem
