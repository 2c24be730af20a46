"""Audits prove no more than is true, find what is planted, and leave the promise alone."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from attacks import truth
from quell import QuellError, adapters
from quell.auditing import lower_bound, rehearse
from quell.noise import Key
from quell.planning import Plan, Prices
from quell.run import Run
from quell.schemes import BallsInBins, Batches, BMinSep, Cyclic, CyclicPoisson, Poisson
from quell.torch import canaries, load_checkpoint, make_private, save_checkpoint

from ..pytorch.training import seeded

EXAMPLES, BATCH = 2000, 100


def all_subsets(scheme):
    """Every way to take part in coins that are flipped at every turn of a group, by enumeration."""
    rows, chances = [], []
    for group in range(scheme.groups):
        turns = list(range(group, scheme.steps, scheme.groups))
        for chosen in itertools.product((0, 1), repeat=len(turns)):
            row = np.zeros(scheme.steps)
            row[turns] = chosen
            rows.append(row)
            heads = sum(chosen)
            chances.append(scheme.rate**heads * (1 - scheme.rate) ** (len(turns) - heads) / scheme.groups)
    return np.array(rows), np.array(chances)


@pytest.mark.parametrize(
    ("scheme", "bands", "steps"),
    [
        (BallsInBins(7, 3), 4, 7),
        (BallsInBins(7, 3), 4, 2),
        (Poisson(6, 0.3), 1, 6),
        (CyclicPoisson(7, 2, 0.4), 2, 7),
        (BMinSep(8, 3, 0.4), 3, 8),
        (BMinSep(8, 4, 0.7), 2, 2),
    ],
)
def test_evidence_is_the_likelihood_ratio_over_all_patterns(scheme, bands, steps):
    """Also where an audit looks at the first steps only."""
    coefficients = np.array([1.0, 0.6, 0.3, 0.1])[:bands]
    columns = sum(value * np.eye(steps, k=-lag) for lag, value in enumerate(coefficients)) / 1.3
    rows, chances = all_subsets(scheme) if hasattr(scheme, "groups") else truth.patterns(scheme)
    rows = rows[:, :steps]
    assert math.isclose(chances.sum(), 1.0)
    seen = np.random.default_rng(0).normal(size=(50, steps)) * 2
    moves = rows @ columns.T
    dumb = [
        math.log(sum(p * math.exp(row @ move - 0.5 * move @ move) for p, move in zip(chances, moves, strict=True)))
        for row in seen
    ]
    np.testing.assert_allclose(scheme.evidence(seen, columns, np.zeros(seen.shape, bool)), dumb, rtol=1e-9, atol=1e-12)


def test_evidence_of_batches_that_are_known():
    scheme, random = Cyclic(6, 3), np.random.default_rng(0)
    columns, seen = np.tril(random.random((6, 6))), random.normal(size=(3, 6))
    patterns = np.arange(6) % 3 == np.arange(3)[:, None]
    dumb = [
        row @ (columns @ mine) - 0.5 * np.sum((columns @ mine) ** 2) for row, mine in zip(seen, patterns, strict=True)
    ]
    np.testing.assert_allclose(scheme.evidence(seen, columns, patterns), dumb)


def plan_of(sampling: str, family: str = "bisr", **parameters) -> Plan:
    run = Run.from_data(
        examples=EXAMPLES, batch_size=BATCH, epochs=3, epsilon=8, delta=1e-5, sampling=sampling, momentum=0.0
    )
    return Plan(run, (Prices(run).price(family, **parameters),), 0)


@pytest.mark.parametrize("sampling", ["cyclic", pytest.param("poisson", marks=pytest.mark.slow)])
def test_a_sound_plan_is_not_broken_and_its_noise_is_measured(sampling):
    found = rehearse(plan_of(sampling, "identity"), canaries=4000)
    assert not found.broken, str(found)
    assert 1.0 < found.bound.epsilon < 8.0
    assert 0.99 * found.noise_multiplier < found.measured_multiplier < 1.1 * found.noise_multiplier
    assert found.measured_epsilon > 6.0
    assert "Nothing was found" in str(found)


def trained(spoil=lambda optimizer: None, canaries=2000, epochs=3, **options):
    """A private run with canaries; `spoil` may plant a bug before it starts."""
    torch.manual_seed(0)
    model = nn.Linear(40, 60)
    data = TensorDataset(torch.randn(EXAMPLES, 40), torch.randn(EXAMPLES, 60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = plan_of("cyclic", bands=3)
    model, optimizer, loader = make_private(model, optimizer, data, plan, 0.5, canaries=canaries, **options)
    spoil(optimizer)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return optimizer


def test_a_sound_run_is_not_broken(tmp_path):
    found = trained().audit()
    assert not found.broken, str(found)
    assert found.bound.epsilon > 1.5
    assert found.measured_epsilon > 6.0
    found.save(tmp_path / "audit.json")
    assert json.loads((tmp_path / "audit.json").read_text())["bound"]["canaries"] == 2000
    found.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 1000


def weaker_noise(share):
    def plant(optimizer):
        noise, add = optimizer.run.noise, optimizer.run.noise.add_

        def weaker(sums):
            before = [total.clone() for total in sums]
            add(sums)
            for total, known in zip(sums, before, strict=True):
                total.copy_(known + share * (total - known))

        noise.add_ = weaker

    return plant


def the_same_noise_again(optimizer):
    noise, add, first = optimizer.run.noise, optimizer.run.noise.add_, []

    def repeated(sums):
        before = [total.clone() for total in sums]
        add(sums)
        first.extend([total - known for total, known in zip(sums, before, strict=True)] if not first else [])
        for total, known, added in zip(sums, before, first, strict=True):
            total.copy_(known + added)

    noise.add_ = repeated


def louder_clipping(factor):
    def plant(optimizer):
        optimizer._engine.max_grad_norm *= factor

    return plant


def batches_of_another_scheme(monkeypatch):
    def other(accounted, *rest):
        return Batches(Cyclic(accounted.steps, accounted.separation // 2), *rest)

    for room in (adapters.scheme, canaries):
        monkeypatch.setattr(room, "Batches", other)


@pytest.mark.parametrize(
    ("bug", "says", "more"),
    [
        (weaker_noise(0.5), "noise", 1.5),
        (the_same_noise_again, "noise", 0.0),
        (louder_clipping(2), "as loud", 1.5),
    ],
)
def test_planted_bugs_are_found(bug, says, more):
    found = trained(bug).audit()
    assert found.broken
    assert any(says in fault for fault in found.faults), found.faults
    assert "broken" in str(found)
    assert found.measured_epsilon > more * found.epsilon


def test_batches_of_another_scheme_are_found(monkeypatch):
    batches_of_another_scheme(monkeypatch)
    found = trained().audit()
    assert found.broken
    assert any("came again" in fault for fault in found.faults), found.faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "count"),
    [
        (weaker_noise(0.5), 16),
        (weaker_noise(0.9), 64),
        (weaker_noise(0.97), 1024),
        (the_same_noise_again, 16),
        (louder_clipping(2), 64),
        (louder_clipping(1.25), 1024),
        (None, 16),
    ],
)
def test_so_many_canaries_find_each_bug_in_every_run(bug, count, monkeypatch):
    """The table of docs/auditing.md; None plants batches of another scheme. Sound runs are never called broken."""
    assert not any(trained(canaries=count).audit().broken for _ in range(5))
    if bug is None:
        batches_of_another_scheme(monkeypatch)
    for _ in range(10):
        assert trained(bug or (lambda _: None), canaries=count).audit().broken


def test_canaries_say_nothing_of_who_was_drawn():
    """They have draws of their own: sharing those of examples would tell when these took part (found by a review)."""
    audited = trained(epochs=1, key=seeded(3))
    steps = EXAMPLES // BATCH
    first = np.zeros(EXAMPLES, int)
    for step, batch in enumerate(audited.run.batches):
        if step < steps:
            first[batch] = step
    own = np.argmax(audited.run.planted.watched._took_part[:steps], axis=0)
    assert abs(np.corrcoef(first, own)[0, 1]) < 0.1
    assert abs((first == own).mean() - 1 / steps) < 0.03


def test_canaries_lie_beside_the_real_gradients():
    """What is known of the real sums is what a run without canaries has, and each canary adds one clip norm, once."""
    audited, plain = (trained(canaries=count, epochs=1, key=seeded(3)) for count in (2000, 0))
    watched = audited.run.planted.watched
    noise = trained(canaries=0, epochs=1, key=seeded(3))  # the same seed: the same noise
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.params, noise.params, strict=True))
    took_part = watched._took_part[: EXAMPLES // BATCH]
    assert (took_part.sum(axis=0) == 1).all()
    added = (watched._left[: EXAMPLES // BATCH] * took_part).sum(axis=0)
    difference = added[watched.included].mean() - added[~watched.included].mean()
    assert abs(difference - 1.0) < 6 * audited.noise_multiplier / math.sqrt(500)


def test_a_resumed_run_is_audited_as_if_it_had_never_stopped(tmp_path):
    """Another process goes on from a checkpoint that is older than the crash."""

    def started(count=2000, key=tmp_path / "key", **options):
        torch.manual_seed(0)
        model = nn.Linear(40, 60)
        data = TensorDataset(torch.randn(EXAMPLES, 40), torch.randn(EXAMPLES, 60))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"key": key, "canaries": count, **options}
        return make_private(model, optimizer, data, plan_of("cyclic", bands=3), 0.5, **options)

    def train(model, optimizer, loader, steps=60, saved=-1):
        while optimizer.run.step < steps:
            for x, y in itertools.islice(loader, steps - optimizer.run.step):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if optimizer.run.step == saved:
                    save_checkpoint(tmp_path / "checkpoint", model, optimizer, loader)
        optimizer.close()

    crashed = started()
    train(*crashed, steps=31, saved=25)
    for wrong in (0, 1000):
        with pytest.raises(QuellError, match=rf"saved with canaries=2000 and this run has canaries={wrong}: pass what"):
            load_checkpoint(tmp_path / "checkpoint", *(other := started(wrong)))
        other[1].close()
    resumed = started()
    assert load_checkpoint(tmp_path / "checkpoint", *resumed) == 25
    train(*resumed)
    straight = started(key=Key.load(tmp_path / "key"), ledger=tmp_path / "other")
    train(*straight)
    found, expected = resumed[1].audit(), straight[1].audit()
    assert np.array_equal(found.scores, expected.scores)
    assert found.as_dict() == expected.as_dict()


def test_wrong_requests_are_refused_in_a_sentence():
    with pytest.raises(QuellError, match="has no canaries: pass canaries="):
        trained(canaries=0, epochs=1).audit()
    with pytest.raises(QuellError, match="has seen 20 of 60 steps"):
        trained(epochs=1).audit()
    with pytest.raises(QuellError, match="need a coordinate each, and the model has 2,460"):
        trained(canaries=2461)
    with pytest.raises(QuellError, match="canaries"):
        trained(canaries=3)
    with pytest.raises(QuellError, match="confidence=1"):
        lower_bound(np.zeros(100), np.zeros(100, bool), 1e-5, 1.0)
    with pytest.raises(QuellError, match="one of each per canary"):
        lower_bound(np.zeros(100), np.zeros(90, bool), 1e-5)
