"""How often, and how far apart, one example can take part in steps."""

from __future__ import annotations

from dataclasses import dataclass

from quell.errors import QuellError, require_count

MOST_STEPS = 10**8  # a few n-vectors of float64 must fit into memory


@dataclass(frozen=True)
class Participation:
    """An example takes part in at most `count` of `steps` steps, any two of them at least `separation` apart.

    >>> Participation(steps=10, separation=3)
    Participation(steps=10, separation=3, count=4)
    """

    steps: int
    separation: int
    count: int = 0  # 0: as often as fits

    def __post_init__(self) -> None:
        steps = require_count("steps", self.steps)
        separation = require_count("separation", self.separation)
        if steps > MOST_STEPS:
            raise QuellError(f"{steps:,} steps are more than Quell can plan for: at most {MOST_STEPS:,}")
        if separation > steps:
            raise QuellError(f"separation={separation} exceeds the run's {steps} steps: it can be at most {steps}")
        fits = -(-steps // separation)  # left-over steps at the end allow one participation more
        count = min(require_count("count", self.count, least=0) or fits, fits)
        object.__setattr__(self, "count", count)

    @classmethod
    def single(cls, steps: int) -> Participation:
        """Every example takes part once."""
        return cls(steps, separation=steps, count=1)

    @property
    def unlimited(self) -> bool:
        """True when only the separation, not the count, limits the pattern."""
        return self.count * self.separation >= self.steps

    def first_steps(self) -> range:
        """The leftmost pattern: 0, separation, 2·separation, …"""
        return range(0, self.count * self.separation, self.separation)
