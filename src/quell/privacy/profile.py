"""What is known of one run's privacy loss: its δ at every ε, not only the (ε, δ) that was promised.

A promise is one point of the curve δ(ε), the *privacy profile*. Two further questions need all of it: what several runs
cost together (`quell.privacy.composition`), and what the best attacker can do (`quell.privacy.meaning`). A profile is
the Gaussian mechanism's, that of composed subsampled Gaussians, or what certified points imply. In each case the true
curve lies on it or below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from quell._types import Array
from quell.errors import QuellError, require_count, require_finite, short
from quell.privacy.coins import Coin, coins
from quell.privacy.losses import Losses, Part, chords, compose_both

_ROUNDING = 1e-14  # of probabilities, where atoms are differences of slopes
_STEEPEST = 600.0  # losses beyond are counted as infinite: e^loss overflows


@dataclass(frozen=True)
class GaussianProfile:
    """The Gaussian mechanism of sensitivity `mu` per unit of noise: exactly μ-GDP (arXiv:1905.02383)."""

    mu: float
    failure: float = 0.0

    @property
    def parts(self) -> tuple[tuple[int, Part], ...]:
        return ((1, Coin(1.0 / self.mu, 1.0)),)


@dataclass(frozen=True)
class CoinProfile:
    """Gaussian mechanisms, each entered with probability `rate`; `rounds` lists (how many, σ) as `coins` has them."""

    rounds: tuple[tuple[int, float], ...]
    rate: float
    failure: float = 0.0

    @property
    def parts(self) -> tuple[tuple[int, Part], ...]:
        return tuple(coins(self.rounds, self.rate))


@dataclass(frozen=True)
class PointProfile:
    """δ is at most `points[i][1]` at ε = `points[i][0]` ≥ 0, in both directions; all of it fails with `failure`.

    Points come from certificates. Between them the curve is their chords, because δ is convex in e^ε (Proof 17).
    """

    points: tuple[tuple[float, float], ...]
    failure: float = 0.0

    @property
    def parts(self) -> tuple[tuple[int, Part], ...]:
        return ((1, Atoms.of(self.points)),)


Profile = GaussianProfile | CoinProfile | PointProfile


@dataclass(frozen=True)
class Atoms:
    """A privacy loss with a few values, the same in both directions; `infinite` is the probability of a loss of ∞."""

    losses: tuple[float, ...]
    mass: tuple[float, ...]
    infinite: float

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Atoms:
        """The dominating pair of certified points (Proof 17).

        >>> pair = Atoms.of([(1.0, 0.01)])
        >>> [round(p / (1 - 0.01), 4) for p in pair.mass], pair.infinite
        ([0.2689, 0.7311], 0.01)
        """
        known = [(e, d) for e, d in points if e < _STEEPEST] + [
            (-e, -math.expm1(-e) + math.exp(-e) * d) for e, d in points
        ]
        corners = _lower_hull([(0.0, 1.0), *sorted((math.exp(e), d) for e, d in known)])
        slopes = [(d - c) / (y - x) for (x, c), (y, d) in pairwise(corners)] + [0.0]
        atoms = [
            (x, x * max(after - before, 0.0))
            for (x, _), before, after in zip(corners[1:], slopes, slopes[1:], strict=False)
        ] or [(1.0, 1e-300)]  # all of the loss is infinite
        return cls(tuple(math.log(x) for x, _ in atoms), tuple(mass for _, mass in atoms), min(1.0, corners[-1][1]))

    @property
    def widest(self) -> float:
        return self.losses[-1] - self.losses[0]

    def slices(self, sign: int) -> tuple[Array, Array]:
        mass = np.maximum(self.mass, 1e-300)
        return np.array(self.losses), mass / mass.sum()

    def on_grid(self, sign: int, width: float) -> tuple[int, Array, float]:
        places = np.floor(np.array(self.losses) / width).astype(int)
        first = int(places[0])
        mass = np.zeros(int(places[-1]) - first + 2)
        for place, loss, ours in zip(places, self.losses, self.mass, strict=True):
            # The mass of one cell, seen from its lower end: a loss of 0 there has e^{lower − loss} of the other law.
            cell = np.array([0.0, width])
            mass[place - first : place - first + 2] += chords(
                np.array([ours]), np.array([ours * math.exp(place * width - loss)]), cell, width, 0.0
            )
        return first, mass, self.infinite + _ROUNDING


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the largest convex function below points in order of x that never rises."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        if hull and (x == hull[-1][0] or y >= hull[-1][1]):
            if x == hull[-1][0] and y < hull[-1][1]:
                hull.pop()
            else:
                continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull


def curve(losses: Losses) -> tuple[Array, Array]:
    """Values of ε in order, and an upper bound on δ in one direction at each of them."""
    inside = np.abs(losses.values) < _STEEPEST
    values, mass = losses.values[inside], losses.mass[inside]
    beyond = losses.lost + float(losses.mass[losses.values >= _STEEPEST].sum())

    def above(weights: Array) -> Array:
        return np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)

    finite = above(mass) - np.exp(values) * above(mass * np.exp(-values))
    return values, np.minimum(np.maximum(finite, 0.0) * (1 + 1e-9) + beyond, 1.0)


@lru_cache(maxsize=32)
def both_ways(profile: Profile) -> tuple[Losses, Losses]:
    """Losses of one run in both directions."""
    return compose_both(profile.parts)


def spread(top: float, points: int = 96) -> list[float]:
    """Values of ε for the points of a profile: evenly from 0 to `top`, and a few beyond for its tail."""
    return [top * i / points for i in range(points + 1)] + [top * more for more in (1.25, 1.5, 2.0)]


def furthest(least: Callable[[float], float], delta: float, share: float = 1e-3) -> float:
    """The ε where δ is a `share` of `delta`, or as little as is known; `least` says which ε belongs to a δ."""
    while share < 1 and not math.isfinite(least(share * delta)):
        share *= 10
    return top if math.isfinite(top := least(share * delta)) else 0.0


def plain(profile: Profile) -> dict[str, Any]:
    """A profile as plain data."""
    return {"kind": _KINDS[type(profile)], **{name: _listed(value) for name, value in vars(profile).items()}}


def of_plain(content: Any) -> Profile:
    """The profile that `plain` wrote; raises `QuellError` for anything else."""
    kinds = {name: kind for kind, name in _KINDS.items()}
    try:
        given = dict(content)
        kind = kinds[given.pop("kind")]
        failure = _probability("failure", given.pop("failure"))
        if kind is GaussianProfile:
            found: Profile = GaussianProfile(_positive("mu", given.pop("mu")), failure)
        elif kind is CoinProfile:
            rounds = tuple((require_count("rounds", n), _positive("sigma", s)) for n, s in given.pop("rounds"))
            found = CoinProfile(rounds, _probability("rate", given.pop("rate")), failure)
        else:
            points = tuple((_least("epsilon", e), _probability("delta", d)) for e, d in given.pop("points"))
            found = PointProfile(points, failure)
        if given or (isinstance(found, CoinProfile) and not (found.rounds and found.rate)):
            raise ValueError
        if isinstance(found, PointProfile) and min(delta for _, delta in found.points) == 1:
            raise ValueError
    except (KeyError, TypeError, ValueError) as problem:
        reason = f" ({problem})" if isinstance(problem, QuellError) else ""
        raise QuellError(f"{short(content)} is not a privacy profile{reason}") from None
    return found


_KINDS: dict[type[Profile], str] = {GaussianProfile: "gaussian", CoinProfile: "coins", PointProfile: "points"}


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def _least(name: str, value: Any) -> float:
    if require_finite(name, value) < 0:
        raise QuellError(f"{name}={value:g} must not be negative")
    return float(value)


def _positive(name: str, value: Any) -> float:
    if not _least(name, value):
        raise QuellError(f"{name}={value:g} must be positive")
    return float(value)


def _probability(name: str, value: Any) -> float:
    if _least(name, value) > 1:
        raise QuellError(f"{name}={value:g} must be at most 1")
    return float(value)
