"""Quell: training with differential privacy under correlated noise. Plan, then train.

>>> import quell
>>> plan = quell.plan(examples=50_000, batch_size=128, epochs=10, epsilon=8, delta=1e-5, sampling="cyclic")
>>> plan.mechanism.rmse < plan.problem.dpsgd.rmse / 4
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quell.errors import QuellError
    from quell.mechanism import Mechanism, Problem
    from quell.planning import Plan, make_plan, plan
    from quell.setup import Setup
    from quell.verification import verify

__version__ = "0.1.0"
__all__ = ["Mechanism", "Plan", "Problem", "QuellError", "Setup", "make_plan", "plan", "verify"]

# Loaded on first use, so that `import quell` costs milliseconds and pulls in neither SciPy nor a framework.
_HOMES = {
    "Mechanism": "quell.mechanism",
    "Plan": "quell.planning",
    "Problem": "quell.mechanism",
    "QuellError": "quell.errors",
    "Setup": "quell.setup",
    "make_plan": "quell.planning",
    "plan": "quell.planning",
    "verify": "quell.verification",
}


_ROOMS = (
    "bounds",
    "costs",
    "curves",
    "error",
    "noise",
    "objective",
    "privacy",
    "questions",
    "quick",
    "research",
    "sampling",
    "sensitivity",
    "show",
    "strategy",
    "torch",
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
