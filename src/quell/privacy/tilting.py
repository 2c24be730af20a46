"""Proposals for importance sampling of rare privacy losses, each with a proven bound on its weights.

The accountant compares P = E_π N(m_π, σ²I), the output with an example, with Q = N(0, σ²I), the output without it.
δ at ε in the directions "remove" and "add" is the mean of X = (S − e^ε)₊/ρ or (1 − e^ε·S)₊/ρ over draws from a
proposal with density ρ, where S = dP/dQ and L = ln S. Notation, both families of proposals and the bounds on X are in
Proof 3 in docs/proofs.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from quell._types import Array

Direction = Literal["remove", "add"]
_POWERS = 24  # θ that are tried
_MOST_EXTRA = 96  # beyond it a tuple costs more to draw than it gains
_PRICE_OF_EXTRA = 0.2  # what one more pattern costs to draw, beside everything else about a draw
_ROUNDING = 1e-9  # added to the logarithm of every bound


@dataclass(frozen=True)
class Tilt:
    """Noise moved by θ times one random pattern, plus `extra` patterns drawn to match it or a shift along m̄."""

    theta: float
    extra: int = 0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.extra and self.shift:
            raise ValueError("no bound on the weights is known for extras together with a shift")


@dataclass(frozen=True)
class Mean:
    """Noise moved along the average pattern m̄ (against it for a negative shift)."""

    shift: float


Proposal = Tilt | Mean
Key = tuple[float, float]


@dataclass(frozen=True)
class Draws:
    """Draws from one proposal, reduced to what weights depend on; all have shape (m,), `powers` has (keys, m)."""

    loss: Array  # L
    drift: Array  # ū = E_π u_π
    powers: Array  # ln E_π exp(θu_π − θ²α_π − θ·shift·⟨m_π, m̄⟩/σ²) for the keys (θ, shift) asked for
    auxiliary: Array  # ln A, zero where there are no extras or tuples were accepted with probability A/max A


class Pair(Protocol):
    """P against Q at one σ."""

    @property
    def width(self) -> int:
        """How many numbers one draw takes."""

    @property
    def rarest(self) -> float:
        """About ln(1/probability of the likeliest pattern)."""

    @property
    def heaviest(self) -> float:
        """max α."""

    @property
    def average(self) -> float:
        """ᾱ = E α_π."""

    def log_moment(self, theta: float) -> float:
        """ln M(θ) = ln E_π exp(θα_π)."""

    @property
    def centre(self) -> float:
        """ā = ‖m̄‖²/2σ²."""

    def log_most(self, tilt: Tilt) -> float:
        """ln max A; inf if no bound is known, in which case the tilt must not be used."""

    def log_weights(self, tilt: Tilt, count: int, random: np.random.Generator) -> Array:
        """ln A of `count` random tuples."""

    def draw(
        self, proposal: Proposal, keys: tuple[Key, ...], count: int, random: np.random.Generator, exact: bool
    ) -> Draws:
        """Draws from one proposal; `exact` ones come from tuples accepted with probability A/max A."""


def log_kappa(order: float) -> float:
    """ln κ(c), increasing to 0 as c falls to 1."""
    return (order - 1) * math.log((order - 1) / order) - math.log(order) if order > 1 else 0.0


def log_bound(proposal: Proposal, pair: Pair, direction: Direction, epsilon: float, log_constant: float) -> float:
    """ln of the bound on X·w that this proposal proves (Proof 3); inf if it proves none."""
    match proposal:
        case Tilt(theta=theta, extra=extra, shift=0.0) if direction == "remove":
            c = theta + extra
            spread = (theta - 1) * pair.log_moment(theta) if theta > 1 else 0.0
            return log_kappa(c) - (c - 1) * epsilon + spread + log_constant + _ROUNDING
        case Mean(shift=shift) if direction == "add" and shift < 0:
            s = -shift
            return log_kappa(s + 1) - s * (epsilon - pair.average) + s * s * pair.centre + _ROUNDING
    return math.inf


def sampling_free(pair: Pair, direction: Direction, epsilon: float) -> float:
    """A bound on δ in one direction that needs no draws (end of Proof 3)."""
    if direction == "add":
        bound = log_bound(Mean(-best_shift(pair, epsilon)), pair, direction, epsilon, 0.0)
    else:
        several = Tilt(1.0, best_extra(pair, epsilon))
        bound = min(
            log_bound(Tilt(best_power(pair, epsilon)), pair, direction, epsilon, 0.0),
            log_bound(several, pair, direction, epsilon, pair.log_most(several)),
        )
    return max(math.exp(min(0.0, bound)), 1e-300)  # not 0: Gaussian noise is never pure


def best_power(pair: Pair, epsilon: float) -> float:
    """The θ with the smallest bound, which is about ½ + ε/2α for an α between the average and the largest."""
    least, most = (max(1.0, 0.5 + epsilon / (2 * alpha)) for alpha in (pair.heaviest, pair.average))
    grid = np.geomspace(least, most, _POWERS) if most > least * (1 + 1e-9) else np.array([least])
    bounds = [log_bound(Tilt(float(theta)), pair, "remove", epsilon, 0.0) for theta in grid]
    return float(grid[int(np.argmin(bounds))])


def best_extra(pair: Pair, epsilon: float) -> int:
    """How many extras with θ = 1 give the smallest bound; 0 if none of them helps."""
    best, chosen, worse = 0.0, 0, 0
    for extra in range(1, _MOST_EXTRA + 1):
        tilt = Tilt(1.0, extra)
        bound = log_bound(tilt, pair, "remove", epsilon, pair.log_most(tilt))
        best, chosen, worse = (bound, extra, 0) if bound < best else (best, chosen, worse + 1)
        if worse > 4:
            break
    return chosen


def best_shift(pair: Pair, epsilon: float) -> float:
    """The s with the smallest bound in direction "add", from a grid that ends where the mean loss reaches −ε."""
    grid = np.concatenate([[0.5], np.geomspace(1.0, max(2.0, epsilon / (2 * pair.centre)), 40)])
    bounds = [log_bound(Mean(-float(s)), pair, "add", epsilon, 0.0) for s in grid]
    return float(grid[int(np.argmin(bounds))])


def candidates(pair: Pair, direction: Direction, epsilon: float) -> list[Proposal]:
    """Proposals worth mixing. The first one always proves a bound."""
    full = epsilon / (2 * pair.centre)  # Mean(full) moves a loss without fluctuations to ε
    if direction == "add":
        low = best_shift(pair, epsilon)
        high = min(full, 8 * low + 8)
        shifts = sorted({round(s, 3) for s in (low, 0.5 * (low + high), high, 1.3 * high)})
        return [Mean(-low), *(Mean(-s) for s in shifts if abs(s - low) > 0.05 * low)]
    extra, theta = best_extra(pair, epsilon), best_power(pair, epsilon)
    # One pattern alone, the others staying as they are: L ≥ ε as soon as u − α ≥ ln (e^ε − 1) + ln 1/probability.
    needed = epsilon + math.log(-math.expm1(-epsilon)) + pair.rarest if epsilon > 0 else pair.rarest
    alone = min(8.0, max(1.1, 0.5 + needed / (2 * pair.heaviest)))
    chosen = [Tilt(1.0, extra)] if extra else [Tilt(theta)]
    powers = {round(alone, 2), round(0.5 * (1 + alone), 2), *([round(theta, 2)] if theta > 1.05 else [])}
    chosen += [Tilt(power) for power in sorted(powers) if Tilt(power) not in chosen]
    if extra > 1:
        chosen += [Tilt(1.5, extra), Tilt(2.0, extra), Tilt(3.0, extra - 1)]  # where one cluster of bins matters most
    both = [Tilt(round(max(1.1, 0.6 * alone), 2), 0, 0.5 * full), Tilt(round(0.9 * alone, 2), 0, 0.15 * full)]
    return [*chosen, *both, Mean(0.5 * full), Mean(full)]


def keys_of(proposals: tuple[Proposal, ...]) -> tuple[Key, ...]:
    """The (θ, shift) that the densities of these proposals need; (1, 0) is the loss itself."""
    return tuple(sorted({(each.theta, each.shift) for each in proposals if isinstance(each, Tilt)} - {(1.0, 0.0)}))


def log_density(proposal: Proposal, draws: Draws, keys: tuple[Key, ...], pair: Pair, log_constant: float) -> Array:
    """ln ρ at the draws; with extras, exact up to the constant Z that `log_constant` replaces."""
    along = proposal.shift * draws.drift - proposal.shift**2 * pair.centre
    if isinstance(proposal, Mean):
        return along
    key = proposal.theta, proposal.shift
    first = draws.loss if key == (1.0, 0.0) else draws.powers[keys.index(key)]
    return first + proposal.extra * draws.loss - log_constant + along


def log_numerator(direction: Direction, epsilon: float, loss: Array) -> Array:
    """ln (S − e^ε)₊ or ln (1 − e^ε·S)₊; −inf outside the event."""
    beyond = loss - epsilon if direction == "remove" else -loss - epsilon
    with np.errstate(divide="ignore"):
        gap = np.log(-np.expm1(-np.maximum(beyond, 0.0)))
    return np.asarray(gap + loss if direction == "remove" else gap)


def price(pair: Pair, proposal: Proposal, log_constant: float) -> float:
    """What an accepted draw costs relative to one without extras."""
    if not isinstance(proposal, Tilt):
        return 1.0
    return 1.0 + _PRICE_OF_EXTRA * proposal.extra * math.exp(min(50.0, pair.log_most(proposal) - log_constant))


def log_mean(values: Array) -> float:
    """ln of the mean of exponentials."""
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).mean()))
