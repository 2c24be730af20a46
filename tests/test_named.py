"""Any row of a table as a plan of its own: what a named mechanism is certified for, and how it is spelled."""

from __future__ import annotations

import math

import pytest
from scipy.special import log_ndtr

import quell
from quell.errors import QuellError
from quell.planning import named_plan, planner
from quell.run import Run
from quell.show import words
from quell.strategy.spelling import read
from tests.enumeration import by_enumeration
from tests.privacy.simulation import Patterns, simulated_delta

TINY = {"examples": 240, "batch_size": 20, "epochs": 2, "epsilon": 2.0, "delta": 1e-4}
DRAWN = {"examples": 160, "batch_size": 20, "epochs": 2, "epsilon": 1.0, "delta": 0.01, "sampling": "balls_in_bins"}


def gaussian_delta(epsilon: float, noise: float) -> float:
    """δ of the Gaussian mechanism with noise σ/Δ, from its two tails (Balle and Wang, Theorem 8)."""
    return math.exp(log_ndtr(0.5 / noise - epsilon * noise)) - math.exp(
        epsilon + log_ndtr(-0.5 / noise - epsilon * noise)
    )


@pytest.mark.parametrize("text", ["bisr* p=4", "lambda_cgd λ=0.7", "band_toeplitz p=3", "blt d=1", "identity (DP-SGD)"])
def test_a_saved_row_is_certified_as_by_hand(text, tmp_path):
    """σ of the file against enumerated sensitivity and the Gaussian tails: enough, and hardly more than that."""
    plan = quell.plan(**TINY, sampling="cyclic", mechanism=text)
    plan.save(tmp_path / "plan.json")
    loaded = quell.Plan.load(tmp_path / "plan.json")
    (row,) = loaded.mechanisms
    assert words.label(row) == text
    moved = by_enumeration(row.strategy.matrix(), loaded.run.participation)
    delta = gaussian_delta(2.0, row.noise_multiplier / moved)
    assert 0.98e-4 < delta <= 1e-4
    assert gaussian_delta(2.0, 0.99 * row.noise_multiplier / moved) > 1e-4


def test_a_saved_row_with_random_batches_is_certified_as_simulated(tmp_path):
    plan = quell.plan(**DRAWN, mechanism="bisr p=2")
    plan.save(tmp_path / "plan.json")
    row = quell.Plan.load(tmp_path / "plan.json").mechanism
    assert row.guarantee.failure_probability > 0
    bins = Patterns.of_bins(plan.steps, plan.run.participation.separation)
    matrix = row.strategy.matrix()
    (delta, error), (beyond, slack) = (
        max(simulated_delta(matrix, bins, share * row.noise_multiplier, 1.0, 40_000).values()) for share in (1.0, 0.8)
    )
    assert delta < 0.01 + 3 * error
    assert beyond > 0.01 + 3 * slack  # and a fifth less noise would not do


def test_certificates_of_named_rows_share_their_failure_probability(monkeypatch):
    """A reader takes the best of several files, so each is certified as one of many."""
    asked = []
    certify = planner.Prices.certify

    def watched(self, strategy, kind=None, comparisons=1, *more):
        asked.append(comparisons)
        return certify(self, strategy, kind, comparisons, *more)

    monkeypatch.setattr(planner.Prices, "certify", watched)
    named_plan(Run.from_data(**TINY, sampling="cyclic"), "bisr p=2")
    assert asked == [planner.COMPARISONS]


def test_limits_give_way_to_what_is_named():
    plan = quell.plan(**TINY, sampling="cyclic", memory=0, draws=1, mechanism="band_toeplitz* p=4")
    assert (plan.run.limits.memory, plan.run.limits.draws) == (3.0, 1)
    assert "Best with" not in plan.explain()


def test_names_alone_take_the_familys_defaults():
    assert read("band_toeplitz") == ("band_toeplitz", {})
    assert read("band-toeplitz p=4") == ("band_toeplitz", {"bands": 4, "column_normalise": False})
    assert read("blt objective=maxse, R=0.5") == ("blt", {"objective": "maxse", "divergence": 0.5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic p=2", "there is no mechanism 'magic'"),
        ("", "there is no mechanism ''"),
        ("bisr 4", "is not a name with settings: write it as tables do"),
        ("bisr p=2 p=4", "is not a name with settings"),
        ("bisr p=four", "bands='four' must be a number"),
        ("bisr d=4", "bisr does not take buffers: it takes bands"),
        ("blt* d=2", "blt cannot be column-normalised"),
    ],
)
def test_misspelled_mechanisms_are_refused(text, message):
    with pytest.raises(QuellError, match=message):
        quell.plan(**TINY, sampling="cyclic", mechanism=text)


def test_a_run_without_data_makes_no_file(tmp_path):
    plan = named_plan(Run.from_steps(steps=12, epochs=2, epsilon=2, delta=1e-4), "bisr p=2")
    with pytest.raises(QuellError, match="give examples and batch_size instead of steps"):
        plan.save(tmp_path / "plan.json")
