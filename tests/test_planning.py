"""Set-ups, plans, and files that lie."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import quell
from quell.errors import QuellError
from quell.planning import Prices, file, planner
from quell.run import Run
from quell.show import words
from quell.strategy import describe

SETUP = {"examples": 2000, "batch_size": 100, "epochs": 4, "epsilon": 4.0, "delta": 1e-5, "sampling": "cyclic"}


@pytest.fixture(scope="module")
def plan():
    return quell.plan(**SETUP, momentum=0.9)


@pytest.fixture
def saved(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def test_a_gain_is_only_claimed_where_there_is_one(plan):
    from quell.show.words import recommendation

    same = plan.price("lambda_cgd", **{"lambda": 0.0})  # cancels nothing: DP-SGD by another name
    without = replace(plan, mechanisms=(same,), recommended=0)
    assert "times less error" in recommendation(plan, plan.answers)
    text = recommendation(without, without.answers)
    assert "better than that of DP-SGD" in text
    assert "times less error" not in text


@pytest.mark.parametrize("objective", ["loss", "training", "rmse", "maxse"])
def test_the_plan_recommends_the_smallest_error_that_fits(objective):
    plan = quell.plan(**SETUP, momentum=0.9, objective=objective)
    affordable = [m for m in plan.mechanisms if m.buffers <= 4 and m.draws <= 16]
    assert plan.mechanism.score(objective) == min(m.score(objective) for m in affordable)
    assert plan.mechanism.rmse < plan.prices.dpsgd.rmse
    assert plan.prices.lower_bound < plan.mechanism.rmse
    scores = [m.score(objective) for m in plan.mechanisms]
    assert scores == sorted(scores)
    assert all(m.certified for m in plan.alternatives)  # without amplification noise is exact


def test_memory_zero_and_one_draw_leave_independent_noise():
    tight = quell.plan(**SETUP, memory=0, draws=1)
    assert tight.mechanism.buffers == 0
    assert tight.mechanism.draws == 1


def test_more_memory_never_hurts():
    errors = [quell.plan(**SETUP, memory=memory, objective="rmse").mechanism.rmse for memory in (0, 4, 19, None)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_a_schedule_is_planned_for():
    scheduled = quell.plan(**SETUP, learning_rates="cosine")
    assert scheduled.mechanism.rmse < scheduled.prices.dpsgd.rmse


def test_a_plan_prints_as_a_table(plan):
    text = str(plan)
    assert "➤ " in text
    assert "identity (DP-SGD)" in text
    assert "Promise: (4, 10⁻⁵)-DP per example" in text


def test_saved_plans_load_and_verify(plan, saved):
    loaded = quell.Plan.load(saved)
    assert loaded.as_dict() == plan.as_dict()
    checks = quell.verify(saved)
    assert len(checks) > 10 * len(plan.mechanisms)
    assert all(check.holds for check in checks)


def tampered(saved, change) -> list[file.Check]:
    content = json.loads(saved.read_text())
    change(content)
    saved.write_text(json.dumps(content))
    return [check for check in quell.verify(saved) if not check.holds]


def scale(key, factor):
    def change(content):
        row = content["mechanisms"][content["recommended"]]
        parts = (row["noise"], row["error"], row["guarantee"], content["yardsticks"], content["run"]["promise"])
        (part,) = (part for part in parts if key in part)
        part[key] *= factor

    return change


@pytest.mark.parametrize(
    "key",
    ["multiplier", "sensitivity", "rmse", "maxse", "training", "epsilon", "delta", "lower_bound", "dpsgd_rmse"],
)
@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_any_false_number_is_found(saved, key, factor):
    assert tampered(saved, scale(key, factor))


def test_a_promise_that_the_noise_does_not_keep_is_found(saved):
    def change(content):
        content["run"]["promise"]["epsilon"] = 1.0

    assert any("its noise suffices" in str(check.stated) for check in tampered(saved, change))
    says = "not a true plan: for mechanism .* it says 'can be built, .* recomputing gives 'noise .* claims are false"
    with pytest.raises(QuellError, match=says):
        quell.Plan.load(saved)


def test_a_wrong_recommendation_is_found(saved):
    def change(content):
        content["recommended"] = len(content["mechanisms"]) - 1

    assert [check.claim for check in tampered(saved, change)] == ["recommended mechanism"]


def test_changed_parameters_are_found(saved):
    def change(content):
        for row in content["mechanisms"]:
            given = row["parameters"]
            if "bands" in given:
                given["bands"] = 2 if given["bands"] != 2 else 3

    assert tampered(saved, change)


def test_another_sampling_scheme_than_the_plans_is_found(saved):
    def change(content):
        for row in content["mechanisms"]:
            row["guarantee"]["sampling"] = "poisson"

    assert tampered(saved, change)


@pytest.mark.slow
def test_a_blt_whose_noise_does_not_match_its_sensitivity_cannot_be_stated(tmp_path):
    """Rows of a BLT are decays alone; C and C⁻¹ both follow from them, so no file can make them disagree."""
    long = quell.plan(examples=6000, batch_size=100, epochs=10, epsilon=8, delta=1e-5, sampling="cyclic")
    path = tmp_path / "plan.json"
    long.save(path)  # more than 512 steps: no dense second opinion

    def change(content):
        row = next(row for row in content["mechanisms"] if row["family"] == "blt")
        row["solution"] = [[0.0] * row["parameters"]["buffers"], *row["solution"]]

    assert tampered(path, change)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"learning_rates": "cosine", "momentum": 0.9}, marks=pytest.mark.slow),
        {"learning_rates": "linear", "momentum": 0.99},
        {},
    ],
)
def test_every_plan_that_is_saved_verifies(tmp_path, options):
    small = {"examples": 1000, "batch_size": 100, "epochs": 4, "epsilon": 8, "delta": 1e-5, "sampling": "cyclic"}
    for memory in (0, 4, None):
        path = tmp_path / f"{memory}.json"
        quell.plan(**small, memory=memory, **options).save(path)
        assert [check for check in quell.verify(path) if not check.holds] == []


def test_a_single_step_with_a_schedule_can_be_planned():
    one = quell.plan(examples=10, batch_size=10, epochs=1, epsilon=8, delta=1e-3, learning_rates="cosine")
    assert one.steps == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "does not hold valid JSON"),
        ('{"format": "quell-plan", "version": 3, "version": 3}', "does not hold valid JSON"),
        ('{"format": "quell-plan", "version": true}', "plan version True"),
        ("", "does not hold valid JSON"),
        ('{"format": "quell-plan", "version": 3', "does not hold valid JSON"),
        ("[]", "is not a plan file"),
        ('{"format": "quell-plan", "version": 99}', "plan version 99"),
        ('{"format": "quell-plan", "version": 2}', "is damaged"),
        ('{"format": "quell-plan", "version": 3}', "is damaged"),
        ('{"format": "quell-plan", "version": 3, "run": {}}', "is damaged"),
        ('{"format": "quell-plan", "version": 2, "setup": {}}', "is damaged"),
    ],
)
def test_corrupt_and_newer_files_are_refused(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(QuellError, match=message):
        quell.verify(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c["mechanisms"][0]["error"].pop("rmse"),
        lambda c: c["mechanisms"][0].pop("error"),
        lambda c: c["mechanisms"][0]["noise"].pop("multiplier"),
        lambda c: c["mechanisms"][0]["noise"].update(multiplier="much"),
        lambda c: c["mechanisms"][0]["noise"].update(multiplier=math.nan),
        lambda c: c["mechanisms"][0]["noise"].update(multiplier=10**400),
        lambda c: c["mechanisms"][0]["noise"].update(multiplier=0),
        lambda c: c["mechanisms"][0]["error"].update(rmse=10**400),
        lambda c: c["mechanisms"][0]["noise"].update(draws=True),
        lambda c: c["mechanisms"].append(7),
        lambda c: c["run"]["promise"].update(epsilon=10**400),
        lambda c: c["run"]["optimizer"].update(learning_rates=["abc"]),
        lambda c: c.update(comment="trust me"),
        lambda c: c["mechanisms"][0].update(family="magic"),
        lambda c: c["mechanisms"][0].update(surprise=1),
        lambda c: c["mechanisms"][-1].update(solution=[1.0]),
        lambda c: c.update(mechanisms=[]),
        lambda c: c.update(recommended=99),
        lambda c: c.update(recommended=True),
        lambda c: c["run"]["optimizer"].update(momentum=2.0),
        lambda c: c["run"].pop("epochs"),
        lambda c: c.pop("mechanisms"),
    ],
)
def test_no_damage_goes_unnoticed(saved, damage):
    content = json.loads(saved.read_text())
    damage(content)
    saved.write_text(json.dumps(content))
    with pytest.raises(QuellError):
        quell.Plan.load(saved)


def test_an_interrupted_save_leaves_the_old_file(plan, saved, monkeypatch):
    before = saved.read_text()

    def crash(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        plan.save(saved)
    assert saved.read_text() == before


def test_missing_folders_are_named(plan, tmp_path):
    with pytest.raises(QuellError, match="cannot write the plan"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(QuellError, match="cannot read the plan"):
        quell.verify(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0}, "epsilon=0 must be positive"),
        ({"epsilon": math.nan}, "epsilon=nan is not a finite number"),
        ({"delta": 1}, "delta=1 must lie strictly between 0 and 1"),
        ({"delta": 0}, "delta=0 must lie strictly"),
        ({"batch_size": 3000}, "batch_size=3,000 is larger than the data set of 2,000"),
        ({"epochs": 0}, "epochs=0 must be a whole number of at least 1"),
        ({"epochs": 1.5}, "epochs=1.5 must be a whole number"),
        ({"epochs": 10**9}, "steps are more than Quell can plan for"),
        ({"momentum": 1.0}, "momentum=1 and weight_decay=1 must satisfy"),
        ({"weight_decay": 1e-4}, "must be the factor that multiplies the weights"),
        ({"memory": -1}, "memory=-1 model copies must not be negative"),
        ({"learning_rates": "step"}, "there is no schedule 'step'"),
        ({"learning_rates": [1.0, 2.0]}, "2 values but the run has 80 steps"),
        ({"examples": "many"}, "examples='many' must be a whole number"),
        ({"workers": 3}, "a plan does not know workers"),
    ],
)
def test_bad_setups_get_one_clear_sentence(change, message):
    with pytest.raises(QuellError, match=message) as caught:
        quell.plan(**{**SETUP, **change})
    assert "\n" not in str(caught.value)


def test_a_missing_value_is_named():
    with pytest.raises(QuellError, match="a plan needs epochs, epsilon as well"):
        quell.plan(examples=10, batch_size=1)


def test_delta_has_a_default_of_at_most_a_tenth_of_an_example():
    for examples in (1, 9, 10, 11, 99, 50_000, 100_000, 1_281_167, 10**8):
        delta = quell.Run.from_data(examples=examples, batch_size=1, epochs=1, epsilon=1).delta
        assert delta * 10 * examples <= 1 < delta * 100 * examples + 1e-9
    assert quell.Run.from_data(users=70, batch_size=1, epochs=1, epsilon=1).delta == 1e-3


def test_a_meaningless_delta_is_pointed_out():
    assert "publishing a whole example" in words.notes(quell.Run.from_data(**{**SETUP, "delta": 0.01}))[0]
    assert words.notes(quell.Run.from_data(**SETUP)) == []


def test_a_mechanism_that_cannot_be_priced_does_not_stop_the_others(monkeypatch):

    honest = Prices.estimate

    def estimated(self, strategy, *arguments):
        if strategy.family == "blt":
            raise QuellError("the error of blt overflows")
        return honest(self, strategy, *arguments)

    monkeypatch.setattr(Prices, "estimate", estimated)
    names = {mechanism.name for mechanism in quell.plan(**SETUP).mechanisms}
    assert "blt" not in names
    assert "lambda_cgd" in names


def test_dense_matrices_are_a_second_opinion(saved, monkeypatch):
    """Break the fast error formula: the dense check of verification must notice, whatever the file says."""
    from quell.analysis import objective
    from quell.analysis.error import Error

    monkeypatch.setattr(objective, "error", lambda *_: Error(1.0, 1.0))
    false = [check.claim for check in quell.verify(saved) if not check.holds]
    assert any("rmse, dense" in claim for claim in false)


@pytest.mark.parametrize("name", [pytest.param("plan_v2", marks=pytest.mark.slow), "plan_v2_users"])
def test_files_of_version_2_load_and_every_lie_in_them_is_found(name, tmp_path):
    path = Path(__file__).parent / "data" / f"{name}.json"
    assert all(check.holds for check in quell.verify(path))
    plan = quell.Plan.load(path)
    plan.save(tmp_path / "again.json")
    assert quell.Plan.load(tmp_path / "again.json").as_dict() == plan.as_dict()
    content = json.loads(path.read_text())
    assert plan.run.promise.unit == content["mechanisms"][0]["guarantee"]["unit"]
    last = content["mechanisms"][-1]  # without amplification: checked in milliseconds
    content["mechanisms"], content["recommended"] = [last], 0
    lied = tmp_path / "lied.json"
    for part in (last, last["guarantee"]):
        for key, value in part.items():
            if isinstance(value, dict | list):
                continue
            more = 1.05 if key == "dpsgd_rmse" else 1.001
            part[key] = f"not {value}" if isinstance(value, str) else value * more + 0.001
            lied.write_text(json.dumps(content))
            with pytest.raises(QuellError):
                quell.Plan.load(lied)
            part[key] = value
    lied.write_text(json.dumps(content))
    quell.Plan.load(lied)


def test_predictions_of_training_are_checked_as_version_2_made_them(tmp_path):
    """With momentum the number is another one today."""
    content, path = json.loads((Path(__file__).parent / "data" / "plan_v2.json").read_text()), tmp_path / "old.json"
    content |= {"mechanisms": content["mechanisms"][-1:], "recommended": 0}  # without amplification
    path.write_text(json.dumps(content))
    assert content["setup"]["momentum"] == 0.9
    assert all(check.holds for check in quell.verify(path))


def test_no_yardstick_of_random_batches_can_be_changed(tmp_path):
    """DP-SGD's error is an estimate there, and the same estimate every time."""
    run = quell.Run.from_data(**{**SETUP, "sampling": "balls_in_bins"})
    path = tmp_path / "plan.json"
    quell.Plan(run, (Prices(run).price("identity"),), 0).save(path)
    quell.Plan.load(path)
    content = json.loads(path.read_text())
    content["yardsticks"]["dpsgd_rmse"] *= 1 + 1e-6
    path.write_text(json.dumps(content))
    with pytest.raises(QuellError, match="dpsgd_rmse"):
        quell.Plan.load(path)


def test_plain_numpy_numbers_are_numbers():
    ours = quell.Run.from_data(**{**SETUP, "examples": np.int64(2000), "epsilon": np.float32(4)})
    assert ours.steps == 80


def test_saved_plans_can_be_read_by_colleagues_and_leave_no_litter(plan, saved):
    assert saved.stat().st_mode & 0o044
    assert [path.name for path in saved.parent.iterdir()] == ["plan.json"]


def test_left_over_examples_are_pointed_out():
    notes = words.notes(quell.Run.from_data(**{**SETUP, "batch_size": 300}))
    assert "do not divide into batches of 300" in notes[0]


SLOW = pytest.mark.slow  # repeats of what a quick case holds


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        "balls-in-bins",
        pytest.param("poisson", marks=SLOW),
        pytest.param("cyclic_poisson", marks=SLOW),
        pytest.param("best", marks=SLOW),
    ],
)
def test_amplified_plans_need_less_noise_and_verify(sampling, tmp_path):
    small = {"examples": 400, "batch_size": 20, "epochs": 2, "epsilon": 4, "delta": 1e-5, "memory": 2, "draws": 2}
    plain, amplified = quell.plan(**small, sampling="cyclic"), quell.plan(**small, sampling=sampling)
    assert amplified.mechanism.score("training") < plain.prices.dpsgd.score("training")
    assert amplified.mechanism.certified
    by_name, best = (
        {each.name: each.score("training") for each in reversed(plan.alternatives) if plan.run.limits.fits(each)}
        for plan in (plain, amplified)
    )
    assert all(best[name] < by_name[name] * 1.02 for name in best)
    path = tmp_path / "plan.json"
    amplified.save(path)
    assert [check for check in quell.verify(path) if not check.holds] == []

    def claim_another(content):
        for row in content["mechanisms"]:
            row["guarantee"]["sampling"] = "b_min_sep"

    assert tampered(path, claim_another)


def test_amplified_noise_does_not_buy_the_promise_without_the_sampling(tmp_path):
    """The classic mistake: noise calibrated for random batches, training on fixed ones."""
    small = {"examples": 400, "batch_size": 20, "epochs": 2, "epsilon": 4, "delta": 1e-5, "memory": 0, "draws": 1}
    path = tmp_path / "plan.json"
    quell.plan(**small, sampling="balls_in_bins").save(path)

    def claim_cyclic(content):
        content["run"]["sampling"] = "cyclic"
        for row in content["mechanisms"]:
            row["guarantee"]["sampling"] = "cyclic"

    assert any("its noise suffices" in str(check.stated) for check in tampered(path, claim_cyclic))


@pytest.mark.slow
def test_more_rows_certified_by_draws_than_share_the_failure_probability_are_refused(tmp_path):
    """Among many certificates by draws one would hold by luck."""
    drawn = quell.plan(**{**SETUP, "sampling": "balls_in_bins"})
    assert drawn.mechanism.guarantee.failure_probability > 0
    path = tmp_path / "plan.json"
    drawn.save(path)
    content = json.loads(path.read_text())
    content["mechanisms"] *= planner.COMPARISONS + 1
    path.write_text(json.dumps(content))
    assert [check.claim for check in quell.verify(path) if not check.holds] == ["mechanisms certified by draws"]
    with pytest.raises(QuellError, match="certified by draws it says '9', and recomputing gives 'at most 8'"):
        quell.Plan.load(path)


LIMIT = {"cost": {"base": 1.0, "draw": 1.0, "buffer": 1.0}, "most": 5.0}
ODD = [0, -1, True, None, "x", "\ud800", "\x1b[2J", "[/red]", [], {}, [1], [[1], [1, 2]], [None], [10**400], {"a": 1}]
ODD += [math.nan, math.inf, 1e308, 5e-324, 10**30, 10**400, 10**4299, json.loads("[" * 500 + "]" * 500)]
ODD += [LIMIT, {**LIMIT, "most": "x"}, {**LIMIT, "cost": 5}, {"cost": {"base": [1]}, "most": 1}, {**LIMIT, "more": 1}]


def outcome(path) -> str:
    """How the command ends: never with a traceback."""
    from typer.testing import CliRunner

    from quell.cli import app

    ended = CliRunner().invoke(app, ["verify", str(path)])
    if isinstance(ended.exception, QuellError):
        assert "\n" not in str(ended.exception)
        assert str(ended.exception).isprintable()
        assert len(str(ended.exception)) < 600
    elif not isinstance(ended.exception, SystemExit | None):
        raise ended.exception
    return "refused" if ended.exit_code else "true"


@pytest.mark.parametrize("wrong", [0, 5, 1.5, "x", [], [1], {}, True, math.nan, *ODD[-4:]], ids=repr)
def test_a_wrong_time_limit_is_a_sentence(saved, wrong):
    """Any number, string or list here was a traceback of `quell verify`."""
    content = json.loads(saved.read_text())
    content["run"]["limits"]["time_limit"] = wrong
    saved.write_text(json.dumps(content))
    with pytest.raises(QuellError, match=r"time_limit=|most=|base="):
        quell.verify(saved)
    with pytest.raises(QuellError, match=r"time_limit=|most=|base="):
        quell.Run.from_data(**{**SETUP, "time_limit": wrong})


@pytest.mark.parametrize(("group", "name", "wrong"), [("promise", "epsilon", "8"), ("limits", "memory", -1)])
def test_a_wrong_value_of_a_run_names_the_file(group, name, wrong, saved):
    content = json.loads(saved.read_text())
    content["run"][group][name] = wrong
    saved.write_text(json.dumps(content))
    with pytest.raises(QuellError, match=rf"the run that .*{saved.name} states is not valid: .*{name}"):
        quell.verify(saved)


@pytest.mark.slow
def test_no_value_of_a_plan_file_makes_a_traceback(saved):
    content = json.loads(saved.read_text())
    keep = [row for row in content["mechanisms"] if row["family"] in ("blt", "lambda_cgd")][:2]
    content["mechanisms"], content["recommended"] = keep, 0
    run = content["run"]
    places = [("run", key) for key in (*run, "separation", "participations", "surprise")]
    places += [("run", group, key) for group in ("promise", "optimizer", "limits") for key in (*run[group], "surprise")]
    places += [("mechanisms", number, key) for number, row in enumerate(keep) for key in (*row, "surprise", "\ud800")]
    groups = ("parameters", "noise", "error", "guarantee")
    places += [("mechanisms", 0, group, key) for group in groups for key in (*keep[0][group], "surprise")]
    whole = (("run",), ("yardsticks",), ("mechanisms",), ("recommended",))
    cases = [(place, value) for place in (*whole, *places) for value in ODD]
    for index in np.random.default_rng(0).choice(len(cases), 150, replace=False):
        place, value = cases[index]
        mutated = copy.deepcopy(content)
        inside = mutated
        for part in place[:-1]:
            inside = inside[part]
        before, inside[place[-1]] = inside.get(place[-1], "absent"), value
        saved.write_text(json.dumps(mutated))
        harmless = place[0] == "run" and place[-1] in ("memory", "draws", "time_limit", "examples", "objective")
        assert outcome(saved) == "refused" or harmless or value == before or place == ("recommended",), (place, value)


@pytest.mark.slow
def test_a_plan_file_with_more_rows_than_plans_have_is_refused_at_once(saved):
    content = json.loads(saved.read_text())
    content["mechanisms"] *= 20_000 // len(content["mechanisms"])
    saved.write_text(json.dumps(content))
    with pytest.raises(QuellError, match="not a list of at most 256 rows"):
        quell.verify(saved)


def test_a_plan_that_could_not_be_read_again_is_not_written(plan, tmp_path, monkeypatch):
    many = replace(plan, mechanisms=plan.mechanisms * 100)
    with pytest.raises(QuellError, match="a plan file holds up to 256 mechanisms"):
        many.save(tmp_path / "many.json")
    monkeypatch.setattr(file, "MOST_BYTES", 1000)
    with pytest.raises(QuellError, match="more than the 1,000 that are read again"):
        plan.save(tmp_path / "long.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [pytest.param(10**5000, id="long"), 2**256, math.inf, "x", [1], None, True])
@pytest.mark.parametrize("name", ["examples", "batch_size", "epochs", "draws", "separation", "participations"])
def test_no_count_is_too_odd_for_a_sentence(name, value):
    if value is None and name in ("separation", "participations"):
        return
    with pytest.raises(QuellError) as refusal:
        quell.Run.from_data(**{**SETUP, name: value})
    assert len(str(refusal.value)) < 300


def test_adaptive_is_yes_or_no():
    with pytest.raises(QuellError, match="adaptive='no' must be True or False"):
        quell.Run.from_data(**SETUP, adaptive="no")


def test_numbers_of_numpy_can_be_saved(tmp_path):
    odd = {"momentum": np.float32(0.5), "weight_decay": np.float32(1), "memory": np.float32(0), "draws": np.int32(2)}
    path = tmp_path / "plan.json"
    quell.plan(**SETUP, **odd).save(path)
    assert quell.Plan.load(path).run.optimizer.momentum == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "momentum"),
    [
        ("erratic", 0.9),
        ("one", 0.0),
        *(pytest.param(shape, 0.9, marks=SLOW) for shape in ("one", "alternating", "rising", "falling")),
        *(pytest.param(shape, 0.0, marks=SLOW) for shape in ("erratic", "alternating", "rising", "falling")),
    ],
)
def test_erratic_schedules_are_planned(shape, momentum, tmp_path):
    """Searches that have no finite loss to start from were tracebacks; other mechanisms can still be had."""
    n, random = 40, np.random.default_rng(0)
    rates = {
        "erratic": random.choice([1e-9, 1.0], n),
        "one": np.where(np.arange(n) == 17, 1.0, 1e-30),
        "alternating": np.where(np.arange(n) % 2, 1e99, 1e80),
        "rising": np.geomspace(1e-99, 1e-70, n),
        "falling": np.geomspace(1e99, 1e70, n),
    }[shape]
    small = {"examples": 100, "batch_size": 10, "epochs": 4, "epsilon": 2, "delta": 1e-5, "sampling": "cyclic"}
    path = tmp_path / "plan.json"
    quell.plan(**small, momentum=momentum, learning_rates=list(rates)).save(path)
    assert [check for check in quell.verify(path) if not check.holds] == []


def test_learning_rates_of_no_effect_are_refused():
    with pytest.raises(QuellError, match="learning rate 1e-31 at step 3 is less than 1e-30 of the largest, 2: "):
        quell.plan(**SETUP, learning_rates=[2.0] * 3 + [1e-31] + [2.0] * 76)


def test_a_changed_run_has_no_cap_that_nobody_gave():
    """Twelve uses in three epochs are all that fit: more epochs make more of them."""
    per_user = Run.from_data(**{**SETUP, "epochs": 3}, separation=5)
    assert per_user.changed(epochs=12).participation.count == 4 * per_user.participation.count
    capped = Run.from_data(**{**SETUP, "epochs": 3}, separation=5, participations=4)
    assert capped.changed(epochs=12).participation.count == 4
    by_steps = Run.from_steps(steps=100, epochs=2, epsilon=2.0, delta=1e-5)
    assert by_steps.changed(epochs=4) == Run.from_steps(steps=100, epochs=4, epsilon=2.0, delta=1e-5)


def test_a_separation_that_the_epochs_leave_no_room_for_is_refused():
    """Poisson sampling was priced at 1/separation: at one epoch instead of two."""
    with pytest.raises(QuellError, match="too long for 2 epochs in 100 steps"):
        Run.from_steps(steps=100, epochs=2, separation=99, sampling="poisson", epsilon=2.0, delta=1e-5)


def test_what_strategies_are_optimised_for_where_weights_are_averaged():
    known = {"examples": 400, "batch_size": 20, "epochs": 2, "epsilon": 4, "momentum": 0.5, "ema": 0.8}
    run, rmse = Run.from_data(**known), Run.from_data(**known, objective="rmse")
    assert (run.workload.ema, run.designed_for.ema) == (0.8, 0.0)
    assert rmse.designed_for is rmse.workload
    plain = Run.from_data(**{**known, "ema": None})
    designs = [Prices(each).build("band_inv", bands=4).noising_matrix() for each in (run, plain, rmse)]
    assert np.array_equal(designs[0], designs[1])
    assert not np.allclose(designs[1], designs[2])


def test_memory_in_bytes_needs_the_size_of_the_model():
    known = {"examples": 400, "batch_size": 20, "epochs": 2, "epsilon": 4}
    assert Run.from_data(**known).limits.memory == 4
    assert Run.from_data(**known, parameters=10**6).limits.memory == 250
    assert Run.from_data(**known, parameters=10**9).limits.memory == 4
    assert Run.from_data(**known, parameters=10**9, memory="8GB").limits.memory == 2
    assert Run.from_data(**known, memory=None).limits.memory is None
    for memory in ("8GB", "eight", "GB"):
        with pytest.raises(QuellError, match="memory="):
            Run.from_data(**known, memory=memory)


@pytest.mark.slow
def test_a_plan_for_averaged_weights_is_saved_and_verified(tmp_path):
    known = {"examples": 400, "batch_size": 20, "epochs": 2, "epsilon": 4, "delta": 1e-5, "momentum": 0.5}
    plain, averaged = (quell.plan(**known, sampling="cyclic", ema=ema) for ema in (None, 0.8))
    chosen = averaged.mechanism
    lag = np.arange(40)[:, None] - np.arange(40)
    average = 0.2 * np.tril(0.8 ** np.maximum(lag, 0).astype(float))
    dense = average @ plain.run.workload.matrix() @ chosen.strategy.noising_matrix()
    assert chosen.rmse == pytest.approx(np.linalg.norm(dense) / math.sqrt(40) * chosen.noise_multiplier, rel=1e-9)
    same = averaged.prices.certify(plain.mechanism.strategy)  # planned without knowing of the average
    assert same.noise_multiplier == plain.mechanism.noise_multiplier
    assert chosen.score("training") <= same.score("training")
    path = tmp_path / "plan.json"
    averaged.save(path)
    assert quell.Plan.load(path).run.optimizer.ema == 0.8
    content = json.loads(path.read_text())
    del content["run"]["optimizer"]["ema"]  # the errors stated are those of averaged weights
    path.write_text(json.dumps(content))
    assert {"rmse", "maxse"} <= {c.claim.split(": ")[-1] for c in quell.verify(path) if not c.holds}
    plain.save(path)
    assert "ema" not in json.loads(path.read_text())["run"]["optimizer"]


def test_a_false_predicted_loss_is_found(tmp_path):
    path = tmp_path / "plan.json"
    quell.plan(**SETUP, objective="loss").save(path)
    assert all(check.holds for check in quell.verify(path))
    content = json.loads(path.read_text())
    content["mechanisms"][0]["error"]["loss"] *= 1.001
    path.write_text(json.dumps(content))
    assert [check.claim.split(": ")[-1] for check in quell.verify(path) if not check.holds] == ["loss"]


def test_a_plan_is_one_line_where_it_is_not_printed():
    plan = quell.plan(
        examples=200, batch_size=20, epochs=1, epsilon=8, delta=1e-4, sampling="cyclic", memory=0, draws=1
    )
    assert repr(plan).startswith(f"<Plan: (8, 0.0001)-DP per example with <{describe(plan.mechanism.strategy)}")
    assert "\n" not in repr(plan)


@pytest.mark.parametrize("epsilon", [400, 720, 1e4])
def test_an_epsilon_beyond_what_random_batches_are_priced_for(epsilon, tmp_path):
    """It ended in an OverflowError, or in a sentence about the sampling; and the plan could not be saved."""
    options = {"examples": 200, "batch_size": 20, "epochs": 1, "epsilon": epsilon, "memory": 0, "draws": 1}
    fixed = quell.plan(**options)
    assert fixed.mechanism.sampling == fixed.prices.dpsgd.sampling == "cyclic"
    fixed.save(tmp_path / "plan.json")
    assert all(check.holds for check in quell.verify(tmp_path / "plan.json"))
    for sampling in ("poisson", "balls_in_bins"):
        with pytest.raises(QuellError, match=f"epsilon={epsilon:g}, .* is beyond what random batches are priced for"):
            quell.plan(**options, sampling=sampling)
