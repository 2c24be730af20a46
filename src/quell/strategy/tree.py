"""Binary-tree aggregation (DP-FTRL), the mechanism that correlated noise started from: a historical baseline."""

from __future__ import annotations

from quell.participation import Participation
from quell.strategy.family import Candidates, Family, Space, no_lines
from quell.strategy.structure import TreeStrategy
from quell.workload import Workload

_MOST_PLANNED = 1024  # steps up to which a planner lists it: its error with momentum needs dense algebra


def tree(workload: Workload, _: Participation) -> TreeStrategy:
    """C = the node sums of a Fenwick tree."""
    return TreeStrategy(workload.steps)


def _affordable(space: Space) -> Candidates:
    steps = space.participation.steps
    return [{}] if steps.bit_length() <= space.buffers and steps <= _MOST_PLANNED else []


TREE = Family(
    "tree",
    "binary-tree aggregation, the historical baseline: log2(steps) buffers",
    tree,
    _affordable,
    lines=no_lines,
)
