"""One small plan, shared by the tests of the page."""

from __future__ import annotations

import pytest

import quell
from quell.planning import Plan


@pytest.fixture(scope="session")
def plan() -> Plan:
    return quell.plan(examples=2000, batch_size=100, epochs=4, epsilon=4, delta=1e-5, momentum=0.9, sampling="cyclic")
