"""Slices of `make attack`: no attack breaks anything. Sizes are chosen for seconds (and minutes, where slow)."""

from __future__ import annotations

import pytest

from attacks import audit, clipping, noise, plan_files, pricing
from attacks.__main__ import FULL, README, committed, table
from attacks.outcome import Outcome

FAST = {"cyclic": 0.9, "balls_in_bins": 0.1}


def assert_unbroken(outcomes: list[Outcome], at_least: int) -> None:
    assert sum(outcome.tried for outcome in outcomes) >= at_least
    assert not [flaw for outcome in outcomes for flaw in outcome.breaks]


@pytest.mark.slow  # make attack tries more of them
def test_prices_fast():
    assert_unbroken(pricing.attack(20, seed=1, shares=FAST), 20)


@pytest.mark.slow
def test_plan_files_fast():
    assert_unbroken(plan_files.attack(120, seed=1), 120)


def test_clipping_fast():
    assert_unbroken(clipping.attack(20, seed=1), 20)


@pytest.mark.slow
def test_noise_fast():
    assert_unbroken(noise.attack(6, seed=1), 6)


@pytest.mark.slow
def test_audit_fast():
    assert_unbroken(audit.attack(2, seed=1, examples=60_000), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "count"), [(pricing, 120), (plan_files, 2000), (clipping, 250), (noise, 56), (audit, 10)]
)
def test_middle_slice(attack, count):
    assert_unbroken(attack.attack(count, seed=2, workers=2), count)


def test_a_full_run_is_as_large_as_promised():
    assert FULL["pricing"] >= 2000
    assert FULL["pricing"] * (1 - pricing.SHARES["cyclic"]) >= 200, "amplified ones"
    assert FULL["plan_files"] >= 20_000
    assert FULL["kills"] >= 200
    assert sum(pricing.SHARES.values()) == pytest.approx(1)


def test_the_readme_shows_the_committed_table():
    assert committed() in README.read_text(encoding="utf-8")
    header = table([]).splitlines()
    assert committed().splitlines()[:2] == header
