"""Σ v_t·w_t² for w = a/c or w = a·θ: the error of a Toeplitz strategy, its gradient, and sums over sequences.

An SGD workload's series ends in one slow exponential, a_t → κ·ρ^t (ρ = 1 for prefix sums), and so does w once the
transient of the few coefficients has died out: w_t → K·ρ^t. The sum over t is therefore split at a horizon: filtered
exactly before it, in closed form after it. Its cost then does not grow with n. Whether the transient is below
rounding at the horizon is checked on the numbers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quell._types import Array
from quell.algebra.recursion import recursion

_SETTLED = 1e-9  # transient left at the horizon, relative: it decays further, and the final error is computed afresh
_NEGLIGIBLE = 1e-16


@dataclass(frozen=True, eq=False)
class Decoder:
    """Σ v_t·w_t² over n steps, for w = a/c or a·θ. `numerator/denominator` is a's series, of any length."""

    steps: int
    numerator: Array
    denominator: Array
    last_only: bool = False
    horizon: int = 0  # 0: filter all n steps
    rate: float = 0.0  # ρ and κ: a_t → κ·ρ^t
    residue: float = 0.0

    @property
    def length(self) -> int:
        return min(self.horizon, self.steps) or self.steps

    @cached_property
    def weights(self) -> Array:
        steps = np.arange(self.length, dtype=np.float64)
        return np.ones(self.length) if self.last_only else self.steps - steps

    @cached_property
    def tail_weight(self) -> float:
        """Σ_{t ≥ horizon} v_t·ρ^{2t}."""
        left = self.steps - self.length
        if self.rate == 1.0:
            return float(left) if self.last_only else 0.5 * left * (left + 1.0)
        later = np.arange(self.length, self.steps, dtype=np.float64)
        return float(np.sum((1.0 if self.last_only else self.steps - later) * self.rate ** (2 * later)))

    @cached_property
    def workload(self) -> Array:
        return self._filter(self.numerator)

    def _filter(self, values: Array) -> Array:
        padded = np.zeros(self.length)
        padded[: len(values)] = values[: self.length]
        return recursion(self.denominator, padded)

    def _powers(self, count: int) -> Array:
        """ρ^{-j}: how coefficient j of a factor counts in the tail."""
        return self.rate ** -np.arange(count, dtype=np.float64)

    def of_quotient(self, c: Array) -> tuple[float, Array, bool]:
        """Loss, gradient in c, and whether the horizon was far enough, for w = a/c."""
        w = recursion(c, self.workload)
        adjoint = backwards(c, 2 * self.weights * w)
        gradient = -correlate(adjoint, w, len(c))
        loss = dot(self.weights, w * w)
        if self.length == self.steps:
            return loss, gradient, True
        powers = self._powers(len(c))
        at_pole = float(powers @ c)
        constant = self.residue / at_pole
        loss += constant * constant * self.tail_weight
        gradient -= 2 * constant * constant * self.tail_weight / at_pole * powers
        return loss, gradient, self._covers(w, constant, len(c))

    def of_product(self, theta: Array) -> tuple[float, Array, bool]:
        """Loss, gradient in θ, and whether the horizon was far enough, for w = a·θ."""
        w = self._filter(np.convolve(theta, self.numerator)[: self.length])
        weighted = 2 * self.weights * w
        gradient = correlate(weighted, self.workload, len(theta))
        loss = dot(self.weights, w * w)
        if self.length == self.steps:
            return loss, gradient, True
        powers = self._powers(len(theta))
        constant = self.residue * float(powers @ theta)
        loss += constant * constant * self.tail_weight
        gradient += 2 * constant * self.tail_weight * self.residue * powers
        return loss, gradient, self._covers(w, constant, len(theta))

    def product_form(self, count: int) -> Array:
        """The matrix of the quadratic form that `of_product` is of θ's `count` coefficients."""
        shifted = np.zeros((count, self.length))
        for j in range(min(count, self.length)):
            shifted[j, j:] = self.workload[: self.length - j]
        form = np.einsum("it,jt->ij", self.weights * shifted, shifted)
        if self.length < self.steps:
            powers = self._powers(count)
            form += self.residue**2 * self.tail_weight * np.outer(powers, powers)
        return np.asarray(form)

    def _covers(self, w: Array, constant: float, bands: int) -> bool:
        """Whether w has settled to K·ρ^t: its last `bands` entries decide all later ones."""
        last = np.arange(max(0, self.length - bands), self.length)
        settled = constant * self.rate**last
        return bool(np.all(np.abs(w[last] - settled) <= _SETTLED * np.abs(settled) + _NEGLIGIBLE * np.abs(w).max()))


def backwards(divisor: Array, values: Array) -> Array:
    """Solve the transposed Toeplitz system: the recursive filter on reversed time."""
    return recursion(divisor, values[::-1])[::-1]


def correlate(later: Array, earlier: Array, lags: int) -> Array:
    """Σ_i later_i·earlier_{i−j} for j < lags."""
    n = len(later)
    return np.array([dot(later[j:], earlier[: max(n - j, 0)]) for j in range(lags)])


def dot(left: Array, right: Array) -> float:
    """A product that no BLAS splits between threads: the result must not depend on how many there are."""
    return float(np.einsum("i,i", left, right))
