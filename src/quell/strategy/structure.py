"""What a strategy C *is*, numerically: a handful of structures that every family is built from.

A strategy is immutable data. Whatever its family, it can say its size, its dense matrices when they are small,
and its recurrence: how its noise is made and what that costs. One that was found by optimisation also carries
its `solution`, the numbers that a plan file has to keep, and how the search converged. What cannot be made in
float32 without losing noise (`quell.strategy.precision`) cannot be built. Sensitivity, error and
accounting are free functions over these structures, so a new family is one file that returns one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.algebra import series
from quell.algebra.descent import Convergence
from quell.errors import QuellError
from quell.strategy.precision import require_fresh_draws
from quell.strategy.recurrence import Exponentials, Fenwick, Recurrence, Regenerate, Ring

Parameter = int | float | bool | str
_INVERSE = 1e-6  # the most that C·C⁻¹ may differ from 1; the difference itself is added to sensitivities
_LEAST = 1e-100  # on the diagonal of C: squares of numbers below 10⁻¹⁵⁴ lose digits, and columns would seem too short


@dataclass(frozen=True, eq=False)
class ToeplitzStrategy:
    """C = T(c)·diag(column_scale), T(c) lower-triangular Toeplitz; C⁻¹ = diag(1/column_scale)·T(1/c).

    Of the two series c and 1/c at least one is given, with as many coefficients as it has bands; the other follows.
    A sum of exponentials is given by both, and by the buffers that make its noise.
    """

    family: str
    steps: int
    given_coefficients: Array | None = None
    given_noising: Array | None = None
    column_scale: Array | None = None
    exponentials: Exponentials | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    solution: Array | None = None
    convergence: Convergence | None = None

    def __post_init__(self) -> None:
        for values in (self.given_coefficients, self.given_noising, self.column_scale):
            if values is not None and not np.all(np.isfinite(values)):
                raise QuellError(f"{self.family}: the strategy has coefficients that are not finite numbers")
        if self.given_noising is not None and not np.all(np.isfinite(self.coefficients)):
            raise QuellError(
                f"{self.family}: C overflows within {self.steps:,} steps; choose fewer bands or another mechanism"
            )
        if not self.coefficients[0] >= _LEAST:
            raise QuellError(
                f"{self.family}: the diagonal of C is {self.coefficients[0]:.3g}, not positive or too small"
            )
        if not self.inversion_error <= _INVERSE:
            raise QuellError(f"{self.family}: C and C^-1 are not inverse to each other, or not to be told in float64")
        require_fresh_draws(self.family, self.recurrence, self.steps)

    def __repr__(self) -> str:
        return describe(self)

    @cached_property
    def coefficients(self) -> Array:
        """First column of T(c): `bands` entries when C is banded, otherwise all n."""
        if self.given_coefficients is not None:
            return self.given_coefficients
        assert self.given_noising is not None
        return series.reciprocal(self.given_noising, self.bands)

    @cached_property
    def inversion_error(self) -> float:
        """Σ|r| with r = c·(1/c) − 1, where the noise is made from 1/c and c was given or comes from Newton's iteration.

        The C that the noise belongs to is T(1 + r)⁻¹·T(c), so what is computed from c is off by up to 1/(1 − Σ|r|).
        """
        if self.given_noising is None:
            return 0.0
        if self.given_coefficients is None and series.filtered(self.given_noising):
            return 0.0
        residual = series.multiply(self.coefficients, self.given_noising, self.steps)
        residual[0] -= 1.0
        return float(np.sum(np.abs(residual)))

    @cached_property
    def noising(self) -> Array:
        """First column of T(1/c): `bands` entries when C⁻¹ is banded, otherwise all n."""
        if self.given_noising is not None:
            return self.given_noising
        assert self.given_coefficients is not None
        return series.reciprocal(self.given_coefficients, self.noising_bands)

    @property
    def bands(self) -> int:
        """Non-zero diagonals of C."""
        return self._length(self.given_coefficients, self.given_noising)

    @property
    def noising_bands(self) -> int:
        """Non-zero diagonals of C⁻¹."""
        return self._length(self.given_noising, self.given_coefficients)

    def _length(self, own: Array | None, inverse: Array | None) -> int:
        if own is not None:
            return min(len(own), self.steps)
        return 1 if inverse is not None and len(inverse) == 1 else self.steps

    @cached_property
    def recurrence(self) -> Recurrence:
        """Remade from counters where C⁻¹ has no more diagonals than C, from a ring of buffers otherwise."""
        row_scale = None if self.column_scale is None else 1.0 / self.column_scale
        if self.exponentials is not None:
            return replace(self.exponentials, row_scale=row_scale)
        if self.noising_bands <= self.bands and (self.noising_bands < self.steps or self.steps == 1):
            return Regenerate(self.noising[: self.noising_bands], row_scale)
        return Ring(self.coefficients[: self.steps], row_scale)

    @cached_property
    def tail_energy(self) -> Array:
        """(n,) squared norm of each column of T(c): column j has the first n−j coefficients."""
        energy = np.cumsum(np.square(series.pad(self.coefficients, self.steps)))
        return energy[::-1]

    @cached_property
    def column_norms(self) -> Array:
        """(n,) norms of the columns of C."""
        scale = 1.0 if self.column_scale is None else np.abs(self.column_scale)
        return np.asarray(np.sqrt(self.tail_energy) * scale)

    def matrix(self) -> Array:
        dense = _toeplitz_matrix(self.coefficients, self.steps)
        return dense if self.column_scale is None else dense * self.column_scale

    def noising_matrix(self) -> Array:
        dense = _toeplitz_matrix(self.noising, self.steps)
        return dense if self.column_scale is None else dense / self.column_scale[:, None]

    @property
    def row_bands(self) -> Array:
        """(n, bands) row bands of C, `[i, d]` holding entry (i, i−d)."""
        scale = np.ones(self.steps) if self.column_scale is None else self.column_scale
        bands = np.zeros((self.steps, self.bands))
        for d in range(self.bands):
            bands[d:, d] = self.coefficients[d] * scale[: self.steps - d]
        return bands

    def column_normalised(self) -> ToeplitzStrategy:
        """The same strategy with every column of C scaled to norm 1 (Proposition 7 of arXiv:2601.22334)."""
        scale = 1.0 / np.sqrt(self.tail_energy)
        return replace(self, column_scale=scale)


@dataclass(frozen=True, eq=False)
class BandedStrategy:
    """C lower-triangular with few diagonals, otherwise free: `row_bands[i, d]` is entry (i, i−d)."""

    family: str
    row_bands: Array  # (n, bands)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    convergence: Convergence | None = None

    def __post_init__(self) -> None:
        if not np.all(np.isfinite(self.row_bands)) or not np.all(self.row_bands[:, 0] >= _LEAST):
            raise QuellError(
                f"{self.family}: C has entries that are not finite, or a diagonal that is not positive or too small"
            )
        require_fresh_draws(self.family, self.recurrence, self.steps)

    def __repr__(self) -> str:
        return describe(self)

    @property
    def steps(self) -> int:
        return len(self.row_bands)

    @property
    def bands(self) -> int:
        return int(self.row_bands.shape[1])

    @property
    def solution(self) -> Array:
        return self.row_bands

    @cached_property
    def recurrence(self) -> Ring:
        return Ring(self.row_bands)

    @cached_property
    def column_norms(self) -> Array:
        energy = np.zeros(self.steps)
        for d in range(self.bands):
            energy[: self.steps - d] += np.square(self.row_bands[d:, d])
        return np.sqrt(energy)

    def matrix(self) -> Array:
        from quell.algebra.banded import to_dense  # compiled code, loaded when first needed

        return to_dense(self.row_bands)

    def noising_matrix(self) -> Array:
        from scipy.linalg import solve_triangular

        return np.asarray(solve_triangular(self.matrix(), np.eye(self.steps), lower=True))


@dataclass(frozen=True, eq=False)
class TreeStrategy:
    """Binary-tree aggregation: row t of C sums the gradients of steps (t − lowbit(t), t], a Fenwick tree.

    Counting steps from 1, these are exactly the tree nodes that some prefix sum uses, one per step, so C is square.
    """

    steps: int
    family: str = "tree"
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    solution: None = None
    convergence: None = None

    def __post_init__(self) -> None:
        require_fresh_draws(self.family, self.recurrence, self.steps)

    def __repr__(self) -> str:
        return describe(self)

    @property
    def levels(self) -> int:
        return self.steps.bit_length()

    @property
    def bands(self) -> int:
        """As many as there are steps: the last node of a tree can sum all of them."""
        return self.steps

    @cached_property
    def recurrence(self) -> Fenwick:
        return Fenwick(self.steps)

    @cached_property
    def column_norms(self) -> Array:
        """(n,) root of how many rows sum each step."""
        starts, stops = self.intervals()
        change = np.bincount(starts, minlength=self.steps + 1) - np.bincount(stops, minlength=self.steps + 1)
        return np.sqrt(np.cumsum(change[:-1], dtype=np.float64))

    def intervals(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The half-open step intervals [start, stop) that the rows sum, in step order."""
        stops = np.arange(1, self.steps + 1)
        return stops - (stops & -stops), stops

    def matrix(self) -> Array:
        starts, stops = self.intervals()
        step = np.arange(self.steps)
        return ((starts[:, None] <= step) & (step < stops[:, None])).astype(np.float64)

    def noising_matrix(self) -> Array:
        return np.asarray(np.linalg.inv(self.matrix()))


Strategy = ToeplitzStrategy | BandedStrategy | TreeStrategy


def describe(strategy: Strategy) -> str:
    """Family, parameters and steps in one line."""
    shown = {name: value for name, value in strategy.parameters.items() if value is not False}
    inside = ", ".join(_setting(name, value) for name, value in shown.items())
    return f"{strategy.family}{f'({inside})' if inside else ''} over {strategy.steps:,} steps"


def _setting(name: str, value: Parameter) -> str:
    if value is True:
        return name
    return f"{name}={value}" if isinstance(value, str | int) else f"{name}={value:.6g}"


def _toeplitz_matrix(coefficients: Array, n: int) -> Array:
    from scipy.linalg import toeplitz

    column = series.pad(coefficients, n)
    return np.asarray(toeplitz(column, np.concatenate([column[:1], np.zeros(n - 1)])))
