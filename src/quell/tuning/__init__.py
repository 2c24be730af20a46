"""Tuning inside the promise: several settings are tried, one result is released, and (ε, δ) covers all of it."""

from quell.tuning.plan import TuningPlan, Way, tune, ways
from quell.tuning.search import Search, Trial

__all__ = ["Search", "Trial", "TuningPlan", "Way", "tune", "ways"]
