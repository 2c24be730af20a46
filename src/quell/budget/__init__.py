"""A budget across runs: a ledger file per data set, in which every run is charged before it starts."""

from quell.budget.entry import Entry
from quell.budget.ledger import Allowance, Budget, Spent

__all__ = ["Allowance", "Budget", "Entry", "Spent"]
