"""Losses and hand-written gradients for strategies with few Toeplitz coefficients.

Two problems, both over p coefficients with the first fixed to 1, for a workload with series a:

* C banded: w = a/c, loss = ‖c‖² · Σ v_t·w_t²             (Proposition 3.1 and C.1 of arXiv:2405.15913)
* C⁻¹ banded: w = a·θ, c = 1/θ, loss = ‖leftmost columns of |C|‖² · Σ v_t·w_t²   (BandInvMF, arXiv:2505.12128 §5)

with v_t = n − t for the mean over queries and v_t = 1 for the last, worst one. In both, another energy can take the
place of the norm, such as that under amplification (`quell.algebra.overlaps`). Differentiating a quotient needs
the transposed system, which is the same recursive filter run backwards, so loss and gradient cost two filters
and p dot products.

The sum over t is that of `quell.algebra.decoder`, whose horizon the optimisers widen until it is far enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from quell._types import Array
from quell.algebra.decoder import Decoder, backwards, correlate, dot
from quell.algebra.descent import Convergence, Solution, Watch, minimise
from quell.algebra.recursion import impulse_response, recursion
from quell.errors import QuellError

_VANISHED = 1e-9  # size of c where it is cut off, relative: its square is what is left out
_ITERATIONS, _IMPROVEMENT = 3000, 1e-9
_FIRST_STEPS = 30  # by gradients alone, before second derivatives are worth their price
_LEAST_START, _ROUGHLY = 1e-12, 1e-7  # for energies that are about right themselves
_LEAST_BEND = 1e-12  # curvature, relative: less is rounding


Energy = Callable[[Array], tuple[float, Array]]  # of c ≥ 0, and its gradient
Expansion = Callable[[Array], tuple[Array, Callable[[Array], Array]]]  # free parameters to coefficients, slopes back


def _squared_norm(c: Array) -> tuple[float, Array]:
    """‖c‖²: with no more bands than the separation, all that sensitivity depends on."""
    return dot(c, c), 2 * c


def leftmost_energy(c: Array, steps: int, separation: int, count: int) -> tuple[float, Array]:
    """‖Σ_j C[:, j·b]‖² and its gradient, for the first coefficients of a C ≥ 0 whose others vanish."""
    length, last = len(c), steps - (count - 1) * separation
    if length <= separation:  # columns do not overlap: `count` copies, the last cut off at the end
        weights = np.full(length, float(count))
        weights[min(last, length) :] -= 1.0
        return dot(weights, c * c), 2 * weights * c
    blocks = -(-steps // separation)
    stacked = np.zeros((blocks, separation))
    stacked.reshape(-1)[:length] = c
    total = np.cumsum(stacked, axis=0)
    total[count:] -= np.cumsum(stacked, axis=0)[: blocks - count]
    total.reshape(-1)[steps:] = 0.0
    later = np.cumsum(total[::-1], axis=0)
    later[count:] -= np.cumsum(total[::-1], axis=0)[: blocks - count]
    return float(np.sum(np.square(total))), 2 * later[::-1].reshape(-1)[:length]


def energy_of_inverse(theta: Array, energy: Energy, steps: int) -> tuple[float, Array]:
    """The energy of |c| for c = 1/θ, and its gradient in θ; c is followed until it has vanished.

    With |c| instead of c the sum cannot be made small by columns that cancel: no example is bound to make them
    cancel.
    """
    c = impulse_response(theta, steps, _VANISHED)
    if math.isinf(c[-1]):
        return math.inf, np.zeros_like(theta)
    value, slope = energy(np.abs(c))
    adjoint = backwards(theta, slope * np.sign(c))
    return value, -correlate(adjoint, c, len(theta))


def curvature_of_inverse(theta: Array, energy: Energy, steps: int) -> Array:
    """About the Hessian of ln energy(|1/θ|) in θ: exactly it for a quadratic energy of a c ≥ 0 that dies out.

    The derivatives of c = 1/θ are shifts of powers of c, ∂c/∂θ_j = −x^j·c² and ∂²c/∂θ_i∂θ_j = 2·x^{i+j}·c³, and a
    quadratic energy takes c² to half the gradient there. All p² entries hence come from 3p products of sequences.
    """
    count = len(theta)
    c = impulse_response(theta, steps, _VANISHED)
    value, slope = energy(np.abs(c))
    signs = np.sign(c)
    square = recursion(theta, c)
    spread = energy(np.abs(square))[1] * np.sign(square)
    first = -correlate(slope * signs, square, count) / value
    lags = correlate(spread, square, count)
    bends = 2 * correlate(slope * signs, recursion(theta, square), 2 * count - 1)
    order = np.arange(count)
    hessian = lags[np.abs(order[:, None] - order)] + bends[order[:, None] + order]
    return np.asarray(hessian / value - np.outer(first, first))


def minimise_quotient(
    decoder: Decoder, start: Array, energy: Energy | None = None, on_iteration: Watch | None = None
) -> Solution:
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
    decoder: Decoder, start: Array, energy: Energy, smooth: bool, on_iteration: Watch | None = None
) -> Solution:
    """The θ with θ_0 = 1 that minimises energy(|1/θ|)·Σ v_t·w_t² for w = a·θ, from such a start.

    At the optimum θ nearly vanishes at 1: one root is very slow, and the loss depends on its distance from 1 in
    relative terms. The search therefore runs first over θ = (1 − λx)·φ with λ = 1 − e^{−s}, then over θ itself. In long
    runs the loss is too unevenly curved for gradients alone; where it is `smooth`, that is where 1/θ stays positive or
    its columns do not overlap, the search goes on with second derivatives once it is near.
    """

    def loss(theta: Array, now: Decoder) -> tuple[float, Array, bool]:
        error, slope, covered = now.of_product(theta)
        value, rise = energy_of_inverse(theta, energy, now.steps)
        return error * value, slope * value + error * rise, covered

    form = decoder.product_form(len(start)) if smooth else np.zeros((0, 0))  # a longer horizon would hardly change it

    def curvature(theta: Array) -> Array:
        slope = form @ theta
        error = theta @ slope
        quadratic = 2 * form / error - 4 * np.outer(slope, slope) / error**2
        return np.asarray(quadratic + curvature_of_inverse(theta, energy, decoder.steps))

    def search(free: Array, expand: Expansion, **options: Any) -> Solution:
        return _minimise_log(loss, decoder, free, expand, on_iteration, **options)

    if not smooth:
        theta, how = search(_split_slowest(start), _slowest_apart)
        theta, polished = search(theta[1:], _all_but_first)
        return theta, _then(how, polished)
    theta, how = search(_split_slowest(start), _slowest_apart, most=_FIRST_STEPS)
    theta, closer = search(_split_slowest(theta), _slowest_apart, curvature=curvature)
    theta, polished = search(theta[1:], _all_but_first, curvature=curvature)
    return theta, _then(_then(how, closer), polished)


def _then(first: Convergence, second: Convergence) -> Convergence:
    """How two searches went, the second from where the first stopped. At a minimum it may find no step at all."""
    if not second.iterations:
        return first
    return replace(
        second,
        iterations=first.iterations + second.iterations,
        evaluations=first.evaluations + second.evaluations,
        converged=second.converged or (first.converged and second.iterations < _ITERATIONS),
    )


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
        return np.concatenate([[-rest * dot(slope[1:], phi)], by_phi[1:]])

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
    expand: Expansion,
    on_iteration: Watch | None,
    improvement: float = _IMPROVEMENT,
    most: int | None = None,
    curvature: Callable[[Array], Array] | None = None,
) -> Solution:
    """Minimise the logarithm of a loss of the coefficients `expand`ed from free parameters.

    A point that its horizon does not cover has no loss: a sum cut short is too small, and a search would run after
    it. When a search got stuck at such points the horizon is widened and it goes on from where it stopped.
    With a `curvature`, the Hessian of the logarithm in the coefficients, the search takes Newton's steps.
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

    def newton(x: Array) -> Callable[[Array], None]:
        coefficients, pull = expand(x)
        change = np.array([pull(unit) for unit in np.eye(len(coefficients))])  # of the coefficients, along x
        bends, axes = np.linalg.eigh(change.T @ curvature(coefficients) @ change)  # type: ignore[misc]
        bends = np.maximum(np.abs(bends), _LEAST_BEND * np.abs(bends).max())

        def precondition(vector: Array) -> None:
            vector[:] = axes @ ((axes.T @ vector) / bends)

        return precondition

    while True:
        if math.isfinite(objective(free)[0]):
            met_the_edge = False
            free, how = minimise(
                objective,
                free,
                history=20,
                max_iterations=most or _ITERATIONS,
                improvement_tolerance=improvement,
                newton=newton if curvature and len(free) else None,
                on_iteration=on_iteration,
            )
            if how.converged or not met_the_edge or how.iterations == most:
                return expand(free)[0], how
        if decoder.length == decoder.steps:
            raise QuellError("the search for an optimal strategy starts where its error overflows: use fewer bands")
        decoder = replace(decoder, horizon=4 * decoder.length)
