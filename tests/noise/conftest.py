"""Keys for tests, and Triton's interpreter where there is no GPU (it must be chosen before Triton is imported)."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable

import pytest

from quell.noise import Key, SeededKeyWarning

if importlib.util.find_spec("triton") is not None and not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def seeded() -> Callable[[int], Key]:
    """A repeatable key, its warning taken as read."""

    def make(seed: int) -> Key:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SeededKeyWarning)
            return Key.from_seed(seed)

    return make
