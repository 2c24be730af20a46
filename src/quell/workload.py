"""The workload A: what the optimizer does with the gradients.

Row t of A·G is what the run has released after step t. For SGD with weight decay factor α and momentum β the
iterates are θ_t = α·θ_{t−1} − η_t·m_t with m_t = β·m_{t−1} + g_t, so A = P_α·diag(η)·P_β where P_ρ has the
entries ρ^{i−j}: with a constant rate A is Toeplitz, the series 1/((1−αx)(1−βx)), and without momentum η_t
weights *column* t. Where what is used is an average of the weights, e_t = ρ·e_{t−1} + (1−ρ)·θ_t, A is (1−ρ)·P_ρ times
that. The inverse of each of these has at most four diagonals, which is what makes exact errors cheap
(`quell.analysis.error`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from quell._types import Array
from quell.algebra import series, streaming
from quell.errors import QuellError, require_finite
from quell.participation import Participation

_LEAST_SHARE = 1e-30  # of the largest learning rate: float32 weights end at 1e-8, float64 ratios far below


@dataclass(frozen=True, eq=False)
class Workload:
    """A lower-triangular workload of `steps` steps; build one with `prefix`, `sgd` or `toeplitz`."""

    steps: int
    decay: float = 1.0
    momentum: float = 0.0
    rates: Array | None = None
    given: Array | None = None  # the first column of a Toeplitz workload that is not SGD's
    ema: float = 0.0  # ρ, the rate of an average of the weights; 0 for the weights themselves

    def __repr__(self) -> str:
        if self.given is not None:
            return f"Workload({self.steps:,} steps, given Toeplitz coefficients)"
        schedule = "" if self.rates is None else ", with a learning-rate schedule"
        schedule += f", averaged at rate {self.ema:g}" if self.ema else ""
        return f"Workload({self.steps:,} steps, weight decay {self.decay:g}, momentum {self.momentum:g}{schedule})"

    @property
    def is_prefix(self) -> bool:
        plain = self.decay == 1 and self.momentum == 0 and self.ema == 0
        return self.given is None and plain and self.rates is None

    @property
    def is_toeplitz(self) -> bool:
        return self.rates is None

    @property
    def without_average(self) -> Workload:
        """The same run's weights themselves."""
        return replace(self, ema=0.0) if self.ema else self

    @cached_property
    def coefficients(self) -> Array:
        """(n,) first column of the Toeplitz matrix; with a schedule, of the same workload at a constant rate."""
        if self.inverse_series is None:
            assert self.given is not None
            return self.given
        return series.reciprocal(self.inverse_series, self.steps)

    @property
    def inverse_series(self) -> Array | None:
        """The coefficients of 1/A for SGD workloads, three or four; None for a workload given by its coefficients."""
        return None if self.given is not None else self.closed_series(0.0)

    @property
    def recursion(self) -> tuple[Array, float, float, float]:
        """Learning rates as shares of the largest, α, β and ρ: an SGD workload step by step."""
        rates = np.ones(self.steps) if self.rates is None else self.rates / self.rates.max()
        return rates, self.decay, self.momentum, self.ema

    def closed_series(self, feedback: float) -> Array:
        """The same where gradients answer to the weights of the step before (`quell.algebra.feedback`)."""
        plain = np.array([1.0, feedback - self.decay - self.momentum, self.decay * self.momentum])
        return np.convolve(plain, self._unaveraged) if self.ema else plain

    @property
    def _unaveraged(self) -> Array:
        """The inverse of the average's series (1−ρ)/(1−ρx)."""
        return np.array([1.0, -self.ema]) / (1.0 - self.ema)

    @property
    def inverse_bands(self) -> Array | None:
        """(n, 3) row bands of A⁻¹, `[i, d]` holding entry (i, i−d), or None when A⁻¹ is not banded; (n, 4) with `ema`.

        A⁻¹ = P_β⁻¹·diag(1/η)·P_α⁻¹, a read-only view of one row where A is Toeplitz.
        """
        if self.inverse_series is None:
            return None
        if self.rates is None:
            return np.broadcast_to(self.inverse_series, (self.steps, len(self.inverse_series)))
        now = 1.0 / self.rates
        before = np.concatenate([[0.0], now[:-1]])
        bands = np.stack([now, -self.decay * now - self.momentum * before, self.decay * self.momentum * before], axis=1)
        bands[0, 1:] = bands[1:2, 2:] = 0.0
        if not self.ema:
            return bands
        from quell.algebra.banded import multiply  # compiled code, loaded when first needed

        return multiply(bands, np.broadcast_to(self._unaveraged, (self.steps, 2)))

    @property
    def jumps(self) -> bool:
        """Whether a learning rate rises so sharply that recursions through A⁻¹, which divide by it, lose digits."""
        return self.rise(2) > 10.0

    def rise(self, within: int) -> float:
        """The most times that a learning rate is as large as one up to so many steps before."""
        if self.rates is None:
            return 1.0
        later = (self.rates[lag:] / self.rates[: self.steps - lag] for lag in range(1, min(within + 1, self.steps)))
        return max((float(ratios.max()) for ratios in later), default=1.0)

    def apply(self, columns: Array) -> Array:
        """A @ columns for an array of shape (n,) or (n, m), in O(n·m) for SGD workloads."""
        from quell.algebra.recursion import recursion

        if self.given is not None:
            flat = columns.reshape(self.steps, -1)
            products = [series.multiply(self.coefficients, column, self.steps) for column in flat.T]
            return np.stack(products, axis=1).reshape(columns.shape)
        moved = recursion(np.array([1.0, -self.momentum]), columns)
        if self.rates is not None:
            moved = moved * self.rates.reshape((-1,) + (1,) * (columns.ndim - 1))
        moved = recursion(np.array([1.0, -self.decay]), moved)
        return recursion(self._unaveraged, moved) if self.ema else moved

    def matrix(self) -> Array:
        """(n, n) dense A, for small n."""
        return self.apply(np.eye(self.steps))

    def operator(self) -> streaming.StreamingOperator:
        """A as a streaming linear operator."""
        if self.inverse_bands is not None:
            return streaming.banded_inverse(self.inverse_bands)
        return streaming.lower_triangular(self.matrix())


def prefix(steps: int) -> Workload:
    """Plain SGD: every step adds its gradient.

    >>> prefix(3).matrix()
    array([[1., 0., 0.],
           [1., 1., 0.],
           [1., 1., 1.]])
    """
    return sgd(steps)


def single_steps(steps: int) -> Workload:
    """Every step by itself: the error is the noise that one step adds."""
    return toeplitz(np.eye(1, steps)[0])


def sgd(
    steps: int,
    momentum: float = 0.0,
    weight_decay: float = 1.0,
    learning_rates: Sequence[float] | Array | None = None,
    ema: float | None = None,
) -> Workload:
    """The iterates of SGD with momentum β and weight decay factor α, 0 ≤ β < α ≤ 1, or their average at rate `ema` < α.

    >>> sgd(3, momentum=0.5).coefficients
    array([1.  , 1.5 , 1.75])
    >>> sgd(3, ema=0.5).coefficients
    array([0.5  , 0.75 , 0.875])
    """
    steps = Participation.single(steps).steps  # one place decides how many steps a run may have
    momentum, weight_decay = require_finite("momentum", momentum), require_finite("weight_decay", weight_decay)
    if not 0 <= momentum < weight_decay <= 1:
        raise QuellError(
            f"momentum={momentum:g} and weight_decay={weight_decay:g} must satisfy 0 <= momentum < weight_decay <= 1: "
            "weight_decay is the factor that multiplies the weights each step, 1 for none, "
            "1 - lr*w for an optimizer's weight_decay=w"
        )
    average = 0.0 if ema is None else require_finite("ema", ema)
    if ema is not None and not 0 < average < weight_decay:
        raise QuellError(
            f"ema={average:g} must be above 0 and below weight_decay={weight_decay:g}: it is the share of the average "
            "that stays at each step, such as 0.98; leave it out to use the weights themselves"
        )
    rates = None if learning_rates is None else _checked_rates(learning_rates, steps)
    return Workload(steps, weight_decay, momentum, rates, ema=average)


def adam_momentum(optimizer: str, betas: Sequence[float], momentum: float = 0.0) -> float:
    """The momentum of SGD that shapes noise for Adam or AdamW: β₁.

    Adam's first moment is m_t = β₁·m_{t−1} + (1−β₁)·g_t, momentum up to a factor. What it divides by changes slowly,
    over 1/(1−β₂) steps: that is a learning rate of its own for every entry, and one noise mechanism serves all entries.
    The corrections for the start of both moments are a learning rate too, which ends after as many steps.

    >>> adam_momentum("adamw", (0.9, 0.999))
    0.9
    """
    if optimizer not in ("adam", "adamw"):
        raise QuellError(f"optimizer={optimizer!r} is not known: use sgd, adam or adamw")
    try:
        first, second = (require_finite("betas", beta) for beta in betas)
    except (TypeError, ValueError):
        raise QuellError(f"betas={betas!r} must be two numbers, such as (0.9, 0.999)") from None
    if not 0 <= first < 1 or not 0 <= second < 1:
        raise QuellError(f"betas={betas!r} must be two numbers from 0 to below 1, such as (0.9, 0.999)")
    if momentum not in (0.0, first):
        raise QuellError(f"momentum={momentum:g} is SGD's: {optimizer} has betas={betas!r}, so leave momentum out")
    return first


def forgetting(workload: Workload, horizon: float) -> Workload:
    """The workload with the effect of a step fading like e^(−t/horizon).

    >>> forgetting(prefix(3), 2.0).coefficients
    array([1.  , 0.5 , 0.25])
    """
    share = max(0.0, 1.0 - 1.0 / horizon)
    if workload.given is not None:
        return replace(workload, given=workload.given * share ** np.arange(workload.steps))
    return replace(workload, decay=workload.decay * share)


def normalised(workload: Workload) -> Workload:
    """The workload with 1 as its largest learning rate: the same strategies are best for it."""
    return workload if workload.rates is None else replace(workload, rates=workload.rates / workload.rates.max())


def schedule(name: str, steps: int) -> Array:
    """The learning rates of a named schedule, as shares of the first; they stay positive to the last step.

    >>> schedule("linear", 4)
    array([1.  , 0.75, 0.5 , 0.25])
    """
    progress = np.arange(steps) / steps
    shapes = {"cosine": 0.5 * (1.0 + np.cos(np.pi * progress)), "linear": 1.0 - progress}
    if name not in shapes:
        raise QuellError(f"there is no schedule {name!r}: use {' or '.join(shapes)}, or one rate per step")
    return shapes[name]


def toeplitz(coefficients: Sequence[float] | Array) -> Workload:
    """Any Toeplitz workload, from its first column.

    >>> toeplitz([1.0, 0.5]).matrix()
    array([[1. , 0. ],
           [0.5, 1. ]])
    """
    column = np.asarray(coefficients, dtype=np.float64)
    if column.ndim != 1 or not len(column) or not np.all(np.isfinite(column)) or column[0] == 0:
        raise QuellError("workload coefficients must be a list of finite numbers that starts with a non-zero one")
    return Workload(len(column), given=column.copy())


def _checked_rates(learning_rates: Sequence[float] | Array, steps: int) -> Array:
    rates = np.asarray(learning_rates, dtype=np.float64)
    if rates.shape != (steps,):
        raise QuellError(f"the learning-rate schedule has {rates.size} values but the run has {steps} steps")
    usable = np.isfinite(rates) & (rates > 1e-100) & (rates < 1e100)
    if not np.all(usable):
        worst = int(np.flatnonzero(~usable)[0])
        raise QuellError(f"learning rate {rates[worst]:g} at step {worst} must be a positive number of ordinary size")
    if rates.min() < _LEAST_SHARE * rates.max():
        worst = int(np.argmin(rates))
        raise QuellError(
            f"learning rate {rates[worst]:g} at step {worst} is less than {_LEAST_SHARE:g} of the largest, "
            f"{rates.max():g}: nothing of such a step is left in the weights, so leave it out"
        )
    return rates.copy()
