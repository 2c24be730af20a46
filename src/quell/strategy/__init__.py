"""Strategies C: how noise is correlated over steps."""

from quell.strategy.family import Family, Space
from quell.strategy.registry import FAMILIES, INDEPENDENT, build, find
from quell.strategy.structure import BandedStrategy, Parameter, Strategy, ToeplitzStrategy, TreeStrategy, describe

__all__ = [
    "FAMILIES",
    "INDEPENDENT",
    "BandedStrategy",
    "Family",
    "Parameter",
    "Space",
    "Strategy",
    "ToeplitzStrategy",
    "TreeStrategy",
    "build",
    "describe",
    "find",
]
