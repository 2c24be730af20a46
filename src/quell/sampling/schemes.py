"""The sampling schemes, each one small frozen object.

| scheme | who is in the batch of step t | priced by (`quell.privacy`) | takes |
|---|---|---|---|
| `Cyclic` | the same fixed batches every epoch | Gaussian mechanism, no amplification | any |
| `BallsInBins` | everyone whose bin, drawn once, is t mod b | mixture of b Gaussians | C ≥ 0 |
| `Poisson` | everyone by an independent coin | PLD of subsampled Gaussians | 1 band |
| `CyclicPoisson` | the members of group t mod g, by independent coins | the same, ⌈n/g⌉ of them | g bands |
| `BMinSep` | by coin, whoever did not take part in the last b−1 steps | mixture over a Markov chain | C ≥ 0, b bands |

What a scheme cannot do cannot be written down: the bins of `BallsInBins` have no option to be drawn again. Drawing
them anew every epoch is a different scheme ("random allocation") whose participations can be two steps apart.

`adjacency` says which neighbours the guarantee is about. Where every example is placed by its own coins, independently
of the others, removing one changes nobody else's batches: "add-remove". The batches of `Cyclic` are cut by position,
so there an example is not removed but replaced by one without a gradient: "zero-out". In both, the number of examples
that a run was planned for is public and the same for both neighbours: it fixes b, the rate and the divisor of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quell.errors import QuellError, require_count, require_finite
from quell.sampling.participation import Participation


@dataclass(frozen=True)
class Cyclic:
    """Fixed batches in a fixed order, the same in every epoch: no amplification, `separation` steps apart.

    `shuffle` cuts the batches from a random order, drawn once, instead of the order of the data; privacy is the same.
    `participations` caps how often anyone takes part, which these batches do not do: it prices a data pipeline that
    keeps such a promise by itself (`Batches` refuses to make batches for it).

    >>> Cyclic(steps=781, separation=78).participation.count
    11
    """

    name: ClassVar[str] = "cyclic"
    adjacency: ClassVar[str] = "zero-out"
    steps: int
    separation: int
    shuffle: bool = False
    participations: int = 0  # 0: as often as fits

    @property
    def participation(self) -> Participation:
        return Participation(self.steps, self.separation, self.participations)

    @property
    def fraction(self) -> float:
        """The share of the examples that a batch holds."""
        return 1.0 / self.separation

    @classmethod
    def from_epochs(cls, steps: int, epochs: int) -> Cyclic:
        """The scheme of a run of `steps` steps over `epochs` epochs: separation is the steps of one epoch."""
        steps, epochs = require_count("steps", steps), require_count("epochs", epochs)
        if epochs > steps:
            raise QuellError(f"epochs={epochs} do not fit into {steps} steps: an epoch needs at least one step")
        return cls(steps, steps // epochs)


@dataclass(frozen=True)
class BallsInBins:
    """Every example is put into one of `separation` bins, once; bin j is the batch of steps j, j + b, j + 2b, …

    Batch sizes vary around their expectation (arXiv:2412.16802; with correlated noise arXiv:2410.06266).

    >>> BallsInBins(steps=3900, separation=390).fraction == 1 / 390
    True
    """

    name: ClassVar[str] = "balls_in_bins"
    adjacency: ClassVar[str] = "add-remove"
    steps: int
    separation: int

    def __post_init__(self) -> None:
        self.participation  # noqa: B018 - validates steps and separation

    @property
    def participation(self) -> Participation:
        return Participation(self.steps, self.separation)

    @property
    def fraction(self) -> float:
        """The expected share of the examples that a batch holds."""
        return 1.0 / self.separation


@dataclass(frozen=True)
class Poisson:
    """Every example joins every batch with probability `rate`, independently: for independent noise (C of one band).

    >>> Poisson(steps=3900, rate=128 / 50_000).participation.count
    3900
    """

    name: ClassVar[str] = "poisson"
    adjacency: ClassVar[str] = "add-remove"
    steps: int
    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _checked_rate(self.rate))
        self.participation  # noqa: B018 - validates steps

    @property
    def groups(self) -> int:
        """Poisson sampling is cyclic Poisson sampling with one group."""
        return 1

    @property
    def separation(self) -> int:
        return 1

    @property
    def participation(self) -> Participation:
        return Participation(self.steps, separation=1)

    @property
    def fraction(self) -> float:
        """The expected share of the examples that a batch holds."""
        return self.rate


@dataclass(frozen=True)
class CyclicPoisson:
    """Every example is put into one of `groups` groups, once; step t samples group t mod groups, each member with
    probability `rate`. For C with at most `groups` bands (arXiv:2306.08153, Theorem 2).

    >>> CyclicPoisson.of_fraction(steps=3900, groups=16, fraction=128 / 50_000).rate
    0.04096
    """

    name: ClassVar[str] = "cyclic_poisson"
    adjacency: ClassVar[str] = "add-remove"
    steps: int
    groups: int
    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _checked_rate(self.rate))
        self.participation  # noqa: B018 - validates steps and groups

    @classmethod
    def of_fraction(cls, steps: int, groups: int, fraction: float) -> CyclicPoisson:
        """The scheme whose batches hold this share of the examples in expectation: rate = groups · fraction."""
        if not 0 < require_finite("fraction", fraction) * groups <= 1:
            raise QuellError(
                f"{groups:,} groups (one per band) cannot give batches with a share of {fraction:g} of the data: a "
                f"group holds 1/{groups:,} of it, so use at most {int(1 / fraction):,} bands, or balls_in_bins"
            )
        return cls(steps, groups, groups * fraction)

    @property
    def separation(self) -> int:
        return self.groups

    @property
    def participation(self) -> Participation:
        return Participation(self.steps, self.groups)

    @property
    def fraction(self) -> float:
        """The expected share of the examples that a batch holds."""
        return self.rate / self.groups


@dataclass(frozen=True)
class BMinSep:
    """At every step, whoever took part in none of the last `separation` − 1 steps joins with probability `rate`.

    The chain starts in its stationary law, so that expected batch sizes are the same from the first step on; with
    rate 1 it is `BallsInBins` (Dong & Ganesh 2026, arXiv:2602.09338).

    >>> round(BMinSep(steps=100, separation=10, rate=0.5).fraction, 6)
    0.090909
    """

    name: ClassVar[str] = "b_min_sep"
    adjacency: ClassVar[str] = "add-remove"
    steps: int
    separation: int
    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _checked_rate(self.rate))
        self.participation  # noqa: B018 - validates steps and separation

    @classmethod
    def of_fraction(cls, steps: int, separation: int, fraction: float) -> BMinSep:
        """The scheme whose batches hold this share of the examples in expectation."""
        waiting = 1.0 - (separation - 1) * require_finite("fraction", fraction)
        if not 0 < fraction <= waiting * (1 + 1e-12):
            raise QuellError(
                f"a separation of {separation:,} steps (one per band) cannot give batches with a share of {fraction:g} "
                f"of the data: use at most {int(1 / fraction):,} bands, or balls_in_bins"
            )
        return cls(steps, separation, min(1.0, fraction / waiting))

    @property
    def participation(self) -> Participation:
        return Participation(self.steps, self.separation)

    @property
    def fraction(self) -> float:
        """The expected share of the examples that a batch holds."""
        return self.rate / (1.0 + (self.separation - 1) * self.rate)


Scheme = Cyclic | BallsInBins | Poisson | CyclicPoisson | BMinSep

SCHEMES: dict[str, type[Scheme]] = {kind.name: kind for kind in (Cyclic, BallsInBins, Poisson, CyclicPoisson, BMinSep)}

BEST = (
    "balls_in_bins",
    "poisson",
    "cyclic_poisson",
    "cyclic",
)  # not b_min_sep, whose certificates are too loose as yet


def scheme_names(text: str) -> tuple[str, ...]:
    """The schemes in a list such as "cyclic,balls-in-bins"; "best" is all that a plan chooses from.

    >>> scheme_names("cyclic, balls-in-bins")
    ('cyclic', 'balls_in_bins')
    """
    names = tuple(part.strip().replace("-", "_").lower() for part in str(text).split(","))
    if names == ("best",):
        return BEST
    for name in names:
        if name not in SCHEMES:
            raise QuellError(
                f"there is no sampling scheme {name!r}: use {', '.join(SCHEMES)}, several of them, or best"
            )
    return tuple(dict.fromkeys(names))


def scheme(name: str, **options: Any) -> Scheme:
    """The scheme called `name` (hyphens allowed), with its options checked.

    >>> scheme("balls-in-bins", steps=100, separation=10)
    BallsInBins(steps=100, separation=10)
    """
    kind = SCHEMES.get(name.replace("-", "_").lower())
    if kind is None:
        raise QuellError(f"there is no sampling scheme {name!r}: use {', '.join(SCHEMES)}")
    takes = [field.name for field in fields(kind)]
    if unknown := sorted(set(options) - set(takes)):
        fixed = ": its bins are drawn once and kept in every epoch" if kind is BallsInBins else ""
        raise QuellError(f"{kind.name} does not take {', '.join(unknown)}{fixed}; it takes {', '.join(takes)}")
    required = [option for option in takes if option not in ("shuffle", "participations")]
    if missing := [option for option in required if option not in options]:
        raise QuellError(f"{kind.name} needs {' and '.join(missing)} as well")
    return kind(**options)


def _checked_rate(rate: float) -> float:
    if not 0 < require_finite("rate", rate) <= 1:
        raise QuellError(f"rate={rate:g} must lie between 0 and 1: it is expected batch size / examples")
    return float(rate)
