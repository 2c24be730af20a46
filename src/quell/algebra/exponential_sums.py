"""Sums of exponentials over many steps, with their gradients: what a BLT's sensitivity and errors are made of.

They are sums Σ_{t<n} f(t) of smooth positive functions. `summation_rule` turns them into some 200 terms: a Gauss rule
for sums (discrete Chebyshev polynomials) on blocks [a, 2a), exact to rounding for exponentials. The cost grows with
log n, there is no case distinction near λ = 1 or between close poles, and the gradient is the rule's too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quell._types import Array

_LISTED = 32  # the first terms of a sum are taken one by one, the rest in doubling blocks
_GAUSS = 12  # points per block: exact for polynomials of degree 23, 1e-16 for every decaying exponential


@dataclass(frozen=True, eq=False)
class SummationRule:
    """Σ_{t<n} f(t) = Σ_q weights_q f(times_q); `signs` is (−1)^t, for sums with negative decays."""

    times: Array
    weights: Array
    signs: Array


@lru_cache(maxsize=256)
def summation_rule(n: int, by_parity: bool = False) -> SummationRule:
    """A rule for sums over t < n of exponentials (times low powers of t), relative error about 1e-15.

    With `by_parity`, even and odd t get rules of their own, so that signs are well defined and f may hold one
    alternating exponential.

    >>> rule = summation_rule(10**6)
    >>> len(rule.times), round(float(rule.weights @ 0.999 ** rule.times), 9)
    (212, 1000.0)
    """
    if by_parity:
        even, odd = summation_rule((n + 1) // 2), summation_rule(n // 2)
        return SummationRule(
            np.concatenate([2.0 * even.times, 2.0 * odd.times + 1.0]),
            np.concatenate([even.weights, odd.weights]),
            np.repeat([1.0, -1.0], [even.times.size, odd.times.size]),
        )
    listed = min(n, _LISTED)
    times, weights = [np.arange(listed, dtype=np.float64)], [np.ones(listed)]
    start = listed
    while start < n:
        size = min(start, n - start)
        if size <= _GAUSS:
            block, share = np.arange(size, dtype=np.float64), np.ones(size)
        else:  # Golub-Welsch for the polynomials orthogonal on 0, 1, …, size − 1
            k = np.arange(1.0, _GAUSS)
            off_diagonal = np.sqrt(k**2 * (float(size) ** 2 - k**2) / (4.0 * (4.0 * k**2 - 1.0)))
            centred, vectors = np.linalg.eigh(np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
            block, share = centred + (size - 1) / 2.0, size * vectors[0] ** 2
        times.append(start + block)
        weights.append(share)
        start += size
    return SummationRule(np.concatenate(times), np.concatenate(weights), np.ones(sum(map(len, times))))


def participation_sum(logs: Array, scales: Array, n: int, k: int, b: int) -> tuple[float, Array, Array]:
    """‖Σ_{j<k} C[:, jb]‖² over n rows, and its gradient with respect to (log λ, α); α (d,), log λ (d,).

    Between participations j and j+1 the running sum is Σ_i x_ji λ_i^s with x_ji = α_i (1 + λ_i^b + … + λ_i^{jb}),
    s = t − jb − 1; on row jb itself it is 1 plus what the block before has decayed to. The last block has
    n − (k−1)b rows, fewer or more than b. Sums over s and over j both go by the rule, so neither n nor k costs
    much, and only positive terms are added when α > 0.
    """
    blocks = summation_rule(k - 1)
    starts = SummationRule(np.append(blocks.times, k - 1.0), np.append(blocks.weights, 1.0), np.ones(1))
    running, d_running = _responses(np.ones_like(logs), b * logs, 1.0, starts)
    x = scales * running
    d_x = np.zeros_like(x)

    rule = summation_rule(n - (k - 1) * b - 1)
    basis = np.exp(rule.times[:, None] * logs)
    column = basis @ x[-1]
    weighted = rule.weights * column
    total = 1.0 + float(weighted @ column)
    d_x[-1] = 2.0 * (weighted @ basis)
    d_logs = 2.0 * x[-1] * ((weighted * rule.times) @ basis)

    if k > 1:
        rule = summation_rule(b - 1)
        basis = np.exp(rule.times[:, None] * logs)
        gram = basis.T @ (rule.weights[:, None] * basis)
        moment = basis.T @ ((rule.weights * rule.times)[:, None] * basis)
        each = blocks.weights[:, None] * x[:-1]
        pairs = x[:-1].T @ each
        decayed = np.exp((b - 1) * logs)
        first_rows = 1.0 + x[:-1] @ decayed
        total += float(np.sum(gram * pairs) + blocks.weights @ first_rows**2)
        d_x[:-1] = 2.0 * (each @ gram + (blocks.weights * first_rows)[:, None] * decayed)
        d_logs += 2.0 * (np.sum(pairs * moment, axis=1) + (b - 1) * decayed * (first_rows @ each))

    return total, d_logs + b * scales * np.sum(d_x * d_running, axis=0), np.sum(d_x * running, axis=0)


def response_sum(
    decays: Array,
    logs: Array,
    weights: Array,
    excess: float,
    poles: tuple[float, ...],
    rule: SummationRule,
    emphasis: Array,
) -> tuple[float, Array, Array, float]:
    """Σ_t emphasis_t w_t² and its gradient with respect to (log|λ̂|, weights, excess), where w is the series

        (1 − λ_1 x)/Π(1 − ρ x) · Σ_i weights_i/(1 − λ̂_i x),      excess = 1 − λ_1/ρ_1.

    `decays` λ̂ (d,) are needed for their signs only, `logs` is log|λ̂|; one or two `poles` ρ, largest first;
    `emphasis` is 1 or (n−t)/n at the rule's times.
    """
    through = [_responses(decays, logs, pole, rule) for pole in poles]
    if len(poles) == 1:
        without, d_without = _powers(decays, logs, rule)
        full, d_full = through[0]
    else:
        (first, d_first), (without, d_without) = through
        # 1/((1−ρ_1 x)(1−ρ_2 x)) in partial fractions; `separated` has made sure that ρ_1 and ρ_2 are not too close.
        share = poles[0] / (poles[0] - poles[1])
        full, d_full = share * first + (1.0 - share) * without, share * d_first + (1.0 - share) * d_without
    series = ((1.0 - excess) * without + excess * full) @ weights
    weighted = 2.0 * rule.weights * emphasis * series
    d_logs = weights * ((1.0 - excess) * (weighted @ d_without) + excess * (weighted @ d_full))
    by_without, by_full = weighted @ without, weighted @ full
    return (
        0.5 * float(weighted @ series),
        d_logs,
        (1.0 - excess) * by_without + excess * by_full,
        float((by_full - by_without) @ weights),
    )


def separated(poles: tuple[float, ...], n: int) -> bool:
    """True if partial fractions over `poles` lose at most three digits in sums of n terms."""
    return len(poles) < 2 or poles[0] - poles[1] >= 1e-3 * max(1.0 - poles[0], 1.0 / n)


def _powers(decays: Array, logs: Array, rule: SummationRule) -> tuple[Array, Array]:
    """μ^t (times, d) and its derivative by log|μ|."""
    powers = np.exp(rule.times[:, None] * logs)
    powers[:, decays < 0.0] *= rule.signs[:, None]
    return powers, rule.times[:, None] * powers


def _responses(decays: Array, logs: Array, pole: float, rule: SummationRule) -> tuple[Array, Array]:
    """h_t = Σ_{s≤t} ρ^{t−s} μ^s (times, d) for the pole ρ, and its derivative by log|μ|."""
    t, negative = rule.times[:, None], decays < 0.0
    # h_t = L^t (1 − r^{t+1})/(1 − r), L the larger of μ and ρ, r = e^{−x} their ratio: stable however close they are.
    x = np.abs(logs - math.log(pole))
    above = logs >= math.log(pole)
    larger = np.exp(t * np.maximum(logs, math.log(pole)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(x > 0.0, np.expm1(-(t + 1.0) * x) / np.expm1(-x), t + 1.0)
        bend = ((t + 1.0) * np.exp(-(t + 1.0) * x) - ratio * np.exp(-x)) / -np.expm1(-x)
    if x.min(initial=np.inf) < 1e-4:
        # The derivative of `ratio` is a difference of nearly equal numbers for small (t+1)x: use its Taylor series.
        series = t * (t + 1.0) * (-0.5 + x * (2.0 * t + 1.0) / 6.0 - x**2 * t * (t + 1.0) / 8.0)
        bend = np.where((t + 1.0) * x < 1e-4, series, bend)
    bend *= larger
    basis = larger * ratio
    slopes = np.where(above, t * basis + bend, -bend)
    if negative.any():  # far from ρ: the plain formula is stable
        mu = decays[negative]
        powers, _ = _powers(mu, logs[negative], rule)
        basis[:, negative] = (pole ** (t + 1.0) - mu * powers) / (pole - mu)
        slopes[:, negative] = mu * (basis[:, negative] - (t + 1.0) * powers) / (pole - mu)
    return basis, slopes
