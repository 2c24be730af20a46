"""How batches are formed, and what that fixes: how often and how densely one example can take part.

A sampling scheme decides the participation pattern, and with it which accountant is valid; `quell.privacy` pairs the
two by type. `Cyclic` is the scheme without amplification: the data are cut once into `separation` batches, visited in
the same order in every epoch, so two participations of one example are at least `separation` steps apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(frozen=True)
class Cyclic:
    """Fixed batches in a fixed order, the same in every epoch: no amplification, `separation` steps apart.

    >>> Cyclic(steps=781, separation=78).participation.count
    11
    """

    name: ClassVar[str] = "cyclic"
    steps: int
    separation: int

    @property
    def participation(self) -> Participation:
        return Participation(self.steps, self.separation)

    @classmethod
    def from_epochs(cls, steps: int, epochs: int) -> Cyclic:
        """The scheme of a run of `steps` steps over `epochs` epochs: separation is the steps of one epoch."""
        steps, epochs = require_count("steps", steps), require_count("epochs", epochs)
        if epochs > steps:
            raise QuellError(f"epochs={epochs} do not fit into {steps} steps: an epoch needs at least one step")
        return cls(steps, steps // epochs)
