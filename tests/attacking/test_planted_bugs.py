"""Every attack finds what it is for: a bug is planted in Quell, and the attack reports it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import quell.noise
import quell.planning.file
import quell.torch.private
import quell.torch.start
from attacks import audit, clipping, noise, plan_files, pricing
from quell import privacy
from quell.noise import Key
from quell.schemes import BallsInBins, Batches


def breaks(outcomes) -> int:
    return sum(len(outcome.breaks) for outcome in outcomes)


def less_noise(function, share):
    def planted(*args, **kwargs):
        said = function(*args, **kwargs)
        return dataclasses.replace(said, noise_multiplier=said.noise_multiplier * share)

    return planted


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "share"), [("cyclic", 0.99), ("balls_in_bins", 0.9)])
def test_prices_with_too_little_noise(scheme, share, monkeypatch):
    for name in ("calibrate", "epsilon", "delta"):
        monkeypatch.setattr(privacy, name, less_noise(getattr(privacy, name), share))
    outcomes = pricing.attack(2, seed=1, shares={scheme: 1.0})
    assert breaks(outcomes)
    assert outcomes[0].tightest > 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["poisson", "cyclic_poisson", "b_min_sep"])
def test_prices_with_too_little_noise_under_coins(scheme, monkeypatch):
    for name in ("calibrate", "epsilon", "delta"):
        monkeypatch.setattr(privacy, name, less_noise(getattr(privacy, name), 0.8))
    assert breaks(pricing.attack(3, seed=1, shares={scheme: 1.0})) >= 2


@pytest.mark.slow
def test_prices_with_another_sampler_than_accounted(monkeypatch):
    """The accountant of balls in bins, given twice the bins that there are."""
    real = privacy.delta

    def planted(strategy, scheme, sigma, epsilon):
        return real(strategy, BallsInBins(scheme.steps, min(scheme.steps, 2 * scheme.separation)), sigma, epsilon)

    monkeypatch.setattr(privacy, "delta", planted)
    assert breaks(pricing.attack(1, seed=6, shares={"balls_in_bins": 1.0}))


@pytest.mark.slow
def test_verification_that_does_not_price_the_noise(monkeypatch):
    def trusting(strategy, scheme, sigma, epsilon, delta, comparisons=1):
        found = privacy.calibrate(strategy, scheme, epsilon, delta)
        return dataclasses.replace(found, noise_multiplier=sigma)

    for number in range(6):
        plan_files.honest(number)
    monkeypatch.setattr(quell.planning.prices.privacy, "certify", trusting)
    (outcome,) = plan_files.attack(100, seed=1)
    assert sum("delta of" in flaw for flaw in outcome.breaks) >= 2
    assert outcome.tightest > 1


def test_verification_that_trusts_the_numbers_of_a_row(monkeypatch):
    real = quell.planning.file._compared
    monkeypatch.setattr(
        quell.planning.file,
        "_compared",
        lambda *args: (dataclasses.replace(check, holds=True) for check in real(*args)),
    )
    (outcome,) = plan_files.attack(100, seed=1)
    assert sum("states something else" in flaw for flaw in outcome.breaks) >= 2


def test_clipping_to_twice_the_norm(monkeypatch):
    real = quell.torch.clip_norms.require_clip_norm
    monkeypatch.setattr(quell.torch.clip_norms, "require_clip_norm", lambda bound: 2 * real(bound))
    (outcome,) = clipping.attack(20, seed=1)
    assert sum("clip norms" in flaw for flaw in outcome.breaks) >= 2
    assert outcome.tightest == pytest.approx(2, rel=0.01)


def test_noise_for_a_smaller_clip_norm(monkeypatch):
    real = quell.torch.start.CorrelatedNoise
    monkeypatch.setattr(
        quell.torch.start,
        "CorrelatedNoise",
        lambda chosen, params, bound, **options: real(chosen, params, 0.8 * bound, **options),
    )
    (outcome,) = noise.attack(4, seed=1)
    assert len(outcome.breaks) == 4
    assert outcome.tightest > 1


@pytest.mark.filterwarnings("ignore::quell.noise.SeededKeyWarning")
def test_noise_of_one_key_in_two_runs(monkeypatch):
    monkeypatch.setattr(Key, "generate", classmethod(lambda cls: cls.from_seed(1)))
    (outcome,) = noise.attack(3, seed=1)
    assert sum("correlated" in flaw for flaw in outcome.breaks) == 3


def test_audit_of_a_sampler_that_takes_more(monkeypatch):
    """Accounted are five bins, but there are two."""
    monkeypatch.setattr(audit, "FAMILIES", {"balls_in_bins": ("identity",)})
    monkeypatch.setattr(audit, "_scheme", lambda name, random: BallsInBins(10, 5))
    monkeypatch.setattr(
        audit, "Batches", lambda scheme, examples, key: Batches(BallsInBins(scheme.steps, 2), examples, key)
    )
    (outcome,) = audit.attack(1, seed=1, examples=100_000)
    assert len(outcome.breaks) == 1
    assert outcome.tightest > 1


def test_audit_of_half_the_noise(monkeypatch):
    real = audit.NoiseSpec
    monkeypatch.setattr(audit, "NoiseSpec", lambda recurrence, steps, scale: real(recurrence, steps, 0.5 * scale))
    monkeypatch.setattr(audit, "FAMILIES", {"cyclic": ("bisr",)})
    (outcome,) = audit.attack(1, seed=1, examples=100_000)
    assert len(outcome.breaks) == 1


def test_the_seeds_are_spread():
    """Cases of one attack differ."""
    first = [pricing.random_scheme(np.random.default_rng([seed, 14]), "cyclic") for seed in range(5)]
    assert len(set(first)) > 3
