"""BLTs against the dumb computation: series, dense columns, exact fractions, published numbers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from quell.algebra import blt_loss, blt_optimise
from quell.algebra.blt import BLT, coefficients, from_gaps, noising_coefficients
from quell.algebra.blt_optimise import optimise_blt
from quell.algebra.exponential_sums import participation_sum, summation_rule
from quell.errors import QuellError

POLES = [(1.0,), (0.99,), (1.0, 0.9), (0.999, 0.5), (0.9, 0.0)]
SLOW = from_gaps([1e-9, 1e-6, 1e-3, 0.1], [1e-7, 1e-5, 1e-2, 0.5])


@st.composite
def blts(draw):
    """Interlaced decays in (0, 1), of every magnitude of 1 − λ."""
    size = draw(st.integers(1, 5))
    steps = draw(st.lists(st.floats(0.02, 3.0), min_size=2 * size, max_size=2 * size))
    gaps = np.exp(-np.cumsum(steps))[::-1]
    return from_gaps(gaps[0::2], gaps[1::2])


@st.composite
def patterns(draw):
    """(n, k, b): b need not divide n, and k·b may be smaller or larger than n."""
    n, b = draw(st.integers(1, 150)), draw(st.integers(1, 60))
    return n, draw(st.integers(1, -(-n // b))), b


def is_monotone(blt: BLT) -> bool:
    """Non-negative and non-increasing coefficients, for which the leftmost columns are the heaviest."""
    return all(scale >= 0 for scale in blt.scales) and math.fsum(blt.scales) <= 1.0


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


def squared_sensitivity(blt: BLT, n: int, k: int = 1, b: int = 1) -> float:
    return participation_sum(np.log1p(-np.array(blt.gaps)), np.array(blt.scales), n, k, b)[0]


def log_loss(blt: BLT, n: int, poles: tuple[float, ...], objective: str) -> float:
    """As a search computes it, for one participation."""
    gaps = np.ravel(np.column_stack([blt.gaps, blt.noising_gaps]))
    return blt_loss.log_loss(blt_loss.problem_of(n, poles, 1, None, objective), blt_loss.coordinates_of(gaps))[0]


def dumb_loss(blt: BLT, n: int, k: int, b: int | None, poles: tuple[float, ...], objective: str) -> float:
    steps = [j * (b or n) for j in range(k) if j * (b or n) < n]
    return math.sqrt(dumb_sensitivity(blt, n, steps) * dumb_errors(blt, n, poles)[objective == "rmse"])


# ---- inversion ----


def test_both_forms_of_the_papers_example():
    blt = from_gaps([1 / 5, 3 / 5], [2 / 5, 1.0])
    np.testing.assert_allclose(blt.scales, [2 / 5, 1 / 5], rtol=1e-14)
    np.testing.assert_allclose(blt.noising_scales, [-1 / 15, -8 / 15], rtol=1e-14)
    assert blt.noising_decays[-1] == 0.0


@given(blts(), st.floats(0.0, 0.9))
def test_inverse_equals_series_reciprocal(blt, beyond):
    n = 60
    negative = from_gaps(blt.gaps, [*blt.noising_gaps[:-1], 1.0 + beyond])
    for each in (blt, negative):  # the last decay of the inverse may be negative
        product = np.convolve(coefficients(each, n), noising_coefficients(each, n))[:n]
        largest = max(np.abs(noising_coefficients(each, n)).max(), np.abs(coefficients(each, n)).max())
        np.testing.assert_allclose(product, np.eye(n)[0], atol=1e-12 * max(1.0, float(largest)) ** 2)


@given(blts())
def test_interlaced_decays_make_a_decreasing_c(blt):
    assert is_monotone(blt)
    assert all(scale < 0 for scale in blt.noising_scales)


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
    expected = dumb_sensitivity(blt, n, [j * b for j in range(k)])
    assert squared_sensitivity(blt, n, k, b) == pytest.approx(expected, rel=1e-12)


@given(blts(), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_sensitivity_equals_enumeration(blt, n, k, b):
    worst = 0.0
    for size in range(1, k + 1):
        for steps in itertools.combinations(range(n), size):
            if all(later - earlier >= b for earlier, later in itertools.pairwise(steps)):
                worst = max(worst, dumb_sensitivity(blt, n, list(steps)))
    assert squared_sensitivity(blt, n, min(k, -(-n // b)), b) == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize(("k", "b"), [(10**5, 1), (40_000, 2), (333, 300), (50, 1999)])
def test_sensitivity_with_many_participations(k, b):
    n = 10**5
    taking_part = np.zeros(n)
    taking_part[: k * b : b] = 1.0
    total = taking_part.copy()
    for scale, decay in zip(SLOW.scales, SLOW.decays, strict=True):
        total += lfilter([0.0, scale], [1.0, -decay], taking_part)
    assert squared_sensitivity(SLOW, n, k, b) == pytest.approx(float(total @ total), rel=1e-10)


@given(blts(), st.integers(2, 400), st.sampled_from(POLES), st.sampled_from(["rmse", "maxse"]))
def test_losses_equal_the_sums(blt, n, poles, objective):
    assert log_loss(blt, n, poles, objective) == pytest.approx(
        math.log(dumb_loss(blt, n, 1, None, poles, objective)), abs=1e-9
    )


@pytest.mark.parametrize("poles", [(1.0,), (1.0, 0.9), (0.99999, 0.95)])
@pytest.mark.parametrize("n", [10**5, 10**6])
def test_errors_and_sensitivity_hold_for_long_runs_and_slow_buffers(n, poles):
    for objective in ("rmse", "maxse"):
        expected = math.log(dumb_loss(SLOW, n, 1, None, poles, objective))
        assert log_loss(SLOW, n, poles, objective) == pytest.approx(expected, abs=1e-9)
    assert squared_sensitivity(SLOW, n, b=n) == pytest.approx(dumb_sensitivity(SLOW, n, [0]), rel=1e-10)
    steps = list(range(0, n, 9_999))[:7]
    assert squared_sensitivity(SLOW, n, 7, 9_999) == pytest.approx(dumb_sensitivity(SLOW, n, steps), rel=1e-10)


@pytest.mark.parametrize("distance", [0.0, 1e-14, 1e-9, 1e-5, -1e-7])
def test_errors_do_not_mind_a_pole_next_to_an_inverse_decay(distance):
    blt = from_gaps([0.01, 0.3], [0.1 + distance, 0.6])
    for objective in ("rmse", "maxse"):
        expected = math.log(dumb_loss(blt, 3000, 1, None, (1.0, 0.9), objective))
        assert log_loss(blt, 3000, (1.0, 0.9), objective) == pytest.approx(expected, abs=1e-11)


def test_no_buffers_is_the_identity():
    assert coefficients(from_gaps([], []), 3).tolist() == [1, 0, 0]
    for objective, error in (("maxse", 100), ("rmse", 50.5)):
        problem = blt_loss.problem_of(100, (1.0,), 5, 10, objective)
        assert blt_loss.identity_loss(problem) == pytest.approx(0.5 * math.log(5 * error), rel=1e-14)


@pytest.mark.parametrize("poles", [(1.1,), (-0.1,), (0.9, 0.8, 0.7)])
def test_bad_poles_are_refused(poles):
    with pytest.raises(QuellError, match="at most two numbers"):
        optimise_blt(10, 1, poles=poles)


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
        assert loss == pytest.approx(math.log(dumb_loss(blt, n, k, b, poles, objective)), abs=1e-11)
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
    assert how.loss == pytest.approx(dumb_loss(blt, n, 1, None, (1.0,), "maxse"), rel=1e-11)
    assert how.loss <= factor * (1 + math.log(n) / math.pi)


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
    assert dumb_loss(blt, 3900, 10, 390, (1.0,), "rmse") * 0.60023 <= 8.14 * 1.003


@pytest.mark.parametrize(
    ("n", "k", "b", "poles", "objective"),
    [
        (10, 1, None, (1.0,), "rmse"),
        (3900, 10, 390, (1.0,), "rmse"),
        (2000, 3, 390, (0.9999, 0.95), "rmse"),  # one buffer wants to be slower than the workload
        (1000, 10, 100, (1.0, 0.9), "rmse"),
        (10**6, 1, None, (1.0, 0.9), "maxse"),
    ],
)
def test_more_buffers_never_hurt_and_the_loss_is_what_it_says(n, k, b, poles, objective):
    problem = blt_loss.problem_of(n, poles, k, b, objective)
    losses = []
    for size, (blt, how) in enumerate(blt_optimise._ladder(problem, 3, None)):
        assert blt.buffers <= size
        assert is_monotone(blt)
        assert how.converged
        assert how.loss == pytest.approx(dumb_loss(blt, n, k, b, poles, objective), rel=1e-9)
        losses.append(how.loss)
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]


def test_random_blts_are_no_better_than_the_optimum():
    n, k, b, poles = 500, 5, 100, (1.0, 0.9)
    _, how = optimise_blt(n, 2, poles=poles, participations=k, separation=b)
    random = np.random.default_rng(1)
    for _ in range(300):
        gaps = np.sort(np.exp(-random.uniform(0.0, 7.0, 4)))
        blt = from_gaps(gaps[0::2], gaps[1::2])
        assert dumb_loss(blt, n, k, b, poles, "rmse") >= how.loss * (1 - 1e-9)


def test_superfluous_buffers_are_dropped():
    assert optimise_blt(1000, 2, participations=1000, separation=1)[0].buffers == 0
    assert optimise_blt(30, 4, participations=3, separation=10)[0].buffers == 1


def test_double_poles_are_optimised_too():
    blt, how = optimise_blt(200, 2, poles=(0.9, 0.9))
    assert how.loss == pytest.approx(dumb_loss(blt, 200, 1, None, (0.9, 0.9), "rmse"), rel=1e-6)


def test_without_a_number_of_buffers_the_fewest_that_are_nearly_best():
    losses = [
        how.loss for _, how in blt_optimise._ladder(blt_loss.problem_of(10**5, (1.0,), 1, None, "maxse"), 6, None)
    ]
    blt, how = optimise_blt(10**5, objective="maxse")
    assert how.loss == losses[blt.buffers] <= losses[blt.buffers + 1] * 1.01
    assert all(before > after * 1.01 for before, after in itertools.pairwise(losses[: blt.buffers + 1]))


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
