"""Small plans, made by pricing a few mechanisms instead of searching all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from quell.planning import Plan, Prices
from quell.run import Run
from quell.schemes import Poisson

MECHANISMS = {
    "identity": {},
    "bisr": {"bands": 4},
    "lambda_cgd": {"lambda": 0.9},
    "bsr": {"bands": 4},
    "blt": {"buffers": 2},
}


@cache
def small_plan(recommended: str = "bisr", alone: bool = False, **changes) -> Plan:
    options = {"examples": 40, "batch_size": 8, "epochs": 2, "epsilon": 8.0, "delta": 1e-5, "sampling": "cyclic"}
    run = Run.from_data(**{**options, **changes})
    names = [recommended] if alone or run.sampling != "cyclic" else list(MECHANISMS)
    prices = Prices(run)
    return Plan(run, tuple(prices.price(n, **MECHANISMS[n]) for n in names), names.index(recommended))


@cache
def unpriced_poisson_plan(examples: int = 12, batch_size: int = 1) -> Plan:
    """A plan with batches that are sometimes empty. Its noise is not calibrated for them: it promises nothing."""
    plan = small_plan("identity", alone=True, examples=examples, batch_size=batch_size, epochs=2)
    scheme = plan.prices.scheme(plan.mechanism.strategy, Poisson)
    mechanism = replace(plan.mechanism, claim=replace(plan.mechanism.guarantee, sampling="poisson", scheme=scheme))
    return Plan(plan.run, (mechanism,), 0)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny tensors on shared cores: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def plan() -> Plan:
    return small_plan()
