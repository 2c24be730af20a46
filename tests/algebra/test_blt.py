"""BLTs against the dumb computation: series, dense columns, exact fractions, published numbers."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.signal import lfilter

from quell.algebra import blt_loss, blt_optimise
from quell.algebra.blt import (
    BLT,
    coefficients,
    from_gaps,
    from_scales,
    is_monotone,
    max_squared_error,
    mean_squared_error,
    noising_coefficients,
    squared_sensitivity,
)
from quell.algebra.blt_optimise import choose_buffers, optimise_blt
from quell.algebra.exponential_sums import summation_rule
from quell.errors import QuellError

POLES = [(1.0,), (0.99,), (1.0, 0.9), (0.999, 0.5), (0.9, 0.0), (0.7, 0.7), (0.0,), (1.0, 1.0)]


@st.composite
def blts(draw, total=1.0):
    """Positive scales that sum to at most `total`, decays in (0, 1) of every magnitude of 1 − λ."""
    heights = draw(st.lists(st.floats(0.02, 14.0), min_size=1, max_size=5, unique=True))
    parts = draw(st.lists(st.floats(0.01, 1.0), min_size=len(heights), max_size=len(heights)))
    share = draw(st.floats(0.05, 1.0 - 1e-9)) * total / sum(parts)
    decays = [1.0 - math.exp(-height) for height in heights]
    if len(set(decays)) < len(decays):
        decays = [0.9 / (i + 1) for i in range(len(decays))]
    return from_scales([part * share for part in parts], decays)


@st.composite
def patterns(draw):
    """(n, k, b): b need not divide n, and k·b may be smaller or larger than n."""
    n, b = draw(st.integers(1, 150)), draw(st.integers(1, 60))
    return n, draw(st.integers(1, -(-n // b))), b


def dumb_sensitivity(blt: BLT, n: int, steps: list[int]) -> float:
    column, total = coefficients(blt, n), np.zeros(n)
    for step in steps:
        total[step:] += column[: n - step]
    return float(total @ total)


def dumb_errors(blt: BLT, n: int, poles: tuple[float, ...]) -> tuple[float, float]:
    series = noising_coefficients(blt, n)
    for pole in poles:
        series = lfilter([1.0], [1.0, -pole], series)
    squares = series**2
    return float(squares.sum()), float(np.cumsum(squares).mean())


# ---- inversion ----


def test_inverse_of_the_papers_example():
    blt = from_scales([2 / 5, 1 / 5], [4 / 5, 2 / 5])
    np.testing.assert_allclose(blt.noising_scales, [-1 / 15, -8 / 15], rtol=1e-14)
    np.testing.assert_allclose(blt.noising_decays, [3 / 5, 0.0], rtol=1e-14, atol=1e-15)


@given(blts(total=1.9))
def test_inverse_equals_series_reciprocal(blt):
    n = 60
    product = np.convolve(coefficients(blt, n), noising_coefficients(blt, n))[:n]
    largest = max(1.0, float(np.abs(noising_coefficients(blt, n)).max()))
    np.testing.assert_allclose(product, np.eye(n)[0], atol=1e-12 * largest)


@given(blts())
def test_inverse_decays_interlace_and_scales_are_negative(blt):
    order = np.ravel(np.column_stack([blt.gaps, blt.noising_gaps]))
    assert np.all(np.diff(order) >= 0)
    assert all(scale < 0 for scale in blt.noising_scales)
    assert blt.noising_decays[-1] > -1
    score = sum(scale / decay for scale, decay in zip(blt.scales, blt.decays, strict=True))
    assert abs(score - 1) < 1e-9 or (score < 1) == (blt.noising_decays[-1] > 0)


@pytest.mark.parametrize(("scale", "sign"), [(0.5, 1), (0.8, 0), (0.9, -1)])
def test_last_inverse_decay_is_zero_or_negative_when_scales_are_large(scale, sign):
    last = from_scales([scale], [0.8]).noising_decays[-1]
    assert last == pytest.approx(0.8 - scale, abs=3e-16)
    assert sign == 0 or last * sign > 0


@pytest.mark.parametrize(
    ("scales", "decays"),
    [
        ([0.1, 0.2], [1 - 1e-9, 0.9]),
        ([0.01, 0.02, 0.3], [1 - 1e-9, 1 - 3e-9, 0.5]),
        ([0.1, 0.2, 0.3], [0.5, 0.5 + 1e-10, 0.9]),
        ([1e-12, 0.2], [0.9999999, 0.3]),
        ([1e-6, 1e-3, 0.05, 0.2], [1 - 1e-8, 1 - 1e-6, 0.999, 0.8]),
    ],
)
def test_roots_are_right_to_the_last_digits_near_one_and_in_clusters(scales, decays):
    blt = from_scales(scales, decays)
    for root in map(Fraction, blt.noising_gaps):  # one Newton step in exact arithmetic must not move the root
        away = [root - Fraction(gap) for gap in blt.gaps]
        value = 1 - sum(Fraction(scale) / x for scale, x in zip(blt.scales, away, strict=True))
        slope = sum(Fraction(scale) / x**2 for scale, x in zip(blt.scales, away, strict=True))
        assert abs(float(value / slope / root)) < 1e-15


@given(blts())
def test_scales_follow_from_both_sets_of_decays(blt):
    # Only differences of gaps count, and rounded gaps give them to 1e-16 of the larger gap.
    closest = np.abs(np.subtract.outer(blt.gaps, blt.noising_gaps)).min() / max(blt.noising_gaps)
    assume(closest > 1e-13)
    again = from_gaps(blt.gaps, blt.noising_gaps)
    np.testing.assert_allclose(again.scales, blt.scales, rtol=1e-13 + 1e-15 / closest)
    np.testing.assert_allclose(again.noising_scales, blt.noising_scales, rtol=1e-13 + 1e-15 / closest)


@pytest.mark.parametrize(
    ("scales", "decays"), [([0.1, 0.1], [0.5, 0.5]), ([-0.1], [0.5]), ([0.1], [1.0]), ([0.1], [0.0])]
)
def test_what_is_not_a_blt_is_refused(scales, decays):
    with pytest.raises(QuellError, match="do not make a BLT"):
        from_scales(scales, decays)


def test_equal_gaps_are_refused():
    with pytest.raises(QuellError, match="must all differ"):
        from_gaps([0.1], [0.1])
    with pytest.raises(QuellError, match="1 gaps but 2"):
        from_gaps([0.1], [0.2, 0.3])


# ---- sums ----


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 45, 100, 12_345, 10**7])
@pytest.mark.parametrize("by_parity", [False, True])
def test_summation_rule_sums_exponentials_to_rounding(n, by_parity):
    rule = summation_rule(n, by_parity)
    assert len(rule.times) < 600
    for rate in np.logspace(-11, 1.5, 80):
        exact = math.expm1(-n * rate) / math.expm1(-rate)
        assert float(rule.weights @ np.exp(-rate * rule.times)) == pytest.approx(exact, rel=2e-14)
        if by_parity:
            exact = (1 - (-1) ** n * math.exp(-n * rate)) / (1 + math.exp(-rate))
            alternating = float(rule.weights @ (rule.signs * np.exp(-rate * rule.times)))
            assert alternating == pytest.approx(exact, abs=2e-14 * min(n, 1 / rate))


@given(blts(), patterns())
def test_sensitivity_equals_leftmost_columns(blt, pattern):
    n, k, b = pattern
    assert is_monotone(blt)
    expected = dumb_sensitivity(blt, n, [j * b for j in range(k)])
    assert squared_sensitivity(blt, n, k, b) == pytest.approx(expected, rel=1e-12)


@given(blts(), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_sensitivity_equals_enumeration(blt, n, k, b):
    worst = 0.0
    for size in range(1, k + 1):
        for steps in itertools.combinations(range(n), size):
            if all(later - earlier >= b for earlier, later in itertools.pairwise(steps)):
                worst = max(worst, dumb_sensitivity(blt, n, list(steps)))
    assert squared_sensitivity(blt, n, k, b) == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize(("k", "b"), [(10**5, 1), (40_000, 2), (333, 300), (50, 1999)])
def test_sensitivity_with_many_participations(k, b):
    n, blt = 10**5, from_scales([1e-6, 1e-3, 0.05, 0.3], [1 - 1e-9, 1 - 1e-6, 0.999, 0.9])
    taking_part = np.zeros(n)
    taking_part[: k * b : b] = 1.0
    total = taking_part.copy()
    for scale, decay in zip(blt.scales, blt.decays, strict=True):
        total += lfilter([0.0, scale], [1.0, -decay], taking_part)
    assert squared_sensitivity(blt, n, k, b) == pytest.approx(float(total @ total), rel=1e-10)


def test_sensitivity_without_a_closed_form_is_refused():
    increasing = from_scales([1.5], [0.9])
    assert not is_monotone(increasing)
    assert squared_sensitivity(increasing, 3) == pytest.approx(1 + 1.5**2 + 1.35**2)
    with pytest.raises(QuellError, match="no closed form"):
        squared_sensitivity(increasing, 30, 3, 10)


@given(blts(), st.integers(1, 400), st.sampled_from(POLES))
def test_errors_equal_the_sums(blt, n, poles):
    largest, mean = dumb_errors(blt, n, poles)
    assert max_squared_error(blt, n, poles) == pytest.approx(largest, rel=1e-9)
    assert mean_squared_error(blt, n, poles) == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("poles", [(1.0,), (1.0, 0.9), (0.99999, 0.95)])
@pytest.mark.parametrize("n", [10**5, 10**6])
def test_errors_and_sensitivity_hold_for_long_runs_and_slow_buffers(n, poles):
    blt = from_scales([1e-6, 1e-3, 0.05, 0.3], [1 - 1e-9, 1 - 1e-6, 0.999, 0.9 - 1e-9])
    largest, mean = dumb_errors(blt, n, poles)
    assert max_squared_error(blt, n, poles) == pytest.approx(largest, rel=1e-9)
    assert mean_squared_error(blt, n, poles) == pytest.approx(mean, rel=1e-9)
    assert squared_sensitivity(blt, n) == pytest.approx(dumb_sensitivity(blt, n, [0]), rel=1e-10)
    steps = list(range(0, n, 9_999))[:7]
    assert squared_sensitivity(blt, n, 7, 9_999) == pytest.approx(dumb_sensitivity(blt, n, steps), rel=1e-10)


def test_errors_do_not_mind_a_pole_next_to_an_inverse_decay():
    for distance in [0.0, 1e-14, 1e-9, 1e-5, -1e-7]:
        blt = from_gaps([0.01, 0.3], [0.1 + distance, 0.6])
        largest, mean = dumb_errors(blt, 3000, (1.0, 0.9))
        assert max_squared_error(blt, 3000, (1.0, 0.9)) == pytest.approx(largest, rel=1e-12)
        assert mean_squared_error(blt, 3000, (1.0, 0.9)) == pytest.approx(mean, rel=1e-12)


def test_no_buffers_is_the_identity():
    identity = from_gaps([], [])
    assert squared_sensitivity(identity, 100, 5, 10) == 5
    assert max_squared_error(identity, 100) == pytest.approx(100, rel=1e-14)
    assert mean_squared_error(identity, 100) == pytest.approx(50.5, rel=1e-14)
    assert coefficients(identity, 3).tolist() == [1, 0, 0]


def test_bad_poles_are_refused():
    for poles in [(1.1,), (-0.1,), (0.9, 0.8, 0.7)]:
        with pytest.raises(QuellError, match="at most two numbers"):
            max_squared_error(from_gaps([], []), 10, poles)


# ---- optimisation ----


@pytest.mark.parametrize("poles", [(1.0,), (0.99,), (1.0, 0.9), (0.998, 0.5)])
@pytest.mark.parametrize(("n", "k", "b"), [(1000, 1, None), (1000, 10, 90), (700, 2, 300), (40, 40, 1)])
@pytest.mark.parametrize("objective", ["rmse", "maxse"])
def test_gradient_equals_finite_differences(poles, n, k, b, objective):
    problem = blt_loss.problem_of(n, poles, k, b, objective)
    random = np.random.default_rng(n + k)
    for last in [-3.0, 0.0, 2.5]:  # the last inverse decay is positive, then negative
        theta = np.append(random.normal(0.3, 0.4, 2 * random.integers(1, 5) - 1), last)
        loss, gradient = blt_loss.log_loss(problem, theta)
        steps = 1e-5 * np.eye(theta.size)
        numeric = [(blt_loss.log_loss(problem, theta + s)[0] - blt_loss.log_loss(problem, theta - s)[0]) for s in steps]
        np.testing.assert_allclose(gradient, np.array(numeric) / 2e-5, atol=2e-9, rtol=1e-7)

        gaps = blt_loss.gaps_of(theta)
        blt = from_gaps(gaps[0::2], gaps[1::2])
        assert is_monotone(blt)
        error = mean_squared_error(blt, n, poles) if objective == "rmse" else max_squared_error(blt, n, poles)
        assert loss == pytest.approx(0.5 * math.log(squared_sensitivity(blt, n, k, b) * error), abs=1e-11)
        np.testing.assert_allclose(blt_loss.gaps_of(blt_loss.coordinates_of(gaps)), gaps, rtol=1e-9)


def test_gradient_survives_buffers_that_coincide():
    problem = blt_loss.problem_of(1000, (1.0, 0.9), 10, 100, "rmse")
    theta = np.array([0.4, -40.0, 0.1, -300.0, 0.2, 0.3])
    _, gradient = blt_loss.log_loss(problem, theta)
    for i in [0, 2, 4, 5]:
        step = 1e-5 * np.eye(6)[i]
        change = blt_loss.log_loss(problem, theta + step)[0] - blt_loss.log_loss(problem, theta - step)[0]
        assert gradient[i] == pytest.approx(change / 2e-5, abs=2e-9)


def test_published_parameters_for_two_buffers():
    blt, how = optimise_blt(10**5, 2, objective="maxse")
    assert how.converged
    np.testing.assert_allclose(blt.scales, [0.01229, 0.18784], atol=5e-6)
    np.testing.assert_allclose(blt.decays, [0.999953, 0.985707], atol=5e-7)


@pytest.mark.parametrize(
    ("n", "buffers", "factor"), [(10**3, 3, 1.03), (10**4, 3, 1.03), (10**5, 4, 1.03), (10**6, 5, 1.05)]
)
def test_few_buffers_come_close_to_the_best_toeplitz_strategy(n, buffers, factor):
    blt, how = optimise_blt(n, buffers, objective="maxse")
    loss = math.sqrt(squared_sensitivity(blt, n) * max_squared_error(blt, n))
    assert how.loss == pytest.approx(loss, rel=1e-12)
    assert loss <= factor * (1 + math.log(n) / math.pi)


@pytest.mark.parametrize(  # losses that jax-privacy 2.0.0 reached, summed exactly
    ("n", "k", "b", "objective", "buffers", "peer"),
    [
        (10**4, 1, None, "maxse", 3, 4.033251607130),
        (10**4, 1, None, "maxse", 4, 4.003116867751),
        (10**4, 1, None, "rmse", 4, 3.784167045121),
        (3900, 10, 390, "rmse", 2, 13.580538924645),
        (3900, 10, 390, "rmse", 3, 13.562100237373),
    ],
)
def test_loss_is_no_worse_than_a_peers(n, k, b, objective, buffers, peer):
    _, how = optimise_blt(n, buffers, participations=k, separation=b, objective=objective)
    assert how.loss <= peer * (1 + 1e-9)


def test_table_4_of_the_lambda_cgd_paper():
    blt, _ = optimise_blt(3900, 3, participations=10, separation=390)
    rmse = math.sqrt(squared_sensitivity(blt, 3900, 10, 390) * mean_squared_error(blt, 3900)) * 0.60023
    assert rmse <= 8.14 * 1.003


@pytest.mark.parametrize(
    ("n", "k", "b", "poles", "objective"),
    [
        (10, 1, None, (1.0,), "rmse"),
        (3900, 10, 390, (1.0,), "rmse"),
        (2000, 3, 390, (0.9999, 0.95), "rmse"),  # one buffer wants to be slower than the workload
        (1000, 10, 100, (1.0, 0.9), "rmse"),
        (10**7, 1, None, (1.0, 0.9), "maxse"),
    ],
)
def test_more_buffers_never_hurt_and_the_loss_is_what_it_says(n, k, b, poles, objective):
    problem = blt_loss.problem_of(n, poles, k, b, objective)
    losses = []
    for attempt in blt_optimise._ladder(problem, 3, None):
        blt = attempt.blt
        assert blt.buffers <= attempt.buffers
        assert is_monotone(blt)
        assert attempt.convergence.converged
        error = mean_squared_error(blt, n, poles) if objective == "rmse" else max_squared_error(blt, n, poles)
        assert attempt.loss == pytest.approx(math.sqrt(squared_sensitivity(blt, n, k, b) * error), rel=1e-9)
        losses.append(attempt.loss)
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]


def test_random_blts_are_no_better_than_the_optimum():
    n, k, b, poles = 500, 5, 100, (1.0, 0.9)
    _, how = optimise_blt(n, 2, poles=poles, participations=k, separation=b)
    random = np.random.default_rng(1)
    for _ in range(300):
        gaps = np.sort(np.exp(-random.uniform(0.0, 7.0, 4)))
        blt = from_gaps(gaps[0::2], gaps[1::2])
        error = dumb_errors(blt, n, poles)[1]
        assert math.sqrt(error * dumb_sensitivity(blt, n, [j * b for j in range(k)])) >= how.loss * (1 - 1e-9)


def test_superfluous_buffers_are_dropped():
    assert optimise_blt(1000, 2, participations=1000, separation=1)[0].buffers == 0
    assert optimise_blt(30, 4, participations=3, separation=10)[0].buffers == 1


def test_double_poles_are_optimised_too():
    blt, how = optimise_blt(200, 2, poles=(0.9, 0.9))
    exact = math.sqrt(squared_sensitivity(blt, 200) * dumb_errors(blt, 200, (0.9, 0.9))[1])
    assert how.loss == pytest.approx(exact, rel=1e-6)


def test_choose_buffers_stops_when_one_more_brings_little():
    choice = choose_buffers(10**5, objective="maxse")
    losses = [attempt.loss for attempt in choice.tried]
    assert choice.chosen is choice.tried[-2]
    assert losses[-2] <= losses[-1] * 1.01
    assert all(before > after * 1.01 for before, after in itertools.pairwise(losses[:-1]))
    assert choose_buffers(10**5, most=1).chosen.buffers == 1


def test_progress_is_reported():
    seen = []
    optimise_blt(100, 1, on_iteration=lambda so_far: seen.append(so_far.loss))
    assert seen


def test_wrong_requests_say_what_to_do():
    with pytest.raises(QuellError, match="independent noise is best"):
        optimise_blt(10, 1, poles=(0.0,))
    with pytest.raises(QuellError, match="use 'rmse' or 'maxse'"):
        optimise_blt(10, 1, objective="mean")
    with pytest.raises(QuellError, match="buffers=0"):
        optimise_blt(10, 0)
