"""The search: quick estimates that are about right, bounds that are bounds, answers that do not jump."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quell
from quell import privacy, strategy, workload
from quell.planning import make_plan, search
from quell.run import Run
from quell.schemes import BallsInBins, Cyclic, CyclicPoisson, Poisson

SMALL = {"examples": 1000, "batch_size": 20, "epochs": 5, "epsilon": 6.0, "delta": 1e-5}
CIFAR = {"examples": 50_000, "batch_size": 128, "epochs": 10, "delta": 1e-5, "objective": "rmse"}
# The best entries of Table 4 of arXiv:2601.22334 that need at most so many model copies and 16 draws a step, by column
# (8 without amplification, then 8, 4, 2, 1, 0.5, 0.25): BandInvMF, λCGD and BISR are remade from counters, BLT keeps 3
# copies, BSR and BandMF one less than their bands. BISR's 20.25 at ε = 1 is a misprint for about 30.5, and BandInvMF
# with p = b takes 390 draws.
COLUMNS = (None, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
BUFFERLESS = (8.54, 6.56, 11.23, 20.17, 30.5, 52.81, 96.45)
TABLE_4 = {
    1: BUFFERLESS,
    2: BUFFERLESS,
    4: (8.14, 5.87, 10.67, 19.50, 30.5, 52.81, 96.45),
    16: (8.14, 5.87, 10.67, 19.50, 30.5, 52.81, 96.45),
    None: (7.77, 5.49, 9.31, 17.06, 29.34, 52.16, 96.45),
}
PRINTED = 0.005  # half a unit of the last printed digit
OWN = json.loads((Path(__file__).parents[1] / "experiments/results/table4.json").read_text(encoding="utf-8"))["runs"]


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
@pytest.mark.parametrize(
    ("name", "options"), [("bisr", {"bands": 4}), ("lambda_cgd", {"lambda": 0.8}), ("identity", {})]
)
def test_quick_noise_is_about_that_of_the_accountants(name, options, epsilon):
    schemes = [BallsInBins(200, 20)] + ([Poisson(200, 0.05)] if name == "identity" else [])
    for scheme in schemes:
        chosen = strategy.build(name, workload.prefix(200), Cyclic(200, 20).participation, None, **options)
        about = privacy.estimate(chosen, scheme, epsilon, 1e-5, effort=1)
        careful = privacy.estimate(chosen, scheme, epsilon, 1e-5)
        assert about.noise_multiplier == pytest.approx(careful.noise_multiplier, rel=0.02)
        assert not about.certified
        bound = scheme.accountant(chosen).at_least(epsilon, 1e-5)
        assert bound <= careful.noise_multiplier * 1.001
        assert bound > 0.5 * careful.noise_multiplier or not isinstance(scheme, BallsInBins)


def test_quick_noise_under_coins_depends_on_the_columns_only():
    pattern = Cyclic(120, 12).participation
    one, other = (strategy.build("bsr", workload.sgd(120, m), pattern, None, bands=4) for m in (0.0, 0.9))
    scheme = CyclicPoisson(120, 4, 1 / 3)
    noises = [privacy.estimate(each, scheme, 2.0, 1e-5, effort=1).noise_multiplier for each in (one, other)]
    norms = [float(each.column_norms.max()) for each in (one, other)]
    assert noises[0] / norms[0] == pytest.approx(noises[1] / norms[1], rel=1e-4)


@pytest.mark.parametrize("scheme", [Poisson(200, 0.05), BallsInBins(200, 20), Cyclic(200, 20)])
def test_quick_epsilon_inverts_quick_noise(scheme):
    dpsgd = strategy.build("identity", workload.prefix(200), Cyclic(200, 20).participation)
    noise = privacy.estimate(dpsgd, scheme, 3.0, 1e-5, effort=1).noise_multiplier
    assert scheme.accountant(dpsgd).estimate_epsilon(noise, 1e-5) == pytest.approx(3.0, rel=0.03)


@given(st.integers(1, 40), st.integers(0, 39), st.floats(0.3, 3.0))
def test_valleys_are_found(count, bottom, steepness):
    scores = np.abs(np.arange(count) - min(bottom, count - 1)) ** steepness
    tried = []
    search._valley(lambda each: tried.append(each["i"]) or scores[each["i"]], [{"i": i} for i in range(count)])
    assert min(bottom, count - 1) in tried
    assert len(tried) <= 3 + 1.5 * np.log2(count + 1) + 2


@pytest.fixture(scope="module")
def found():
    return quell.plan(**SMALL)


@pytest.mark.slow
def test_estimates_are_shown_and_never_promised(found, tmp_path):
    assert found.mechanism.certified
    assert found.estimates
    assert {m.certified for m in found.alternatives} == {True, False}
    with pytest.raises(quell.QuellError, match="is only estimated: certify it"):
        replace(found, mechanisms=(*found.mechanisms, found.estimates[0]))
    found.save(tmp_path / "plan.json")
    loaded = quell.Plan.load(tmp_path / "plan.json")
    assert loaded.mechanism.noise_multiplier == found.mechanism.noise_multiplier
    assert loaded.estimates == ()


def test_the_winner_is_the_best_of_what_was_seen(found):
    """Certifying may cost a percent, not the lead."""
    affordable = [m for m in found.alternatives if found.run.limits.fits(m)]
    assert found.mechanism.score("training") <= 1.02 * min(m.score("training") for m in affordable)
    plain = make_plan(found.run.changed(sampling="cyclic"))
    assert found.mechanism.score("training") < plain.mechanism.score("training")
    assert found.dpsgd_equivalent_epsilon > found.run.epsilon


@pytest.mark.slow
def test_plans_are_deterministic(found):
    again = quell.plan(**SMALL)
    assert again.as_dict() == found.as_dict()
    assert [repr(m) for m in again.alternatives] == [repr(m) for m in found.alternatives]


@pytest.mark.slow
def test_allowed_schemes_are_respected():
    for sampling in ("cyclic_poisson,cyclic", "poisson"):
        plan = quell.plan(**SMALL, sampling=sampling)
        assert {m.sampling for m in plan.alternatives} <= set(sampling.split(","))


def test_explanations_name_the_scheme_the_gain_and_the_promise(found):
    text = found.explain()
    assert found.mechanism.sampling in text
    assert "DP-SGD would need ε = " in text or "Use DP-SGD" in text
    assert "Promise: (6, 10⁻⁵)-DP per example" in text
    assert "Twice the epochs" in text
    assert "<iframe" in found._repr_html_()


@pytest.mark.slow
@settings(max_examples=6)
@given(st.floats(0.3, 12.0), st.sampled_from(["loss", "training", "rmse", "maxse"]), st.sampled_from([0.0, 0.9]))
def test_a_percent_of_epsilon_never_costs_two_percent_of_error(epsilon, objective, momentum):
    run = Run.from_data(**{**SMALL, "epsilon": epsilon}, momentum=momentum, sampling="cyclic", objective=objective)
    changed = run.changed(epsilon=epsilon * 1.01)
    before, after = (make_plan(each).mechanism.score(objective) for each in (run, changed))
    assert after <= before * 1.0001


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5, 7.0])
@pytest.mark.parametrize("objective", ["training", "rmse"])
def test_a_percent_of_epsilon_never_costs_two_percent_of_error_amplified(epsilon, objective):
    scores = [
        make_plan(Run.from_data(**{**SMALL, "epsilon": epsilon * change}, objective=objective)).mechanism.score(
            objective
        )
        for change in (1.0, 1.01, 1.02, 1.03)
    ]
    for before, after in pairwise(scores):
        assert after <= 1.02 * before


@pytest.mark.parametrize(("memory", "column"), [(1, 0), (4, 0), (None, 0)])
def test_never_worse_than_table_4(memory, column):
    _check_table_4(memory, column)


@pytest.mark.slow
@pytest.mark.parametrize("memory", TABLE_4)
@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_never_worse_than_table_4_everywhere(memory, column):
    _check_table_4(memory, column)


def _check_table_4(memory, column):
    sampling = "best" if column else "cyclic"
    epsilon = COLUMNS[column] or 8.0
    plan = quell.plan(**CIFAR, epsilon=epsilon, memory=memory, sampling=sampling)
    assert plan.run.epsilon == epsilon
    ours = [run["rmse"] for run in OWN if run["column"] == _title(column) and _affordable(run["row"], memory)]
    certified = 1.001 if column else 1.0  # by draws, for a tenth of a percent of noise; the paper's are estimates
    assert plan.mechanism.rmse <= certified * min(rmse for rmse in ours if rmse is not None)
    assert plan.mechanism.rmse <= certified * (TABLE_4[memory][column] + PRINTED)


def _title(column):
    return f"ε={COLUMNS[column] or 8:g}{'' if column else ' without amplification'}"


def _affordable(row, memory):
    """Whether a row of the table needs no more than so many model copies and, unless all is allowed, 16 draws."""
    if memory is None:
        return True
    size = row.split("p=")[-1] if "p=" in row else "1"
    bands = 390 if size == "b" else int(size)
    if row.startswith(("BSR", "BandMF")):
        return bands - 1 <= memory
    return memory >= 3 if row == "BLT" else bands <= 16


def test_the_epsilon_of_hardly_any_noise_is_large_and_found():
    """Millions of steps: a plan's error can be a thousandth of DP-SGD's, and the grid of losses had no end."""
    dpsgd = strategy.build("identity", workload.prefix(10_000), Cyclic(10_000, 1000).participation)
    assert Poisson(10_000, 1e-3).accountant(dpsgd).estimate_epsilon(1e-4, 1e-8) > 1000
