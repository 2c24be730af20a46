"""The examples of docs/noise.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "noise.md"


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
def test_examples_run(example: str) -> None:
    exec(compile(example, str(PAGE), "exec"), {})
