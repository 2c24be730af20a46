"""Lower-banded matrices, exact query variances, and the optimal banded strategy in O(n·p²).

A lower-banded n×n matrix M with w diagonals is stored by row: `bands[i, d] = M[i, i-d]`, shape (n, w). Entries that
would lie left of column zero are ignored. A matrix that repeats one row of bands (Toeplitz) may be a broadcast view.

Why banded: the inverse of every SGD workload A has two or three diagonals, so for a banded strategy C the matrix
E = C·A⁻¹ is banded too, and the variance of every released query, the diagonal of W = (EᵀE)⁻¹ = B Bᵀ with
B = A C⁻¹, follows from a recursion that never leaves the band. That makes the loss of Problem 2.1 of the BandMF paper
(arXiv:2405.15913; its constraint should read C_ij = 0 if j > i or i ≥ j + b)

    minimise ‖A C⁻¹‖_F² = Σ_i W_ii   over b-banded C with columns of norm one

cost O(n·p²) instead of the O(n²·p) of its Algorithm 2, and the gradient as much again. `_banded_kernels` derives
the recursion and its derivative.
"""

from __future__ import annotations

import numpy as np

from quell._types import Array
from quell.algebra import _banded_kernels as kernels
from quell.algebra.descent import Solution, Watch, minimise
from quell.errors import QuellError

_LARGE = 4_000_000  # unknowns from which memory decides: a shorter history, in single precision


def to_dense(bands: Array) -> Array:
    """The (n, n) matrix, for small n.

    >>> to_dense(np.array([[1.0, 0.0], [2.0, 3.0], [4.0, 5.0]]))
    array([[1., 0., 0.],
           [3., 2., 0.],
           [0., 5., 4.]])
    """
    n, width = bands.shape
    dense = np.zeros((n, n))
    for d in range(min(width, n)):
        dense[np.arange(d, n), np.arange(n - d)] = bands[d:, d]
    return dense


def multiply(left: Array, right: Array) -> Array:
    """The product of two row-banded matrices: w₁ and w₂ diagonals give w₁ + w₂ - 1.

    >>> prefix_inverse = np.broadcast_to([1.0, -1.0], (3, 2))
    >>> multiply(prefix_inverse, prefix_inverse)
    array([[ 1.,  0.,  0.],
           [ 1., -2.,  0.],
           [ 1., -2.,  1.]])
    """
    if left.shape[0] != right.shape[0]:
        raise QuellError(f"cannot multiply {left.shape[0]} rows by {right.shape[0]}: the matrices must be of one size")
    out = np.zeros((left.shape[0], left.shape[1] + right.shape[1] - 1))
    kernels.multiply_bands(*_compact(left), *_compact(right), out)
    return out


def query_variances(recursion: Array, forcing: Array) -> Array:
    """Var(θ_i) for every i, where E θ = T(f) z, z i.i.d. standard normal; exact, in O(n(w² + w·q)).

    E is the matrix with row bands `recursion` (n, w) and T(f) the lower-triangular Toeplitz matrix with first column
    `forcing` (q,). Two uses: a banded strategy C has E = C·A⁻¹ and f = 1; a banded inverse with noising
    coefficients f and column norms D has E = D⁻¹·A⁻¹.

    >>> random_walk = np.broadcast_to([1.0, -1.0], (4, 2))
    >>> query_variances(random_walk, np.ones(1))
    array([1., 2., 3., 4.])
    """
    n, width = recursion.shape
    forcing = np.ascontiguousarray(forcing, dtype=np.float64)
    bands, step = _compact(recursion)
    out = np.empty(n)
    if forcing.size == 1 and width > kernels.TILE:
        kernels.banded_variances(bands, step, *_sizes(width), out)
        out *= forcing[0] ** 2
    else:
        kernels.forced_variances(bands, step, forcing, out)
    return out


def normalise_columns(bands: Array) -> Array:
    """The same matrix with every column scaled to norm one.

    >>> normalise_columns(np.array([[3.0, 0.0], [2.0, 4.0]]))
    array([[0.6, 0. ],
           [1. , 0.8]])
    """
    scaled = np.array(bands, dtype=np.float64)
    norms = np.empty(len(scaled))
    if not kernels.column_norms(scaled, norms):
        raise QuellError("a strategy needs a positive diagonal: at least one entry C[i, i] is zero, negative or nan")
    kernels.divide_columns(scaled, norms)
    return scaled


def optimise(
    start: Array, workload_inverse: Array, *, max_iterations: int = 500, on_iteration: Watch | None = None
) -> Solution:
    """The optimal banded strategy with columns of norm one (Problem 2.1), and how the optimisation went.

    Args:
        start: (n, p) row bands; its columns are scaled first. Take the optimal banded Toeplitz strategy.
        workload_inverse: (n, r) row bands of A⁻¹.
        max_iterations: accepted steps after which we stop, unconverged.
        on_iteration: see `quell.algebra.descent.minimise`.

    It stops when five steps in a row each lower the loss by less than 1e-13 per unknown, but not less than 1e-12 nor
    more than 3e-8: small problems are solved to the last digit, large ones to about one part in a million.

    The loss does not change when a column of theta is scaled, so its gradient is orthogonal to theta's columns:
    nothing needs to be projected. How much column j matters is known beforehand, its curvature is about
    proportional to (AᵀA)_jj (n - j for prefix sums); dividing by that saves up to a third of the steps, fewer when
    p is large.

    >>> toeplitz = np.broadcast_to([1.0, 0.5], (4, 2))
    >>> strategy, how = optimise(toeplitz, np.broadcast_to([1.0, -1.0], (4, 2)))
    >>> round(how.loss, 6), how.converged
    (7.546408, True)
    """
    point = normalise_columns(start)
    problem = Loss(point.shape, workload_inverse)
    curvature = problem.column_weights()
    large = point.size > _LARGE
    theta, how = minimise(
        problem,
        point,
        history=5 if large else 10,
        history_dtype=np.float32 if large else np.float64,
        max_iterations=max_iterations,
        improvement_tolerance=min(max(1e-13 * point.size, 1e-12), 3e-8),
        patience=5,
        precondition=lambda vector: kernels.divide_columns(vector, curvature),
        overwrite_start=True,
        on_iteration=on_iteration,
    )
    del problem, point
    norms = np.empty(len(theta))
    kernels.column_norms(theta, norms)
    kernels.divide_columns(theta, norms)
    return theta, how


class Loss:
    """‖A C⁻¹‖_F² and its gradient in theta, C having theta's columns scaled to norm one; keeps its work space.

    Args:
        shape: (n, p), that of theta's row bands.
        workload_inverse: (n, r) row bands of A⁻¹.

    The loss is +inf where a diagonal entry is not positive or C⁻¹ overflows.

    >>> Loss((3, 1), np.broadcast_to([1.0, -1.0], (3, 2)))(np.ones((3, 1)))[0]  # C = I
    6.0
    """

    def __init__(self, shape: tuple[int, ...], workload_inverse: Array) -> None:
        n, bands = shape
        if workload_inverse.shape[0] != n:
            raise QuellError(f"the strategy has {n} rows but the workload {workload_inverse.shape[0]}: make them equal")
        self.inverse = np.ascontiguousarray(workload_inverse.T, dtype=np.float64)  # by lag: (r, n)
        self.sizes = _sizes(bands + len(self.inverse) - 1)
        self.norms, self.dots = np.empty(n), np.empty(n)
        self.gradient = np.empty((n, bands))

    def __call__(self, theta: Array) -> tuple[float, Array]:
        if not kernels.column_norms(theta, self.norms):
            return np.inf, self.gradient
        np.reciprocal(self.norms, out=self.norms)
        loss = kernels.banded_loss_and_gradient(theta, self.norms, self.inverse, *self.sizes, self.gradient, self.dots)
        return float(loss), self.gradient

    def column_weights(self) -> Array:
        """(AᵀA)_jj: minus half the derivative of the loss, at C = I, in the logarithm of column j's scale."""
        alone = Loss((len(self.norms), 1), self.inverse.T)
        alone(np.ones((len(self.norms), 1)))
        importance = -0.5 * alone.dots
        floored: Array = np.maximum(importance, 1e-6 * importance.max())
        return floored


def _compact(bands: Array) -> tuple[Array, int]:
    """A contiguous array and the step from one row to the next in it: 0 for a broadcast view of one row."""
    if len(bands) > 1 and bands.strides[0] == 0:
        return np.ascontiguousarray(bands[:1], dtype=np.float64), 0
    return np.ascontiguousarray(bands, dtype=np.float64), 1


def _sizes(width: int) -> tuple[int, int, int]:
    """Window, block and segment of the kernels for a matrix with `width` diagonals, as measured to be fastest."""
    window = max(width - 1, 1)
    block = 8 if window <= 64 else 16 if window <= 128 else 32
    window = -(-window // block) * block
    return window, block, max(64, 2 * window)
