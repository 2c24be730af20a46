"""δ of balls in bins from above and below without draws: what all bins share is exact, the rest bounded by moments.

All bins move the output by the same amount along one line. So S = e^{z − v/2}·T, where z = N(0, v) is common to all
bins and T = mean_j e^{r_j − Var(r_j)/2} is independent of it, with E T = 1. Given T, δ is a Black–Scholes price, which
is convex in T. Its mean is at least the price at T = 1, and at most what any law with the moments of T can reach: a
linear program, whose dual proves the bound (Proof 21 in docs/proofs.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quell._types import Array
from quell.privacy.bins import Bins
from quell.privacy.gaussian import gaussian_delta

_ORDERS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # q of the moments E T^q that are used beside 2 and 3
_POWERS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 95)  # of exp(R/σ²), between which logarithms are interpolated
_INVERSE = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # moments E T^−q
_GRID = 400  # values of T at which the dual is checked; between them chords are paid for
_FAR = 1e6  # how much larger than δ what lies beyond the grid has to be, for it to cost nothing
_WIDEST = 300.0  # in logarithms, a grid: beyond, the noise is far too small for moments to say anything
_MARGIN = 1e-6  # of every inequality of the dual, well above the solver's tolerance
_ROUNDING = 1e-15  # relative, of one product in a sum


@dataclass(frozen=True, eq=False)
class Shared:
    """The part that all bins share, and the rest."""

    bins: Bins

    @cached_property
    def _line(self) -> tuple[float, float]:
        """f with G − f ≥ 0 up to rounding, and what has to be added to its diagonal for that."""
        from scipy.linalg import solve_triangular

        b, table = self.bins.count, self.bins.table
        if not self.bins.exact:  # constant vectors are eigenvectors
            return float(table.mean()), _ROUNDING * b * float(table.sum())
        factor = self.bins.factor
        weights = solve_triangular(factor, solve_triangular(factor, np.ones(b), lower=True), lower=True, trans="T")
        moved, error = table @ weights, _ROUNDING * b * float(np.max(table @ np.abs(weights)))
        least, most = float(moved.min()) - error, float(moved.max()) + error
        if least <= 0:
            return 0.0, 0.0
        f = least**2 / (float(weights @ moved) + error * float(np.abs(weights).sum()))
        return f, 2 * f * b * (most / least - 1)

    @property
    def energy(self) -> float:
        """f: every bin moves the output by √f along one line, at least."""
        return self._line[0]

    @cached_property
    def _rest(self) -> Bins:
        """R ≥ G − f."""
        f, raised = self._line
        rest = self.bins.table - f
        if self.bins.exact:
            rest[np.diag_indices_from(rest)] += raised
        else:
            rest[0] += raised
        return Bins(rest)

    def lower(self, sigma: float, epsilon: float) -> float:
        """A lower bound on δ: the Gaussian mechanism along the line."""
        return gaussian_delta(sigma / math.sqrt(self.energy), epsilon) * (1 - 1e-6) if self.energy > 0 else 0.0

    def upper(self, sigma: float, epsilon: float, about: float) -> float:
        """An upper bound on δ, both directions; `about` is δ to some orders of magnitude, for scaling."""
        if self.energy <= 0:
            return 1.0
        variance, strike = self.energy / sigma**2, math.exp(epsilon)
        moments = self._log_moments(sigma)
        remove = _most(moments, lambda s: _call(s, strike, variance), 0.0, 1.0, about)
        if remove >= 1.0:
            return 1.0
        return max(remove, _most(moments, lambda s: strike * _put(s, 1 / strike, variance), 1.0, 0.0, about))

    def _log_moments(self, sigma: float) -> dict[int, float]:
        """Bounds on ln E T^q: for q = 2, 3 exact, beyond by Hölder's inequality in the better of two ways."""
        rest = self._rest
        scaled = rest.table / sigma**2
        top = float(scaled.max())
        logs = {2: top + math.log(float(np.exp(scaled - top).mean())), 3: _log_triples(scaled)}
        steps = [power * top + math.log(float(np.exp(power * (scaled - top)).mean(axis=-1).max())) for power in _POWERS]
        chain = logs[3] + np.cumsum(np.interp(np.arange(3, _ORDERS[-1]), _POWERS, steps))  # chords: logs are convex
        smaller = True  # triples are the better way up to some order
        for order in _ORDERS:
            logs[order] = float(chain[order - 4])
            if smaller:
                triples = order / 3 * _log_triples(0.5 * (order - 1) * scaled)
                smaller = triples < logs[order]
                logs[order] = min(triples, logs[order])
        spread, own = float(rest.table.mean()) / sigma**2, float(rest.energies.mean()) / sigma**2
        for order in _INVERSE:
            logs[-order] = 0.5 * order * (order * spread + own)
        return {order: value + 1e-9 * (1 + abs(value)) for order, value in logs.items()}


def _log_triples(table: Array) -> float:
    """ln of the mean of exp(R_jk + R_kl + R_jl) over all triples of bins."""
    top = float(table.max())
    lifts = np.exp(table - top)
    if lifts.ndim == 2:
        total = float(np.einsum("jl,jl->", lifts @ lifts.T, lifts)) / len(lifts)
    else:
        total = float(np.mean(np.fft.fft(lifts).real ** 3))
    return 3 * top + math.log(total) - 2 * math.log(len(lifts))


def _most(
    log_moments: dict[int, float], price: Callable[[Array], Array], at_zero: float, steepest: float, about: float
) -> float:
    """An upper bound on E price(T), for convex and monotone prices of at most `at_zero` at 0 and slope `steepest`.

    With price ≤ a + B·s + Σ c_q·s^q at the points of a geometric grid it is a + B + Σ c_q·η_q·E T^q, where η_q is what
    chords exceed powers by. The slopes at both ends of the grid take care of what lies beyond.
    """
    from scipy.optimize import linprog

    orders, logs = np.array(list(log_moments)), np.array(list(log_moments.values()))
    far = math.log(_FAR / about)
    high = float(np.min((logs[orders > 1] + far) / (orders[orders > 1] - 1)))
    low = float(np.min((logs[orders < 0] + far) / -orders[orders < 0]))
    if high + low > _WIDEST:
        return 1.0
    x = np.linspace(-low, high, _GRID)
    s, cell = np.exp(x), (high + low) / (_GRID - 1)
    powers = np.exp(np.minimum(np.outer(x, orders) - logs - _log_chords(orders, cell), 600.0))
    slopes = powers[[0, -1]] * orders / s[[0, -1], None]
    prices = price(s)
    prices[0] = max(prices[0], at_zero)
    terms = np.vstack([np.c_[np.ones(_GRID), s, powers], np.r_[0.0, 1.0, slopes[1]], -np.r_[0.0, 1.0, slopes[0]]])
    goals = np.r_[prices / about, steepest / about, 0.0]
    sizes = terms.max(axis=1)
    found = linprog(
        np.ones(terms.shape[1]),
        A_ub=-terms / sizes[:, None],
        b_ub=-goals / sizes - _MARGIN,
        bounds=[(None, None)] * 2 + [(0.0, None)] * len(orders),
    )
    if found.x is None:
        return 1.0
    dual = np.r_[found.x[:2], np.maximum(found.x[2:], 0.0)]
    for _ in range(2):  # the solver may have left a little open
        left = terms @ dual - 1e-13 * (np.abs(terms) @ np.abs(dual)) - goals
        if left.min() >= 0:
            return min(1.0, about * float(dual.sum()) * (1 + 1e-9))
        dual += 2 * float(np.max(-left / sizes))
    return 1.0


def _log_chords(orders: Array, cell: float) -> Array:
    """ln max of (chord of s^q)/s^q between two points of a grid whose logarithms are `cell` apart."""
    slope = np.expm1(orders * cell) / math.expm1(cell)
    where = orders * (slope - 1) / (slope * (orders - 1))
    return np.asarray(np.log1p(slope * (where - 1)) - orders * np.log(where))


def _call(spot: Array, strike: float, variance: float) -> Array:
    """E(spot·e^{z − v/2} − strike)₊ for z = N(0, v), rounded up."""
    from scipy.special import ndtr

    spread = math.sqrt(variance)
    d = np.log(spot / strike) / spread
    first = spot * ndtr(d + spread / 2)
    return np.asarray(np.maximum(first - strike * ndtr(d - spread / 2), 0.0) + 1e-12 * first)


def _put(spot: Array, strike: float, variance: float) -> Array:
    """E(strike − spot·e^{z − v/2})₊, rounded up."""
    from scipy.special import ndtr

    spread = math.sqrt(variance)
    d = np.log(spot / strike) / spread
    first = strike * ndtr(spread / 2 - d)
    return np.asarray(np.maximum(first - spot * ndtr(-d - spread / 2), 0.0) + 1e-12 * first)
