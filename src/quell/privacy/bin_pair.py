"""Balls in bins as a pair to be compared: b equally likely patterns, drawn through their Gram matrix.

The inner products u_l = ⟨m_l, y⟩/σ² are all that losses and weights depend on. Under a proposal N(m, σ²I) they are
normal with mean ⟨m_l, m⟩/σ² and covariance G/σ², whatever σ is: the same standard normals serve every σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quell._types import Array
from quell.privacy.bins import Bins
from quell.privacy.tilting import Draws, Key, Mean, Proposal, Tilt


@dataclass(frozen=True, eq=False)
class BinPair:
    """P = (1/b)·Σ_j N(m_j, σ²I) against Q = N(0, σ²I)."""

    bins: Bins
    sigma: float

    @property
    def width(self) -> int:
        return self.bins.count

    @property
    def rarest(self) -> float:
        return math.log(self.bins.count)

    @cached_property
    def alpha(self) -> Array:
        return self.bins.energies / (2 * self.sigma**2)

    @property
    def heaviest(self) -> float:
        return float(self.alpha.max())

    @property
    def average(self) -> float:
        return float(self.alpha.mean())

    @property
    def centre(self) -> float:
        return float(self.bins.pull.mean()) / (2 * self.sigma**2)

    def log_most(self, tilt: Tilt) -> float:
        """Σ_{i<extra} ln max_j mean_l exp((θ+i)·G_jl/σ²)."""
        for i in range(tilt.extra):
            if (tilt.theta, i + 1) not in self._known:
                step = self.bins.largest_row_mean((tilt.theta + i) / self.sigma**2)
                self._known[tilt.theta, i + 1] = self._known.get((tilt.theta, i), 0.0) + step
        return self._known.get((tilt.theta, tilt.extra), 0.0)

    @cached_property
    def _known(self) -> dict[tuple[float, int], float]:
        return {}

    def draw(self, proposal: Proposal, keys: tuple[Key, ...], count: int, random: np.random.Generator) -> Draws:
        mean, auxiliary = self._mean(proposal, count, random)
        u = self.bins.noise(random, count)
        u *= 1.0 / self.sigma
        u += mean
        loss = _log_mean_exp(u - self.alpha)
        pull = self.bins.pull / self.sigma**2
        powers = [_log_mean_exp(theta * u - theta * (theta * self.alpha + shift * pull)) for theta, shift in keys]
        return Draws(loss, u.mean(axis=1), np.array(powers).reshape(len(keys), count), auxiliary)

    def _mean(self, proposal: Proposal, count: int, random: np.random.Generator) -> tuple[Array, Array]:
        """(count, b) or (b,) means of u, and ln A."""
        b, auxiliary = self.bins.count, np.zeros(count)
        if isinstance(proposal, Mean):
            return proposal.shift * self.bins.pull / self.sigma**2, auxiliary
        field = self.bins.rows(random.integers(0, b, count)) * (proposal.theta / self.sigma**2)
        if proposal.shift:
            field += proposal.shift * self.bins.pull / self.sigma**2
        for _ in range(proposal.extra):
            top = field.max(axis=1)
            running = np.cumsum(np.exp(field - top[:, None]), axis=1)
            auxiliary += top + np.log(running[:, -1] / b)
            place = random.random(count) * running[:, -1]
            chosen = np.minimum((running < place[:, None]).sum(axis=1), b - 1)
            field += self.bins.rows(chosen) / self.sigma**2
        return field, auxiliary


def _log_mean_exp(values: Array) -> Array:
    """ln of the mean of exponentials, over the last axis; overwrites its argument."""
    top = values.max(axis=1)
    values -= top[:, None]
    np.exp(values, out=values)
    return np.asarray(top + np.log(values.sum(axis=1)) - math.log(values.shape[1]))
