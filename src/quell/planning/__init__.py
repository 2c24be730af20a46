"""From a run to a certified plan in a file: prices, search, plan, file, and questions around a plan."""

from quell.planning.mechanism import Mechanism
from quell.planning.named import named_plan
from quell.planning.planner import Plan, make_plan, plan
from quell.planning.prices import Prices

__all__ = ["Mechanism", "Plan", "Prices", "make_plan", "named_plan", "plan"]
