"""kill -9 in the middle of training, and a planted bug that makes a replayed step differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_no_step_is_released_twice_differently_and_a_planted_difference_is_found(count):
    """One process for both: starting torch is what takes the time."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "killing.py"), str(count), "3"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    (honest, breaks), (_, found) = re.findall(r"^(\d+) kills, (\d+) breaks", output, re.MULTILINE)
    assert (honest, breaks) == (str(count), "0"), output
    assert int(found) > 0, output
