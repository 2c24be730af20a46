"""`quell train` as a user meets it, on data small enough for seconds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from quell import cli
from quell.budget import Budget
from quell.budget.claims import search_claim
from quell.errors import QuellError
from quell.planning import Plan, Prices
from quell.planning.file import certified
from quell.privacy.selection import Trials
from quell.run import Promise, Run
from quell.show import outcomes
from quell.train import command, comparison
from quell.train.models import build
from quell.tuning import TuningPlan
from quell.tuning import plan as tuning_plan
from tests import documented

ROOT = Path(__file__).parent.parent.parent
OPTIONS = ["--epochs", "2", "--batch-size", "20", "--epsilon", "8", "--delta", "1e-3", "--sampling", "cyclic"]


@pytest.fixture(autouse=True)
def quick_plans(monkeypatch):
    """Two mechanisms instead of a search over all of them."""

    def plan(run: Run, progress=None) -> Plan:
        prices = Prices(run)
        return Plan(run, (prices.price("bisr", bands=4), prices.price("identity")), 0)

    for module in (command, tuning_plan):
        monkeypatch.setattr(module, "make_plan", plan)


@pytest.fixture
def file(tmp_path):
    """Two well separated clouds."""
    maker = np.random.default_rng(3)
    y = maker.integers(0, 2, 200)
    np.savez(tmp_path / "data.npz", x=maker.normal(size=(200, 6)) + 4 * y[:, None], y=y)
    return tmp_path / "data.npz"


def train(file, *arguments: str):
    result = CliRunner().invoke(cli.app, ["train", str(file), *OPTIONS, *arguments], env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_train_shows_three_rows_and_writes_what_was_asked_for(file, tmp_path):
    names = ["weights.pt", "plan.json", "report.md", "curves.png", "page.html"]
    options = ["--save-weights", "--save-plan", "--save-report", "--plot", "--html"]
    wanted = [part for option, name in zip(options, names, strict=True) for part in (option, str(tmp_path / name))]
    text = train(file, "--lr", "0.1", "--runs", "2", *wanted).stdout
    for shown in (
        "not private",
        "DP-SGD",
        "planned",
        "Promise of the planned run: (8, 0.001)-DP",
        "spends as much again",
    ):
        assert shown in " ".join(text.split())
    assert "…" not in text.split("The plan")[0], "the table is cut off in 80 columns"
    model = build("auto", (6,), 2)
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    report = (tmp_path / "report.md").read_text()
    assert "256 bits from the operating system" in report
    assert "spends as much again" in report
    assert json.loads((tmp_path / "plan.json").read_text())["run"]["examples"] == 150
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text()
    assert "planned" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_weights_and_report_are_written_before_anything_that_can_be_made_again(file, tmp_path, monkeypatch):
    def full_disk(*_):
        raise QuellError("no space left")

    for module, name in ((command.plots, "draw_training"), (command, "write_page"), (Plan, "save")):
        monkeypatch.setattr(module, name, full_disk)
    wanted = {"--save-weights": "w.pt", "--save-report": "r.md", "--save-plan": "p", "--plot": "p.png", "--html": "h"}
    arguments = [part for option, name in wanted.items() for part in (option, str(tmp_path / name))]
    with pytest.raises(QuellError, match="no space left"):
        train(file, "--no-baselines", "--lr", "0.1", *arguments)
    assert torch.load(tmp_path / "w.pt", weights_only=True)
    assert "256 bits" in (tmp_path / "r.md").read_text()


def test_a_model_without_privacy_learns_and_json_tells_all(file):
    found = json.loads(train(file, "--seed", "1", "--lr", "0.1", "--json").stdout)
    assert documented.in_tables("train") == [found.keys(), found["arms"][0].keys()]
    plain, dpsgd, planned = found["arms"]
    assert plain["finals"][0] > 0.95
    assert [len(arm["curve"]) for arm in found["arms"]] == [2, 2, 2]
    assert (dpsgd["mechanism"], dpsgd["batches"], planned["batches"]) == ("independent noise", "cyclic", "cyclic")
    assert any("voids their privacy" in note for note in found["notes"])


def test_a_seed_repeats_the_runs_and_no_seed_does_not(file):
    def weights(*arguments: str) -> torch.Tensor:
        path = file.with_name("weights.pt")
        train(file, "--no-baselines", "--lr", "0.1", "--save-weights", str(path), *arguments)
        return torch.cat([value.ravel() for value in torch.load(path, weights_only=True).values()])

    assert torch.equal(weights("--seed", "4"), weights("--seed", "4"))
    assert not torch.equal(weights("--seed", "4"), weights("--seed", "5"))
    assert not torch.equal(weights(), weights())


def test_the_search_is_inside_the_promise_and_keeps_its_scores(file, tmp_path, monkeypatch):
    """Trials are scored on held-out examples; only the best one's rate, curve, model and report come out."""
    asked, drawn = [], []
    real, draw = comparison.accuracy, Trials.draw
    monkeypatch.setattr(comparison, "accuracy", lambda model, part: (asked.append(len(part)), real(model, part))[1])
    monkeypatch.setattr(Trials, "draw", lambda *given: (drawn.append(draw(*given)), drawn[-1])[1])
    monkeypatch.setattr(comparison, "GRID", (0.5, 1.0))
    monkeypatch.setattr(command, "TRIALS", 3.0)
    wanted = ["--save-report", str(tmp_path / "report.json"), "--save-plan", str(tmp_path / "plan.json")]
    found = json.loads(train(file, "--epochs", "1", "--json", *wanted).stdout)
    plain, *private = found["arms"]
    assert plain["searched"][plain["learning_rate"]] == max(plain["searched"].values())
    assert all(arm["searched"] == {} and len(arm["finals"]) == 1 for arm in private)
    held_out, test = 22, 50
    trainings = 2 * 2 + 1 + sum(drawn)
    assert (asked.count(test), asked.count(held_out), len(drawn)) == (trainings, trainings - 1, 2)
    assert any("22 examples held out" in note for note in found["notes"])
    assert found["promise"].startswith("(8, 0.001)-DP per example")
    assert found["promise"].endswith("the search for a learning rate included")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["epsilon_at_the_end"], report["epsilon_so_far"]) == (8.0, 8.0)
    assert "best of a random number of runs" in report["search"]
    plan = json.loads((tmp_path / "plan.json").read_text())
    kind = certified(plan["run"], plan["mechanisms"][0])
    assert plan["run"]["promise"]["epsilon"] < 7.0
    assert 7.7 < search_claim(Trials(3.0), [kind], 1e-3).epsilon <= 8.0


@pytest.mark.parametrize("options", [["--lr", "0.1"], []])
def test_runs_are_charged_to_a_budget(file, tmp_path, options, monkeypatch):
    monkeypatch.setattr(command, "TRIALS", 2.0)
    budget = Budget.create(tmp_path / "b", name="x", epsilon=9.0, delta=1e-3)
    with pytest.raises(QuellError, match="add --no-baselines"):
        train(file, "--budget", str(budget.path), *options)
    with pytest.raises(QuellError, match="has no privacy that a budget could count"):
        train(file, "--budget", str(budget.path), "--no-baselines", "--seed", "1", *options)
    train(file, "--budget", str(budget.path), "--no-baselines", *options)
    (entry,) = budget.entries
    assert (entry.kind, entry.epsilon) == ("bisr", 8.0) if options else entry.kind == "search"
    with pytest.raises(QuellError, match="does not suffice"):
        train(file, "--budget", str(budget.path), "--no-baselines", *options)


@pytest.mark.parametrize("sampling", ["cyclic", pytest.param("poisson", marks=pytest.mark.slow)])
def test_dpsgd_gets_noise_for_its_own_search(sampling):
    run = Run.from_data(examples=200, batch_size=20, epochs=1, epsilon=5.5, delta=1e-3, sampling=sampling)
    plan = Plan(run, (Prices(run).price("identity"),), 0)
    search = TuningPlan(Promise(8.0, 1e-3), Trials(10.0), (plan,), ())
    trained = comparison.dpsgd(plan, search)
    prices = Prices(run.changed(epsilon=trained.guarantee.epsilon))
    assert 7.7 < search_claim(Trials(10.0), [(prices, trained)], 1e-3).epsilon <= 8.0


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "best"), [("best", "poisson"), ("cyclic", "cyclic")])
def test_dpsgd_gets_the_best_allowed_batches(sampling, best):
    run = Run.from_data(examples=20, batch_size=10, epochs=1, epsilon=2, delta=1e-3, sampling=sampling)
    prices = Prices(run)
    trained = comparison.dpsgd(Plan(run, (prices.price("identity"),), 0))
    assert trained.guarantee.sampling == prices.dpsgd.sampling == best
    assert (trained.guarantee.epsilon, trained.guarantee.delta) == (2, 1e-3)


def test_the_verdict_claims_no_more_than_the_runs_show():
    dpsgd = [0.90, 0.91]
    assert outcomes.verdict([0.92, 0.93], dpsgd) == "The plan beats DP-SGD by 2.0 points, in every run."
    assert outcomes.verdict([0.80, 0.85], dpsgd) == "DP-SGD beats the plan by 8.0 points, in every run."
    assert "1.0 points below DP-SGD, in one run each, which shows little" in outcomes.verdict([0.8], [0.81])
    assert "chance" in outcomes.verdict([0.92, 0.905], dpsgd)


@pytest.mark.parametrize(("shape", "layer"), [((1, 8, 8), "Conv2d"), ((64,), "Linear"), ((3, 4, 5), "Conv2d")])
def test_models_fit_the_shape_of_examples(shape, layer):
    model = build("auto", shape, 7)
    assert layer in str(model)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    assert build("linear", shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


WRONG = {
    "there is no model": ["--model", "transformer"],
    "a cnn needs images": ["--model", "cnn"],
    "lr=-1 must be positive": ["--lr", "-1"],
    "runs=0": ["--runs", "0"],
    "must end in .md or .json": ["--save-report", "report.pdf"],
    "ending in .png, .svg or .pdf": ["--plot", "plot.foo"],
    "it is a folder": ["--save-plan", "."],
    "there is no folder": ["--save-weights", "nowhere/weights.pt"],
    "larger than the data set": ["--batch-size", "1000"],
    "max_grad_norm": ["--clip", "0"],
    "seed=-1": ["--seed", "-1"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_refused_before_training(file, message, monkeypatch):
    monkeypatch.setattr(command, "compare", lambda *_: pytest.fail("training began"))
    with pytest.raises(QuellError, match=message.replace(".", r"\.")):
        train(file, *WRONG[message])


@pytest.mark.slow
def test_on_digits_planned_runs_beat_dpsgd_on_average(tmp_path, monkeypatch):
    """The claim of `make demo`, by its own command, with the whole plan and the search over learning rates."""
    monkeypatch.undo()
    recipe = (ROOT / "Makefile").read_text()
    line = next(line for line in recipe.splitlines() if "quell train" in line)
    options = line.split("demo/digits.npz")[1].split("--plot")[0].split()
    runpy.run_path(str(ROOT / "examples" / "digits.py"))["write"](str(tmp_path / "digits.npz"))
    result = CliRunner().invoke(cli.app, ["train", str(tmp_path / "digits.npz"), *options, "--json"])
    assert result.exit_code == 0, result.output
    plain, dpsgd, planned = json.loads(result.stdout)["arms"]
    assert len(planned["finals"]) == 3
    assert np.mean(plain["finals"]) > np.mean(planned["finals"]) > np.mean(dpsgd["finals"]) + 0.01
