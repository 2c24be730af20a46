"""A plan for the tests of `quell.jax`, which run where JAX is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import quell
from quell.planning import Plan

collect_ignore_glob = [] if find_spec("jax") else ["*.py"]


@pytest.fixture(scope="package")
def plan() -> Plan:
    return quell.plan(examples=60, batch_size=12, epochs=2, epsilon=8, delta=1e-3, sampling="cyclic", memory=0)
