"""A loss to try mechanisms on: how much of it a run is predicted to leave, and at which learning rate.

A network's loss is taken as a quadratic whose curvatures fall like 1/k. That is what Hessians of trained networks show
(arXiv:2201.13011), and what data bring along: words are as frequent as 1/k (Zipf), and the variances of natural images'
components fall like 1/k (a power spectrum of 1/f² in two dimensions). There are as many of them as there are examples,
because N examples bend a loss in about N directions. Training starts equally far from the optimum in all directions,
with a gradient as long as the clip norm. Every weight gets noise of standard deviation σ·clip/batch, correlated as the
mechanism does it. The unit of curvature is the unit of the learning rate, and every mechanism gets its best learning
rate. These constants have reasons, but they were settled after many settings had been compared on trained networks
(docs/results.md says how many, and how well they do on runs that were made later).

Noise in a direction with curvature λ is undone at the rate lr·λ, so what a mechanism should cancel depends on the
learning rate, and this on how much noise there is: at large ε the rate is high and steps forget fast, at small ε they
sum up. Adam divides gradients by a size that is mostly that of the noise, much the same for every weight, which is
another learning rate (`Measured.best_rate`); so it needs no other treatment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quell._types import Array
from quell.algebra import series
from quell.algebra.feedback import energy, last_row, left_over
from quell.algebra.recursion import recursion
from quell.strategy import INDEPENDENT, Strategy
from quell.strategy.structure import BandedStrategy, ToeplitzStrategy
from quell.workload import Workload

USUAL_BATCH = 512  # for runs that are given by their steps alone
_PER_DECADE = 6  # grid points of curvatures and of learning rates
_MOST = 0.8  # of the feedback at which training would be unstable
_DECADES = 9  # of learning rates
_UNNOTICED = 0.1  # feedback over the run below which it changes nothing
_FORGOTTEN = 40  # times that a step is forgotten by e until nothing of it is left


@dataclass(frozen=True, eq=False)
class Noise:
    """What one unit of a mechanism's noise costs at every learning rate of a landscape."""

    landscape: Landscape
    cost: Array

    def best(self, sigma: float) -> tuple[float, float]:
        """The share of the starting loss that is left at the best learning rate, and that rate.

        The rate is in the landscape's own unit, so only ratios of rates mean something.
        """
        loss = self.landscape.bias + sigma * sigma * self.cost
        at = int(np.argmin(loss))
        shift, gain = 0.0, 0.0
        if 0 < at < len(loss) - 1:  # the lowest point of a parabola
            before, here, after = loss[at - 1 : at + 2]
            bend, slope = before + after - 2 * here, 0.5 * (after - before)
            shift, gain = -slope / bend, 0.5 * slope * slope / bend
        rate = float(self.landscape.rates[at] * 10 ** (-shift / _PER_DECADE))
        return float(loss[at] - gain), rate

    def equivalent(self, sigma: float) -> float:
        """The noise multiplier with which independent noise would leave as much of the loss."""
        if sigma == 0:
            return 0.0
        wanted, independent = self.best(sigma)[0], self.landscape.independent
        low, high = math.log(sigma) - 1.0, math.log(sigma) + 1.0
        while independent.best(math.exp(low))[0] > wanted and low > -300:
            low -= 4.0
        while independent.best(math.exp(high))[0] < wanted and high < 300:
            high += 4.0
        for _ in range(48):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if independent.best(math.exp(middle))[0] < wanted else (low, middle)
        return math.exp(0.5 * (low + high))


@dataclass(frozen=True, eq=False)
class Landscape:
    """The loss for one run of SGD (averaged or not), with so many steps per epoch and examples (or users) per batch."""

    workload: Workload
    steps_per_epoch: int
    batch_size: int | None = None

    @property
    def batch(self) -> int:
        return self.batch_size or USUAL_BATCH

    @cached_property
    def curvatures(self) -> Array:
        decades = math.log10(max(10, self.batch * self.steps_per_epoch))
        return np.asarray(10.0 ** (-np.arange(round(_PER_DECADE * decades) + 1) / _PER_DECADE))

    @cached_property
    def weights(self) -> Array:
        """How much of the loss, and of the cost of noise, lies in each curvature: their number times λ."""
        share = np.full(len(self.curvatures), math.log(10) / _PER_DECADE)
        share[[0, -1]] *= 0.5
        share[0] += 0.5  # a sum over k = 1, 2, … is its integral and half of the first term
        return share

    @cached_property
    def distance(self) -> float:
        """The squared distance to the optimum in every direction with which the gradient has norm 1."""
        return 1.0 / float(np.sum(self.weights * self.curvatures))

    @cached_property
    def feedback(self) -> Array:
        """The values of lr·λ, largest first: from close to unstable, to what changes nothing."""
        most = _MOST * (1.0 + self.workload.decay) * (1.0 + self.workload.momentum)
        least = _UNNOTICED * (1.0 - self.workload.momentum) / self.workload.steps
        count = 2 * math.ceil(0.5 * _PER_DECADE * math.log10(most / least)) + 1  # of which every other is computed
        return np.asarray(most * 10.0 ** (-np.arange(count) / _PER_DECADE))

    @cached_property
    def rates(self) -> Array:
        count = _PER_DECADE * _DECADES
        return np.asarray(self.feedback[0] * 10.0 ** (-np.arange(count) / _PER_DECADE))

    def _over_curvatures(self, values: Array) -> Array:
        """For every rate the mean over the loss of a function that is known at the values of `feedback`."""
        at = np.arange(len(self.rates))[:, None] + np.arange(len(self.curvatures))
        return np.asarray(values[np.minimum(at, len(values) - 1)] @ self.weights / self.weights.sum())

    @cached_property
    def bias(self) -> Array:
        """What is left of the loss without noise, for every rate."""
        left = left_over(*self.workload.recursion, self.feedback)
        return self._over_curvatures(left * left)

    @cached_property
    def independent(self) -> Noise:
        """Noise that is not correlated."""
        return self.noise(ToeplitzStrategy(INDEPENDENT.name, self.workload.steps, np.ones(1)))

    @cached_property
    def _lengths(self) -> list[int]:
        """How many steps at the end of the run matter, with every other feedback."""
        rates, _, momentum, ema = self.workload.recursion
        forgotten = np.searchsorted(np.cumsum(rates[::-1]), _FORGOTTEN * (1.0 - momentum) / self.feedback[::2])
        settled = math.ceil(_FORGOTTEN * (1.0 / (1.0 - momentum) + ema / (1.0 - ema)))
        return [min(len(rates), int(each) + settled) for each in forgotten]

    @cached_property
    def _rows(self) -> list[Array]:
        """The end of the last row of (A⁻¹ + q·S)⁻¹, with every other feedback q."""
        rates, decay, momentum, ema = self.workload.recursion
        return [
            last_row(rates[-m:], decay, momentum, ema, q)
            for q, m in zip(self.feedback[::2], self._lengths, strict=True)
        ]

    def final_variances(self, strategy: Strategy) -> Array:
        """(q,) the variance of the last weights (or their average) per unit of noise, with every other feedback.

        That is ‖r·C⁻¹‖² with r the last row of (A⁻¹ + q·S)⁻¹, an impulse response backwards where A is Toeplitz.
        """
        if isinstance(strategy, ToeplitzStrategy) and strategy.column_scale is None and self.workload.rates is None:
            noising = series.pad(strategy.noising[: strategy.steps], strategy.steps)
            return np.array(
                [
                    energy(noising[:length], self.workload.closed_series(q))
                    for q, length in zip(self.feedback[::2], self._lengths, strict=True)
                ]
            )
        return np.array([float(np.sum(np.square(_times_noising(row, strategy)))) for row in self._rows])

    def noise(self, strategy: Strategy) -> Noise:
        """What a mechanism's noise costs."""
        variance = self._over_curvatures(np.exp(_with_middles(np.log(self.final_variances(strategy)))))
        return Noise(self, self.rates**2 * variance / (self.batch**2 * self.distance))


def _with_middles(values: Array) -> Array:
    """A smooth function at twice as many points: cubics through four neighbours, and parabolas at the ends.

    >>> _with_middles(np.arange(5.0) ** 2)
    array([ 0.  ,  0.25,  1.  ,  2.25,  4.  ,  6.25,  9.  , 12.25, 16.  ])
    """
    out = np.repeat(values, 2)[:-1]
    out[3:-3:2] = (9.0 * (values[1:-2] + values[2:-1]) - values[:-3] - values[3:]) / 16.0
    out[1], out[-2] = ((3.0 * a + 6.0 * b - c) / 8.0 for a, b, c in (values[:3], values[:-4:-1]))
    return out


def _times_noising(row: Array, strategy: Strategy) -> Array:
    """r·C⁻¹ for a row r that is zero but for its last entries, which are given; without what is left of it before them.

    Of a Toeplitz or banded C⁻¹ this is little, because a step is forgotten there.
    """
    length = len(row)
    if isinstance(strategy, ToeplitzStrategy):
        scaled = row if strategy.column_scale is None else row / strategy.column_scale[-length:]
        if strategy.bands < strategy.noising_bands:
            return recursion(strategy.coefficients[:length], scaled[::-1])
        return series.multiply(strategy.noising[:length], scaled[::-1], length)
    if isinstance(strategy, BandedStrategy):
        from scipy.linalg import solve_banded

        bands = strategy.row_bands[-length:, :length]
        upper = np.zeros(bands.T.shape)  # of the transposed C, as LAPACK stores diagonals
        for d, diagonal in enumerate(bands.T):
            upper[-1 - d, d:] = diagonal[d:]
        return np.asarray(solve_banded((0, len(upper) - 1), upper, row))
    starts, stops = strategy.intervals()  # the draw of a node enters at its last step, and leaves a node's length later
    steps = strategy.steps
    padded = np.concatenate([np.zeros(steps - length), row, [0.0]])
    return np.asarray(padded[stops - 1] - padded[np.minimum(2 * stops - starts - 1, steps)])
