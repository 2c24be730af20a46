"""How the rows of C⁻¹Z are made, one step at a time, and what that costs in buffers and draws.

`buffers` are model-sized vectors that must be kept between steps, `draws` standard normal vectors generated per
step. In all of them `row_scale`, where given, multiplies row t of the result: that is how column normalisation
enters the noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from quell._types import Array


@dataclass(frozen=True, eq=False)
class Regenerate:
    """C⁻¹ has few diagonals: x_t = row_scale_t · Σ_j noising_j · z_{t−j}, the old z made anew from counters."""

    buffers: ClassVar[int] = 0
    noising: Array  # (p,)
    row_scale: Array | None = field(default=None, repr=False)  # (n,)

    @property
    def draws(self) -> int:
        return len(self.noising)


@dataclass(frozen=True, eq=False)
class Ring:
    """C has few diagonals: y_t = (z_t − Σ_{d≥1} C_{t,t−d}·y_{t−d}) / C_{t,t}, then x_t = row_scale_t·y_t."""

    draws: ClassVar[int] = 1
    bands: Array  # (p,) when C is Toeplitz, else (n, p) with entry [t, d] = C_{t,t−d}
    row_scale: Array | None = field(default=None, repr=False)  # (n,)

    @property
    def buffers(self) -> int:
        return int(self.bands.shape[-1]) - 1


@dataclass(frozen=True, eq=False)
class Exponentials:
    """C⁻¹ is a BLT: x_t = z_t + Σ_i scales_i·s_i with s_i ← z_t + decays_i·s_i after every step, s starting at 0."""

    draws: ClassVar[int] = 1
    scales: Array  # (d,)
    decays: Array  # (d,)
    row_scale: Array | None = field(default=None, repr=False)  # (n,)

    @property
    def buffers(self) -> int:
        return len(self.decays)


@dataclass(frozen=True)
class Fenwick:
    """C is a Fenwick tree: x_t = z_t + n_{t−lowbit(t)} − n_{t−1}, n_t the noise of prefix sum t (from 1; n_0 = 0).

    Of the past only n at the binary prefixes of t − 1 is needed, one buffer per bit.
    """

    draws: ClassVar[int] = 1
    steps: int
    row_scale: None = None

    @property
    def buffers(self) -> int:
        return self.steps.bit_length()


Recurrence = Regenerate | Ring | Exponentials | Fenwick
