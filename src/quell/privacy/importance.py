"""δ of a pair by importance sampling: a pilot that chooses, then a certificate from fresh draws.

The *pilot* spends a few thousand draws on every candidate proposal. It gives a point estimate of δ, the mixture of
proposals with the smallest variance, and the number of draws that a certificate will need. The *certificate* draws
anew, from a stream that the pilot never touches, so that everything chosen (mixture, number of draws, size of the bet)
is independent of what it is applied to. Its upper bound (`quell.privacy.confidence`) uses the weight bound that the
mixture proves (`quell.privacy.tilting`); draws are allotted to the proposals in fixed numbers.

Streams are numbered, not shared: chunk i of proposal k always gets the same generator, so results do not depend on the
number of threads, and differ between machines by rounding only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from quell._types import Array
from quell.privacy.confidence import best_bet, draws_needed, expected_excess, lower_mean, upper_mean
from quell.privacy.guarantee import Certificate
from quell.privacy.tilting import (
    Direction,
    Draws,
    Pair,
    Proposal,
    Tilt,
    candidates,
    keys_of,
    log_bound,
    log_density,
    log_numerator,
    sampling_free,
)

DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")
_SEED = 0x5175656C6C  # fixed and public: an accountant's draws hide nothing
_PILOT, _CERTIFICATE = 1, 2
_CHUNK = 1 << 20  # numbers per chunk: eight megabytes
_SLACK = 0.06  # relative width of a certificate worth paying for; 6% of δ is about 0.3% of σ
_LEAST, _MOST = 1 << 14, 1 << 20  # draws
_WORK = 2.0**29  # numbers that one certificate may draw; more only where a draw has more than 512
_BLENDS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Mixture:
    """Proposals with their shares, the constants Z of those with extras, and what it promises."""

    proposals: tuple[Proposal, ...]
    shares: Array
    log_constants: Array
    most: float  # the proven bound on X
    mean: float
    variance: float


@dataclass(frozen=True)
class Pilot:
    """What a few draws from every candidate say about one direction of δ."""

    direction: Direction
    estimate: float
    error: float  # one standard error
    mixture: Mixture | None  # None: not asked for, or the event was never seen


@dataclass(frozen=True)
class Drawn:
    """Draws from all proposals of a mixture, one after the other."""

    numerator: Array  # ln (…)₊
    densities: Array  # (proposals, m) ln ρ_k
    auxiliary: Array  # ln A/Z
    origin: NDArray[np.intp]  # which proposal each draw came from


def pilot(pair: Pair, direction: Direction, epsilon: float, size: int, failure: float | None = None) -> Pilot:
    """`size` draws from every candidate proposal; a mixture is chosen where a certificate is to follow."""
    proposals = tuple(candidates(pair, direction, epsilon))
    drawn, constants = _draw(pair, direction, epsilon, proposals, [size] * len(proposals), None, _PILOT)
    even = np.full(len(proposals), 1.0 / len(proposals))
    values = _values(drawn, even)
    estimate, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    if failure is None or not np.any(values > 0):
        return Pilot(direction, estimate, error, None)
    best, least = None, _least_variance(drawn, even)
    for blend in _BLENDS:
        shares = (1 - blend) * least + blend * np.eye(len(proposals))[0]
        mixture = _promise(pair, direction, epsilon, proposals, shares, constants, drawn)
        cost = draws_needed(_SLACK * estimate, mixture.variance, mixture.most, failure)
        if best is None or cost < best[0]:
            best = cost, mixture
    assert best is not None
    return Pilot(direction, estimate, error, best[1])


@dataclass(frozen=True)
class Scouted:
    """Pilots of the directions that matter, and how many draws each certificate should take."""

    pilots: tuple[Pilot, ...]
    draws: tuple[int, ...]
    free: float  # proven without draws, both directions
    rest: float  # proven without draws, for the directions that have no pilot
    expected_upper: float  # where the upper end will come out, about


def scout(pair: Pair, epsilon: float, failure: float, size: int) -> Scouted:
    """Pilots in both directions; one whose δ is proven to be negligible needs none."""
    free = {direction: sampling_free(pair, direction, epsilon) for direction in DIRECTIONS}
    pilots = [pilot(pair, "remove", epsilon, size, failure)]
    if free["add"] > 1e-3 * pilots[0].estimate:
        pilots.append(pilot(pair, "add", epsilon, size, failure))
    top = max(each.estimate for each in pilots)
    draws = [_draws(pair, each, failure, top) for each in pilots]
    expected = [
        each.mixture.mean + expected_excess(count, each.mixture.variance, each.mixture.most, failure)
        if each.mixture
        else free[each.direction]
        for each, count in zip(pilots, draws, strict=True)
    ]
    rest = free["add"] if len(pilots) == 1 else 0.0
    return Scouted(tuple(pilots), tuple(draws), max(free.values()), rest, max(rest, *expected))


def certify(pair: Pair, epsilon: float, failure: float, scouted: Scouted) -> Certificate:
    """Bounds on δ, the larger of the two directions, that hold but with probability `failure`.

    The larger δ is understated only if the bound of *its* direction fails, so the two need not share `failure`.
    """
    lower, upper, used = 0.0, scouted.rest, 0
    for each, count in zip(scouted.pilots, scouted.draws, strict=True):
        floor, ceiling, draws = _certify_direction(pair, each, epsilon, failure, count)
        lower, upper, used = max(lower, floor), max(upper, ceiling), used + draws
    method = f"importance sampling in both directions ({used:,} draws)"
    return Certificate(lower, min(upper, scouted.free), method, failure, scouted.free)


def _draws(pair: Pair, scouted: Pilot, failure: float, top: float) -> int:
    mixture = scouted.mixture
    if mixture is None:
        return 0
    # The direction with the smaller δ may be bounded generously: only the larger of the two is reported.
    excess = max(_SLACK * top, 0.5 * (top - scouted.estimate))
    wanted = draws_needed(excess, mixture.variance, mixture.most, failure)
    extras = sum(p.extra * s for p, s in zip(mixture.proposals, mixture.shares, strict=True) if isinstance(p, Tilt))
    affordable = _WORK / (min(pair.width, 512) * (1 + extras))
    return int(max(_LEAST, min(wanted, affordable, _MOST)))


def _certify_direction(
    pair: Pair, scouted: Pilot, epsilon: float, failure: float, count: int
) -> tuple[float, float, int]:
    mixture = scouted.mixture
    if mixture is None:
        return 0.0, 1.0, 0
    counts = [max(1, round(count * share)) for share in mixture.shares]
    total = sum(counts)
    shares = np.array(counts) / total
    most = _most(pair, scouted.direction, epsilon, mixture.proposals, shares, mixture.log_constants)
    drawn, _ = _draw(pair, scouted.direction, epsilon, mixture.proposals, counts, mixture.log_constants, _CERTIFICATE)
    values = _values(drawn, shares)
    bet = best_bet(total, mixture.variance, most, failure)
    return lower_mean(values, failure, bet), upper_mean(values, most, failure, bet), total


def _draw(
    pair: Pair,
    direction: Direction,
    epsilon: float,
    proposals: tuple[Proposal, ...],
    counts: list[int],
    log_constants: Array | None,
    stream: int,
) -> tuple[Drawn, Array]:
    """Draws from every proposal, reduced chunk by chunk; constants Z are estimated where none are given.

    Chunks run side by side, so each multiplies its matrices on one thread, and sums never depend on how many there are.
    """
    keys = keys_of(proposals)
    pieces: list[Draws] = []
    with threadpool_limits(limits=1), ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        jobs = [
            workers.submit(pair.draw, proposals[k], keys, size, _generator(stream, direction, k, chunk))
            for k, chunk, size in _chunks(pair, counts)
        ]
        pieces = [job.result() for job in jobs]
    loss, drift, auxiliary = (
        np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("loss", "drift", "auxiliary")
    )
    together = Draws(loss, drift, np.concatenate([piece.powers for piece in pieces], axis=1), auxiliary)
    origin = np.repeat(np.arange(len(proposals), dtype=np.intp), counts)
    if log_constants is None:
        log_constants = np.array([_log_mean(auxiliary[origin == k]) for k in range(len(proposals))])
    densities = np.array(
        [log_density(each, together, keys, pair, float(z)) for each, z in zip(proposals, log_constants, strict=True)]
    )
    numerator = log_numerator(direction, epsilon, loss)
    return Drawn(numerator, densities, auxiliary - log_constants[origin], origin), log_constants


def _chunks(pair: Pair, counts: list[int]) -> Iterator[tuple[int, int, int]]:
    step = max(16, int(_CHUNK / pair.width))
    for k, count in enumerate(counts):
        for chunk, start in enumerate(range(0, count, step)):
            yield k, chunk, min(step, count - start)


def _generator(stream: int, direction: Direction, proposal: int, chunk: int) -> np.random.Generator:
    spawn = (stream, DIRECTIONS.index(direction), proposal, chunk)
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(_SEED, spawn_key=spawn)))


def _values(drawn: Drawn, shares: Array) -> Array:
    """X for every draw, under a mixture with these shares."""
    return np.exp(drawn.numerator + drawn.auxiliary - _log_mixture(drawn.densities, shares))


def _log_mixture(densities: Array, shares: Array) -> Array:
    with np.errstate(divide="ignore"):
        weighted = densities + np.log(shares)[:, None]
    top = weighted.max(axis=0)
    return np.asarray(top + np.log(np.exp(weighted - top).sum(axis=0)))


def _least_variance(drawn: Drawn, even: Array, rounds: int = 80) -> Array:
    """The shares with the smallest second moment E_Q[(…)₊²/ρ], a convex problem, by multiplicative updates."""
    hit = np.isfinite(drawn.numerator)
    densities, numerator = drawn.densities[:, hit], drawn.numerator[hit]
    base = 2 * numerator + drawn.auxiliary[hit] - _log_mixture(densities, even)
    base -= base.max()
    shares = even
    for _ in range(rounds):
        log_mix = _log_mixture(densities, shares)
        gain = np.exp(densities + (base - 2 * log_mix) - (base - log_mix).max()).sum(axis=1)
        shares = shares * gain
        shares = shares / shares.sum()
    shares = np.where(shares < 0.01, 0.0, np.round(shares, 3))  # rounded: the same on every machine
    return np.asarray(shares / shares.sum())


def _promise(
    pair: Pair,
    direction: Direction,
    epsilon: float,
    proposals: tuple[Proposal, ...],
    shares: Array,
    log_constants: Array,
    drawn: Drawn,
) -> Mixture:
    """The mixture of the proposals with a positive share: its bound, and its mean and variance in the pilot."""
    values, even = _values(drawn, shares), _values(drawn, np.full(len(shares), 1.0 / len(shares)))
    kept = np.flatnonzero(shares)
    mean = float(even.mean())
    # E_R[X²] in two ways: from the draws of the kept proposals alone, which sees the noise of A, and from all draws,
    # which sees the events that the kept proposals would only meet with more draws.
    own = sum(float(shares[k] * np.square(values[drawn.origin == k]).mean()) for k in kept)
    everyone = float(np.mean(even * values * np.exp(-drawn.auxiliary)))
    second = max(own, everyone)
    chosen = tuple(proposals[k] for k in kept)
    most = _most(pair, direction, epsilon, chosen, shares[kept], log_constants[kept])
    return Mixture(chosen, shares[kept], log_constants[kept], most, mean, max(second - mean**2, 0.1 * mean**2))


def _most(
    pair: Pair,
    direction: Direction,
    epsilon: float,
    proposals: tuple[Proposal, ...],
    shares: Array,
    log_constants: Array,
) -> float:
    """The proven bound on X under the mixture."""
    logs = [
        log_bound(each, pair, direction, epsilon, float(z)) - math.log(share)
        for each, z, share in zip(proposals, log_constants, shares, strict=True)
    ]
    noise = [
        pair.log_most(each) - float(z)
        for each, z in zip(proposals, log_constants, strict=True)
        if isinstance(each, Tilt)
    ]
    return math.exp(min(700.0, min(logs) + max([0.0, *noise])))


def _log_mean(values: Array) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).mean()))
