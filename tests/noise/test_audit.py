"""The white-box audit passes every recurrence and fails every seeded mutation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quell.analysis.sensitivity import sensitivity
from quell.noise import Key, NoiseSpec, NoiseStream, Shard
from quell.noise.audit import NoiseAudit, audit, audit_stream, collect
from quell.noise.layout import WORDS
from quell.participation import Participation
from quell.planning import Prices
from quell.strategy.recurrence import Regenerate

from .cases import CASES, STEPS, matrix, spec, strategy

Seeded = Callable[[int], Key]
SIZES = [(40, 50), 1500, 37]
GENERATORS = tuple(WORDS)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("case", CASES)
def test_every_recurrence_is_sound(case: str, generator: str, seeded: Seeded) -> None:
    stream = NoiseStream(spec(case, 0.7), SIZES, key=seeded(21), generator=generator)
    report = audit_stream(stream, matrix(case), 0.7)
    assert report.passed, str(report)
    assert len(report.findings) > 2 * STEPS


@pytest.mark.parametrize("case", ["lambda_cgd", "bsr", "blt"])
def test_ranks_are_independent_of_one_another(case: str, seeded: Seeded) -> None:
    ranks = [[Shard(0, 0, 1000), Shard(1, 0, 700)], [Shard(0, 1000, 1000), Shard(1, 700, 800)]]
    added = [rows for shards in ranks for rows in collect(NoiseStream(spec(case), shards=shards, key=seeded(22)))]
    assert audit(added, matrix(case), 1.0).passed


def _fails(report: NoiseAudit, *names: str) -> None:
    """The audit failed, by a wide margin, and for the reason given."""
    assert not report.passed
    assert abs(report.findings[0].deviation) > 2 * report.threshold
    failed = {finding.name for finding in report.failures}
    assert any(any(found.startswith(name) for found in failed) for name in names), str(report)


def test_mutation_wrong_sign_of_lambda(seeded: Seeded) -> None:
    wrong = NoiseSpec(Regenerate(np.array([1.0, 0.9])), STEPS, 1.0)
    _fails(audit_stream(NoiseStream(wrong, SIZES, key=seeded(23)), matrix("lambda_cgd"), 1.0), "covariance at lag 1")


def test_mutation_off_by_one_in_the_regenerated_step(seeded: Seeded) -> None:
    late = NoiseSpec(Regenerate(np.array([1.0, 0.0, -0.9])), STEPS, 1.0)  # z of step t−2 where t−1 was meant
    _fails(audit_stream(NoiseStream(late, SIZES, key=seeded(23)), matrix("lambda_cgd"), 1.0), "covariance at lag")


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("case", ["lambda_cgd", "bsr", "blt", "tree"])
def test_mutation_off_by_one_on_resume(case: str, shift: int, seeded: Seeded) -> None:
    stop = 16
    first = NoiseStream(spec(case, steps=STEPS + 1), SIZES, key=seeded(24))
    second = NoiseStream(spec(case, steps=STEPS + 1), SIZES, key=seeded(24))
    before = [rows[:stop] for rows in _collect_some(first, stop)]
    saved = first.state_dict()
    saved["step"] = saved["released"] = saved["step"] + shift
    second.load_state_dict(saved)
    after = [rows[: STEPS - stop] for rows in _collect_some(second, STEPS - stop)]
    added = [np.concatenate(pair) for pair in zip(before, after, strict=True)]
    _fails(audit(added, matrix(case), 1.0), "covariance at lag", "variance at step")


def _collect_some(stream: NoiseStream, steps: int) -> list[Any]:
    rows = []
    for _ in range(steps):
        zeros = [np.zeros(shard.length, np.float32) for shard in stream.shards]
        stream.add_(zeros)
        rows.append(zeros)
    return [np.array([row[i] for row in rows], np.float64) for i in range(len(stream.shards))]


@pytest.mark.parametrize("case", ["independent", "lambda_cgd", "bsr"])
def test_mutation_reused_key(case: str, seeded: Seeded) -> None:
    """Two runs under one key, or two tensors under one number: their noise is the same."""
    runs = [collect(NoiseStream(spec(case), [2000], key=seeded(25)))[0] for _ in range(2)]
    _fails(audit(runs, matrix(case), 1.0), "covariance of groups 0 and 1")
    offset = [NoiseStream(spec(case), shards=[Shard(0, 0, size)], key=seeded(25)) for size in (2000, 900)]
    _fails(audit([collect(stream)[0] for stream in offset], matrix(case), 1.0), "covariance of groups 0 and 1")


@pytest.mark.parametrize("case", ["lambda_cgd", "bisr", "bsr"])
def test_mutation_missing_sensitivity_factor(case: str, seeded: Seeded) -> None:
    factor = sensitivity(strategy(case), Participation(STEPS, 10)).value
    promised = 0.6 * factor
    assert audit_stream(NoiseStream(spec(case, promised), SIZES, key=seeded(26)), matrix(case), promised).passed
    _fails(audit_stream(NoiseStream(spec(case, 0.6), SIZES, key=seeded(26)), matrix(case), promised), "variance")


def test_mutation_row_scale_of_the_wrong_step(seeded: Seeded) -> None:
    right = strategy("bisr normalised").recurrence
    assert isinstance(right, Regenerate)
    assert right.row_scale is not None
    wrong = dataclasses.replace(right, row_scale=np.roll(right.row_scale, 1))
    report = audit_stream(
        NoiseStream(NoiseSpec(wrong, STEPS, 1.0), SIZES, key=seeded(26)), matrix("bisr normalised"), 1.0
    )
    _fails(report, "variance at step", "covariance at lag")


@pytest.mark.parametrize("case", ["independent", "lambda_cgd", "bsr"])
def test_mutation_noise_per_micro_batch(case: str, seeded: Seeded) -> None:
    """Four micro-batches make one step; the noise is added to each of the four."""
    streams = [NoiseStream(spec(case), [2000], key=seeded(30 + i)) for i in range(4)]
    added = sum(collect(stream)[0] for stream in streams)
    _fails(audit([np.asarray(added)], matrix(case), 1.0), "variance")


@pytest.mark.parametrize("case", ["bsr", "two exponentials", "bisr", "tree"])
def test_mutation_swapped_buffers(case: str, seeded: Seeded) -> None:
    """Half-way, two of the buffers trade places."""
    stream = NoiseStream(spec(case), [3000], key=seeded(27), buffered=case == "bisr")
    rows = []
    for step in range(STEPS):
        gradient = np.zeros(3000, np.float32)
        if step in (15, 22, 30):
            buffers: Any = stream._engine._buffers
            buffers[[0, 1]] = buffers[[1, 0]]
        stream.add_(gradient)
        rows.append(gradient.astype(np.float64))
    _fails(audit([np.stack(rows)], matrix(case), 1.0), "covariance at lag", "variance at step")


def test_mutation_a_dead_buffer(seeded: Seeded) -> None:
    """A state loaded without its buffers would be noticed as well."""
    stream = NoiseStream(spec("bsr"), [3000], key=seeded(28))
    rows = []
    for step in range(STEPS):
        gradient = np.zeros(3000, np.float32)
        if step == 20:
            stream._engine._buffers[:] = 0
        stream.add_(gradient)
        rows.append(gradient.astype(np.float64))
    _fails(audit([np.stack(rows)], matrix("bsr"), 1.0), "covariance at lag", "variance at step")


def test_missing_noise_and_nan_fail() -> None:
    assert not audit([np.zeros((STEPS, 100))], np.eye(STEPS), 1.0).passed
    assert not audit([np.full((STEPS, 100), np.nan)], np.eye(STEPS), 1.0).passed
    assert "broken" in str(audit([np.zeros((STEPS, 100))], np.eye(STEPS), 1.0))


def test_a_priced_mechanism_gets_the_noise_it_was_calibrated_for(table4: Prices, seeded: Seeded) -> None:
    prices = table4
    mechanism = prices.price("lambda_cgd", **{"lambda": 0.9})
    stream = NoiseStream(mechanism, [3000], key=seeded(29), max_grad_norm=0.5)
    assert stream.steps == 3900
    [rows] = _collect_some(stream, STEPS)
    report = audit([rows], mechanism.strategy.matrix()[:STEPS, :STEPS], 0.5 * mechanism.noise_multiplier)
    assert report.passed, str(report)
    dpsgd = prices.price("identity")
    ratio = mechanism.guarantee.sensitivity.value / dpsgd.guarantee.sensitivity.value
    assert mechanism.noise_multiplier == pytest.approx(ratio * dpsgd.noise_multiplier)
