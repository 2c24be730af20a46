"""Losses and hand-written gradients for strategies with few Toeplitz coefficients.

Two problems, both over p coefficients with the first fixed to 1, for a workload with series a:

* C banded: w = a/c, loss = ‖c‖² · Σ v_t·w_t²             (Proposition 3.1 and C.1 of arXiv:2405.15913)
* C⁻¹ banded: w = a·θ, c = 1/θ, loss = ‖leftmost columns of |C|‖² · Σ v_t·w_t²   (BandInvMF, arXiv:2505.12128 §5)

with v_t = n − t for the mean over queries and v_t = 1 for the last, worst one. In both, another energy can take the
place of the norm, such as that under amplification (`quell.algebra.overlaps`). Differentiating a quotient needs
the transposed system, which is the same recursive filter run backwards, so loss and gradient cost two filters
and p dot products.

An SGD workload's series ends in one slow exponential, a_t → κ·ρ^t (ρ = 1 for prefix sums), and so does w once
the transient of the few coefficients has died out: w_t → K·ρ^t. The sum over t is therefore split at a horizon:
filtered exactly before it, in closed form after it. Its cost then does not grow with n. `Tail.covers` checks,
on the numbers themselves, that the transient is below rounding; the optimisers widen the horizon until it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from quell._types import Array
from quell.algebra.descent import Convergence, minimise
from quell.algebra.recursion import recursion
from quell.errors import QuellError

_SETTLED = 1e-9  # transient left at the horizon, relative: it decays further, and the final error is computed afresh
_NEGLIGIBLE = 1e-16
_VANISHED = 1e-9  # size of c at the horizon, relative: its square is what is left out
_ITERATIONS, _IMPROVEMENT = 3000, 1e-9
_LEAST_START, _ROUGHLY = 1e-12, 1e-7  # for energies that are about right themselves


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


Energy = Callable[[Array], tuple[float, Array]]  # of c ≥ 0, and its gradient


def _squared_norm(c: Array) -> tuple[float, Array]:
    """‖c‖²: with no more bands than the separation, all that sensitivity depends on."""
    return _dot(c, c), 2 * c


def leftmost_energy(c: Array, steps: int, separation: int, count: int) -> tuple[float, Array]:
    """‖Σ_j C[:, j·b]‖² and its gradient, for the first coefficients of a C ≥ 0 whose others vanish."""
    length, last = len(c), steps - (count - 1) * separation
    if length <= separation:  # columns do not overlap: `count` copies, the last cut off at the end
        weights = np.full(length, float(count))
        weights[min(last, length) :] -= 1.0
        return _dot(weights, c * c), 2 * weights * c
    blocks = -(-steps // separation)
    stacked = np.zeros((blocks, separation))
    stacked.reshape(-1)[:length] = c
    total = np.cumsum(stacked, axis=0)
    total[count:] -= np.cumsum(stacked, axis=0)[: blocks - count]
    total.reshape(-1)[steps:] = 0.0
    later = np.cumsum(total[::-1], axis=0)
    later[count:] -= np.cumsum(total[::-1], axis=0)[: blocks - count]
    return float(np.sum(np.square(total))), 2 * later[::-1].reshape(-1)[:length]


def energy_of_inverse(theta: Array, energy: Energy, steps: int, length: int) -> tuple[float, Array, bool]:
    """The energy of |c| for c = 1/θ, its gradient in θ, and whether `length` terms of c were enough.

    With |c| instead of c the sum cannot be made small by columns that cancel: no example is bound to make them
    cancel.
    """
    length = min(length, steps)
    impulse = np.zeros(length)
    impulse[0] = 1.0
    c = recursion(theta, impulse)
    enough = length == steps or float(np.abs(c[-len(theta) :]).max()) <= _VANISHED * float(np.abs(c).max())
    value, slope = energy(np.abs(c))
    adjoint = _backwards(theta, slope * np.sign(c))
    return value, -_correlate(adjoint, c, len(theta)), enough


def minimise_quotient(
    decoder: Decoder,
    start: Array,
    energy: Energy | None = None,
    on_iteration: Callable[[Convergence], None] | None = None,
) -> tuple[Array, Convergence]:
    """The c with c_0 = 1 that minimises energy(c)·Σ v_t·w_t² for w = a/c, from a start with c_0 = 1.

    Without an energy it is ‖c‖², by which coefficients stay positive of themselves; for others they are kept so.
    """
    measured = energy or _squared_norm

    def loss(c: Array, now: Decoder) -> tuple[float, Array, bool]:
        error, slope, covered = now.of_quotient(c)
        value, rise = measured(c)
        return error * value, slope * value + error * rise, covered

    if energy is None:
        return _minimise_log(loss, decoder, start[1:], _all_but_first, on_iteration)
    logs = np.log(np.maximum(start[1:], _LEAST_START))
    return _minimise_log(loss, decoder, logs, _positive, on_iteration, _ROUGHLY)


def minimise_product(
    decoder: Decoder, start: Array, energy: Energy, on_iteration: Callable[[Convergence], None] | None = None
) -> tuple[Array, Convergence]:
    """The θ with θ_0 = 1 that minimises energy(|1/θ|)·Σ v_t·w_t² for w = a·θ, from such a start.

    At the optimum θ nearly vanishes at 1: one root is very slow, and the loss depends on its distance from 1 in
    relative terms. The search therefore runs first over θ = (1 − λx)·φ with λ = 1 − e^{−s}, then over θ itself.
    """

    def loss(theta: Array, now: Decoder) -> tuple[float, Array, bool]:
        error, slope, covered = now.of_product(theta)
        value, rise, enough = energy_of_inverse(theta, energy, now.steps, now.length)
        return error * value, slope * value + error * rise, covered and enough

    theta, how = _minimise_log(loss, decoder, _split_slowest(start), _slowest_apart, on_iteration)
    theta, polished = _minimise_log(loss, decoder, theta[1:], _all_but_first, on_iteration)
    if not polished.iterations:  # from a minimum of the first search the second may find no step at all
        return theta, how
    converged = polished.converged or (how.converged and polished.iterations < _ITERATIONS)
    return theta, replace(polished, iterations=how.iterations + polished.iterations, converged=converged)


def _all_but_first(free: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Coefficients (1, free), and how a gradient in them becomes one in `free`."""
    return np.concatenate([[1.0], free]), lambda slope: slope[1:]


def _positive(logs: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Coefficients (1, exp(logs)), and how a gradient in them becomes one in their logarithms."""
    c = np.concatenate([[1.0], np.exp(logs)])
    return c, lambda slope: slope[1:] * c[1:]


def _slowest_apart(free: Array) -> tuple[Array, Callable[[Array], Array]]:
    """θ = (1 − (1 − e^{−s})x)·φ from (s, φ_1, φ_2, …), and how a gradient in θ becomes one in them."""
    if not len(free):
        return np.ones(1), lambda slope: slope[1:]
    rest = np.exp(-free[0])  # 1 − λ
    phi = np.concatenate([[1.0], free[1:]])

    def pull(slope: Array) -> Array:
        by_phi = slope[:-1] - (1.0 - rest) * slope[1:]
        return np.concatenate([[-rest * _dot(slope[1:], phi)], by_phi[1:]])

    return np.convolve([1.0, rest - 1.0], phi), pull


def _split_slowest(theta: Array) -> Array:
    """(s, φ_1, φ_2, …) of θ = (1 − (1 − e^{−s})x)·φ, for θ's slowest root in (0, 1), or λ = 1/2 when it has none."""
    if len(theta) == 1:
        return np.zeros(0)
    rates = np.roots(theta)  # as a polynomial in 1/x
    real = rates.real[(np.abs(rates.imag) < 1e-12) & (rates.real > 0) & (rates.real < 1)]
    slowest = float(real.max()) if len(real) else 0.5
    phi = recursion(np.array([1.0, -slowest]), theta)[:-1]
    return np.concatenate([[-math.log1p(-slowest)], phi[1:]])


def _minimise_log(
    loss: Callable[[Array, Decoder], tuple[float, Array, bool]],
    decoder: Decoder,
    free: Array,
    expand: Callable[[Array], tuple[Array, Callable[[Array], Array]]],
    on_iteration: Callable[[Convergence], None] | None,
    improvement: float = _IMPROVEMENT,
) -> tuple[Array, Convergence]:
    """Minimise the logarithm of a loss of the coefficients `expand`ed from free parameters.

    A point that its horizon does not cover has no loss: a sum cut short is too small, and a search would run after
    it. When a search got stuck at such points the horizon is widened and it goes on from where it stopped.
    """
    met_the_edge = False

    def objective(x: Array) -> tuple[float, Array]:
        nonlocal met_the_edge
        with np.errstate(over="ignore", invalid="ignore"):  # a trial step may make 1/c explode: that is "too long"
            coefficients, pull = expand(x)
            value, slope, covered = loss(coefficients, decoder)
        met_the_edge = met_the_edge or not covered
        if not (covered and math.isfinite(value) and value > 0 and np.all(np.isfinite(slope))):
            return math.inf, np.zeros_like(x)
        return math.log(value), pull(slope / value)

    while True:
        if math.isfinite(objective(free)[0]):
            met_the_edge = False
            free, how = minimise(
                objective,
                free,
                history=20,
                max_iterations=_ITERATIONS,
                improvement_tolerance=improvement,
                on_iteration=on_iteration,
            )
            if how.converged or not met_the_edge:
                return expand(free)[0], how
        if decoder.length == decoder.steps:
            raise QuellError("the search for an optimal strategy starts where its error overflows: use fewer bands")
        decoder = replace(decoder, horizon=4 * decoder.length)


def _backwards(divisor: Array, values: Array) -> Array:
    """Solve the transposed Toeplitz system: the recursive filter on reversed time."""
    return recursion(divisor, values[::-1])[::-1]


def _correlate(later: Array, earlier: Array, lags: int) -> Array:
    """Σ_i later_i·earlier_{i−j} for j < lags."""
    n = len(later)
    return np.array([_dot(later[j:], earlier[: n - j]) for j in range(lags)])


def _dot(left: Array, right: Array) -> float:
    """A product that no BLAS splits between threads: the result must not depend on how many there are."""
    return float(np.einsum("i,i", left, right))
