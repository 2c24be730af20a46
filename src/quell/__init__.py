"""Quell: training with differential privacy under correlated noise. Plan, then train.

>>> import quell
>>> plan = quell.plan(examples=50_000, batch_size=128, epochs=10, epsilon=8, delta=1e-5, sampling="cyclic")
>>> plan.mechanism.rmse < plan.prices.dpsgd.rmse / 4
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quell.budget import Budget
    from quell.costs import Limits
    from quell.errors import QuellError
    from quell.planning import Mechanism, Plan, Prices, make_plan, plan
    from quell.planning.file import verify
    from quell.run import Promise, Run
    from quell.watching import Log

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "Limits",
    "Log",
    "Mechanism",
    "Plan",
    "Prices",
    "Promise",
    "QuellError",
    "Run",
    "make_plan",
    "plan",
    "verify",
]

# Loaded on first use, so that `import quell` costs milliseconds and pulls in neither SciPy nor a framework.
_HOMES = {
    "Budget": "quell.budget",
    "Limits": "quell.costs",
    "Log": "quell.watching",
    "Mechanism": "quell.planning",
    "Plan": "quell.planning",
    "Prices": "quell.planning",
    "Promise": "quell.run",
    "QuellError": "quell.errors",
    "Run": "quell.run",
    "make_plan": "quell.planning",
    "plan": "quell.planning",
    "verify": "quell.planning.file",
}


_ROOMS = (
    "analysis",
    "auditing",
    "budget",
    "costs",
    "jax",
    "noise",
    "participation",
    "planning",
    "privacy",
    "research",
    "schemes",
    "show",
    "strategy",
    "torch",
    "tuning",
    "watching",
    "workload",
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"quell.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'quell' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})
