"""What noise to make: a recurrence, how many steps, and how large; from a plan, a mechanism or by hand.

At step t the stream adds `scale`·x_t, x_t being row t of C⁻¹Z with Z i.i.d. standard normal. For a mechanism, scale
is max_grad_norm · noise_multiplier, and the noise multiplier already contains the sensitivity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from quell.errors import QuellError, require_count, require_finite
from quell.noise.layout import MOST_STEPS
from quell.strategy.precision import Magnitudes, require_fresh_draws, shortfall
from quell.strategy.recurrence import Exponentials, Fenwick, Recurrence, Regenerate, Ring

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan

Kind = Literal["regenerate", "ring", "exponentials", "fenwick"]

LEAST_SCALE, MOST_SCALE = 2.0**-102, 2.0**100  # noise down to 2⁻²⁴ of this keeps all its digits; none overflows
MOST_SHORTFALL = 2.0**-6  # how much smaller float32 coefficients may make the noise before it is scaled up again
GRID_BITS = 14  # a release is rounded to 2⁻¹⁴ of the largest sum in a row of noise: see docs/noise.md
NO_GRID = np.float32(2.0**-100)  # finer than any draw: rounding to it changes nothing
_ROUNDED_ONCE = 2.0**-20  # more than single roundings, of a scale, a coefficient or a normal, take from the noise


@dataclass(frozen=True, eq=False)
class NoiseSpec:
    """`scale`·C⁻¹Z over `steps` steps, C given by its recurrence.

    >>> spec = NoiseSpec(Regenerate(np.array([1.0, -0.9])), steps=100, scale=0.7)
    >>> spec.recipe().buffers, spec.recipe(keep=15).buffers
    (0, 1)
    """

    recurrence: Recurrence
    steps: int
    scale: float
    promise: str = ""  # what it is made for, as exact text: clip norm, σ, ε, δ, sampling, parameters

    def __post_init__(self) -> None:
        steps = require_count("steps", self.steps)
        if steps > MOST_STEPS:
            raise QuellError(f"steps={steps:,} is beyond the {MOST_STEPS:,} that a key can serve")
        if require_finite("scale", self.scale) <= 0:
            raise QuellError(f"scale={self.scale:g} must be positive: it is max_grad_norm times the noise multiplier")
        for covered in _steps_covered(self.recurrence):
            if covered != steps:
                raise QuellError(f"steps={steps:,} but the recurrence was made for {covered:,} steps: make a new one")
        _check_tables(self.recurrence)
        _ = self.magnitudes  # refuses noise that float32 would round away

    @cached_property
    def magnitudes(self) -> Magnitudes:
        """How large the fresh draw and the sums of a row are, before scales."""
        return require_fresh_draws("this noise", self.recurrence, self.steps)

    @cached_property
    def shortfall(self) -> float:
        """How much smaller float32 coefficients can make the noise; the scale makes up for it."""
        lost = shortfall(self.recurrence, self.steps)
        if not lost <= MOST_SHORTFALL:
            raise QuellError(
                f"rounding the coefficients to float32 could make this noise smaller by {lost:.1%} over {self.steps:,} "
                "steps: choose a strategy that remembers fewer steps, such as a smaller lambda"
            )
        return lost

    @classmethod
    def of(cls, source: NoiseSpec | Mechanism | Plan, max_grad_norm: float | None = None) -> NoiseSpec:
        """The noise of a mechanism, or of a plan's recommended one, for gradients clipped to `max_grad_norm`."""
        if isinstance(source, NoiseSpec):
            if max_grad_norm is not None:
                raise QuellError("a NoiseSpec carries its scale already: leave max_grad_norm out")
            return source
        if max_grad_norm is None or require_finite("max_grad_norm", max_grad_norm) <= 0:
            raise QuellError(
                f"max_grad_norm={max_grad_norm!r} must be positive: it is what per-example gradients are clipped to"
            )
        mechanism: Any = getattr(source, "mechanism", source)  # a plan's recommended one
        strategy = getattr(mechanism, "strategy", None)
        if strategy is None:
            raise QuellError(f"noise is made from a Plan, a Mechanism or a NoiseSpec, not from {type(source).__name__}")
        claim = mechanism.claim
        numbers = (max_grad_norm, claim.noise_multiplier, claim.epsilon, claim.delta)
        promise = " ".join([*(float(number).hex() for number in numbers), claim.sampling])
        return cls(strategy.recurrence, strategy.steps, max_grad_norm * mechanism.noise_multiplier, promise)

    def recipe(self, keep: float = 0) -> Recipe:
        """The same as float32 tables. Of the old draws of a `Regenerate`, up to `keep` are kept, the others remade."""
        return _recipe(self, keep)

    @cached_property
    def fingerprint(self) -> str:
        """Names the noise and its promise: equal only if every float32 table is, bit for bit, and the promise too.

        Noise that differs in a last bit would, where a step comes again, differ by a known multiple of the draws.
        """
        recipe = self.recipe()
        digest = blake2b(digest_size=16, person=b"quell noise")
        digest.update("\n".join([recipe.kind, str(self.steps), float(self.scale).hex(), self.promise]).encode())
        for table in (recipe.taps, recipe.scales, recipe.moves):
            if table is not None:
                digest.update(str(table.shape).encode())
                digest.update(table.tobytes())
        return digest.hexdigest()

    def made_by(self, generator: str) -> str:
        """Names the noise and what makes it: with the key, all that a state or a ledger belongs to."""
        return f"{self.fingerprint} {generator}"


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recurrence as the compiled kernels take it: float32 tables, the scale folded in.

    `taps` is (1, p) or (n, p). regenerate: x_t = Σ_j taps_j·z_{t−j}. ring: x_t = taps_0·z_t + Σ_d taps_d·kept_{t−d},
    then x_t is kept (or z_t, if `keep_draw`; taps beyond the buffers are then for older draws, which are remade).
    exponentials: (1, 2d), the weights, then the decays. fenwick: empty, and `moves` (n, 3) says which buffer is added,
    which subtracted and which written, −1 for none.
    """

    kind: Kind
    steps: int
    buffers: int
    taps: NDArray[np.float32]
    scales: NDArray[np.float32]  # (1,) or (n,): what multiplies row t
    grids: NDArray[np.float32]  # as many: the power of 2 of which release t is a multiple
    keep_draw: bool = False
    moves: NDArray[np.int32] | None = None

    @property
    def remade(self) -> int:
        """How many of the old draws are made again in every step."""
        return 0 if self.kind not in ("regenerate", "ring") else self.taps.shape[1] - 1 - self.buffers

    @property
    def saved_buffers(self) -> int:
        """How many buffers a checkpoint must hold: kept draws can be made again, all else cannot."""
        return 0 if self.keep_draw else self.buffers

    def taps_at(self, step: int) -> NDArray[np.float32]:
        return np.asarray(self.taps[min(step, len(self.taps) - 1)])

    def scale_at(self, step: int) -> tuple[np.float32, np.float32]:
        """Scale and grid of a step."""
        row = min(step, len(self.scales) - 1)
        return np.float32(self.scales[row]), np.float32(self.grids[row])


def _recipe(spec: NoiseSpec, keep: float) -> Recipe:
    recurrence, n = spec.recurrence, spec.steps
    if keep and not isinstance(recurrence, Regenerate):
        raise QuellError(f"buffered=True is a choice only where draws are remade; {_name(recurrence)} always buffers")
    scales32, grids = _scales_and_grids(spec)
    if isinstance(recurrence, Regenerate):
        taps = _float32("noising", np.atleast_2d(recurrence.noising[:n]))
        kept = int(min(keep, taps.shape[1] - 1))
        return Recipe("ring" if kept else "regenerate", n, kept, taps, scales32, grids, keep_draw=kept > 0)
    if isinstance(recurrence, Ring):
        bands = np.atleast_2d(recurrence.bands)[:, :n]
        taps64 = -bands / bands[:, :1]
        taps64[:, 0] = 1.0 / bands[:, 0]
        return Recipe("ring", n, bands.shape[1] - 1, _float32("bands", taps64), scales32, grids)
    if isinstance(recurrence, Exponentials):
        taps = _float32("scales and decays", np.concatenate([recurrence.scales, recurrence.decays])[None])
        return Recipe("exponentials", n, len(recurrence.decays), taps, scales32, grids)
    nothing = np.zeros((1, 0), np.float32)
    return Recipe("fenwick", n, recurrence.buffers, nothing, scales32, grids, moves=_fenwick_moves(n))


def _scales_and_grids(spec: NoiseSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What multiplies each row, a little more than promised so that no rounding makes it less, and the grids."""
    rows, found = spec.recurrence.row_scale, spec.magnitudes
    wanted = spec.scale * (1 + _ROUNDED_ONCE) / (1 - spec.shortfall) * (np.ones(1) if rows is None else rows)
    scales, fresh, sums = np.broadcast_arrays(_float32("scale", wanted), found.fresh, found.sums)
    within = [(scales >= LEAST_SCALE) & (scales <= MOST_SCALE), fresh >= LEAST_SCALE, sums <= MOST_SCALE]
    if not np.all([*within, fresh * scales >= LEAST_SCALE, sums * scales <= MOST_SCALE]):
        raise QuellError(
            f"scale={spec.scale:g}, times coefficients and row scale, is outside what float32 noise can represent "
            f"({LEAST_SCALE:g} to {MOST_SCALE:g}): choose another max_grad_norm, and scale the loss to match"
        )
    _, exponents = np.frexp(sums * scales)  # 2**exponents is at least that
    return np.ascontiguousarray(scales), np.ldexp(np.float32(1), exponents - GRID_BITS).astype(np.float32)


def _fenwick_moves(n: int) -> NDArray[np.int32]:
    """Counting from 1: node t is kept at the place of its lowest bit; x_t needs nodes t − lowbit(t) and t − 1."""
    t = np.arange(1, n + 1)

    def place(node: NDArray[np.int64]) -> NDArray[np.int64]:
        lowest = node & -node
        return np.where(node > 0, np.log2(np.maximum(lowest, 1)).astype(np.int64), -1)

    return np.stack([place(t - (t & -t)), place(t - 1), place(t)], axis=1).astype(np.int32)


def _float32(name: str, values: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        rounded = np.ascontiguousarray(values, dtype=np.float32)
    if not np.all(np.isfinite(rounded)):
        raise QuellError(
            f"{name} has values that float32 noise cannot carry: scale the gradients, or choose other bands"
        )
    return rounded


def _steps_covered(recurrence: Recurrence) -> Iterator[int]:
    """For how many steps each table that has a row per step was made."""
    if isinstance(recurrence, Fenwick):
        yield recurrence.steps
    if isinstance(recurrence, Ring) and np.ndim(recurrence.bands) == 2:
        yield len(recurrence.bands)
    if recurrence.row_scale is not None:
        yield len(recurrence.row_scale)


def _check_tables(recurrence: Recurrence) -> None:
    """Refuse tables whose noise hides nothing: a zero on the diagonal, a row scaled to nothing, a NaN."""
    if recurrence.row_scale is not None and not _positive(recurrence.row_scale):
        raise QuellError("row_scale must hold one positive, finite number per step: a row without noise hides nothing")
    if isinstance(recurrence, Regenerate) and not (np.ndim(recurrence.noising) == 1 and _leads(recurrence.noising)):
        raise QuellError("noising must be one row of finite coefficients, the first not 0: it multiplies the new noise")
    if isinstance(recurrence, Ring) and not (np.ndim(recurrence.bands) in (1, 2) and _leads(recurrence.bands)):
        raise QuellError("bands must be finite, with no 0 on the diagonal of C: such a C has no inverse")
    if isinstance(recurrence, Exponentials) and np.shape(recurrence.scales) != np.shape(recurrence.decays):
        raise QuellError("scales and decays must be as many: each exponential has one of both")


def _positive(values: Any) -> bool:
    return np.ndim(values) == 1 and bool(np.all(np.isfinite(values) & (np.asarray(values) > 0)))


def _leads(coefficients: Any) -> bool:
    """Whether all coefficients are finite and the leading one of each row is not 0."""
    values = np.atleast_2d(coefficients)
    return values.shape[1] > 0 and bool(np.all(np.isfinite(values)) and np.all(np.abs(values[:, 0]) > LEAST_SCALE))


def _name(recurrence: Recurrence) -> str:
    return f"a {type(recurrence).__name__} recurrence"
