"""Is the noise that was added the noise that was promised? A white-box test with zero gradients.

With zero gradients a stream adds scale·C⁻¹Z, so C·(what was added)/scale must be i.i.d. standard normal. Each finding
below is a sum of many terms with mean 0, divided by its standard deviation: under the promise it is a standard normal
itself, and beyond the threshold something is broken: a sign, an index, a buffer, a factor, a key used twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from quell._types import Array
from quell.noise.layout import LANES
from quell.noise.stream import NoiseStream

THRESHOLD = 5.5  # a sound stream exceeds it with probability 4e-8 per finding


@dataclass(frozen=True)
class Finding:
    """One statistic, in standard deviations from what i.i.d. normals would give."""

    name: str
    deviation: float


@dataclass(frozen=True)
class NoiseAudit:
    """All findings of one audit, largest deviation first."""

    findings: tuple[Finding, ...]
    threshold: float = THRESHOLD

    @property
    def passed(self) -> bool:
        return abs(self.findings[0].deviation) < self.threshold  # NaN does not pass

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not abs(finding.deviation) < self.threshold)

    def __str__(self) -> str:
        worst = self.findings[0]
        shown = "; ".join(f"{finding.name} off by {finding.deviation:+.3g}σ" for finding in self.failures[:5])
        verdict = f"sound, worst of {len(self.findings)}: {worst.name} {worst.deviation:+.1f}σ"
        return verdict if self.passed else f"broken: {shown}"


def audit_stream(stream: NoiseStream, strategy_matrix: Array, scale: float) -> NoiseAudit:
    """Run a whole stream on zero gradients and audit it. It uses the stream up, so give it a key of its own.

    >>> from quell.noise import Key, NoiseSpec
    >>> from quell.strategy.recurrence import Regenerate
    >>> stream = NoiseStream(NoiseSpec(Regenerate(np.ones(1)), steps=8, scale=3.0), [2000, 500], key=Key.generate())
    >>> audit_stream(stream, strategy_matrix=np.eye(8), scale=3.0).passed
    True
    """
    return audit(collect(stream), strategy_matrix, scale)


def collect(stream: NoiseStream) -> list[Array]:
    """What the stream adds to zero gradients: one (steps, length) array per shard, for the steps that are left."""
    rows: list[list[Array]] = [[] for _ in stream.shards]
    for _ in range(stream.steps - stream.step):
        zeros = [np.zeros(shard.length, np.float32) for shard in stream.shards]
        stream.add_(zeros)
        for kept, added in zip(rows, zeros, strict=True):
            kept.append(added.astype(np.float64))
    return [np.stack(kept) for kept in rows]


def audit(added: Sequence[Array], strategy_matrix: Array, scale: float, most_lags: int = 64) -> NoiseAudit:
    """Audit rows of noise; `added` holds one (n, elements) array per group: tensors, shards, ranks or whole runs.

    The groups are held to the promise together and checked for independence of one another.
    """
    groups = [strategy_matrix @ rows / scale for rows in added if rows.shape[1]]
    findings = sorted(_findings(groups, most_lags), key=lambda f: -_size(f.deviation))
    return NoiseAudit(tuple(findings))


def _findings(groups: list[Array], most_lags: int) -> Iterator[Finding]:
    z = np.concatenate(groups, axis=1)
    n, m = z.shape
    yield Finding("mean", float(z.mean() * np.sqrt(n * m)))
    yield Finding("variance", float((np.mean(z**2) - 1) * np.sqrt(n * m / 2)))
    yield Finding("kurtosis", float((np.mean(z**4) - 3) * np.sqrt(n * m / 96)))
    for step in range(n):
        yield Finding(f"variance at step {step}", float((np.mean(z[step] ** 2) - 1) * np.sqrt(m / 2)))
    for lag in range(1, min(n, most_lags + 1)):
        yield Finding(f"covariance at lag {lag}", _covariance(z[lag:], z[:-lag]))
    for number, group in enumerate(groups):
        for apart in (1, LANES):  # neighbours in memory, and the two normals of a Box–Muller pair
            if group.shape[1] > apart:
                a, b = group[:, apart:], group[:, :-apart]
                yield Finding(f"elements {apart} apart in group {number}", _covariance(a, b))
                yield Finding(f"squares {apart} apart in group {number}", _covariance(a**2 - 1, b**2 - 1) / 2)
    for (i, a), (j, b) in combinations(enumerate(groups), 2):
        common = min(a.shape[1], b.shape[1])
        yield Finding(f"covariance of groups {i} and {j}", _covariance(a[:, :common], b[:, :common]))


def _covariance(a: Array, b: Array) -> float:
    return float(np.sum(a * b) / np.sqrt(a.size))


def _size(deviation: float) -> float:
    return np.inf if np.isnan(deviation) else abs(deviation)
