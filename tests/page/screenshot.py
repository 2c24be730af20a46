"""The picture of the page in docs/report.md: python -m tests.page.screenshot docs/report.png"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

import quell

from .browser import Browser, chromium


def main(picture: Path) -> None:
    program = chromium()
    if program is None:
        sys.exit("no Chromium found: see CONTRIBUTING.md")
    plan = quell.plan(examples=50_000, batch_size=128, epochs=10, epsilon=8, delta=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.html")
        plan.write_page(report)
        with Browser(program, Path(folder, "profile"), width=900) as browser:
            browser.open(report.as_uri())
            height = browser.run("document.getElementById('privacy-title').getBoundingClientRect().top")
            browser.screenshot(picture, 900, int(height))
    with Image.open(picture) as full:  # few colours: a third of the bytes
        full.convert("RGB").quantize(32).save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
