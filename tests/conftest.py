"""Shared by all tests: reproducible hypothesis runs, and the paper's setting."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import settings

from quell.planning import Prices
from quell.run import Run

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX looks for devices

settings.register_profile("quell", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("quell")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """No test reads or fills the user's cache of optimised strategies."""
    patch = pytest.MonkeyPatch()
    patch.setenv("QUELL_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(20260131)


@pytest.fixture(scope="session")
def table4() -> Prices:
    """The setting of Table 4 of arXiv:2601.22334: CIFAR-10, batch 128, 10 epochs, prefix sums, ε = 8."""
    return Prices(Run.from_steps(steps=3900, epochs=10, epsilon=8.0, delta=1e-5))
