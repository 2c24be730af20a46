"""What a sampling scheme is: one way of forming batches, and everything that depends on it, in one class.

A scheme says who is in the batch of a step, how often one example can take part, which strategies it goes with, which
accountant prices it, and how to say all that to people. Each scheme is one file of this package and one line in its
`__init__`; nothing outside asks which scheme it has.

A class has options only for what its accountant covers. Balls-in-bins sampling, for example, has no option to draw the
bins again every epoch: that would be another scheme ("random allocation"), in which an example can take part in two
consecutive steps.

`adjacency` says which neighbours the guarantee is about. Where every example is placed by its own coins, independently
of the others, removing one changes nobody else's batches: "add-remove". Where batches are cut by position, an example
is not removed but replaced by one without a gradient: "zero-out". In both, the number of examples that a run was
planned for is public and the same for both neighbours: it fixes the bins, the rate and the divisor of sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.errors import QuellError, require_finite, require_same_steps
from quell.participation import Participation
from quell.privacy.accountant import Accountant
from quell.schemes.randomness import Indices
from quell.strategy.structure import Strategy

if TYPE_CHECKING:
    from quell.schemes.batches import Batches


class Scheme(ABC):
    """One way of forming batches for one run: a frozen dataclass with `steps` and the scheme's own numbers."""

    name: ClassVar[str]  # what users pass as sampling=; also in plan files
    adjacency: ClassVar[str] = "add-remove"
    words: ClassVar[str]  # how batches are formed, in a sentence for people; {unit} stands for example or user
    amplifies: ClassVar[bool] = True  # whether random batches are part of the proof
    best_for_independent_noise: ClassVar[bool] = False  # no other scheme needs less of it
    takes_any_strategy: ClassVar[bool] = False  # whether every C ≥ 0 is accepted, with any number of bands
    drawn: ClassVar[bool] = False  # whether certificates may come from draws
    per_user: ClassVar[bool] = False  # whether its proof also holds for users with several examples in batches
    equal_sizes: ClassVar[bool] = False  # whether batch sizes differ by at most one example
    unknown: ClassVar[str] = ""  # added to the error about an unknown option

    steps: int

    def __post_init__(self) -> None:
        rate = getattr(self, "rate", 1.0)  # where a scheme has one, it is a probability
        if not 0 < require_finite("rate", rate) <= 1:
            raise QuellError(f"rate={rate:g} must lie between 0 and 1: it is expected batch size / examples")
        assert self.participation  # computing it refuses numbers that do not fit together

    @classmethod
    @abstractmethod
    def for_run(cls, participation: Participation, bands: int) -> Self:
        """The scheme for a run, with its steps and expected batch size and the groups that `bands` bands need."""

    @classmethod
    def suits(cls, bands: int, separation: int) -> bool:
        """Whether a search should try it for a strategy with `bands` bands; it can always be asked for by name."""
        return True

    if TYPE_CHECKING:  # some schemes have it as a dataclass field, which a property here would override

        @property
        def separation(self) -> int: ...

    @property
    def participation(self) -> Participation:
        """How often, and how far apart, one example can take part."""
        return Participation(self.steps, self.separation)

    @property
    def fraction(self) -> float:
        """The expected share of the examples that a batch holds."""
        return 1.0 / self.separation

    @property
    def breaks_promise(self) -> str | None:
        """Why batches must not be formed like this although they can be priced; None if they may be."""
        return None

    @abstractmethod
    def batch(self, stream: Batches, step: int) -> Indices:
        """The examples of one step."""

    def batches(self, stream: Batches, start: int) -> Iterator[Indices]:
        """The batches from a step to the end of the run."""
        return (self.batch(stream, step) for step in range(start, self.steps))

    def for_training(self) -> Scheme:
        """The scheme that training should use, with the same privacy."""
        return self

    def of_first(self, steps: int) -> Scheme | None:
        """The scheme of the first steps alone; None if their privacy is not that of a shorter run."""
        return None

    @abstractmethod
    def account(self, strategy: Strategy) -> Accountant:
        """A new accountant; raises `QuellError` if the scheme does not go with the strategy."""

    @abstractmethod
    def evidence(self, seen: Array, columns: Array, patterns: NDArray[np.bool_]) -> Array:
        """(examples,) how much likelier an attacker finds it that an example takes part: ln P[seen | it does]/P[… not].

        Args:
            seen: (examples, steps) what is released about each example, with noise of variance 1: C times the row.
            columns: C/σ, with the same steps: what taking part in a step adds.
            patterns: (examples, steps) who took part when, if they did: only for schemes whose batches anyone may know.
        """

    def accountant(self, strategy: Strategy) -> Accountant:
        """The accountant of a strategy under this scheme, cached."""
        return _accountant(self, strategy)


@lru_cache(maxsize=16)
def _accountant(scheme: Scheme, strategy: Strategy) -> Accountant:
    require_same_steps(strategy=strategy.steps, sampling=scheme.steps)
    return scheme.account(strategy)
