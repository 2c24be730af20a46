"""Pages inside a notebook: the same self-contained page, in a frame of its own.

The frame is sandboxed: the page's script runs, under the page's own content security policy, and can reach neither the
notebook nor the network. What a viewer without frames leaves of it is the text below, which others can unfold.
"""

from __future__ import annotations

import html

_HEIGHT = 900  # pixels; the page scrolls inside


def framed(page: str, text: str) -> str:
    """HTML that shows a page inside another page.

    Args:
        page: A whole document.
        text: The same in words, for viewers that show no frames.
    """
    source = html.escape(page, quote=True)
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" allow="clipboard-write" title="Quell" srcdoc="{source}" '
        f'style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
        f"<details><summary>As text</summary>{preformatted(text)}</details>"
    )


def preformatted(text: str) -> str:
    """HTML that shows lines as a terminal does."""
    return f"<pre>{html.escape(text)}</pre>"
