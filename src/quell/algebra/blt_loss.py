"""The loss that an optimal BLT minimises, in coordinates without constraints, with its gradient.

The unknowns. The gaps 1 − λ and 1 − λ̂, merged, are g_0 < g_1 < … < g_{2d−1}, the even ones of C and the odd ones of
C⁻¹. All but the last are g_p = exp(−(x_p + x_{p+1} + …)) with x = exp θ > 0; the last is g_{2d−2} + s·room with
s = sigmoid(θ_{2d−1}), where room = 1 − Σ_{i<d}(g_{2i−1} − g_{2i−2}) is what Σ α = Σ_i(g_{2i−1} − g_{2i−2}) ≤ 1 leaves.
So θ is unconstrained and covers exactly the BLTs with α > 0, λ in (0, 1) and Σ α ≤ 1.

Scales and weights are products of differences g_q − g_p. We work with their logarithms, −(x_q + …) +
log(1 − exp(−(x_p + … + x_{q−1}))), and pull the gradient back through those: two buffers may then approach each
other to 1e-300 (they do, when one of them is superfluous) without loss of digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quell._types import Array
from quell.algebra.exponential_sums import SummationRule, participation_sum, response_sum, separated, summation_rule
from quell.errors import QuellError, require_count

Objective = Literal["rmse", "maxse"]
_LONGEST = 60.0  # largest log-ratio of neighbouring gaps: e^60 steps are as good as infinitely many


@dataclass(frozen=True, eq=False)
class Problem:
    n: int
    k: int
    b: int
    poles: tuple[float, ...]  # ρ_1 > ρ_2
    rule: SummationRule
    emphasis: Array


def problem_of(
    n: int, poles: Sequence[float], participations: int, separation: int | None, objective: Objective
) -> Problem:
    n, k, b = _participation(n, participations, separation)
    kept = _poles(poles)
    if not kept:
        raise QuellError(f"poles={tuple(poles)}: for the identity workload independent noise is best, use no BLT")
    if objective not in ("rmse", "maxse"):
        raise QuellError(f"objective={objective!r} is not known: use 'rmse' or 'maxse'")
    rule = summation_rule(n, by_parity=True)
    emphasis = (n - rule.times) / n if objective == "rmse" else np.ones_like(rule.times)
    if not separated(kept, n):
        # A double pole, pulled apart symmetrically: changes the loss by a relative 1e-6 at most.
        middle, apart = 0.5 * (kept[0] + kept[1]), 5e-4 * max(1.0 - kept[0], 1.0 / n)
        kept = (middle + apart, middle - apart)
    return Problem(n, k, b, kept, rule, emphasis)


def _participation(n: int, participations: int, separation: int | None) -> tuple[int, int, int]:
    """(n, k, b), k cut to the ⌈n/b⌉ participations that fit."""
    n, k = require_count("n", n), require_count("participations", participations)
    b = n if separation is None else require_count("separation", separation)
    return n, min(k, -(-n // b)), b


def _poles(poles: Sequence[float]) -> tuple[float, ...]:
    """The non-zero poles, largest first."""
    if not all(0.0 <= pole <= 1.0 for pole in poles) or sum(pole > 0.0 for pole in poles) > 2:
        raise QuellError(f"poles={tuple(poles)} must be at most two numbers between 0 and 1, such as (1.0, 0.9)")
    return tuple(sorted((float(pole) for pole in poles if pole > 0.0), reverse=True))


def identity_loss(problem: Problem) -> float:
    zero, log, one = np.zeros(1), np.array([-700.0]), np.ones(1)  # one buffer that forgets at once, λ = λ̂ = 0
    error = response_sum(zero, log, one, 1.0, problem.poles, problem.rule, problem.emphasis)[0]
    return 0.5 * math.log(problem.k * error)


# ---- coordinates ----


def gaps_of(theta: Array) -> Array:
    """(2d,) merged gaps."""
    heights = np.cumsum(np.exp(theta[-2::-1]))[::-1]
    gaps = np.exp(-heights)
    return np.append(gaps, gaps[-1] + _sigmoid(theta[-1]) * _room(gaps))


def coordinates_of(gaps: Array) -> Array:
    steps = np.diff(np.log(np.append(gaps[:-1], 1.0)))
    share = (gaps[-1] - gaps[-2]) / _room(gaps[:-1])
    share = min(max(share, 1e-12), 1.0 - 1e-9)
    return np.append(np.log(np.clip(steps, 1e-15, 0.9 * _LONGEST)), math.log(share / (1.0 - share)))


def _room(gaps: Array) -> float:
    """What Σ α ≤ 1 leaves for the last pair; a hair less, so that rounding cannot make c_1 exceed c_0."""
    return 1.0 - 1e-12 - float(np.sum(gaps[1::2] - gaps[0:-1:2]))


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(value, -700.0), 700.0)))


# ---- the loss and its gradient ----


def log_loss(problem: Problem, theta: Array) -> tuple[float, Array]:
    """log(sensitivity × error) and its gradient; +inf where the coordinates would overflow."""
    if theta[:-1].max(initial=-np.inf) > math.log(_LONGEST) or abs(theta[-1]) > 600.0:
        return math.inf, np.zeros_like(theta)
    with np.errstate(all="ignore"):
        loss, gradient = _loss_and_gradient(problem, theta)
    if not (math.isfinite(loss) and np.isfinite(gradient).all()):
        return math.inf, np.zeros_like(theta)
    return loss, gradient


def _loss_and_gradient(problem: Problem, theta: Array) -> tuple[float, Array]:
    m = theta.size - 1  # nodes 0 … m−1 have a height x_p + x_{p+1} + …, node m is the last
    ours, theirs = slice(0, None, 2), slice(1, None, 2)
    x = np.exp(theta[:-1])
    spans = np.zeros((m, m + 1))  # spans[p, q] = x_p + … + x_{q−1}: sums of positive numbers, never differences
    spans[:, 1:] = np.cumsum(np.triu(np.broadcast_to(x, (m, m))), axis=1)
    spans, heights = spans[:, :m], spans[:, m]
    gaps = np.exp(-heights)
    upper = np.triu(np.ones((m, m), dtype=bool), 1)
    log_between = np.where(upper, -heights + np.log(-np.expm1(-spans)), 0.0)  # log(g_q − g_p)
    pairs = np.arange(0, m - 1, 2)
    widths = np.exp(log_between[pairs, pairs + 1])
    share = _sigmoid(theta[-1])
    last = share * (1.0 - 1e-12 - widths.sum())
    to_penultimate = np.append(np.exp(log_between[: m - 1, m - 1]), 0.0)
    to_last = to_penultimate + last

    logs = np.zeros((m + 1, m + 1))
    logs[:m, :m], logs[:m, m] = log_between, np.log(to_last)
    logs += logs.T
    # Theorem 2 for α; for the error the same products without the slowest zero.
    scales = np.exp(logs[ours, theirs].sum(axis=1) - logs[ours, ours].sum(axis=1))
    weights = np.exp(logs[2::2, theirs].sum(axis=0) - logs[theirs, theirs].sum(axis=1))
    excess = (gaps[0] - (1.0 - problem.poles[0])) / problem.poles[0]

    decays = -np.expm1(-heights)
    log_decays = np.where(heights > 0.7, np.log1p(-gaps), np.log(decays))
    last_decay = decays[-1] - last
    if abs(last_decay) < 1e-150:
        last_decay = 1e-150  # its logarithm is needed; no sum can tell it from 0
    squared, d_slow, d_scales = participation_sum(log_decays[ours], scales, problem.n, problem.k, problem.b)
    error, d_fast, d_weights, d_excess = response_sum(
        np.append(decays[theirs], last_decay),
        np.append(log_decays[theirs], math.log(abs(last_decay))),
        weights,
        excess,
        problem.poles,
        problem.rule,
        problem.emphasis,
    )
    loss = 0.5 * (math.log(squared) + math.log(error))

    # Backwards: adjoints of log(g_q − g_p) and of log|1 − g_p| …
    by_scale, by_weight = d_scales * scales / squared, d_weights * weights / error
    between = np.zeros((m + 1, m + 1))
    between[ours, theirs] += by_scale[:, None]
    between[2::2, theirs] += by_weight
    between[ours, ours] -= by_scale[:, None]
    between[theirs, theirs] -= by_weight[:, None]
    np.fill_diagonal(between, 0.0)
    between = np.triu(between + between.T, 1)
    by_decay = np.zeros(m + 1)
    by_decay[ours], by_decay[theirs] = d_slow / squared, d_fast / error

    # … of the last node, which hangs on the penultimate one and on the room …
    by_to_last = between[:m, m] / to_last
    by_last = by_to_last.sum() - by_decay[m] / last_decay
    between = between[:m, :m]
    between[: m - 1, m - 1] += by_to_last[:-1] * to_penultimate[:-1]
    between[pairs, pairs + 1] -= by_last * share * widths
    by_decay[m - 1] += by_decay[m] / last_decay * decays[-1]

    # … and of x_r: it is in every height p ≤ r, and in every span p ≤ r < q.
    by_height = -between.sum(axis=0) + by_decay[:m] / np.expm1(heights)
    by_height[0] -= d_excess / error * gaps[0] / problem.poles[0]
    by_span = np.where(upper, between / np.expm1(spans), 0.0)
    crossing = np.cumsum(np.cumsum(by_span, axis=0)[:, ::-1], axis=1)[:, ::-1]
    by_x = np.cumsum(by_height)
    by_x[:-1] += np.diagonal(crossing, 1)
    return loss, 0.5 * np.append(by_x * x, by_last * last * (1.0 - share))
