"""One small plan, shared by the tests of the page."""

from __future__ import annotations

import pytest

import quell
from quell.planning import Plan, Prices
from quell.run import Run


@pytest.fixture(scope="session")
def plan() -> Plan:
    return quell.plan(examples=2000, batch_size=100, epochs=4, epsilon=4, delta=1e-5, momentum=0.9, sampling="cyclic")


@pytest.fixture(scope="session")
def amplified() -> Plan:
    """One certified mechanism, and DP-SGD with noise that is only estimated."""
    run = Run.from_data(examples=100, batch_size=20, epochs=4, epsilon=4.0, delta=1e-3, sampling="balls_in_bins")
    prices = Prices(run)
    return Plan(run, (prices.price("bisr", bands=2),), 0, estimates=(prices.dpsgd,))
