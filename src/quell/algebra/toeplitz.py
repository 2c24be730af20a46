"""Losses and hand-written gradients for strategies with few Toeplitz coefficients.

Two problems, both over p coefficients with the first fixed to 1, for a workload with series a:

* C banded: w = a/c, loss = ‖c‖² · Σ v_t·w_t²             (Proposition 3.1 and C.1 of arXiv:2405.15913)
* C⁻¹ banded: w = a·θ, c = 1/θ, loss = ‖leftmost columns of |C|‖² · Σ v_t·w_t²   (BandInvMF, arXiv:2505.12128 §5)

with v_t = n − t for the mean over queries and v_t = 1 for the last, worst one. Differentiating a quotient needs
the transposed system, which is the same recursive filter run backwards, so loss and gradient cost two filters
and p dot products.

An SGD workload's series ends in one slow exponential, a_t → κ·ρ^t (ρ = 1 for prefix sums), and so does w once
the transient of the few coefficients has died out: w_t → K·ρ^t. The sum over t is therefore split at a horizon:
filtered exactly before it, in closed form after it. Its cost then does not grow with n. `Tail.covers` checks,
on the numbers themselves, that the transient is below rounding; the optimisers double the horizon until it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.signal import lfilter

from quell._types import Array
from quell.algebra.descent import Convergence, minimise

_SETTLED = 1e-9  # transient left at the horizon, relative: it decays further, and the final error is computed afresh
_NEGLIGIBLE = 1e-16
_ITERATIONS, _IMPROVEMENT = 5000, 1e-12


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
        return np.asarray(lfilter([1.0], self.denominator, padded))

    def _powers(self, count: int) -> Array:
        """ρ^{-j}: how coefficient j of a factor counts in the tail."""
        return self.rate ** -np.arange(count, dtype=np.float64)

    def of_quotient(self, c: Array) -> tuple[float, Array, bool]:
        """Loss, gradient in c, and whether the horizon was far enough, for w = a/c."""
        w = np.asarray(lfilter([1.0], c, self.workload))
        adjoint = _backwards(c, 2 * self.weights * w)
        gradient = -_correlate(adjoint, w, len(c))
        loss = _dot(self.weights, w * w)
        if self.length == self.steps:
            return loss, gradient, True
        powers = self._powers(len(c))
        at_pole = float(powers @ c)
        constant = self.residue / at_pole
        loss += constant**2 * self.tail_weight
        gradient -= 2 * constant**2 * self.tail_weight / at_pole * powers
        return loss, gradient, self._covers(w, constant, len(c))

    def of_product(self, theta: Array) -> tuple[float, Array, bool]:
        """Loss, gradient in θ, and whether the horizon was far enough, for w = a·θ."""
        w = self._filter(np.convolve(theta, self.numerator)[: self.length])
        weighted = 2 * self.weights * w
        gradient = _correlate(weighted, self.workload, len(theta))
        loss = _dot(self.weights, w * w)
        if self.length == self.steps:
            return loss, gradient, True
        powers = self._powers(len(theta))
        constant = self.residue * float(powers @ theta)
        loss += constant**2 * self.tail_weight
        gradient += 2 * constant * self.tail_weight * self.residue * powers
        return loss, gradient, self._covers(w, constant, len(theta))

    def _covers(self, w: Array, constant: float, bands: int) -> bool:
        """Whether w has settled to K·ρ^t: its last `bands` entries decide all later ones."""
        last = np.arange(max(0, self.length - bands), self.length)
        settled = constant * self.rate**last
        return bool(np.all(np.abs(w[last] - settled) <= _SETTLED * np.abs(settled) + _NEGLIGIBLE * np.abs(w).max()))


def leftmost_energy(theta: Array, steps: int, separation: int, count: int, length: int) -> tuple[float, Array, bool]:
    """‖Σ_j |C|[:, j·b]‖² for c = 1/θ, its gradient in θ, and whether `length` terms of c were enough.

    With |c| instead of c the sum cannot be made small by columns that cancel: no example is bound to make them
    cancel.
    """
    length = min(length, steps)
    impulse = np.zeros(length)
    impulse[0] = 1.0
    c = np.asarray(lfilter([1.0], theta, impulse))
    signs = np.sign(c)
    enough = length == steps or float(np.abs(c[-len(theta) :]).max()) <= _NEGLIGIBLE * float(np.abs(c).max())
    used = c * signs
    last = steps - (count - 1) * separation
    if length <= separation:  # columns do not overlap: `count` copies, the last cut off at the end
        weights = np.full(length, float(count))
        weights[min(last, length) :] -= 1.0
        energy, sums = _dot(weights, used * used), 2 * weights * used
    else:
        blocks = -(-steps // separation)
        stacked = np.zeros((blocks, separation))
        stacked.reshape(-1)[:length] = used
        total = np.cumsum(stacked, axis=0)
        total[count:] -= np.cumsum(stacked, axis=0)[: blocks - count]
        total.reshape(-1)[steps:] = 0.0
        energy = float(np.sum(np.square(total)))
        later = np.cumsum(total[::-1], axis=0)
        later[count:] -= np.cumsum(total[::-1], axis=0)[: blocks - count]
        sums = 2 * later[::-1].reshape(-1)[:length]
    adjoint = _backwards(theta, sums * signs)
    return energy, -_correlate(adjoint, c, len(theta)), enough


def minimise_quotient(
    decoder: Decoder, start: Array, on_iteration: Callable[[Convergence], None] | None = None
) -> tuple[Array, Convergence]:
    """The c with c_0 = 1 that minimises ‖c‖²·Σ v_t·w_t² for w = a/c, from a start with c_0 = 1."""

    def loss(c: Array, now: Decoder) -> tuple[float, Array, bool]:
        error, slope, covered = now.of_quotient(c)
        norm = _dot(c, c)
        return error * norm, slope * norm + error * 2 * c, covered

    return _minimise_log(loss, decoder, start, on_iteration)


def minimise_product(
    decoder: Decoder,
    start: Array,
    separation: int,
    count: int,
    on_iteration: Callable[[Convergence], None] | None = None,
) -> tuple[Array, Convergence]:
    """The θ with θ_0 = 1 that minimises ‖leftmost columns of |1/θ|‖²·Σ v_t·w_t² for w = a·θ."""

    def loss(theta: Array, now: Decoder) -> tuple[float, Array, bool]:
        error, slope, covered = now.of_product(theta)
        energy, rise, enough = leftmost_energy(theta, now.steps, separation, count, now.length)
        return error * energy, slope * energy + error * rise, covered and enough

    return _minimise_log(loss, decoder, start, on_iteration)


def _minimise_log(
    loss: Callable[[Array, Decoder], tuple[float, Array, bool]],
    decoder: Decoder,
    start: Array,
    on_iteration: Callable[[Convergence], None] | None,
) -> tuple[Array, Convergence]:
    """Minimise the logarithm of a loss over all coefficients but the first, doubling the horizon until it covers."""
    free = start[1:]
    while True:
        reached = True

        def objective(x: Array, now: Decoder = decoder) -> tuple[float, Array]:
            nonlocal reached
            with np.errstate(over="ignore", invalid="ignore"):  # a trial step may make 1/c explode: that is "too long"
                value, slope, reached = loss(np.concatenate([[1.0], x]), now)
            if not (math.isfinite(value) and value > 0 and np.all(np.isfinite(slope))):
                return math.inf, np.zeros_like(x)
            return math.log(value), slope[1:] / value

        objective(free)
        if reached:
            free, how = minimise(
                objective,
                free,
                history=20,
                max_iterations=_ITERATIONS,
                improvement_tolerance=_IMPROVEMENT,
                on_iteration=on_iteration,
            )
            objective(free)
            if reached or decoder.length == decoder.steps:
                return np.concatenate([[1.0], free]), how
        decoder = replace(decoder, horizon=2 * decoder.length)


def _backwards(divisor: Array, values: Array) -> Array:
    """Solve the transposed Toeplitz system: the recursive filter on reversed time."""
    return np.asarray(lfilter([1.0], divisor, values[::-1]))[::-1]


def _correlate(later: Array, earlier: Array, lags: int) -> Array:
    """Σ_i later_i·earlier_{i−j} for j < lags."""
    n = len(later)
    return np.array([_dot(later[j:], earlier[: n - j]) for j in range(lags)])


def _dot(left: Array, right: Array) -> float:
    """A product that no BLAS splits between threads: the result must not depend on how many there are."""
    return float(np.einsum("i,i", left, right))
