"""The keys that docs/json.md promises."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parent.parent / "docs" / "json.md").read_text(encoding="utf-8")


def section(command: str) -> str:
    """What the page says under the heading that begins by naming the command's output."""
    (found,) = [text for text in PAGE.split("\n## ")[1:] if f"`quell {command} --json`" in text.splitlines()[0]]
    return found


def in_tables(command: str) -> list[set[str]]:
    """The keys in the first column of each table of a section."""
    tables = re.split(r"^\|---.*$", section(command), flags=re.MULTILINE)[1:]
    return [{key for row in re.findall(r"^\|(.*?)\|", rows, re.MULTILINE) for key in quoted(row)} for rows in tables]


def quoted(text: str) -> set[str]:
    """All names in backticks."""
    return set(re.findall(r"`(\w+)`", text))
