"""Minimise a smooth function: L-BFGS with a weak-Wolfe line search, for four unknowns or sixteen million.

Nearly every optimal strategy in Quell (banded, Toeplitz, BLT) is the minimum of a smooth loss whose gradient
is written by hand. Three needs made us write these few lines rather than call `scipy.optimize`:

* a trial step may make C⁻¹ overflow; the loss is then +inf or nan, which must mean "step too long" and
  nothing else (L-BFGS-B can stall there);
* the exact banded problem at a million steps has 1.6e7 unknowns, 128 MB a vector, so the number of vectors
  counts: this routine holds 4 + 2·history of them and updates all of them in place;
* the answer must not depend on the number of threads. Long dot products are summed in fixed pieces, each too
  short for a BLAS to split between threads.

The direction is the two-loop recursion of Nocedal & Wright, *Numerical Optimization* (2006), Algorithm 7.4.
The line search brackets a point that satisfies the weak Wolfe conditions (Lewis & Overton 2013). Close to the
minimum, where differences of the loss are rounding noise, the test for sufficient decrease is replaced by its
slope form (Hager & Zhang 2005, "approximate Wolfe"): that lets small problems converge to machine precision.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quell._types import Array
from quell.errors import QuellError

Vector = npt.NDArray[np.floating[Any]]  # the history may be float32
Objective = Callable[[Array], tuple[float, Array]]

_SUFFICIENT_DECREASE = 1e-4
_CURVATURE = 0.9
_ROUNDING = 1e-14  # relative noise we expect in a loss that sums many terms
_MAX_TRIALS = 60  # trial steps in one line search
_REFRESH = 3  # steps after which Newton's model is made anew
_PIECE = 8192  # OpenBLAS splits a dot product between threads above 10,000 entries


@dataclass(frozen=True)
class Convergence:
    """How a minimisation went.

    Attributes:
        iterations: accepted steps.
        evaluations: calls of the objective.
        loss: loss at the returned point.
        gradient_norm: largest absolute entry of the gradient there.
        last_improvement: relative decrease of the loss in the last accepted step.
        converged: False if the iterations ran out or the line search failed far from a minimum.
        reason: one plain sentence.
    """

    iterations: int
    evaluations: int
    loss: float
    gradient_norm: float
    last_improvement: float
    converged: bool
    reason: str


Watch = Callable[[Convergence], None]  # called after every accepted step
Solution = tuple[Array, Convergence]


def minimise(
    objective: Objective,
    start: Array,
    *,
    history: int = 10,
    max_iterations: int = 500,
    gradient_tolerance: float = 1e-13,
    improvement_tolerance: float = 1e-14,
    patience: int = 3,
    precondition: Callable[[Array], None] | None = None,
    newton: Callable[[Array], Callable[[Array], None]] | None = None,
    history_dtype: npt.DTypeLike = np.float64,
    overwrite_start: bool = False,
    on_iteration: Watch | None = None,
) -> Solution:
    """Minimise `objective` from `start`; return the point and how it went.

    Args:
        objective: x -> (loss, gradient), gradient of x's shape. A loss that is not finite means "step too
            long". The gradient is copied before the next call, so the objective may write it into one buffer
            of its own; x is a buffer of ours, not to be changed or kept.
        start: first point, any shape; its loss must be finite.
        history: number of (step, gradient change) pairs remembered: memory against iterations.
        max_iterations: accepted steps after which we stop, unconverged.
        gradient_tolerance: stop when the largest gradient entry is at most this times |loss|.
        improvement_tolerance: stop after `patience` steps in a row whose relative decrease is at most this.
            Zero (with gradient_tolerance zero) goes on until rounding.
        patience: see improvement_tolerance.
        precondition: multiplies a vector (x's shape) in place by a fixed symmetric positive definite
            approximation of the inverse Hessian, up to scale.
        newton: makes such a preconditioner, to scale, for a point. It is made for the start and again every
            few steps, and its steps are tried at full length.
        history_dtype: float32 halves the memory of the history; x and gradient stay float64.
        overwrite_start: use `start` as workspace (its values are lost): one vector less.
        on_iteration: called after every accepted step, for instance to draw a progress bar.

    >>> bowl = lambda x: (float(((x - 3.0) ** 2).sum()) + 1.0, 2.0 * (x - 3.0))
    >>> x, how = minimise(bowl, np.zeros(4))
    >>> x.round(12).tolist(), how.converged
    ([3.0, 3.0, 3.0, 3.0], True)
    """
    shape = np.shape(start)
    point = _flat(start) if overwrite_start else np.array(start, dtype=np.float64).reshape(-1)
    loss, answer = objective(point.reshape(shape))
    loss = float(loss)
    gradient = np.array(answer, dtype=np.float64).reshape(-1)
    if not (math.isfinite(loss) and np.isfinite(gradient).all()):
        raise QuellError(
            "the search for a strategy has no error to start from in float64, as where learning rates jump by many "
            "orders of magnitude: smooth the schedule, or take a mechanism that is not optimised"
        )

    trial, direction = np.empty_like(point), np.empty_like(point)
    memory = _Memory(history, np.dtype(history_dtype), precondition, shape)
    if newton is not None:
        memory.precondition = newton(point.reshape(shape))
    best, small_steps = loss, 0
    so_far = Convergence(0, 1, loss, _largest(gradient), math.inf, False, "Still descending.")

    while True:
        if so_far.gradient_norm <= gradient_tolerance * abs(loss):
            return point.reshape(shape), _stop(so_far, True, "The gradient vanishes to within the tolerance.")
        if small_steps >= patience:
            reason = f"The last {patience} steps each lowered the loss by at most {improvement_tolerance:g}."
            return point.reshape(shape), _stop(so_far, True, reason)
        if so_far.iterations >= max_iterations:
            return point.reshape(shape), _stop(so_far, False, f"Stopped after {max_iterations} iterations.")

        slope = memory.descend(gradient, direction)
        if not slope < 0.0:  # rounding made the model indefinite: forget it and follow the gradient
            memory.clear()
            slope = memory.descend(gradient, direction)
        step, length = 1.0, math.sqrt(_dot(direction, direction)) if len(memory) == 0 else 0.0
        if (
            length > 0.0 and newton is None
        ):  # no curvature known yet: move x by about a percent, the search stretches it if need be
            step = max(0.01 * math.sqrt(_dot(point, point)), 1e-3) / length
        elif length > 0.0:  # a model of here says little about points farther away than x is long
            step = min(1.0, max(math.sqrt(_dot(point, point)), 1.0) / length)

        found = _search(objective, point, loss, slope, direction, step, best, trial, shape)
        so_far = replace(so_far, evaluations=so_far.evaluations + found.evaluations)
        if found.gradient is None:
            if len(memory):
                memory.clear()
                continue
            rounding = -slope <= 1e-9 * abs(loss) or _largest(direction) <= 1e-8 * _largest(point)
            reason = "rounding." if rounding else "is the gradient right?"
            return point.reshape(shape), _stop(so_far, rounding, f"No step lowers the loss further: {reason}")

        memory.remember(found.step, direction, found.gradient, gradient)
        point, trial = trial, point
        improvement = (loss - found.loss) / max(abs(loss), abs(found.loss), 1e-300)
        loss, best = found.loss, min(best, found.loss)
        gradient[:] = found.gradient
        small_steps = small_steps + 1 if improvement <= improvement_tolerance else 0
        so_far = replace(
            so_far,
            iterations=so_far.iterations + 1,
            loss=loss,
            gradient_norm=_largest(gradient),
            last_improvement=improvement,
        )
        if on_iteration is not None:
            on_iteration(so_far)
        if newton is not None and so_far.iterations % _REFRESH == 0:
            memory.clear()
            memory.precondition = newton(point.reshape(shape))


def _stop(so_far: Convergence, converged: bool, reason: str) -> Convergence:
    return replace(so_far, converged=converged, reason=reason)


class _Memory:
    """The last few (step s, gradient change y) pairs: a quasi-Newton model of the inverse Hessian."""

    def __init__(
        self,
        size: int,
        dtype: np.dtype[Any],
        precondition: Callable[[Array], None] | None,
        shape: tuple[int, ...],
    ) -> None:
        self.size, self.dtype, self.precondition, self.shape = size, dtype, precondition, shape
        self.steps: list[Vector] = []
        self.changes: list[Vector] = []
        self.products: list[float] = []  # s·y of each pair, positive
        self.scale = 1.0  # s·y / y·M y of the newest pair, M the preconditioner (or the identity)

    def __len__(self) -> int:
        return len(self.products)

    def clear(self) -> None:
        self.steps, self.changes, self.products, self.scale = [], [], [], 1.0

    def descend(self, gradient: Array, out: Array) -> float:
        """Write -H·gradient to `out`; return its product with the gradient, negative if we go downhill."""
        np.negative(gradient, out=out)
        pairs = list(zip(self.steps, self.changes, self.products, strict=True))
        weights: list[float] = []
        inner = _dot(pairs[-1][0], out) if pairs else 0.0
        for k in range(len(pairs) - 1, -1, -1):
            weights.append(inner / pairs[k][2])
            following = pairs[k - 1][0] if k else None
            inner = _add_scaled(out, -weights[-1], pairs[k][1], following)
        if self.precondition is not None:
            self.precondition(out.reshape(self.shape))
        out *= self.scale
        inner = _dot(pairs[0][1], out) if pairs else 0.0
        for k, (step, _, product) in enumerate(pairs):
            following = pairs[k + 1][1] if k + 1 < len(pairs) else gradient
            inner = _add_scaled(out, weights.pop() - inner / product, step, following)
        return inner if pairs else _dot(out, gradient)

    def remember(self, step: float, direction: Array, new: Array, old: Array) -> None:
        """Store s = step·direction and y = new - old, in the oldest pair's place; `direction` is lost."""
        if self.size < 1:
            return
        if len(self) < self.size:
            s, y = np.empty(direction.size, self.dtype), np.empty(direction.size, self.dtype)
        else:
            s, y = self.steps.pop(0), self.changes.pop(0)
            self.products.pop(0)
        np.multiply(direction, step, out=s, casting="same_kind")
        np.subtract(new, old, out=y, casting="same_kind")
        product = _dot(s, y)
        direction[:] = y
        if self.precondition is not None:
            self.precondition(direction.reshape(self.shape))
        size = _dot(y, direction)
        # A pair whose s·y drowned in rounding would make the model indefinite: leave it out.
        if not product > 1e-14 * math.sqrt(_dot(s, s) * _dot(y, y)) or not size > 0.0:
            return
        self.steps.append(s)
        self.changes.append(y)
        self.products.append(product)
        self.scale = product / size


@dataclass(frozen=True)
class _Found:
    """What a line search found; `gradient` is None when no step would do."""

    step: float
    loss: float
    gradient: Array | None
    evaluations: int


def _search(
    objective: Objective,
    point: Array,
    loss: float,
    slope: float,
    direction: Array,
    step: float,
    best: float,
    trial: Array,
    shape: tuple[int, ...],
) -> _Found:
    """Find a step with sufficient decrease and a flatter slope. Leaves the point it accepts in `trial`."""
    low, low_loss, low_slope = 0.0, loss, slope
    high, high_loss = math.inf, math.inf
    for evaluations in range(1, _MAX_TRIALS + 1):
        _move(trial, point, step, direction)
        new, answer = objective(trial.reshape(shape))
        new = float(new)
        gradient = _flat(answer)
        new_slope = _dot(gradient, direction) if math.isfinite(new) else math.nan
        lower = new <= loss + _SUFFICIENT_DECREASE * step * slope or (
            # Both losses are the same to rounding: let the slope say whether we went past the minimum.
            new <= best + _ROUNDING * abs(best) and new_slope <= (2.0 * _SUFFICIENT_DECREASE - 1.0) * slope
        )
        if not math.isfinite(new_slope):
            high, high_loss = step, math.inf
        elif not lower:
            high, high_loss = step, new
        elif new_slope < _CURVATURE * slope:
            low, low_loss, low_slope = step, new, new_slope
        else:
            return _Found(step, new, gradient, evaluations)

        if math.isinf(high):  # too short: follow the slopes to where they vanish, at least doubling
            bend = new_slope - slope
            step = min(max(step * slope / -bend if bend > 0.0 else math.inf, 2.0 * step), 8.0 * step)
        else:
            width = high - low
            if width <= 1e-15 * high:
                break
            share = 0.5 if math.isfinite(high_loss) else 0.25
            excess = high_loss - low_loss - low_slope * width
            if math.isfinite(excess) and excess > 0.0:  # minimum of the parabola through what we know
                share = min(max(-0.5 * low_slope * width / excess, 0.1), 0.9)
            step = low + share * width
    return _Found(0.0, loss, None, evaluations)


# Long vectors are handled in pieces: temporaries stay in cache, sums do not depend on threads.


def _flat(values: npt.ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _dot(a: Vector, b: Vector) -> float:
    if a.size <= _PIECE:
        return float(a.astype(np.float64, copy=False) @ b)
    return math.fsum(_dot(a[k : k + _PIECE], b[k : k + _PIECE]) for k in _starts(a))


def _add_scaled(out: Array, factor: float, values: Vector, other: Vector | None) -> float:
    """out += factor·values; return out·other (0 without one), in one pass over memory."""
    if out.size > _PIECE:
        from quell.algebra._vectors import add_scaled  # compiled code, for long vectors only

        return float(add_scaled(out, factor, values, values if other is None else other))
    out += factor * values
    return 0.0 if other is None else float(out @ other)


def _move(out: Array, point: Array, step: float, direction: Array) -> None:
    """out = point + step·direction."""
    for k in _starts(out):
        np.add(point[k : k + _PIECE], step * direction[k : k + _PIECE], out=out[k : k + _PIECE])


def _largest(values: Array) -> float:
    return max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))


def _starts(values: Vector) -> range:
    return range(0, values.size, _PIECE)
