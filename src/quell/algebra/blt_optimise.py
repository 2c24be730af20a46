"""The best BLT for a workload and a participation pattern, in milliseconds.

We minimise loss = sensitivity × error (root mean square, or worst query) over the BLTs whose sensitivity is exactly
known: α > 0, λ in (0, 1), Σ α ≤ 1. The usual parameterisation, interlaced decays in (0, 1), is the part with
λ̂_d > 0; momentum wants the part beyond, since the exact square root of 1/((1−ρ_1 x)(1−ρ_2 x)) has a λ̂ at 0.

The unknowns. The gaps 1 − λ and 1 − λ̂, merged, are g_0 < g_1 < … < g_{2d−1}, the even ones of C and the odd ones of
C⁻¹. All but the last are g_p = exp(−(x_p + x_{p+1} + …)) with x = exp θ > 0; the last is g_{2d−2} + s·room with
s = sigmoid(θ_{2d−1}), where room = 1 − Σ_{i<d}(g_{2i−1} − g_{2i−2}) is what Σ α = Σ_i(g_{2i−1} − g_{2i−2}) ≤ 1 leaves.
So θ is unconstrained and covers exactly the region above.

Scales and weights are products of differences g_q − g_p. We work with their logarithms, −(x_q + …) +
log(1 − exp(−(x_p + … + x_{q−1}))), and pull the gradient back through those: two buffers may then approach each
other to 1e-300 (they do, when one of them is superfluous) without loss of digits.

L-BFGS finds local minima, so each size d is started from evenly spaced log-gaps, from a few random ones (always the
same), and from the optimum of size d − 1 with a pair inserted where it helps most. A buffer that does not lower the
loss by a millionth is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from quell._types import Array
from quell.algebra import blt as algebra
from quell.algebra.blt import BLT
from quell.algebra.descent import Convergence, minimise
from quell.errors import QuellError, require_count

Objective = Literal["rmse", "maxse"]
Progress = Callable[[Convergence], None]

_WORTHWHILE = 1e-6  # relative gain below which a buffer is dropped
_RANDOM_STARTS = 1
_FIRST = 25  # iterations from every start; the best goes on
_LONGEST = 60.0  # largest log-ratio of neighbouring gaps: e^60 steps are as good as infinitely many


@dataclass(frozen=True)
class Attempt:
    """One size that was tried: `loss` is sensitivity × error; `blt.buffers` may be smaller than `buffers`."""

    buffers: int
    blt: BLT
    loss: float
    convergence: Convergence


@dataclass(frozen=True)
class Choice:
    """The size chosen, and everything that was tried, smallest first."""

    chosen: Attempt
    tried: tuple[Attempt, ...]


def optimise_blt(
    n: int,
    buffers: int,
    *,
    poles: Sequence[float] = (1.0,),
    participations: int = 1,
    separation: int | None = None,
    objective: Objective = "rmse",
    on_iteration: Progress | None = None,
) -> tuple[BLT, Convergence]:
    """The BLT with at most `buffers` buffers of least sensitivity × error, and how the search went.

    Fewer buffers come back where more bring nothing; none at all means that independent noise is best.

    Args:
        n: steps.
        buffers: most buffers to use.
        poles: of the workload's series 1/Π(1 − ρ x), see `blt.max_squared_error`.
        participations: how often an example can take part.
        separation: least distance between two participations; n by default.
        objective: "rmse" for the root mean squared error over all queries, "maxse" for the worst query's.
        on_iteration: called after every accepted step of every descent.

    Returns:
        The BLT, and a `Convergence` whose `loss` is sensitivity × error (times σ_{ε,δ}: the error of the release)
        and whose gradient is that of its logarithm.

    >>> best, how = optimise_blt(100_000, 2, objective="maxse")
    >>> [round(decay, 4) for decay in best.decays], [round(scale, 4) for scale in best.scales]
    ([1.0, 0.9857], [0.0123, 0.1878])
    >>> round(how.loss, 4)
    5.2967
    """
    problem = _problem(n, poles, participations, separation, objective)
    *_, best = _ladder(problem, require_count("buffers", buffers), on_iteration)
    return best.blt, best.convergence


def choose_buffers(
    n: int,
    *,
    poles: Sequence[float] = (1.0,),
    participations: int = 1,
    separation: int | None = None,
    objective: Objective = "rmse",
    tolerance: float = 0.01,
    most: int = 8,
    on_iteration: Progress | None = None,
) -> Choice:
    """The smallest number of buffers whose loss one more buffer would lower by less than `tolerance`.

    Other arguments as in `optimise_blt`. Independent noise (no buffers) is the first candidate.

    >>> choice = choose_buffers(3900, participations=10, separation=390)
    >>> choice.chosen.buffers, [round(attempt.loss, 2) for attempt in choice.tried]
    (2, [139.66, 14.56, 13.58, 13.56])
    """
    problem = _problem(n, poles, participations, separation, objective)
    tried: list[Attempt] = []
    for attempt in _ladder(problem, require_count("most", most), on_iteration):
        tried.append(attempt)
        if len(tried) > 1 and tried[-2].loss <= attempt.loss * (1.0 + tolerance):
            return Choice(tried[-2], tuple(tried))
    return Choice(tried[-1], tuple(tried))


# ---- the problem ----


@dataclass(frozen=True, eq=False)
class _Problem:
    n: int
    k: int
    b: int
    poles: tuple[float, ...]  # ρ_1 > ρ_2
    rule: algebra.SummationRule
    emphasis: Array


def _problem(
    n: int, poles: Sequence[float], participations: int, separation: int | None, objective: Objective
) -> _Problem:
    n, k, b = algebra.require_participation(n, participations, separation)
    kept = algebra.require_poles(poles)
    if not kept:
        raise QuellError(f"poles={tuple(poles)}: for the identity workload independent noise is best, use no BLT")
    if objective not in ("rmse", "maxse"):
        raise QuellError(f"objective={objective!r} is not known: use 'rmse' or 'maxse'")
    rule = algebra.summation_rule(n, by_parity=True)
    emphasis = (n - rule.times) / n if objective == "rmse" else np.ones_like(rule.times)
    if not algebra.separated(kept, n):
        # A double pole, pulled apart symmetrically: changes the loss by a relative 1e-6 at most.
        middle, apart = 0.5 * (kept[0] + kept[1]), 5e-4 * max(1.0 - kept[0], 1.0 / n)
        kept = (middle + apart, middle - apart)
    return _Problem(n, k, b, kept, rule, emphasis)


def _ladder(problem: _Problem, most: int, on_iteration: Progress | None) -> Iterator[Attempt]:
    """The best of size 0, 1, …, most, each size no worse than the one before."""
    gaps, loss = np.empty(0), _identity_loss(problem)
    how = Convergence(0, 1, loss, 0.0, 0.0, True, "No buffers: nothing to optimise.")
    yield _attempt(0, gaps, how)
    for size in range(1, most + 1):
        runs = [_descend(problem, start, _FIRST, on_iteration) for start in _starts(problem, size, gaps)]
        leader, ahead = min(runs, key=lambda run: run[1].loss)
        theta, found = _descend(problem, leader, 2000, on_iteration)
        runs.append((theta, found))
        iterations = how.iterations + sum(run.iterations for _, run in runs)
        evaluations = how.evaluations + sum(run.evaluations for _, run in runs)
        if found.loss < loss - _WORTHWHILE:
            gaps, loss = _prune(problem, _gaps(theta))
            gained = found.last_improvement if found.iterations else ahead.last_improvement
            how = replace(found, loss=loss, last_improvement=gained)
        else:  # how well the smaller one converged still stands
            how = replace(how, reason=f"Buffer {size} lowers the loss by less than {_WORTHWHILE:g}.")
        how = replace(how, iterations=iterations, evaluations=evaluations)
        yield _attempt(size, gaps, how)


def _descend(
    problem: _Problem, start: Array, max_iterations: int, on_iteration: Progress | None
) -> tuple[Array, Convergence]:
    return minimise(
        lambda theta: _loss(problem, theta),
        start,
        max_iterations=max_iterations,
        gradient_tolerance=1e-9,
        improvement_tolerance=1e-12,
        on_iteration=on_iteration,
    )


def _attempt(size: int, gaps: Array, how: Convergence) -> Attempt:
    best = algebra.from_gaps(gaps[0::2].tolist(), gaps[1::2].tolist())
    loss = math.exp(how.loss)
    return Attempt(size, best, loss, replace(how, loss=loss))


def _identity_loss(problem: _Problem) -> float:
    zero, log, one = np.zeros(1), np.array([-700.0]), np.ones(1)  # one buffer that forgets at once, λ = λ̂ = 0
    error = algebra.response_sum(zero, log, one, 1.0, problem.poles, problem.rule, problem.emphasis)[0]
    return 0.5 * math.log(problem.k * error)


# ---- where to start ----


def _starts(problem: _Problem, size: int, smaller: Array) -> list[Array]:
    """Starting points θ for `size` buffers, given the merged gaps of the best smaller BLT."""
    horizon = math.log(4.0 * min(problem.b, 1.0 / max(1.0 - problem.poles[0], 1.0 / problem.n)))
    starts = [_spaced(size, horizon)]
    if problem.k > 1:
        # Another kind of optimum has one buffer that never forgets and the others within an epoch. There are a few
        # more kinds, such as short C for a small separation; random starts find them.
        tail = np.array([1e-4, 1.0]) / problem.n
        starts.append(np.append(tail, _spaced(size - 1, horizon)))
        random = np.random.default_rng(size)
        for height in random.uniform(0.2, 1.0, _RANDOM_STARTS) * math.log(4.0 * problem.n):
            starts.append(np.exp(-np.sort(random.uniform(0.0, height, 2 * size))[::-1]))
    thetas = [_theta(gaps) for gaps in starts]
    return thetas + _insertions(problem, smaller) if smaller.size else thetas


def _spaced(size: int, height: float) -> Array:
    """(2·size,) gaps from exp(−height) up, their logarithms evenly spaced."""
    return np.exp(-np.linspace(height, 0.0, 2 * size, endpoint=False))


def _insertions(problem: _Problem, gaps: Array) -> list[Array]:
    """θ with one more pair of gaps, at the two places, not close to each other, where it lowers the loss most."""
    tried: list[tuple[float, float, Array]] = []
    for height in np.linspace(0.1, math.log(100.0 * problem.n), 32):
        below = gaps[gaps < math.exp(-height)]
        # Both must lie between the same neighbours, or the gaps of C and C⁻¹ would no longer alternate.
        width = min(0.5, 0.5 * (-height - math.log(below[-1]))) if below.size else 0.5
        longer = np.sort(np.append(gaps, [math.exp(-height), math.exp(-height - width)]))
        if np.all(np.diff(longer) > 0.0):
            theta = _theta(longer)
            tried.append((_loss(problem, theta)[0], float(height), theta))
    chosen: list[tuple[float, float, Array]] = []
    for loss, height, theta in sorted(tried, key=lambda entry: entry[0]):
        if len(chosen) < 2 and math.isfinite(loss) and all(abs(height - other[1]) > 1.5 for other in chosen):
            chosen.append((loss, height, theta))
    return [theta for _, _, theta in chosen]


def _prune(problem: _Problem, gaps: Array) -> tuple[Array, float]:
    """Drop neighbouring (λ, λ̂) that all but cancel: without them the loss rises by at most a ten-millionth."""
    loss = limit = _loss(problem, _theta(gaps))[0]
    pair = 0
    while pair + 1 < gaps.size and gaps.size > 2:
        without = np.delete(gaps, [pair, pair + 1])
        raised = _loss(problem, _theta(without))[0]
        if raised <= limit + 0.1 * _WORTHWHILE:
            gaps, loss, pair = without, raised, 0
        else:
            pair += 1
    return gaps, loss


# ---- coordinates ----


def _gaps(theta: Array) -> Array:
    """(2d,) merged gaps."""
    heights = np.cumsum(np.exp(theta[-2::-1]))[::-1]
    gaps = np.exp(-heights)
    return np.append(gaps, gaps[-1] + _sigmoid(theta[-1]) * _room(gaps))


def _theta(gaps: Array) -> Array:
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


def _loss(problem: _Problem, theta: Array) -> tuple[float, Array]:
    """log(sensitivity × error) and its gradient; +inf where the coordinates would overflow."""
    if theta[:-1].max(initial=-np.inf) > math.log(_LONGEST) or abs(theta[-1]) > 600.0:
        return math.inf, np.zeros_like(theta)
    with np.errstate(all="ignore"):
        loss, gradient = _loss_and_gradient(problem, theta)
    if not (math.isfinite(loss) and np.isfinite(gradient).all()):
        return math.inf, np.zeros_like(theta)
    return loss, gradient


def _loss_and_gradient(problem: _Problem, theta: Array) -> tuple[float, Array]:
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
    squared, d_slow, d_scales = algebra.participation_sum(log_decays[ours], scales, problem.n, problem.k, problem.b)
    error, d_fast, d_weights, d_excess = algebra.response_sum(
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
