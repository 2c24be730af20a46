"""Canaries: made-up units beside the data of a run, whose traces in what it releases are looked for afterwards.

Canaries are drawn by the run's own scheme, from random numbers of their own. A canary's gradient, of the clip norm,
lies along one coordinate of the model that no other canary has. A fair coin decides whether it is added. Nothing of
that depends on the data or on who was drawn, so the promise stays what it is. The attacker knows everything but the
coins (and, where the promise rests on random batches, who was in them): the real gradients are taken off what was
released, and what is left is weighed by the exact likelihood ratio.

That proves an ε whatever the mechanism is. If noise is normal, as designed, far more is known: how loud the canaries
are, how loud the noise is, and so the noise multiplier that the run really had, and the ε that belongs to it.

Only the first steps of a very long run are looked at. That can only weaken the attacker.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, norm

from quell._types import Array
from quell.auditing.one_run import LowerBound, independent_bound
from quell.errors import QuellError, require_count
from quell.noise import Key, NoiseSpec, NoiseStream
from quell.noise.audit import THRESHOLD
from quell.noise.audit import audit as noise_audit
from quell.planning import Mechanism, Plan
from quell.schemes import Batches, Scheme
from quell.show import outcomes, plots
from quell.show.notebook import preformatted

MOST_STEPS = 4096
_MOST_NUMBERS = 1 << 28  # canaries × steps that are kept, of five bytes each
_CLIPPED = 1e-3  # by how much clipping may miss its norm, in float32
_TOGETHER = 1 << 22  # numbers of canaries that are weighed at once


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found: a lower bound on ε, beside the ε that is promised."""

    epsilon: float  # as promised
    delta: float
    bound: LowerBound  # whatever the mechanism is
    noise_multiplier: float  # as promised
    measured_multiplier: float  # no less than the run's, with the bound's confidence, if its noise is normal
    measured_epsilon: float  # the ε of that, about
    faults: tuple[str, ...]  # what is certainly not as promised
    steps: int  # that were looked at
    scores: Array = field(repr=False)
    included: NDArray[np.bool_] = field(repr=False)

    @property
    def broken(self) -> bool:
        """Whether the promise does not hold, as far as anyone can tell from one run."""
        return self.bound.epsilon > self.epsilon or bool(self.faults)

    def as_dict(self) -> dict[str, Any]:
        """The findings as plain values (docs/json.md)."""
        plain = {name: value for name, value in vars(self).items() if name not in ("scores", "included")}
        return {**plain, "broken": self.broken, "bound": vars(self.bound), "faults": list(self.faults)}

    def save(self, path: str | Path) -> None:
        """Write the findings as JSON. They are as secret as the data: they are computed from the noise itself."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def plot(self, path: str | Path | None = None) -> plots.Picture:
        """The scores of canaries that were added and of those that were not, as a picture; with a path, also a file."""
        added, others = self.scores[self.included], self.scores[~self.included]
        return plots.draw_audit(added, others, str(self).split("\n")[0], path)

    def __str__(self) -> str:
        return outcomes.audited(self.as_dict())

    def _repr_html_(self) -> str:
        return preformatted(str(self))


class Canaries:
    """The canaries of one run: their coins, and what was released about them so far."""

    def __init__(self, mechanism: Mechanism, scheme: Scheme, count: int, key: bytes) -> None:
        self.count = require_count("canaries", count, least=16)
        self.steps = min(mechanism.strategy.steps, MOST_STEPS)
        if self.count * self.steps > _MOST_NUMBERS:
            raise QuellError(
                f"canaries={count:,} over {self.steps:,} steps need too much memory: use at most "
                f"{_MOST_NUMBERS // self.steps:,}"
            )
        self.mechanism, self.scheme = mechanism, scheme
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
        self.included = random.random(self.count) < 0.5
        self.random = random
        self._left = np.zeros((self.steps, self.count), np.float32)
        self._took_part = np.zeros((self.steps, self.count), bool)
        self._next = 0

    def record(self, step: int, took_part: NDArray[np.int64], left: NDArray[np.floating[Any]]) -> None:
        """Note a step below `steps`.

        Args:
            step: Its number.
            took_part: The canaries of its batch, also those that were not added.
            left: (count,) what was released at their coordinates, in units of the clip norm, without real gradients.
        """
        self._next += step == self._next
        self._took_part[step] = False
        self._took_part[step, took_part] = True
        self._left[step] = left

    @property
    def traces(self) -> NDArray[np.float32]:
        """(steps so far, count) what `record` was told was left, to be told again where the run goes on."""
        return self._left[: self._next]

    def audit(self, confidence: float = 0.95) -> Audit:
        """The ε that the attacker proves, and whether the noise is what it should be."""
        if self._next < self.steps:
            raise QuellError(
                f"the audit has seen {self._next:,} of {self.steps:,} steps: finish the run, from its first step or a "
                "checkpoint of it on, and ask again"
            )
        promised, sigma = self.mechanism.guarantee, self.mechanism.noise_multiplier
        columns = np.asarray(self.mechanism.strategy.matrix()[: self.steps, : self.steps]) / sigma
        size = max(1, _TOGETHER // self.steps)
        found, faults, loud, energy, along = [], self._batch_faults(), 0.0, 0.0, 0.0
        for first in range(0, self.count, size):
            part = slice(first, first + size)
            seen = columns @ self._left[:, part]
            moves = columns @ (self._took_part[:, part] & self.included[part])
            found.append(self.scheme.evidence(seen.T, columns, self._took_part[:, part].T))
            loud, energy, along = loud + np.sum(seen**2), energy + np.sum(moves**2), along + np.sum(seen * moves)
            if not first:
                noise = noise_audit([seen - moves], np.eye(self.steps), 1.0)
                faults += () if noise.passed else (f"the noise is not what was promised ({noise})",)
        scores = np.concatenate(found)
        bound = independent_bound(scores, self.included, promised.delta, confidence)
        # seen = a·moves + √v·normal: a is the canaries' loudness, v the noise's, and σ√v/a what the run really had.
        freedom, failure = self.steps * self.count - 1, (1 - confidence) / 2
        variance = float((loud - along**2 / energy) / chi2.ppf(failure, freedom))
        error = math.sqrt(variance / energy)
        measured = sigma * math.sqrt(variance) / max(along / energy - float(norm.isf(failure)) * error, 1e-300)
        if along / energy > 1 + THRESHOLD * error + _CLIPPED:
            faults += (f"canaries are {along / energy:.3g} times as loud as clipping allows",)
        about = self.scheme.accountant(self.mechanism.strategy).estimate_epsilon(measured, promised.delta)
        own = (bound, sigma, measured, about, faults, self.steps)
        return Audit(promised.epsilon, promised.delta, *own, scores, self.included)

    def _batch_faults(self) -> tuple[str, ...]:
        """What in the batches is not as the scheme has it: gaps, and how often anyone takes part."""
        allowed, faults = self.scheme.participation, []
        last = np.full(self.count, -allowed.separation)
        least = self.steps
        for step, there in enumerate(self._took_part):
            least = min(least, int(np.min(step - last[there], initial=self.steps)))
            last[there] = step
        if least < allowed.separation:
            faults.append(
                f"an example came again after {least:,} steps, and the promise rests on {allowed.separation:,}"
            )
        counts = self._took_part.sum(axis=0)
        wanted, spread = self.steps * self.scheme.fraction, max(1.0, float(counts.std())) / math.sqrt(self.count)
        if abs(counts.mean() - wanted) > THRESHOLD * spread:
            faults.append(f"examples took part {counts.mean():.4g} times on average, and {wanted:.4g} are promised")
        return tuple(faults)


def rehearse(plan: Plan, canaries: int = 20_000, confidence: float = 0.95) -> Audit:
    """Audit a plan without data: its batches and its noise, drawn as in training, for canaries alone.

    Args:
        plan: The plan, whose recommended mechanism is audited.
        canaries: How many. More of them prove more.
        confidence: Probability that the bound is true.

    Returns:
        The audit.

    >>> import quell
    >>> plan = quell.plan(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5, sampling="cyclic")
    >>> rehearse(plan, canaries=2000).broken
    False
    """
    key, mechanism = Key.generate(), plan.mechanism
    scheme = plan.prices.scheme_of(mechanism).for_training()
    watched = Canaries(mechanism, scheme, canaries, key.derive("canaries"))
    spec = NoiseSpec(mechanism.strategy.recurrence, scheme.steps, mechanism.noise_multiplier)
    stream = NoiseStream(spec, [canaries], key=key)
    for step, batch in zip(range(watched.steps), Batches(scheme, canaries, key.derive("batches")), strict=False):
        released = np.zeros(canaries, np.float32)
        released[batch[watched.included[batch]]] = 1.0
        stream.add_([released])
        watched.record(step, batch, released)
    return watched.audit(confidence)
