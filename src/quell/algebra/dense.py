"""The optimal strategy with no limit on its bands, for a single participation and a few thousand steps at most.

With X = CᵀC the problem "minimise ‖A C⁻¹‖_F² over C with columns of norm one" becomes

    minimise tr(AᵀA X⁻¹)   over positive definite X with ones on the diagonal,

which is convex, so L-BFGS finds the one minimum (Choquette-Choo et al. 2023, reference [5] of arXiv:2405.15913). X
outside the positive definite cone has loss +inf, "step too long" for the line search. One evaluation goes

    X = CᵀC,   B = A C⁻¹,   loss = ‖B‖_F²,   Y = B C⁻ᵀ,   ∂loss/∂X = -YᵀY (off the diagonal).

C is lower triangular: a *reverse* Cholesky factor, for Cholesky's gives X = L Lᵀ.

At the minimum YᵀY is a diagonal matrix Λ (the multipliers of X_jj = 1) and the Hessian takes D to X⁻¹DΛ + ΛDX⁻¹.
With Λ^½ X Λ^½ = V diag(s) Vᵀ that is easily inverted, D' = Λ^½ D Λ^½ having D'_ij/(1/s_i + 1/s_j) in the basis V.
Used as the preconditioner, and brought up to date every few steps, it makes 20 to 50 steps enough where plain
L-BFGS needs hundreds, or thousands when a learning-rate schedule spreads Λ over many orders of magnitude.

Products are done with the serial kernel of `_banded_kernels`, as fast as a BLAS on one core: a threaded BLAS may
be faster on an idle machine but is many times slower on a busy one. Only the eigenvectors come from LAPACK.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from threadpoolctl import threadpool_limits

from quell._types import Array
from quell.algebra._banded_kernels import add_product, clear, transpose
from quell.algebra._compile import compiled
from quell.algebra.descent import Convergence, minimise
from quell.errors import QuellError

_BLOCK = 32  # small triangular blocks are done one number at a time
_REFRESH = 15  # steps after which the preconditioner is brought up to date


def optimise_dense(
    workload: Array,
    *,
    max_iterations: int = 500,
    improvement_tolerance: float = 1e-12,
    patience: int = 3,
    on_iteration: Callable[[Convergence], None] | None = None,
) -> tuple[Array, Convergence]:
    """The lower-triangular C (n, n) with columns of norm one that minimises ‖A C⁻¹‖_F, and how it went.

    workload: A, (n, n) lower triangular with a non-zero diagonal. The other arguments are those of
    `quell.algebra.descent.minimise`.

    >>> strategy, how = optimise_dense(np.tri(3))
    >>> strategy.round(3)
    array([[0.866, 0.   , 0.   ],
           [0.443, 0.935, 0.   ],
           [0.232, 0.355, 1.   ]])
    """
    n = len(workload)
    if workload.shape != (n, n) or not np.diagonal(workload).all() or np.triu(workload, 1).any():
        raise QuellError(f"the workload, of shape {workload.shape}, must be square, lower triangular and invertible")
    with threadpool_limits(limits=1):  # small blocks are faster on one thread, and the result must not depend on it
        return _optimise(workload, max_iterations, improvement_tolerance, patience, on_iteration)


def _optimise(
    workload: Array,
    max_iterations: int,
    improvement_tolerance: float,
    patience: int,
    on_iteration: Callable[[Convergence], None] | None,
) -> tuple[Array, Convergence]:
    problem = _Problem(workload)
    point = problem.start()
    how = Convergence(0, 0, math.inf, math.inf, math.inf, False, "")
    while True:
        before = how

        def counted(stage: Convergence, before: Convergence = before) -> Convergence:
            total = before.iterations + stage.iterations
            return replace(stage, iterations=total, evaluations=before.evaluations + stage.evaluations)

        point, stage = minimise(
            problem,
            point,
            max_iterations=min(_REFRESH, max_iterations - before.iterations),
            improvement_tolerance=improvement_tolerance,
            patience=patience,
            precondition=problem.preconditioner(point),
            on_iteration=None if on_iteration is None else lambda stage: on_iteration(counted(stage)),
        )
        how = counted(stage)
        if how.iterations >= max_iterations and not how.converged:
            how = replace(how, reason=f"Stopped after {max_iterations} iterations.")
        if how.converged or stage.iterations < _REFRESH:
            return problem.strategy(point), how


class _Problem:
    """The loss as a function of X, with its work space: matrices padded to whole blocks, and flat."""

    def __init__(self, workload: Array) -> None:
        self.n = len(workload)
        # An odd number of blocks: rows a power of two apart would compete for the same few cache lines.
        self.size = (-(-self.n // _BLOCK) | 1) * _BLOCK
        self.a, self.x, self.inverse, self.b, self.y = (np.zeros(self.size**2) for _ in range(5))
        self.inside(self.a)[:] = workload  # the rows that fill up a block have no workload, and X is the identity there

    def inside(self, padded: Array) -> Array:
        """The n×n matrix in a padded one."""
        return padded.reshape(self.size, self.size)[: self.n, : self.n]

    def load(self, point: Array) -> None:
        self.x[:] = 0.0
        self.x[:: self.size + 1] = 1.0
        self.inside(self.x)[:] = point

    def __call__(self, point: Array) -> tuple[float, Array]:
        self.load(point)
        loss = _loss_and_gradient(self.a, self.x, self.inverse, self.b, self.y, self.size)
        return float(loss), self.inside(self.x)

    def start(self) -> Array:
        """√(AᵀA) scaled to ones on the diagonal: the minimum if only the sum of X's diagonal were bounded."""
        gram, n = np.zeros(self.size**2), self.size
        add_product(self.a, 0, 1, n, self.a, 0, n, gram, 0, n, n, n, n)
        values, vectors = np.linalg.eigh(self.inside(gram))
        root = (vectors * np.maximum(values, 1e-14 * values[-1]) ** 0.25) @ vectors.T
        root /= np.linalg.norm(root, axis=0)
        x: Array = root.T @ root
        np.fill_diagonal(x, 1.0)
        return x

    def preconditioner(self, point: Array) -> Callable[[Array], None]:
        """The inverse Hessian as it would be if `point` were the minimum."""
        self(point)
        multipliers = (self.inside(self.y) ** 2).sum(axis=0)
        roots = np.sqrt(np.maximum(multipliers, 1e-9 * multipliers.max()))
        scale = np.outer(roots, roots)
        values, vectors = np.linalg.eigh(point * scale)
        gain = values * values[:, None] / (values + values[:, None])
        basis, transposed, work = (np.zeros(self.size**2) for _ in range(3))
        self.inside(basis)[:], self.inside(transposed)[:] = vectors, vectors.T

        def precondition(vector: Array) -> None:
            self.inside(work)[:] = vector / scale
            turned = self.product(transposed, self.product(work, basis))
            self.inside(turned)[:] *= gain
            vector[:] = self.inside(self.product(basis, self.product(turned, transposed))) / scale
            np.fill_diagonal(vector, 0.0)

        return precondition

    def product(self, left: Array, right: Array) -> Array:
        out, n = np.zeros(self.size**2), self.size
        add_product(left, 0, n, 1, right, 0, n, out, 0, n, n, n, n)
        return out

    def strategy(self, point: Array) -> Array:
        """The reverse Cholesky factor of `point`."""
        self.load(point)
        _factor(self.x, self.inverse, self.b, self.size)
        return np.tril(self.inside(self.x))


@compiled()
def _loss_and_gradient(a, x, inverse, b, y, n):  # type: ignore[no-untyped-def]
    """‖A C⁻¹‖_F² for x = CᵀC, which is replaced by the gradient, zero on the diagonal. All are n×n, flat."""
    if not _factor(x, inverse, b, n):
        return math.inf
    b[:] = 0.0
    y[:] = 0.0
    for k in range(0, n, _BLOCK):
        for m in range(0, k + _BLOCK, _BLOCK):  # B = A C⁻¹, lower triangular times lower triangular
            add_product(a, k * n + m, n, 1, inverse, m * n, n, b, k * n, n, _BLOCK, _BLOCK, m + _BLOCK)
    loss = 0.0
    for k in range(0, n * n, n):
        part = 0.0
        for j in range(k, k + n):
            part += b[j] * b[j]
        loss += part
    transpose(inverse, 0, n, x, 0, n, n, n)
    for k in range(0, n, _BLOCK):
        for m in range(0, k + _BLOCK, _BLOCK):  # Y = B C⁻ᵀ, lower triangular times upper triangular
            add_product(b, k * n + m, n, 1, x, m * n + m, n, y, k * n + m, n, _BLOCK, _BLOCK, n - m)
    for i in range(n * n):
        b[i] = -y[i]
    x[:] = 0.0
    for k in range(0, n, _BLOCK):  # -YᵀY, lower half
        add_product(b, k, 1, n, y, 0, n, x, k * n, n, _BLOCK, n, k + _BLOCK)
    for i in range(n):
        for j in range(i):
            x[j * n + i] = x[i * n + j]
        x[i * n + i] = 0.0
    return loss


@compiled()
def _factor(x, inverse, work, n):  # type: ignore[no-untyped-def]
    """Replace the lower half of x by C with x = CᵀC, and `inverse` by C⁻¹. False if x is not positive definite."""
    inverse[:] = 0.0
    for k in range(n - _BLOCK, -1, -_BLOCK):  # from the last block: that is what "reverse" means
        for i in range(k + _BLOCK - 1, k - 1, -1):
            pivot = x[i * n + i]
            if not pivot > 0.0:
                return False
            pivot = math.sqrt(pivot)
            for j in range(k, i + 1):
                x[i * n + j] /= pivot
            for row in range(k, i):
                for j in range(k, row + 1):
                    x[row * n + j] -= x[i * n + row] * x[i * n + j]
        for i in range(k, k + _BLOCK):  # the inverse of the block, row by row
            for j in range(k, i):
                total = 0.0
                for m in range(j, i):
                    total -= x[i * n + m] * inverse[m * n + j]
                inverse[i * n + j] = total / x[i * n + i]
            inverse[i * n + i] = 1.0 / x[i * n + i]
        # The rest of these rows is C_kk⁻ᵀ x, and their share of CᵀC leaves what is above.
        clear(work, 0, n, _BLOCK, n)
        add_product(inverse, k * n + k, 1, n, x, k * n, n, work, 0, n, _BLOCK, _BLOCK, k)
        for i in range(_BLOCK):
            for j in range(k):
                x[(k + i) * n + j] = work[i * n + j]
                work[i * n + j] *= -1.0
        for m in range(0, k, _BLOCK):
            add_product(work, m, 1, n, x, k * n, n, x, m * n, n, _BLOCK, _BLOCK, m + _BLOCK)
    for k in range(_BLOCK, n, _BLOCK):  # rows of C⁻¹ left of its diagonal blocks: -C_kk⁻¹ Σ_m C_km (C⁻¹)_m
        clear(work, 0, n, _BLOCK, n)
        for m in range(0, k, _BLOCK):
            add_product(x, k * n + m, n, 1, inverse, m * n, n, work, 0, n, _BLOCK, _BLOCK, m + _BLOCK)
        for i in range(_BLOCK):
            for j in range(k):
                work[i * n + j] *= -1.0
        add_product(inverse, k * n + k, n, 1, work, 0, n, inverse, k * n, n, _BLOCK, _BLOCK, k)
    return True
