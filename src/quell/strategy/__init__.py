"""Strategies C: how noise is correlated over steps."""

from quell.strategy.family import Family, Limits
from quell.strategy.registry import FAMILIES, build, find
from quell.strategy.structure import BandedStrategy, Parameter, Strategy, ToeplitzStrategy, TreeStrategy, describe

__all__ = [
    "FAMILIES",
    "BandedStrategy",
    "Family",
    "Limits",
    "Parameter",
    "Strategy",
    "ToeplitzStrategy",
    "TreeStrategy",
    "build",
    "describe",
    "find",
]
