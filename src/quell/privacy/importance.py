"""δ of a pair by importance sampling: a pilot chooses how to draw, then a certificate is made from fresh draws.

The *pilot* estimates δ by a few thousand draws from every candidate proposal, and chooses a mixture of them and the
number of draws. The *certificate* draws from a stream that the pilot never touches, so what was chosen is independent
of what it is applied to (Proof 6 in docs/proofs.md). For proposals with extras it first bounds their constants Z.
Every chunk of draws has its own numbered generator: results do not depend on the number of threads, and differ between
machines by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.privacy.confidence import best_bet, draws_needed, expected_excess, lower_mean, upper_mean
from quell.privacy.guarantee import Certificate
from quell.privacy.side_by_side import side_by_side
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
    log_mean,
    log_numerator,
    price,
    sampling_free,
)

DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")
METHOD = "importance sampling in both directions"
_SEED = 0x5175656C6C  # fixed and public: an accountant's draws hide nothing
_PILOT, _CERTIFICATE, _CONSTANT = 1, 2, 3
_CHUNK = {_PILOT: 1 << 20, _CERTIFICATE: 1 << 16, _CONSTANT: 1 << 16}  # numbers: the many fit a core's cache
_SLACK = 0.05  # relative width of a certificate worth paying for; with that of Z̄, 6% of δ, about 0.3% of σ
_SLACKS, _CHEAP, _PLENTY = (0.025, 0.035, _SLACK), 2.0**26, 3 << 17  # finer ones where few numbers and draws buy it
_LEAST, _MOST = 1 << 14, 1 << 20  # draws; none where a quarter of the least is not affordable
_WORK = 2.0**28  # numbers that one certificate may draw; more only where a draw has more than 512
_CONSTANT_SLACK, _CONSTANT_FAILURE = 0.01, 0.1  # wanted width of Z̄; part of the failure probability for all of them
_FEWEST = 1 << 12  # tuples for one constant
_BLENDS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Mixture:
    """Proposals with their shares, what the pilot learned about them, and the bound on X."""

    proposals: tuple[Proposal, ...]
    shares: Array
    log_constants: Array  # ln Z, about
    spreads: Array  # variance of A/Z, about
    most: float  # the bound on X, if that is Z
    mean: float
    variance: float
    price: float  # of one draw, in numbers drawn per bin


@dataclass(frozen=True)
class Pilot:
    """What a few draws from every candidate proposal tell about one direction of δ."""

    direction: Direction
    estimate: float
    error: float  # one standard error
    mixture: Mixture | None  # None: not asked for


@dataclass(frozen=True)
class Drawn:
    """Draws from all proposals of a mixture, concatenated."""

    numerator: Array  # ln (…)₊
    densities: Array  # (proposals, m) ln ρ_k
    auxiliary: Array  # ln A/Z, zero where tuples were accepted with probability A/max A
    origin: NDArray[np.intp]  # which proposal each draw came from


def pilot(pair: Pair, direction: Direction, epsilon: float, size: int, failure: float | None = None) -> Pilot:
    """Take `size` draws from every candidate proposal; choose a mixture if a certificate is to follow (`failure`)."""
    proposals = tuple(candidates(pair, direction, epsilon))
    drawn, constants = _draw(pair, direction, epsilon, proposals, [size] * len(proposals), None)
    even = np.full(len(proposals), 1.0 / len(proposals))
    values = _values(drawn, even)
    estimate, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    if failure is None:
        return Pilot(direction, estimate, error, None)
    prices = np.array([price(pair, each, float(z)) for each, z in zip(proposals, constants, strict=True)])
    first = np.eye(len(proposals))[0]  # alone where the event was never seen: it proves the bound
    best, least = None, _least_variance(drawn, prices) if estimate > 0 else first
    for blend in _BLENDS:
        shares = (1 - blend) * least + blend * first
        mixture = _promise(pair, direction, epsilon, proposals, shares, constants, prices, drawn)
        cost = mixture.price * draws_needed(_SLACK * estimate, mixture.variance, mixture.most, failure)
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

    @property
    def estimate(self) -> float:
        """δ, about; 0 if no draw met the event."""
        return max(each.estimate for each in self.pilots)


def scout(pair: Pair, epsilon: float, failure: float, size: int) -> Scouted:
    """Run the pilots of both directions, except where δ is proven to be negligible without draws."""
    free = {direction: sampling_free(pair, direction, epsilon) for direction in DIRECTIONS}
    pilots = [pilot(pair, "remove", epsilon, size, failure)]
    if free["add"] > 1e-3 * pilots[0].estimate:
        pilots.append(pilot(pair, "add", epsilon, size, failure))
    draws = _draws(pair, pilots, failure, free)
    expected = [
        _expected_upper(each.mixture, count, failure) if each.mixture and count else free[each.direction]
        for each, count in zip(pilots, draws, strict=True)
    ]
    rest = free["add"] if len(pilots) == 1 else 0.0
    return Scouted(tuple(pilots), tuple(draws), max(free.values()), rest, max(rest, *expected))


def certify(pair: Pair, epsilon: float, failure: float, scouted: Scouted) -> Certificate:
    """Bounds on δ, the larger of the two directions, that fail with probability at most `failure` (Proof 6)."""
    lower, upper, used = 0.0, scouted.rest, 0
    for each, count in zip(scouted.pilots, scouted.draws, strict=True):
        floor, ceiling, draws = _certify_direction(pair, each, epsilon, failure, count)
        lower, upper, used = max(lower, floor), max(upper, ceiling), used + draws
    return Certificate(lower, min(upper, scouted.free), METHOD, failure, used)


def _draws(pair: Pair, pilots: list[Pilot], failure: float, free: dict[Direction, float]) -> list[int]:
    """How many draws each direction's certificate should take: for the narrowest width that is cheap, at most 5%.

    None if they cost too much, or if their bound is expected to be above `free`, which takes no draws.
    """
    top = max(each.estimate for each in pilots)
    if top == 0.0:
        return [0] * len(pilots)
    counts = []
    for slack in _SLACKS:
        counts = [_draws_for(slack, pair, each, failure, top, free[each.direction]) for each in pilots]
        numbers = sum(
            n * pair.width * each.mixture.price for n, each in zip(counts, pilots, strict=True) if each.mixture
        )
        if numbers <= _CHEAP and sum(counts) <= _PLENTY:
            break
    return counts


def _draws_for(slack: float, pair: Pair, piloted: Pilot, failure: float, top: float, free: float) -> int:
    mixture = piloted.mixture
    if mixture is None:
        return 0
    # The direction with the smaller δ may be bounded generously: only the larger of the two is reported.
    excess = max(slack * top, 0.5 * (top - piloted.estimate), 0.8 * top - 2.0 * piloted.estimate)
    wanted = draws_needed(excess, mixture.variance, mixture.most, failure)
    affordable = _WORK / (min(pair.width, 512) * mixture.price)
    count = int(max(_LEAST, min(wanted, affordable, _MOST)))
    return count if affordable > _LEAST / 4 and _expected_upper(mixture, count, failure) < free else 0


def _expected_upper(mixture: Mixture, count: int, failure: float) -> float:
    return (1 + _CONSTANT_SLACK) * mixture.mean + expected_excess(count, mixture.variance, mixture.most, failure)


def _certify_direction(
    pair: Pair, piloted: Pilot, epsilon: float, failure: float, count: int
) -> tuple[float, float, int]:
    """Lower and upper bound on δ in the pilot's direction, and how many draws that took."""
    mixture = piloted.mixture
    if mixture is None or not count:
        return 0.0, sampling_free(pair, piloted.direction, epsilon), 0
    counts = [max(1, round(count * share)) for share in mixture.shares]
    total = sum(counts)
    shares = np.array(counts) / total
    log_lower, log_upper = _constants(pair, piloted.direction, mixture, counts, _CONSTANT_FAILURE * failure)
    most = _most(pair, piloted.direction, epsilon, mixture.proposals, shares, log_upper)
    drawn, _ = _draw(pair, piloted.direction, epsilon, mixture.proposals, counts, log_upper)
    values = _values(drawn, shares)
    rest = (1 - _CONSTANT_FAILURE) * failure
    bet = best_bet(total, mixture.variance, most, rest)
    overstated = math.exp(float(np.max(log_upper - log_lower)))  # at most, the mean of X over δ
    return lower_mean(values, rest, bet) / overstated, upper_mean(values, most, rest, bet), total


def _constants(
    pair: Pair, direction: Direction, mixture: Mixture, counts: list[int], failure: float
) -> tuple[Array, Array]:
    """Bounds on ln Z of every proposal, 0 for those without extras; all upper bounds together fail with `failure`."""
    log_lower, log_upper = np.zeros(len(counts)), np.zeros(len(counts))
    extended = [(k, p) for k, p in enumerate(mixture.proposals) if isinstance(p, Tilt) and p.extra]
    for k, tilt in extended:
        share, log_most = failure / len(extended), pair.log_most(tilt)
        mean = math.exp(float(mixture.log_constants[k]) - log_most)  # of A/max A
        variance = float(mixture.spreads[k]) * mean**2
        wanted = draws_needed(_CONSTANT_SLACK * mean, variance, 1.0, share)
        count = max(_FEWEST, round(min(wanted, counts[k] / (2 * mean))))  # no more than half of what acceptance takes
        pieces = side_by_side(
            (pair.log_weights, tilt, size, _generator(_CONSTANT, direction, k, chunk))
            for _, chunk, size in _chunks(pair, [count], _CONSTANT)
        )
        values, bet = np.exp(np.concatenate(pieces) - log_most), best_bet(count, variance, 1.0, share)
        log_lower[k] = math.log(max(lower_mean(values, share, bet), 1e-300)) + log_most
        log_upper[k] = math.log(min(upper_mean(values, 1.0, share, bet), 1.0)) + log_most
    return log_lower, log_upper


def _draw(
    pair: Pair,
    direction: Direction,
    epsilon: float,
    proposals: tuple[Proposal, ...],
    counts: list[int],
    log_constants: Array | None,
) -> tuple[Drawn, Array]:
    """Draws from every proposal, reduced chunk by chunk: for a certificate if the constants Z are given.

    Otherwise they are the pilot's, which takes tuples with their weights and estimates Z from them.
    """
    keys, exact = keys_of(proposals), log_constants is not None
    stream = _CERTIFICATE if exact else _PILOT
    pieces: list[Draws] = side_by_side(
        (pair.draw, proposals[k], keys, size, _generator(stream, direction, k, chunk), exact)
        for k, chunk, size in _chunks(pair, counts, stream)
    )
    loss, drift, auxiliary = (
        np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("loss", "drift", "auxiliary")
    )
    together = Draws(loss, drift, np.concatenate([piece.powers for piece in pieces], axis=1), auxiliary)
    origin = np.repeat(np.arange(len(proposals), dtype=np.intp), counts)
    if log_constants is None:
        log_constants = np.array([log_mean(auxiliary[origin == k]) for k in range(len(proposals))])
    densities = np.array(
        [log_density(each, together, keys, pair, float(z)) for each, z in zip(proposals, log_constants, strict=True)]
    )
    numerator = log_numerator(direction, epsilon, loss)
    if not exact:
        auxiliary = auxiliary - log_constants[origin]
    return Drawn(numerator, densities, auxiliary, origin), log_constants


def _chunks(pair: Pair, counts: list[int], stream: int) -> Iterator[tuple[int, int, int]]:
    step = max(16, _CHUNK[stream] // pair.width)
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


def _least_variance(drawn: Drawn, prices: Array, rounds: int = 80) -> Array:
    """The shares with the smallest second moment E_Q[(…)₊²/ρ] for what they cost.

    In terms of shares of the cost this is a convex problem, solved by multiplicative updates.
    """
    hit = np.isfinite(drawn.numerator)
    densities, numerator = drawn.densities[:, hit], drawn.numerator[hit]
    shares = np.full(len(prices), 1.0 / len(prices))
    base = 2 * numerator + drawn.auxiliary[hit] - _log_mixture(densities, shares)
    base -= base.max()
    densities = densities - np.log(prices)[:, None]
    for _ in range(rounds):
        log_mix = _log_mixture(densities, shares)
        gain = np.exp(densities + (base - 2 * log_mix) - (base - log_mix).max()).sum(axis=1)
        shares = shares * gain
        shares = shares / shares.sum()
    shares = shares / prices / np.sum(shares / prices)
    shares = np.where(shares < 0.01, 0.0, np.round(shares, 3))  # rounded: the same on every machine
    return np.asarray(shares / shares.sum())


def _promise(
    pair: Pair,
    direction: Direction,
    epsilon: float,
    proposals: tuple[Proposal, ...],
    shares: Array,
    log_constants: Array,
    prices: Array,
    drawn: Drawn,
) -> Mixture:
    """The mixture of the proposals with a positive share: its bound, and its mean and variance in the pilot."""
    kept, even = np.flatnonzero(shares), np.full(len(shares), 1.0 / len(shares))
    mean = float(_values(drawn, even).mean())
    # E_R[X²] from the draws of all candidates, for they see events that the kept ones would only meet with more draws.
    mixed = _log_mixture(drawn.densities, shares) + _log_mixture(drawn.densities, even)
    second = float(np.mean(np.exp(2 * drawn.numerator + drawn.auxiliary - mixed)))
    chosen = tuple(proposals[k] for k in kept)
    most = _most(pair, direction, epsilon, chosen, shares[kept], log_constants[kept])
    spreads = np.array([np.exp(drawn.auxiliary[drawn.origin == k]).var() for k in kept])
    variance, price = max(second - mean**2, 0.1 * mean**2), float(shares @ prices)
    return Mixture(chosen, shares[kept], log_constants[kept], spreads, most, mean, variance, price)


def _most(
    pair: Pair,
    direction: Direction,
    epsilon: float,
    proposals: tuple[Proposal, ...],
    shares: Array,
    log_constants: Array,
) -> float:
    """The bound on X under the mixture, proven if the constants are no smaller than Z."""
    logs = [
        log_bound(each, pair, direction, epsilon, float(z)) - math.log(share)
        for each, z, share in zip(proposals, log_constants, shares, strict=True)
    ]
    return math.exp(max(-690.0, min(700.0, min(logs))))  # not 0: bets are divided by it
