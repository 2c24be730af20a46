"""The numbers behind the charts: error per step, what remains of old noise, ε against σ.

Curves of long runs are thinned to a few hundred points that keep every bucket's extremes, so that a peak is never
drawn lower than it is.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from quell import privacy
from quell._types import Array
from quell.analysis.error import query_variances
from quell.errors import QuellError, at_least
from quell.planning.file import text_of
from quell.planning.mechanism import Mechanism
from quell.planning.named import plan_of
from quell.planning.planner import Plan
from quell.planning.prices import Prices
from quell.planning.questions import Answers
from quell.privacy import gaussian_sigma
from quell.progress import announce
from quell.run import Run
from quell.schemes import Scheme
from quell.show.page.content import plan_content
from quell.strategy import BandedStrategy, Strategy, ToeplitzStrategy, TreeStrategy
from quell.workload import Workload

Curve = dict[str, list[float]]
Curves = dict[str, Any]  # of one mechanism: error, cancellation, epsilon
_BUCKETS = 100
_VISIBLE = 0.02  # difference between two shares that a chart can show
_GUARANTEED_POINTS = 33
_MOST_NUMBERS = 2000  # of an optimised strategy whose plan file a page holds
_ESTIMATED_FACTORS = (0.25, 0.5, 2.0, 4.0)  # of ε: an estimate under amplification can take a second


def page_content(plan: Plan, answers: Answers, thorough: bool, preview: bool = False) -> dict[str, Any]:
    """A plan's page as plain data.

    Args:
        plan: The plan.
        answers: What was asked about it.
        thorough: Whether to explain everything, and to estimate the noise for other ε where batches are random, for the
            recommended mechanism and DP-SGD; that takes seconds.
        preview: Whether a search is still running.
    """
    workload, curves = plan.run.workload, {}
    for mechanism in (*plan.alternatives, answers.dpsgd):
        compared = mechanism is plan.mechanism or mechanism is answers.dpsgd
        curves[id(mechanism)] = {
            "error": error_curve(mechanism, workload),
            "cancellation": cancellation_curves(mechanism.strategy, workload),
            "epsilon": epsilon_curve(plan.prices, mechanism, thorough and compared),
            "file": file_of(plan.run, mechanism),
        }
    return plan_content(plan, answers, curves, brief=not thorough, preview=preview)


def file_of(run: Run, mechanism: Mechanism) -> str | None:
    """The file of a plan with this mechanism alone; None where it is not certified, or too large for a page."""
    solution = mechanism.strategy.solution
    if run.batch_size is None or not mechanism.certified or (solution is not None and solution.size > _MOST_NUMBERS):
        return None
    return text_of(plan_of(run, mechanism).as_dict())


def error_curve(mechanism: Mechanism, workload: Workload) -> Curve:
    """Standard deviation of the noise in the model after each step, per unit of clip norm."""
    deviations = np.sqrt(query_variances(mechanism.strategy, workload)) * mechanism.noise_multiplier
    kept = _extremes(deviations, np.linspace(0, len(deviations), _BUCKETS + 1))
    return {"x": [float(i + 1) for i in kept], "y": _short(deviations[kept])}


def cancellation_curves(strategy: Strategy, workload: Workload) -> list[dict[str, object]]:
    """What share of one step's noise is still in the model t steps later; from several steps where they differ."""
    n = workload.steps
    alike = workload.is_toeplitz and isinstance(strategy, ToeplitzStrategy) and strategy.column_scale is None
    shares: dict[int, Array] = {}
    for start in (0,) if alike else sorted({0, max(0, n // 2 - 1), max(0, 3 * n // 4 - 1)}):
        remaining = noise_remaining(strategy, workload, start)
        share = remaining / remaining[0]
        if all(np.max(np.abs(share - other[: len(share)])) > _VISIBLE for other in shares.values()):
            shares[start] = share
    curves: list[dict[str, object]] = []
    for start, share in shares.items():
        kept = _extremes(share, np.geomspace(1, len(share) + 1, _BUCKETS + 1) - 1)
        curves.append({"start": start + 1, "x": [float(i + 1) for i in kept], "y": _short(share[kept])})
    return curves


def noise_remaining(strategy: Strategy, workload: Workload, start: int) -> Array:
    """(n − start,) column `start` of B = A·C⁻¹ from its diagonal down: fresh noise of one step in later iterates.

    >>> from quell import strategy, workload
    >>> from quell.participation import Participation
    >>> sums = workload.prefix(4)
    >>> noise_remaining(strategy.build("lambda_cgd", sums, Participation.single(4), **{"lambda": 0.75}), sums, 1)
    array([1.  , 0.25, 0.25])
    """
    column = np.zeros(workload.steps)
    column[start:] = _noising_column(strategy, start)
    return workload.apply(column)[start:]


def epsilon_curve(prices: Prices, mechanism: Mechanism, with_estimates: bool) -> dict[str, object] | None:
    """ε against σ, and whether its points are guarantees; None where only costly estimates could tell.

    Without amplification every point of a certified mechanism is a guarantee, so numbers are rounded up. Under an
    amplifying scheme only the plan's own point is certified and the rest of the curve is estimated.
    """
    claim, guaranteed = mechanism.claim, mechanism.certified and not mechanism.scheme.amplifies
    if guaranteed:  # what `calibrate` does, without pricing the sensitivity again for every point
        moved = mechanism.guarantee.sensitivity.value
        epsilons = np.geomspace(claim.epsilon / 8, claim.epsilon * 8, _GUARANTEED_POINTS)
        points = {float(e): moved * gaussian_sigma(float(e), claim.delta) for e in epsilons}
    elif with_estimates:
        points = _estimated_points(prices.scheme_of(mechanism), mechanism)
    else:
        return None
    return {
        "guaranteed": guaranteed,
        "x": [float(at_least(sigma, 4)) for sigma in points.values()],
        "y": [float(at_least(epsilon, 4)) for epsilon in points],
    }


def _estimated_points(scheme: Scheme, mechanism: Mechanism) -> dict[float, float]:
    """About the noise at a few other ε, with the plan's own in its place."""
    points = {}
    for factor in _ESTIMATED_FACTORS:
        epsilon, delta = mechanism.claim.epsilon * factor, mechanism.claim.delta
        announce(f"estimating the noise for ε = {epsilon:g}")
        try:
            points[epsilon] = privacy.estimate(mechanism.strategy, scheme, epsilon, delta).noise_multiplier
        except QuellError:  # beyond what the accountant can tell: the curve is shorter
            continue
    points[mechanism.claim.epsilon] = mechanism.noise_multiplier
    return dict(sorted(points.items()))


def _noising_column(strategy: Strategy, start: int) -> Array:
    """Column `start` of C⁻¹ from its diagonal down."""
    length = strategy.steps - start
    match strategy:
        case ToeplitzStrategy():
            column = np.zeros(length)
            kernel = strategy.noising[:length]
            column[: len(kernel)] = kernel
            return column if strategy.column_scale is None else column / strategy.column_scale[start:]
        case BandedStrategy():
            return _solve_banded(strategy.row_bands[start:])
        case TreeStrategy():  # a node is used until the next one as large begins
            column = np.zeros(length)
            column[0] = 1.0
            width = (start + 1) & -(start + 1)
            if width < length:
                column[width] = -1.0
            return column


def _solve_banded(row_bands: Array) -> Array:
    """x with C·x = (1, 0, 0, …)ᵀ for C given by its row bands."""
    from scipy.linalg import solve_banded

    n, bands = row_bands.shape[0], min(row_bands.shape)
    diagonals = np.zeros((bands, n))
    for d in range(bands):
        diagonals[d, : n - d] = row_bands[d:, d]
    unit = np.zeros(n)
    unit[0] = 1.0
    return np.asarray(solve_banded((bands - 1, 0), diagonals, unit))


def _extremes(values: Array, edges: Array) -> list[int]:
    """First, last, and the index of the least and the greatest value between any two edges."""
    if len(values) <= 2 * _BUCKETS:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for low, high in pairwise(sorted({math.floor(edge) for edge in edges})):
        kept |= {low + int(np.argmin(values[low:high])), low + int(np.argmax(values[low:high]))}
    return sorted(kept)


def _short(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
