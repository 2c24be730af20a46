"""Every sensitivity against enumeration of all participation patterns."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quell import strategy, workload
from quell.analysis.sensitivity import heaviest_pattern, row_wise_bound, sensitivity
from quell.errors import QuellError
from quell.participation import Participation
from quell.strategy import BandedStrategy, ToeplitzStrategy
from quell.strategy.fractional import lambda_cgd_sensitivity
from tests.enumeration import by_enumeration, patterns

participations = st.builds(
    lambda n, b, k: Participation(n, min(b, n), min(k, -(-n // min(b, n)))),
    st.integers(1, 10),
    st.integers(1, 10),
    st.integers(1, 10),
)
signed = st.lists(st.floats(-1, 1), min_size=0, max_size=9)
scales = st.lists(st.floats(0.1, 3), min_size=10, max_size=10)
CLOSE = 1 + 1e-9


def random_strategy(tail: list[float], n: int, scale: list[float] | None) -> ToeplitzStrategy:
    return ToeplitzStrategy(
        "test", n, np.array([1.0, *tail])[:n], column_scale=None if scale is None else np.array(scale[:n])
    )


@given(participations)
def test_patterns_are_all_subsets_that_are_allowed(participation):
    n, b, k = participation.steps, participation.separation, participation.count
    allowed = {
        subset
        for size in range(1, k + 1)
        for subset in itertools.combinations(range(n), size)
        if all(later - earlier >= b for earlier, later in itertools.pairwise(subset))
    }
    assert {tuple(pattern) for pattern in patterns(participation)} == allowed


@given(signed, participations)
def test_no_toeplitz_sensitivity_is_below_enumeration(tail, participation):
    tested = random_strategy(tail, participation.steps, None)
    truth = by_enumeration(tested.matrix(), participation)
    result = sensitivity(tested, participation)
    assert truth <= result.value * CLOSE
    if result.exact:
        assert result.value <= truth * (1 + 1e-8)


@given(signed, participations, scales)
def test_no_scaled_sensitivity_is_below_enumeration(tail, participation, scale):
    tested = random_strategy(tail, participation.steps, scale)
    truth = by_enumeration(tested.matrix(), participation)
    result = sensitivity(tested, participation)
    assert truth <= result.value * CLOSE
    if result.exact:
        assert result.value <= truth * (1 + 1e-8)


@given(st.lists(st.floats(0, 1), min_size=0, max_size=9), participations)
def test_non_increasing_toeplitz_is_exact(tail, participation):
    tested = random_strategy(sorted(tail, reverse=True), participation.steps, None)
    result = sensitivity(tested, participation)
    assert result.exact
    assert result.value == pytest.approx(by_enumeration(tested.matrix(), participation), rel=1e-11)


@given(st.floats(0, 1), participations)
def test_column_normalised_lambda_cgd_is_exact_by_lemma_8(lambda_, participation):
    sums = workload.prefix(participation.steps)
    tested = strategy.build("lambda_cgd", sums, participation, column_normalise=True, **{"lambda": lambda_})
    np.testing.assert_allclose(np.linalg.norm(tested.matrix(), axis=0), 1.0)
    result = sensitivity(tested, participation)
    assert result.exact
    assert result.value == pytest.approx(by_enumeration(tested.matrix(), participation), rel=1e-9)


@given(signed, participations, scales)
def test_bands_within_the_separation_are_exact(tail, participation, scale):
    tested = random_strategy(tail[: participation.separation - 1], participation.steps, scale)
    result = sensitivity(tested, participation)
    assert result.exact
    assert result.value == pytest.approx(by_enumeration(tested.matrix(), participation), rel=1e-11)


@given(signed, participations, scales)
def test_row_wise_bound_holds_for_any_matrix(tail, participation, scale):
    matrix = random_strategy(tail, participation.steps, scale).matrix()
    assert by_enumeration(matrix, participation) <= row_wise_bound(matrix, participation) * CLOSE


@given(st.lists(st.floats(0, 5), min_size=10, max_size=10), participations)
def test_heaviest_pattern_is_the_maximum_over_patterns(weights, participation):
    given_weights = np.array(weights[: participation.steps])
    best = max(given_weights[pattern].sum() for pattern in patterns(participation))
    assert float(heaviest_pattern(given_weights, participation)) == pytest.approx(best, rel=1e-12)


@given(participations)
def test_tree_is_never_below_enumeration(participation):
    tested = strategy.build("tree", workload.prefix(participation.steps), participation)
    truth = by_enumeration(tested.matrix(), participation)
    result = sensitivity(tested, participation)
    assert truth <= result.value * CLOSE
    if participation.count == 1:
        assert result.value == pytest.approx(math.sqrt(participation.steps.bit_length()))


@given(st.floats(0, 1), participations)
def test_lambda_cgd_closed_form(lambda_, participation):
    sums = workload.prefix(participation.steps)
    tested = strategy.build("lambda_cgd", sums, participation, **{"lambda": lambda_})
    result = sensitivity(tested, participation)
    assert result.exact
    assert lambda_cgd_sensitivity(lambda_, participation) == pytest.approx(result.value, rel=1e-10)


def test_leftmost_columns_would_understate_a_signed_strategy():
    """The trap behind the paper's 7.87: positive and negative entries cancel in the leftmost sum."""
    participation = Participation(6, 2)
    tested = ToeplitzStrategy("test", 6, np.array([1.0, 0.2, -0.9, 0.1]))
    leftmost = np.linalg.norm(tested.matrix()[:, participation.first_steps()].sum(axis=1))
    truth = by_enumeration(tested.matrix(), participation)
    assert leftmost < 0.8 * truth
    assert sensitivity(tested, participation).value >= truth


def test_leftmost_is_not_worst_for_every_normalised_strategy():
    """A counter-example from ALGORITHMS.md §3's warning: a late, short column can overlap more after scaling."""
    participation = Participation(5, 2, 2)
    tested = ToeplitzStrategy("test", 5, np.array([1.0, 0.0, 0.9, 0.0, 0.0])).column_normalised()
    result = sensitivity(tested, participation)
    assert by_enumeration(tested.matrix(), participation) <= result.value * CLOSE


@given(st.floats(0.1, 0.99), st.integers(2, 6))
def test_non_monotone_momentum_roots_are_bounded_without_loss(momentum, bands):
    """BSR with momentum first rises, then falls; beyond the separation the rank argument loses nothing."""
    assume(momentum < 0.95)
    participation = Participation(40, 10)
    tested = strategy.build("bisr", workload.sgd(40, momentum), participation, bands=bands)
    result = sensitivity(tested, participation)
    assert result.value >= row_wise_bound(tested.matrix(), participation) * (1 - 1e-9) or result.exact


def test_sizes_must_match():
    tested = ToeplitzStrategy("test", 6, np.ones(2))
    with pytest.raises(QuellError, match="6 steps but the participation 7"):
        sensitivity(tested, Participation(7, 2))


def test_large_problems_stay_sound_and_fast():
    """A limited count, a large count and a million steps all end in a bracket around the leftmost pattern."""
    n = 10**6
    for participation in (Participation(n, n // 10), Participation(n, 100, 50), Participation(n, 1)):
        rising = ToeplitzStrategy("test", n, np.array([1.0, 1.2, 0.5, 0.1]))
        result = sensitivity(rising, participation)
        assert result.lower <= result.value <= 3 * math.sqrt(participation.count) * 3


def test_a_sensitivity_that_overflows_is_refused():
    huge = ToeplitzStrategy("test", 400, np.array([1e200, 1e199]))
    with pytest.raises(QuellError, match="overflows"):
        sensitivity(huge, Participation(400, 1))


def test_long_sums_are_rounded_outwards():
    n = 10**6
    constant = ToeplitzStrategy("test", n, np.full(n, 0.1))
    truth = math.sqrt(math.fsum([0.1 * 0.1] * n))
    result = sensitivity(constant, Participation.single(n))
    assert truth <= result.value <= truth * (1 + 1e-9)
    assert result.exact


@given(st.integers(0, 10**6), st.integers(2, 10), st.integers(1, 4), st.integers(1, 10))
def test_banded_strategies_with_overlapping_columns_are_never_below_enumeration(seed, n, separation, bands):
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(n, min(bands, n)))
    rows[:, 0] = np.abs(rows[:, 0]) + 2.0  # so that C^-1 does not grow beyond what float32 noise can follow
    tested = BandedStrategy("test", np.where(np.arange(rows.shape[1]) <= np.arange(n)[:, None], rows, 0.0))
    pattern = Participation(n, min(separation, n))
    truth = by_enumeration(tested.matrix(), pattern)
    assert truth <= sensitivity(tested, pattern).value * CLOSE


@pytest.mark.parametrize("bands", [3, 5, 9])
def test_the_overlap_bound_alone_is_sound(bands, monkeypatch):
    """Beyond dense sizes only the counting bound is left; force it, and make the columns as alike as they can be."""
    from quell.analysis import sensitivity as room

    monkeypatch.setattr(room, "_DENSE", 0)
    rows = np.tril(np.ones((9, 9)))[:, ::-1][:, ::-1][:, :bands]
    tested = BandedStrategy("test", np.where(np.arange(bands) <= np.arange(9)[:, None], np.ones((9, bands)), rows))
    pattern = Participation(9, 2)
    assert by_enumeration(tested.matrix(), pattern) <= room.sensitivity(tested, pattern).value * CLOSE


def growing_noising(n=1200):
    """A C⁻¹ of 600 bands whose C grows to 1e20: Newton's iteration on FFTs gets it wrong by a fifth."""
    noising = np.zeros(600)
    noising[:2] = 1.0, -1.04
    noising[2:] = 1e-6 * np.random.default_rng(57).standard_normal(598)
    return ToeplitzStrategy("forged", n, given_noising=noising)


def test_a_reciprocal_that_float64_gets_wrong_is_refused():
    with pytest.raises(QuellError, match=r"not inverse|not positive or too small"):
        growing_noising()


def test_what_a_reciprocal_may_be_off_is_added_to_the_sensitivity():
    noising = strategy.build("bisr", workload.prefix(1000), Participation(1000, 100), bands=600).noising
    coefficients = strategy.build("bisr", workload.prefix(1000), Participation(1000, 100), bands=600).coefficients
    wrong = coefficients * (1 - 1e-8)  # C smaller than the noise needs it
    pattern = Participation(1000, 100)
    stated = sensitivity(ToeplitzStrategy("off", 1000, wrong, noising), pattern).value
    assert stated >= sensitivity(ToeplitzStrategy("right", 1000, coefficients), pattern).lower
