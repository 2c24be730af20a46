"""The pictures of the pages in the documentation.

    python -m tests.page.screenshot docs/images demo/digits-private/page.html

Each page is shown on a desk and on a phone, light and dark: a plan's page, the live page, the page of a
training, and that of a log.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from PIL import Image

import quell
from quell.run import Run
from quell.serve.server import PageServer

from .browser import Browser, chromium
from .test_other_pages import page_of_a_log

RUN: dict[str, Any] = {
    "examples": 50_000,
    "batch_size": 500,
    "epochs": 10,
    "epsilon": 8,
    "delta": 1e-6,
    "momentum": 0.9,
}
HEIGHTS = {1440: 1300, 390: 1500}  # of the pictures: the first screens
_DONE = "document.body.dataset.kind === 'full' && document.querySelector('#working progress').hidden"
_SETTLED = "new Promise(resolve => setTimeout(resolve, 500))"  # charts are drawn anew when a window has its new size
_COLOURS = 128


def main(folder: Path, training: Path) -> None:
    program = chromium()
    if program is None:
        sys.exit("no Chromium found: see CONTRIBUTING.md")
    folder.mkdir(parents=True, exist_ok=True)
    plan = quell.plan(**RUN)
    server = PageServer(Run.from_data(**RUN), 0, usual_delta=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as place:
        plan.write_page(Path(place, "plan.html"))
        pages = {
            "plan": (Path(place, "plan.html").as_uri(), "true"),
            "serve": (server.url, _DONE),
            "training": (training.resolve().as_uri(), "true"),
            "watch": (page_of_a_log(Path(place), norms=False), "true"),
        }
        with Browser(program, Path(place, "profile")) as browser:
            for name, (address, ready) in pages.items():
                browser.open(address)
                browser.wait_for(ready, seconds=600)
                for width, height in HEIGHTS.items():
                    for dark in (False, True):
                        browser.look(width, 900, dark)
                        browser.run(_SETTLED)
                        shown = min(height, browser.run("document.documentElement.scrollHeight"))
                        _take(browser, folder / f"{name}-{width}-{'dark' if dark else 'light'}.png", width, shown)
            if browser.complaints:
                sys.exit(f"the browser complains: {browser.complaints}")
    server.shutdown()


def _take(browser: Browser, picture: Path, width: int, height: int) -> None:
    browser.screenshot(picture, width, height)
    with Image.open(picture) as full:  # few colours: a third of the bytes
        full.convert("RGB").quantize(_COLOURS).save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
