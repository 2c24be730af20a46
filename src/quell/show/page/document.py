"""Data and template into one self-contained HTML document.

No request leaves the page: style and script are inline, and a content security policy that names them by hash keeps
the browser from running anything else. The data travel in a JSON block in which every character that could end the
block is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from quell import __version__
from quell.files import PAGE

_OFFLINE = "This page is complete in itself and uses no network."
_LIVE = "This page talks only to the server on this machine that it came from."
_SCRIPTS = ("charts.js", "page.js", "choose.js", "live.js")


@dataclass(frozen=True)
class Document:
    """The HTML of a page and the policy that its browser should enforce."""

    html: str
    policy: str


def document(plan: dict[str, Any] | None, text: str = "", live: dict[str, Any] | None = None) -> Document:
    """The page of one plan's content, or with `live` a page whose controls ask the server for it.

    `text` is what a browser without scripts shows.
    """
    return assemble("Quell plan", "page.html", _SCRIPTS, {"plan": plan, "live": live}, text, connects=live is not None)


def assemble(
    title: str, body: str, scripts: Sequence[str], data: dict[str, Any], text: str, connects: bool = False
) -> Document:
    """A body of this package with its style, scripts and data; `connects` lets it ask the server it came from."""
    style, script = _file("style.css"), "\n".join(_file(name) for name in scripts)
    sources = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'" if connects else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    policy = "; ".join(f"{kind} {source}" for kind, source in sources.items())
    page = Template(_file("document.html")).substitute(
        title=html.escape(title),
        body=_file(body),
        made=PAGE.mark,
        version=__version__,
        network=_LIVE if connects else _OFFLINE,
        policy=html.escape(policy),
        style=style,
        script=script,
        data=_json_block(data),
        text=html.escape(text),
    )
    return Document(page, policy)


def _file(name: str) -> str:
    return files("quell.show.page").joinpath("template", name).read_text(encoding="utf-8")


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


def _json_block(content: dict[str, Any]) -> str:
    """JSON that cannot close the <script> element it stands in, or open a comment there."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
