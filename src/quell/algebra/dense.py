"""The optimal strategy with no limit on its bands, for a single participation and a few thousand steps at most.

With X = CᵀC the problem "minimise ‖A C⁻¹‖_F² over C with columns of norm one" becomes

    minimise tr(AᵀA X⁻¹)   over positive definite X with ones on the diagonal,

which is convex, so there is one minimum and L-BFGS finds it (Choquette-Choo et al. 2023, the BandMF paper's reference
[5]). The gradient is -X⁻¹ AᵀA X⁻¹ off the diagonal. X outside the positive definite cone has loss +inf, which the line
search takes as "step too long". C is then the *reverse* Cholesky factor of X: X = CᵀC with C lower triangular, whereas
Cholesky gives X = L Lᵀ. One evaluation costs about 3 n³ operations, all in BLAS.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg import lapack

from quell._types import Array
from quell.algebra.descent import Convergence, minimise
from quell.errors import QuellError


def optimise_dense(
    workload: Array,
    *,
    max_iterations: int = 1000,
    improvement_tolerance: float = 1e-12,
    patience: int = 5,
    on_iteration: Callable[[Convergence], None] | None = None,
) -> tuple[Array, Convergence]:
    """The lower-triangular C (n, n) with columns of norm one that minimises ‖A C⁻¹‖_F, and how it went.

    workload: A, (n, n) lower triangular with a non-zero diagonal. The other arguments are those of
    `quell.algebra.descent.minimise`.

    >>> strategy, how = optimise_dense(np.tri(3))
    >>> strategy.round(3)
    array([[0.73 , 0.   , 0.   ],
           [0.544, 0.823, 0.   ],
           [0.414, 0.568, 1.   ]])
    """
    n = len(workload)
    if workload.shape != (n, n) or not np.diagonal(workload).all():
        raise QuellError(f"the workload must be square with a non-zero diagonal; its shape is {workload.shape}")
    gram = workload.T @ workload

    def objective(x: Array) -> tuple[float, Array]:
        factor, failed = lapack.dpotrf(x, lower=1, clean=0)
        if failed:
            return np.inf, x
        inverse, _ = lapack.dpotri(factor, lower=1)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        product = inverse @ gram
        gradient = -(product @ inverse)
        np.fill_diagonal(gradient, 0.0)  # the diagonal of X stays 1
        return float(np.trace(product)), gradient

    x, how = minimise(
        objective,
        _start(gram),
        max_iterations=max_iterations,
        improvement_tolerance=improvement_tolerance,
        patience=patience,
        on_iteration=on_iteration,
    )
    return reverse_cholesky(x), how


def reverse_cholesky(x: Array) -> Array:
    """The lower-triangular C with positive diagonal and CᵀC = x.

    >>> c = reverse_cholesky(np.array([[2.0, 1.0], [1.0, 1.0]]))
    >>> c
    array([[1., 0.],
           [1., 1.]])
    """
    return np.ascontiguousarray(np.linalg.cholesky(x[::-1, ::-1])[::-1, ::-1].T)


def _start(gram: Array) -> Array:
    """√(AᵀA) scaled to ones on the diagonal: the minimum if the *sum* of X's diagonal were what is bounded."""
    values, vectors = np.linalg.eigh(gram)
    root = (vectors * np.sqrt(np.maximum(values, 1e-12 * values[-1]))) @ vectors.T
    scale = 1.0 / np.sqrt(np.diagonal(root))
    x: Array = root * scale * scale[:, None]
    np.fill_diagonal(x, 1.0)
    return 0.5 * (x + x.T)
