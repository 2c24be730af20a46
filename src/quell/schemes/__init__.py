"""How batches are formed. A scheme fixes the batches, how often one example takes part, and the accountant.

| scheme | who is in the batch of step t | priced by (`quell.privacy`) | takes |
|---|---|---|---|
| `Cyclic` | the same fixed batches every epoch | Gaussian mechanism, no amplification | any |
| `BallsInBins` | everyone whose bin, drawn once, is t mod b | mixture of b Gaussians | C ≥ 0 |
| `Poisson` | everyone by an independent coin | PLD of subsampled Gaussians | 1 band |
| `CyclicPoisson` | the members of group t mod g, by independent coins | the same, ⌈n/g⌉ of them | g bands |
| `BMinSep` | by coin, whoever did not take part in the last b−1 steps | mixture over a Markov chain | C ≥ 0, b bands |

A scheme is frozen data with everything that it decides (`quell.schemes.scheme`); `Batches` turns it into index arrays
that are the same on every worker and can be resumed at any step. To add a scheme, write its file and put it into
`SCHEMES`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from quell.errors import QuellError
from quell.schemes.b_min_sep import BMinSep
from quell.schemes.balls_in_bins import BallsInBins
from quell.schemes.batches import Batches
from quell.schemes.cyclic import Cyclic
from quell.schemes.cyclic_poisson import CyclicPoisson
from quell.schemes.poisson import Poisson
from quell.schemes.scheme import Scheme

__all__ = [
    "BEST",
    "FIXED",
    "SCHEMES",
    "BMinSep",
    "BallsInBins",
    "Batches",
    "Cyclic",
    "CyclicPoisson",
    "Poisson",
    "Scheme",
    "named",
    "scheme",
    "suited",
]

SCHEMES: dict[str, type[Scheme]] = {kind.name: kind for kind in (Cyclic, BallsInBins, Poisson, CyclicPoisson, BMinSep)}
BEST = (BallsInBins, Poisson, CyclicPoisson, Cyclic)  # not BMinSep, whose certificates are too loose as yet
FIXED = Cyclic  # what needs no randomness, and prices any strategy for any unit of privacy


def named(text: str) -> tuple[type[Scheme], ...]:
    """The schemes in a list such as "cyclic,balls-in-bins"; "best" is all that a plan chooses from.

    >>> [kind.name for kind in named("cyclic, balls-in-bins")]
    ['cyclic', 'balls_in_bins']
    """
    names = tuple(part.strip().replace("-", "_").lower() for part in str(text).split(","))
    if names == ("best",):
        return BEST
    for name in names:
        if name not in SCHEMES:
            raise QuellError(
                f"there is no sampling scheme {name!r}: use {', '.join(SCHEMES)}, several of them, or best"
            )
    return tuple(SCHEMES[name] for name in dict.fromkeys(names))


def suited(allowed: tuple[type[Scheme], ...], bands: int, separation: int) -> tuple[type[Scheme], ...]:
    """The allowed schemes to try for a strategy with `bands` bands; a single allowed one is always taken.

    >>> [kind.name for kind in suited(BEST, bands=1, separation=390)]
    ['poisson', 'cyclic']
    """
    if len(allowed) == 1:
        return allowed
    best = [kind for kind in allowed if kind.best_for_independent_noise] if bands == 1 else []
    return tuple(
        kind for kind in allowed if kind.suits(bands, separation) and (kind in best or not (best and kind.amplifies))
    )


def scheme(name: str, **options: Any) -> Scheme:
    """The scheme called `name` (hyphens allowed), with its options checked.

    >>> scheme("balls-in-bins", steps=100, separation=10)
    BallsInBins(steps=100, separation=10)
    """
    kind = SCHEMES.get(name.replace("-", "_").lower())
    if kind is None:
        raise QuellError(f"there is no sampling scheme {name!r}: use {', '.join(SCHEMES)}")
    own = fields(kind)  # type: ignore[arg-type]
    takes = [field.name for field in own]
    if unknown := sorted(set(options) - set(takes)):
        raise QuellError(f"{kind.name} does not take {', '.join(unknown)}{kind.unknown}; it takes {', '.join(takes)}")
    if missing := [field.name for field in own if field.default is MISSING and field.name not in options]:
        raise QuellError(f"{kind.name} needs {' and '.join(missing)} as well")
    return kind(**options)
