"""axe-core in the tests' browser: what it finds wrong with a page.

`make test` fetches it from npm where there is npm; tests that need it are skipped where it is missing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .browser import Browser

_RUN = """axe.run().then(found => found.violations.map(
  rule => `${rule.id}: ${rule.nodes.map(node => node.html.slice(0, 120) + node.failureSummary).join(' | ')}`))"""


def axe() -> Path | None:
    """The script named by $QUELL_AXE, or the one beside the virtual environment's programs."""
    path = Path(os.environ.get("QUELL_AXE") or Path(sys.prefix, "axe.min.js"))
    return path if path.exists() else None


def violations(browser: Browser, script: Path) -> list[str]:
    """Every rule that the page in the browser breaks, with the elements that break it."""
    browser.run(script.read_text(encoding="utf-8") + ";0")
    return list(browser.run(_RUN))
