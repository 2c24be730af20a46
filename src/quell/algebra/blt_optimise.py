"""The best BLT for a workload and a participation pattern, in milliseconds.

We minimise loss = sensitivity × error (root mean square, or worst query) over the BLTs whose sensitivity is exactly
known: α > 0, λ in (0, 1), Σ α ≤ 1. The usual parameterisation, interlaced decays in (0, 1), is the part with
λ̂_d > 0; momentum wants the part beyond, since the exact square root of 1/((1−ρ_1 x)(1−ρ_2 x)) has a λ̂ at 0.

`blt_loss.py` has the loss, in coordinates without constraints.

L-BFGS finds local minima, so each size d is started from evenly spaced log-gaps, from a few random ones (always the
same), and from the optimum of size d − 1 with a pair inserted where it helps most. A buffer that does not lower the
loss by a millionth is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from quell._types import Array
from quell.algebra.blt import BLT, from_gaps
from quell.algebra.blt_loss import Objective, Problem, coordinates_of, gaps_of, identity_loss, log_loss, problem_of
from quell.algebra.descent import Convergence, Solution, Watch, minimise
from quell.errors import require_count

_WORTHWHILE = 1e-6  # relative gain below which a buffer is dropped
_RANDOM_STARTS = 1
_FIRST = 25  # iterations from every start; the best goes on
_LITTLE, _MOST = 0.01, 8  # gain for which one more buffer is not taken where their number is free, and the most tried


def optimise_blt(
    n: int,
    buffers: int | None = None,
    *,
    poles: Sequence[float] = (1.0,),
    participations: int = 1,
    separation: int | None = None,
    objective: Objective = "rmse",
    on_iteration: Watch | None = None,
) -> tuple[BLT, Convergence]:
    """The BLT with at most `buffers` buffers of least sensitivity × error, and how the search went.

    Fewer buffers come back where more bring nothing; none at all means that independent noise is best.

    Args:
        n: steps.
        buffers: most buffers to use. Default: the fewest whose loss one more would lower by less than a percent.
        poles: of the workload's series 1/Π(1 − ρ x), at most two in [0, 1]: (1,) for prefix sums, (weight decay factor,
            momentum) for SGD.
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
    problem = problem_of(n, poles, participations, separation, objective)
    most = _MOST if buffers is None else require_count("buffers", buffers)
    sizes = _ladder(problem, most, on_iteration)
    best = next(sizes)
    for each in sizes:
        if buffers is None and best[1].loss <= each[1].loss * (1.0 + _LITTLE):
            break
        best = each
    return best


# ---- sizes, from small to large ----


def _ladder(problem: Problem, most: int, on_iteration: Watch | None) -> Iterator[tuple[BLT, Convergence]]:
    """The best of size 0, 1, …, most, each size no worse than the one before."""
    gaps, loss = np.empty(0), identity_loss(problem)
    how = Convergence(0, 1, loss, 0.0, 0.0, True, "No buffers: nothing to optimise.")
    yield _found(gaps, how)
    for size in range(1, most + 1):
        runs = [_descend(problem, start, _FIRST, on_iteration) for start in _starts(problem, size, gaps)]
        leader, ahead = min(runs, key=lambda run: run[1].loss)
        theta, found = _descend(problem, leader, 2000, on_iteration)
        runs.append((theta, found))
        iterations = how.iterations + sum(run.iterations for _, run in runs)
        evaluations = how.evaluations + sum(run.evaluations for _, run in runs)
        if found.loss < loss - _WORTHWHILE:
            gaps, loss = _prune(problem, gaps_of(theta))
            gained = found.last_improvement if found.iterations else ahead.last_improvement
            how = replace(found, loss=loss, last_improvement=gained)
        else:  # how well the smaller one converged still stands
            how = replace(how, reason=f"Buffer {size} lowers the loss by less than {_WORTHWHILE:g}.")
        how = replace(how, iterations=iterations, evaluations=evaluations)
        yield _found(gaps, how)


def _descend(problem: Problem, start: Array, max_iterations: int, on_iteration: Watch | None) -> Solution:
    return minimise(
        lambda theta: log_loss(problem, theta),
        start,
        max_iterations=max_iterations,
        gradient_tolerance=1e-9,
        improvement_tolerance=1e-12,
        on_iteration=on_iteration,
    )


def _found(gaps: Array, how: Convergence) -> tuple[BLT, Convergence]:
    return from_gaps(gaps[0::2].tolist(), gaps[1::2].tolist()), replace(how, loss=math.exp(how.loss))


# ---- where to start ----


def _starts(problem: Problem, size: int, smaller: Array) -> list[Array]:
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
    thetas = [coordinates_of(gaps) for gaps in starts]
    return thetas + _insertions(problem, smaller) if smaller.size else thetas


def _spaced(size: int, height: float) -> Array:
    """(2·size,) gaps from exp(−height) up, their logarithms evenly spaced."""
    return np.exp(-np.linspace(height, 0.0, 2 * size, endpoint=False))


def _insertions(problem: Problem, gaps: Array) -> list[Array]:
    """θ with one more pair of gaps, at the two places, not close to each other, where it lowers the loss most."""
    tried: list[tuple[float, float, Array]] = []
    for height in np.linspace(0.1, math.log(100.0 * problem.n), 32):
        below = gaps[gaps < math.exp(-height)]
        # Both must lie between the same neighbours, or the gaps of C and C⁻¹ would no longer alternate.
        width = min(0.5, 0.5 * (-height - math.log(below[-1]))) if below.size else 0.5
        longer = np.sort(np.append(gaps, [math.exp(-height), math.exp(-height - width)]))
        if np.all(np.diff(longer) > 0.0):
            theta = coordinates_of(longer)
            tried.append((log_loss(problem, theta)[0], float(height), theta))
    chosen: list[tuple[float, float, Array]] = []
    for loss, height, theta in sorted(tried, key=lambda entry: entry[0]):
        if len(chosen) < 2 and math.isfinite(loss) and all(abs(height - other[1]) > 1.5 for other in chosen):
            chosen.append((loss, height, theta))
    return [theta for _, _, theta in chosen]


def _prune(problem: Problem, gaps: Array) -> tuple[Array, float]:
    """Drop neighbouring (λ, λ̂) that all but cancel: without them the loss rises by at most a ten-millionth."""
    loss = limit = log_loss(problem, coordinates_of(gaps))[0]
    pair = 0
    while pair + 1 < gaps.size and gaps.size > 2:
        without = np.delete(gaps, [pair, pair + 1])
        raised = log_loss(problem, coordinates_of(without))[0]
        if raised <= limit + 0.1 * _WORTHWHILE:
            gaps, loss, pair = without, raised, 0
        else:
            pair += 1
    return gaps, loss
