"""kill -9 in the middle of training, and a planted bug that makes a replayed step differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def kills(kind: str, count: int) -> tuple[int, int, str]:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "killing.py"), kind, str(count)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    found = re.search(r"^(\d+) kills, (\d+) breaks, (\d+) steps released again", output, re.MULTILINE)
    assert found, output
    return int(found[1]), int(found[2]), output


def test_no_step_is_released_twice_differently():
    tried, found, output = kills("honest", 6)
    assert tried == 6
    assert not found, output


@pytest.mark.slow
def test_twenty_kills():
    tried, found, output = kills("honest", 20)
    assert tried == 20
    assert not found, output


def test_a_release_that_differs_is_found():
    _, found, output = kills("planted", 4)
    assert found, output
