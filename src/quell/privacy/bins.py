"""The Gram matrix of bins: all that balls-in-bins accounting needs to know of a strategy.

An example in bin j takes part in steps j, j + b, j + 2b, … and, with C ≥ 0, moves the output by at most
m_j = Σ_i C[:, j + ib]. Only G_jl = ⟨m_j, m_l⟩ matters, and δ only grows if G is replaced by a larger matrix. So
rounding errors are rounded up, and many bins get a circulant matrix (Proof 4 in docs/proofs.md). Entries of C that are
negative by rounding are set to 0, and δ is raised for it (`slack`, Proof 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from quell._types import Array
from quell.errors import QuellError
from quell.participation import Participation
from quell.strategy.structure import BandedStrategy, Strategy, ToeplitzStrategy


class Binned(Protocol):
    """What bins need to know of a scheme: their number, and how often each takes part."""

    @property
    def separation(self) -> int: ...

    @property
    def participation(self) -> Participation: ...


_DENSE = 1024  # bins up to which draws by a b×b factor are affordable, and G is exact
_ROUNDING = 1e-12  # relative to the largest entry, added to all of G: far above the error of an FFT
_NEGATIVE = 1e-9  # relative size up to which negative entries of C may be rounding


@dataclass(frozen=True, eq=False)
class Bins:
    """The Gram matrix of b bins: `table` is (b, b), or (b,) the first row of a circulant matrix that dominates it."""

    table: Array
    slack: float = 0.0  # norm by which entries of C set to 0 could have moved an output

    @property
    def count(self) -> int:
        return len(self.table)

    @property
    def exact(self) -> bool:
        return self.table.ndim == 2

    @cached_property
    def energies(self) -> Array:
        """(b,) ‖m_j‖²."""
        return np.diag(self.table).copy() if self.exact else np.full(self.count, self.table[0])

    @cached_property
    def pull(self) -> Array:
        """(b,) ⟨m_j, m̄⟩ with m̄ the mean of all m_l."""
        return self.table.mean(axis=1) if self.exact else np.full(self.count, self.table.mean())

    @property
    def is_orthogonal(self) -> bool:
        """No two bins overlap: independent noise."""
        if not self.exact:
            return not np.any(self.table[1:] > 4 * _ROUNDING * self.table[0])
        rest = self.table - np.diag(self.energies)
        return not np.any(rest > 4 * _ROUNDING * np.minimum.outer(self.energies, self.energies))

    def rows(self, bins: NDArray[np.int64]) -> Array:
        """(m, b) rows of G."""
        return self.table[bins] if self.exact else self._windows[self.count - bins]

    def noise(self, random: np.random.Generator, draws: int) -> Array:
        """(draws, b) from N(0, G)."""
        from scipy import fft
        from scipy.linalg.blas import dtrmm

        if self.exact:  # a triangular factor: half the work of a product with any other matrix
            normal = random.standard_normal((draws, self.count))
            return np.asarray(dtrmm(1.0, self.factor, normal.T, lower=1, overwrite_b=1).T)
        half = self.count // 2 + 1
        waves = random.standard_normal((draws, half, 2)).view(np.complex128)[..., 0]
        size = np.sqrt(self._spectrum * self.count / 2)
        size[0] *= math.sqrt(2)
        if self.count % 2 == 0:
            size[-1] *= math.sqrt(2)
        return np.asarray(fft.irfft(waves * size, self.count))

    @cached_property
    def factor(self) -> Array:
        """Lower triangular, with the matrix as its square."""
        return np.asfortranarray(np.linalg.cholesky(self.table))

    @cached_property
    def _windows(self) -> Array:
        return sliding_window_view(np.concatenate([self.table, self.table]), self.count)

    @cached_property
    def _spectrum(self) -> Array:
        return np.maximum(np.fft.rfft(self.table).real, 0.0)


def bins_of(strategy: Strategy, sampling: Binned) -> Bins:
    """The bins of a strategy under balls-in-bins sampling (Proof 4).

    >>> from quell import strategy, workload
    >>> from quell.schemes import BallsInBins
    >>> scheme = BallsInBins(steps=6, separation=3)
    >>> bins_of(strategy.build("identity", workload.prefix(6), scheme.participation), scheme).energies.round(9)
    array([2., 2., 2.])
    """
    slack = negative_slack(strategy, sampling.participation.count)
    b = sampling.separation
    if isinstance(strategy, ToeplitzStrategy) and strategy.column_scale is None:
        first, ends = _toeplitz_row(np.maximum(strategy.coefficients, 0.0), strategy.steps, b)
        first = first + _ROUNDING * first[0]
        table = _toeplitz_gram(first, ends) if b <= _DENSE else _folded_kernel(first)
    else:
        gram = _gram_by_rows(strategy, b) if isinstance(strategy, ToeplitzStrategy) else _sparse_gram(strategy, b)
        gram = gram + _ROUNDING * float(gram.max())
        table = gram if b <= _DENSE else _kernel(gram)
    if isinstance(strategy, ToeplitzStrategy):  # C may be off by that, which can make patterns meet that do not here
        error = strategy.inversion_error
        table = table * (1 + 2 * error) ** 2 + 4 * error * float(table.max())
    return Bins(_positive_definite(table), slack)


def negative_slack(strategy: Strategy, participations: int) -> float:
    """How far setting negative entries of C to 0 can move an output (Proof 5); refuses entries beyond rounding."""
    if isinstance(strategy, ToeplitzStrategy):
        scale = 1.0 if strategy.column_scale is None else strategy.column_scale
        entries, largest = strategy.coefficients, float(np.max(np.abs(scale)))
        if np.any(np.asarray(scale) <= 0):
            raise QuellError(f"{strategy!r} has a column scale that is not positive: amplified accounting needs C >= 0")
        below = float(np.linalg.norm(np.minimum(entries, 0.0))) * largest
    elif isinstance(strategy, BandedStrategy):
        entries, largest = strategy.row_bands, 1.0
        below = float(np.linalg.norm(np.minimum(entries, 0.0)))
    else:
        return 0.0
    worst, size = float(entries.min()), float(np.abs(entries).max())
    if worst < -_NEGATIVE * size:
        raise QuellError(
            f"{strategy!r} has negative entries in C (down to {worst:.3g}), and this sampling scheme can only be "
            "priced for C >= 0: use cyclic sampling, or another strategy"
        )
    return participations * below


def _toeplitz_row(c: Array, n: int, b: int) -> tuple[Array, Array]:
    """Row 0 of G, and e_j = Σ_i c[n − 1 − j − ib] for every bin."""
    full = np.zeros(-(-n // b) * b)
    full[: min(n, len(c))] = c[:n]
    first = np.cumsum(full.reshape(-1, b), axis=0).reshape(-1)[:n]  # m_0
    row = _fold(correlate(full[:n], first), b)
    backwards = np.zeros(len(full))
    backwards[:n] = full[:n][::-1]
    return row, _fold(backwards[:n], b)


def _toeplitz_gram(first: Array, ends: Array) -> Array:
    b = len(first)
    gram = np.empty((b, b))
    gram[0] = first
    for j in range(b - 1):
        gram[j + 1, 0] = first[j + 1]
        gram[j + 1, 1:] = gram[j, :-1] - ends[j] * ends[:-1]
    return np.asarray(np.maximum(gram, gram.T))


def _folded_kernel(first: Array) -> Array:
    """The first row of a circulant matrix that dominates G: G_jl ≤ first[|j − l|] because e ≥ 0 (Proof 4)."""
    return np.asarray(np.maximum(first, np.concatenate([first[:1], first[:0:-1]])))


def _kernel(gram: Array) -> Array:
    b = len(gram)
    bins = np.arange(b)
    kernel = np.array([gram[bins, (bins + lag) % b].max() for lag in range(b)])
    return _folded_kernel(kernel)


def _gram_by_rows(strategy: ToeplitzStrategy, b: int) -> Array:
    """The Gram matrix of column-scaled Toeplitz C: each row by two FFT products."""
    n = strategy.steps
    c = np.zeros(n)
    c[: min(n, strategy.bands)] = np.maximum(strategy.coefficients[:n], 0.0)
    assert strategy.column_scale is not None
    gram = np.empty((b, b))
    together = max(1, (1 << 22) // n)
    for start in range(0, b, together):
        chosen = np.zeros((min(together, b - start), n))
        for row, bin_ in enumerate(range(start, start + len(chosen))):
            chosen[row, bin_::b] = strategy.column_scale[bin_::b]
        gram[start : start + len(chosen)] = _fold(correlate(c, convolve(c, chosen)) * strategy.column_scale, b)
    return np.asarray(np.maximum(gram, gram.T))


def _sparse_gram(strategy: Strategy, b: int) -> Array:
    """The Gram matrix of any other C, from its entries."""
    from scipy import sparse

    if isinstance(strategy, BandedStrategy):
        steps, lags = np.nonzero(np.tri(strategy.steps, strategy.bands, 0, dtype=bool))
        values, columns = np.maximum(strategy.row_bands[steps, lags], 0.0), steps - lags
    else:
        matrix = strategy.matrix()
        steps, columns = np.nonzero(matrix)
        values = matrix[steps, columns]
    moved = sparse.csr_matrix((values, (steps, columns % b)), shape=(strategy.steps, b))
    return np.asarray((moved.T @ moved).todense())


def _positive_definite(table: Array) -> Array:
    """Raise the diagonal until the matrix is positive definite, which only makes it larger."""
    if table.ndim == 1:
        lowest = float(np.fft.rfft(table).real.min())
        table[0] += max(0.0, -lowest) * (1 + 1e-9)
        return table
    step = _ROUNDING * float(table.max())
    while True:
        try:
            np.linalg.cholesky(table)
            return table
        except np.linalg.LinAlgError:
            table = table + step * np.eye(len(table))
            step *= 4.0


def _fold(values: Array, b: int) -> Array:
    """Add up the epochs: (…, n) → (…, b)."""
    n = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], -(-n // b) * b))
    padded[..., :n] = values
    return np.asarray(padded.reshape(*values.shape[:-1], -1, b).sum(axis=-2))


def convolve(c: Array, values: Array) -> Array:
    """C·values for Toeplitz C, over the last axis."""
    from scipy import fft

    n = len(c)
    size = fft.next_fast_len(2 * n, real=True)
    return np.asarray(fft.irfft(fft.rfft(values, size) * fft.rfft(c, size), size)[..., :n])


def correlate(c: Array, values: Array) -> Array:
    """Cᵀ·values for Toeplitz C, over the last axis."""
    from scipy import fft

    n = len(c)
    size = fft.next_fast_len(2 * n, real=True)
    return np.asarray(fft.irfft(fft.rfft(values, size) * np.conj(fft.rfft(c, size)), size)[..., :n])
