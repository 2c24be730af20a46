"""How much an attacker learns from a run, measured: a lower bound on ε beside the certified upper bound."""

from quell.auditing.canaries import Audit, Canaries, rehearse
from quell.auditing.one_run import LowerBound, independent_bound, lower_bound

__all__ = ["Audit", "Canaries", "LowerBound", "independent_bound", "lower_bound", "rehearse"]
