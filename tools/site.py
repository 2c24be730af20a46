"""Hooks of MkDocs (mkdocs.yml): the repository's other pages become part of the site, and nothing comes from elsewhere.

Links are written so that they work in the repository. A page outside docs/ keeps its path on the site, README.md is the
first page, examples become pages with their code, and links between all of these are rewritten.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#:]+)(#[^)\s]*)?\)")
_REMOTE = re.compile(r"<(?:script|img|iframe|link)[^>]*\s(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


@cache
def pages() -> list[Path]:
    """All pages of the site, by their place in the repository: docs/, and what is linked from there."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in found:
        found += [path for path in _linked(page) if place(path).endswith(".md") and path not in found]
    return found


def _linked(page: Path) -> Iterator[Path]:
    text = without_code(page.read_text(encoding="utf-8")) if page.suffix == ".md" else ""
    paths = (Path(os.path.normpath(page.parent / target)) for _, target, _ in LINK.findall(text))
    yield from dict.fromkeys(path for path in paths if path.is_file())


def without_code(text: str) -> str:
    """Markdown without its code, where brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def place(path: Path) -> str:
    """Where a file of the repository lies on the site: examples become pages."""
    inside = path.relative_to(ROOT)
    if inside.parts[0] == "examples" and inside.suffix == ".py":
        return inside.with_suffix(".md").as_posix()
    return inside.relative_to("docs").as_posix() if inside.parts[0] == "docs" else inside.as_posix()


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File

    for page in pages():
        if page.parent.name != "docs":
            text = page.read_text(encoding="utf-8")
            shown = text if page.suffix == ".md" else f"# {page.name}\n\n```python\n{text}```\n"
            files.append(File.generated(config, place(page), content=shown))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Point links to where the files lie on the site. A link to what is no page becomes its name."""
    uri = page.file.src_uri
    origins = {place(each): each for each in pages()}

    def moved(found: re.Match[str]) -> str:
        label, target, anchor = found.groups()
        path = Path(os.path.normpath(origins[uri].parent / target))
        if not path.exists():
            return found[0]  # MkDocs warns about it, which is an error
        if path not in origins.values() and not path.is_relative_to(ROOT / "docs"):
            return f"{label[1:-1]} (`{path.relative_to(ROOT).as_posix()}`)"
        return f"{label}({os.path.relpath(place(path), os.path.dirname(uri) or '.')}{anchor or ''})"

    return LINK.sub(moved, text)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads something from the network."""
    if found := _REMOTE.search(output):
        raise SystemExit(f"{page.file.src_uri} loads from the network: {found[0]}")
    return output
