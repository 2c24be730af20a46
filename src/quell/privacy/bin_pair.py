"""Balls in bins as a pair to be compared: b equally likely patterns, drawn through their Gram matrix.

The inner products u_l = ⟨m_l, y⟩/σ² are all that losses and weights depend on. Under a proposal N(m, σ²I) they are
normal with mean ⟨m_l, m⟩/σ² and covariance G/σ², whatever σ is: the same standard normals serve every σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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

    def log_moment(self, theta: float) -> float:
        return float(_log_mean_exp(theta * self.alpha[None])[0])

    @property
    def centre(self) -> float:
        return float(self.bins.pull.mean()) / (2 * self.sigma**2)

    def log_most(self, tilt: Tilt) -> float:
        """Σ_{i<extra} ln max_j mean_l exp((θ+i)·G_jl/σ²)."""
        known = self._known.setdefault(tilt.theta, [0.0])
        top = float(self.bins.table.max()) / self.sigma**2
        while len(known) <= tilt.extra:
            i = len(known) - 1
            # exp((θ+i)·(G/σ² − top)), from one power to the next by a product, because exp takes far longer.
            powers = self._powers.get(tilt.theta)
            if powers is None:
                powers = np.exp(tilt.theta * (self.bins.table / self.sigma**2 - top))
            else:
                powers *= self._falls
            self._powers[tilt.theta] = powers
            known.append(known[-1] + (tilt.theta + i) * top + math.log(float(np.max(powers.mean(axis=-1)))))
        return known[tilt.extra]

    @cached_property
    def _lifts(self) -> Bins:
        """exp(G/σ²): how much likelier a bin makes every other one as the next of a tuple."""
        return Bins(np.exp(self.bins.table / self.sigma**2))

    @cached_property
    def _falls(self) -> Array:
        """exp((G − max G)/σ²)."""
        return np.asarray(np.exp((self.bins.table - self.bins.table.max()) / self.sigma**2))

    @cached_property
    def _powers(self) -> dict[float, Array]:
        return {}

    @cached_property
    def _known(self) -> dict[float, list[float]]:
        return {}

    def draw(
        self, proposal: Proposal, keys: tuple[Key, ...], count: int, random: np.random.Generator, exact: bool
    ) -> Draws:
        mean, auxiliary = self._mean(proposal, count, random, exact)
        u = self.bins.noise(random, count)
        u *= 1.0 / self.sigma
        u += mean
        room, pull = np.empty_like(u), self.bins.pull / self.sigma**2  # one array for all: making them takes time
        loss = _log_mean_exp(np.subtract(u, self.alpha, out=room))
        powers = np.empty((len(keys), count))
        for power, (theta, shift) in zip(powers, keys, strict=True):
            np.multiply(u, theta, out=room)
            room -= theta * (theta * self.alpha + shift * pull)
            power[:] = _log_mean_exp(room)
        return Draws(loss, u.mean(axis=1), powers, auxiliary)

    def log_weights(self, tilt: Tilt, count: int, random: np.random.Generator) -> Array:
        return self._tuples(tilt, count, random)[1]

    def _mean(self, proposal: Proposal, count: int, random: np.random.Generator, exact: bool) -> tuple[Array, Array]:
        """(count, b) or (b,) means of u, and ln A."""
        along = proposal.shift * self.bins.pull / self.sigma**2
        if isinstance(proposal, Mean):
            return along, np.zeros(count)
        draw = self._accepted if exact and proposal.extra else self._tuples
        tuples, auxiliary = draw(proposal, count, random)
        field = self.bins.rows(tuples[0]) * proposal.theta
        for extra in tuples[1:]:
            field += self.bins.rows(extra)
        field *= 1.0 / self.sigma**2
        if proposal.shift:
            field += along
        return field, auxiliary

    def _tuples(self, tilt: Tilt, count: int, random: np.random.Generator) -> tuple[NDArray[np.int64], Array]:
        """(1 + extra, count) bins drawn one after the other, and ln A."""
        b, log_weight = self.bins.count, np.zeros(count)
        tuples = np.empty((1 + tilt.extra, count), dtype=np.int64)
        tuples[0] = random.integers(0, b, count)
        if not tilt.extra:
            return tuples, log_weight
        in_block = math.isqrt(b - 1) + 1
        blocks = np.zeros((count, -(-b // in_block), in_block))  # zeros after the last bin
        lifted = blocks.reshape(count, -1)[:, :b]
        np.multiply(self.bins.rows(tuples[0]), tilt.theta / self.sigma**2, out=lifted)
        log_total = lifted.max(axis=1)
        lifted -= log_total[:, None]
        np.exp(lifted, out=lifted)
        for i in range(1, 1 + tilt.extra):
            total, picked = _pick(blocks, random.random(count))
            tuples[i] = np.minimum(picked, b - 1)
            log_total += np.log(total)
            log_weight += log_total - math.log(b)
            if i < tilt.extra:
                lifted *= self._lifts.rows(tuples[i])
                lifted *= 1.0 / total[:, None]
        return tuples, log_weight

    def _accepted(self, tilt: Tilt, count: int, random: np.random.Generator) -> tuple[NDArray[np.int64], Array]:
        """Tuples accepted with probability A/max A, so that what is left of A is one."""
        kept, found, most = [], 0, self.log_most(tilt)
        while found < count:
            tuples, log_weight = self._tuples(tilt, count, random)
            if log_weight.max() > most + 1e-6:
                raise AssertionError("a tuple's weight exceeds its proven bound: this is a bug in Quell")
            accepted = tuples[:, random.random(count) < np.exp(log_weight - most)]
            kept.append(accepted)
            found += accepted.shape[1]
        return np.concatenate(kept, axis=1)[:, :count], np.zeros(count)


def _pick(blocks: Array, shares: Array) -> tuple[Array, NDArray[np.int64]]:
    """The sum of every row, and where its running sum reaches a share of that: first the block, then the place in it.

    Blocks are added up in one pass, where a running sum over whole rows would wait for every addition.
    """
    rows, size = np.arange(len(blocks)), blocks.shape[2]
    by_block = np.cumsum(blocks.sum(axis=2), axis=1)
    total = by_block[:, -1]
    goal = shares * total
    block = (by_block >= goal[:, None]).argmax(axis=1)
    goal -= np.where(block > 0, by_block[rows, block - 1], 0.0)
    within = np.cumsum(blocks[rows, block], axis=1)
    reached = within >= goal[:, None]
    reached[:, -1] |= ~reached.any(axis=1)  # rounding: the two sums may differ in their last bits
    return total, block * size + reached.argmax(axis=1)


def _log_mean_exp(values: Array) -> Array:
    """ln of the mean of exponentials, over the last axis; overwrites its argument."""
    top = values.max(axis=1)
    values -= top[:, None]
    np.exp(values, out=values)
    return np.asarray(top + np.log(values.sum(axis=1)) - math.log(values.shape[1]))
