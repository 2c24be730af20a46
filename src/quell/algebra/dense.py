"""The optimal strategy with no limit on its bands, for a single participation and a few thousand steps at most.

With X = CᵀC and G = AᵀA the problem "minimise ‖A C⁻¹‖_F² over C with columns of norm one" becomes

    minimise tr(G X⁻¹)   over positive definite X with ones on the diagonal                               (primal)
    maximise 2·tr M − tr Λ,   M = (Λ^½ G Λ^½)^½,   over diagonal Λ > 0                                    (dual)

(Choquette-Choo et al. 2023, reference [5] of arXiv:2405.15913). Any Λ gives a lower bound on every strategy's loss,
and the optimal one gives the optimal X = Λ^-½ M Λ^-½. The dual has n unknowns where the primal has n²/2. It is solved
by Newton's method in ln Λ. With M = V diag(s) Vᵀ, from the singular values of A Λ^½, and ∘ for products entry by entry,

    gradient = diag M − Λ,   −Hessian = Λ − diag M + Σ_ab q_ab·(v_a∘v_b)(v_a∘v_b)ᵀ,   q_ab = s_a·s_b/(s_a + s_b).

q is positive definite and smooth: a pivoted Cholesky factorisation writes it as Σ_r l_r l_rᵀ with ten to thirty terms,
each of which is one matrix product, (V diag(l_r) Vᵀ)∘(V diag(l_r) Vᵀ). At the end the loss is compared with the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg
from threadpoolctl import threadpool_limits

from quell._types import Array
from quell.algebra.descent import Convergence, Solution, Watch
from quell.errors import QuellError

_SETTLED = 1e-14  # slope squared, relative: the loss is then above its lower bound by a hundred times that at most
_LARGEST_GAP = 1e-6  # between the loss and the bound, relative: what is accepted where rounding ends the search
_WELL_CONDITIONED = 1e-9  # ratio of eigenvalues from which squaring a matrix loses too much
_MODEL = 1e-3  # relative accuracy of the Hessian
_SHORTEST = 1e-6  # step of a line search
_ITERATIONS = 100


def optimise_dense(workload: Array, on_iteration: Watch | None = None) -> Solution:
    """The lower-triangular C (n, n) with columns of norm one that minimises ‖A C⁻¹‖_F, and how it went.

    workload: A, (n, n) lower triangular with a non-zero diagonal. `on_iteration` is called after every step.

    >>> strategy, how = optimise_dense(np.tri(3))
    >>> strategy.round(3)
    array([[0.866, 0.   , 0.   ],
           [0.443, 0.935, 0.   ],
           [0.232, 0.355, 1.   ]])
    """
    n = len(workload)
    if workload.shape != (n, n) or not np.diagonal(workload).all() or np.triu(workload, 1).any():
        raise QuellError(f"the workload, of shape {workload.shape}, must be square, lower triangular and invertible")
    with threadpool_limits(limits=1):  # the result must not depend on the number of threads
        return _optimise(workload, on_iteration)


def _optimise(workload: Array, on_iteration: Watch | None) -> Solution:
    largest = float(np.abs(workload).max())
    workload = workload / largest
    gram = workload.T @ workload
    point = _at(workload, gram, 0.5 * np.log(np.diagonal(gram)))
    point = _at(workload, gram, point.logs + 2 * math.log(point.roots.sum() / point.multipliers.sum()))
    evaluations, improvement, reason = 2, math.inf, f"Stopped after {_ITERATIONS} iterations."
    for iterations in range(_ITERATIONS + 1):
        slope = point.diagonal - point.multipliers
        residual = float(np.abs(slope).max())
        if on_iteration is not None and iterations:
            on_iteration(Convergence(iterations, evaluations, point.value, residual, improvement, False, reason))
        if np.sum(slope**2 / point.multipliers) <= _SETTLED * point.value or iterations == _ITERATIONS:
            break
        direction = _newton(point)
        promised = float(direction @ slope)
        step = min(1.0, 4.0 / float(np.abs(direction).max()))
        new = _at(workload, gram, point.logs + step * direction)
        evaluations += 1
        while not new.value >= point.value + 1e-4 * step * promised and step > _SHORTEST:
            step *= 0.5
            new = _at(workload, gram, point.logs + step * direction)
            evaluations += 1
        if not new.value > point.value:  # rounding
            break
        improvement = (new.value - point.value) / point.value
        point = new
    strategy = _strategy(point)
    loss = float(np.sum(np.square(linalg.solve_triangular(strategy, workload.T, trans="T", lower=True))))
    gap = loss / point.bound - 1.0
    converged = gap <= _LARGEST_GAP
    if converged:
        reason = f"No strategy has a loss lower by more than {max(gap, 0.0):.1e} of it."
    scale = largest**2
    return strategy, Convergence(
        iterations, evaluations, scale * loss, scale * residual, improvement, converged, reason
    )


@dataclass(frozen=True, eq=False)
class _Point:
    """The dual at one Λ = exp(logs): M = V diag(roots) Vᵀ and its diagonal."""

    logs: Array
    multipliers: Array
    roots: Array
    vectors: Array
    diagonal: Array

    @property
    def value(self) -> float:
        return float(2 * self.roots.sum() - self.multipliers.sum())

    @property
    def bound(self) -> float:
        """The largest value at a multiple of Λ."""
        return float(self.roots.sum() ** 2 / self.multipliers.sum())


def _at(workload: Array, gram: Array, logs: Array) -> _Point:
    multipliers = np.exp(logs)
    scale = np.sqrt(multipliers)
    squares, vectors = linalg.eigh(gram * np.outer(scale, scale), driver="evd", overwrite_a=True)
    if squares[0] >= _WELL_CONDITIONED * squares[-1]:
        roots = np.sqrt(squares)
    else:
        _, roots, transposed = linalg.svd(workload * scale)
        vectors = np.ascontiguousarray(transposed.T)
    return _Point(logs, multipliers, roots, vectors, np.square(vectors) @ roots)


def _newton(point: _Point) -> Array:
    """Newton's step in logs, from a model of the Hessian that is negative definite everywhere."""
    n, roots = len(point.logs), point.roots
    scale = np.sqrt(point.multipliers)
    rows = (point.vectors / np.sqrt(scale)[:, None]).astype(np.float32)  # a model need not be exact
    model = np.diag(np.maximum(1.0 - point.diagonal / point.multipliers, 0.0) + 1e-12)
    # Entries of q are of the size of √(s_a·s_b): without that factor all of them are represented equally well.
    left, terms = np.full(n, 0.5), np.zeros((0, n))
    while left.max() > 0.5 * _MODEL and len(terms) < n:
        pivot = int(left.argmax())
        column = np.sqrt(roots * roots[pivot]) / (roots + roots[pivot]) - terms[:, pivot] @ terms
        term = column / math.sqrt(left[pivot])
        terms, left = np.vstack([terms, term]), left - term * term
        model += np.square((rows * (term * np.sqrt(roots)).astype(np.float32)) @ rows.T)
    factor = linalg.cho_factor(model, lower=True, overwrite_a=True)
    return np.asarray(linalg.cho_solve(factor, (point.diagonal - point.multipliers) / scale) / scale)


def _strategy(point: _Point) -> Array:
    """C with CᵀC = X: the triangular factor of √M·Λ^-½, from its last column to the first, columns of norm one."""
    root = np.sqrt(point.roots)[:, None] * point.vectors.T / np.sqrt(point.diagonal)
    (triangle,) = linalg.qr(root[:, ::-1], mode="r", overwrite_a=True)
    strategy = np.tril(triangle[::-1, ::-1] * np.sign(np.diagonal(triangle)[::-1, None]))
    return np.asarray(strategy / np.linalg.norm(strategy, axis=0))
