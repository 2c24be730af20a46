"""`quell train` as a user meets it, on data small enough for seconds."""

from __future__ import annotations

import json
import runpy
import shlex
import tempfile
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from quell import cli
from quell.budget.claims import search_claim
from quell.errors import QuellError
from quell.planning import Plan, Prices
from quell.planning.file import certified
from quell.privacy.profile import PointProfile
from quell.privacy.selection import Trials, selected_epsilon
from quell.run import Promise, Run
from quell.show import outcomes
from quell.train import command, comparison, counting
from quell.train.models import build
from quell.train.saved import Model
from quell.tuning import TuningPlan
from quell.tuning import plan as tuning_plan
from tests import documented

ROOT = Path(__file__).parent.parent.parent
OPTIONS = ["--epochs", "2", "--batch-size", "20", "--epsilon", "8", "--delta", "1e-3", "--sampling", "cyclic"]
CLASSES = ["--classes", "2"]


ARMS = ("dp-sgd", "planned")  # as logs are called


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


def train(file, *arguments: str, options=(*OPTIONS, *CLASSES)):
    if "--out" not in arguments:
        arguments = (*arguments, "--out", tempfile.mkdtemp(dir=file.parent))
    result = CliRunner().invoke(cli.app, ["train", str(file), *options, *arguments], env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_train_shows_three_rows_and_writes_what_a_colleague_needs(file, tmp_path):
    out = tmp_path / "out"
    options = ("--lr", "0.1", "--runs", "2", "--out", str(out), "--plot", str(tmp_path / "curves.png"))
    text = train(file, "--baselines", "--log", str(tmp_path / "runs"), *options).stdout
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"{arm}-{n}" for arm in ARMS for n in "12"]
    for shown in ("not private", "DP-SGD", "planned", "Promise of the planned run: (8, 0.001)-DP", "not for others"):
        assert shown in " ".join(text.split())
    assert "…" not in text.split("The plan")[0], "the table is cut off in 80 columns"
    assert Model.load(out).classes == ("0", "1")
    report = (out / "privacy.md").read_text()
    assert "256 bits from the operating system" in report
    assert "50 examples that were held out from training, with noise" in report
    assert json.loads((out / "plan.json").read_text())["run"]["examples"] == 150
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "page.html").read_text()
    assert f"<title>data.npz, trained with Quell on {date.today()}</title>" in page
    assert "200 examples: 150 to train, 50 to test." in page
    assert "Promise of the planned run: (8, 0.001)-DP" in page.split("<noscript>")[1].split("</noscript>")[0]
    assert "Whatever anyone concludes from the trained model" in page
    assert "The best attack on who was in the data finds at most" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_table_becomes_a_model_that_predicts(tmp_path):
    """From a .csv file to predictions, with every default but the speed."""
    maker, path = np.random.default_rng(3), tmp_path / "people.csv"
    ages, cities = maker.integers(10, 90, 400), maker.choice(["Oslo", "Rome"], 400)
    rows = [f"{age},{city},{'yes' if age > 50 else 'no'}" for age, city in zip(ages, cities, strict=True)]
    path.write_text("\n".join(["age,city,bought", *rows]))
    known = ("--target", "bought", "--classes", "no,yes", "--range", "age=0:100", "--lr", "0.5", "--sampling", "cyclic")
    text = " ".join(train(path, "--out", str(tmp_path / "out"), options=known).stdout.split())
    assert "300 examples, batches of 16, 10 epochs" in text
    assert "Target: (8, 0.0001)-DP" in text
    assert "Taken for public: the number of rows, the names of the columns" in text
    (tmp_path / "new.csv").write_text("city,age\nRome,12\nOslo,88\n")
    result = CliRunner().invoke(cli.app, ["predict", str(tmp_path / "out"), str(tmp_path / "new.csv")])
    assert [line.split(",")[0] for line in result.stdout.split()] == ["class", "no", "yes"]
    wanted = ["predict", str(tmp_path / "out" / "model.pt"), str(path), "--out", str(tmp_path / "found.csv")]
    for _ in range(2):  # predictions are replaced, and nobody's table is
        assert CliRunner().invoke(cli.app, wanted).exit_code == 0
    text = path.read_text()
    refused = CliRunner().invoke(cli.app, [*wanted[:-1], str(path)]).exception
    assert "people.csv: it exists and is not a table of predictions" in str(refused)
    assert path.read_text() == text
    found = [line.split(",")[0] for line in (tmp_path / "found.csv").read_text().split()[1:]]
    assert np.mean([guess == row.split(",")[2] for guess, row in zip(found, rows, strict=True)]) > 0.75


def test_a_model_refuses_what_it_was_not_made_for(file, tmp_path):
    train(file, "--lr", "0.1", "--out", str(tmp_path / "out"))
    model = Model.load(tmp_path / "out")
    assert len(model.predict(file)) == 200
    np.savez(tmp_path / "other.npz", x=np.zeros((2, 5)))
    with pytest.raises(QuellError, match=r"shape \(5,\), but the model was trained with \(6,\)"):
        model.predict(tmp_path / "other.npz")
    (tmp_path / "broken.pt").write_bytes(b"no model")
    with pytest.raises(QuellError, match="is not a model"):
        Model.load(tmp_path / "broken.pt")


def test_an_earlier_model_is_not_overwritten(file, tmp_path):
    train(file, "--lr", "0.1", "--out", str(tmp_path / "out"))
    with pytest.raises(QuellError, match="is not empty"):
        train(file, "--lr", "0.1", "--out", str(tmp_path / "out"))
    for wanted in (["--out", str(file)], ["--out", str(tmp_path / "new"), "--plot", str(tmp_path / "mine.png")]):
        (tmp_path / "mine.png").write_bytes(b"mine")
        with pytest.raises(QuellError, match="is not replaced"):
            train(file, "--lr", "0.1", *wanted)
    assert (tmp_path / "mine.png").read_bytes() == b"mine"
    assert np.load(file)["x"].shape == (200, 6)


def test_model_and_report_are_written_before_anything_that_can_be_made_again(file, tmp_path, monkeypatch):
    def full_disk(*_):
        raise QuellError("no space left")

    for module, name in ((command.plots, "draw_training"), (command, "write_page"), (Plan, "save")):
        monkeypatch.setattr(module, name, full_disk)
    with pytest.raises(QuellError, match="no space left"):
        train(file, "--lr", "0.1", "--out", str(tmp_path / "out"))
    assert Model.load(tmp_path / "out")
    assert "256 bits" in (tmp_path / "out" / "privacy.md").read_text()


def test_held_out_examples_are_counted_with_noise(file, monkeypatch):
    """Half of ε on the last accuracy, the rest on the others; a third of ε on a trial's score. None with a seed."""
    asked = []
    monkeypatch.setattr(counting, "noisy", lambda count, most, epsilon: (asked.append((most, epsilon)), count)[1])
    monkeypatch.setattr(command, "TRIALS", 1.5)
    train(file, "--lr", "0.1", "--epochs", "3")
    assert asked == [(50, 2.0), (50, 2.0), (50, 4.0)]
    asked.clear()
    train(file, "--epochs", "1")
    assert asked[:2] == [(50, 8.0), (22, 8 / 3)]
    trial = PointProfile(((8 / 3, 0.0),))  # all that is known of a score: pure ε
    assert selected_epsilon([trial], Trials(comparison.TRIALS, comparison.LAW), 1e-9) <= 8.0 * (1 + 1e-6)
    asked.clear()
    train(file, "--lr", "0.1", "--seed", "1")
    assert asked == []


def test_a_model_without_privacy_learns_and_json_tells_all(file):
    found = json.loads(train(file, "--baselines", "--seed", "1", "--lr", "0.1", "--delta", "0.1", "--json").stdout)
    assert documented.in_tables("train") == [found.keys(), found["arms"][0].keys()]
    plain, dpsgd, planned = found["arms"]
    assert plain["finals"][0] > 0.95
    assert [len(arm["curve"]) for arm in found["arms"]] == [2, 2, 2]
    assert (dpsgd["mechanism"], dpsgd["batches"], planned["batches"]) == ("independent noise", "cyclic", "cyclic")
    assert any("voids their privacy" in note for note in found["notes"])
    assert found["notes"][0].startswith("δ = 0.1 is above 1/examples")


def test_a_seed_repeats_the_runs_and_no_seed_does_not(file):
    def weights(*arguments: str) -> torch.Tensor:
        folder = tempfile.mkdtemp(dir=file.parent)
        train(file, "--lr", "0.1", "--out", folder, *arguments)
        return torch.cat([value.ravel() for value in Model.load(folder).network.state_dict().values()])

    assert torch.equal(weights("--seed", "4"), weights("--seed", "4"))
    assert not torch.equal(weights("--seed", "4"), weights("--seed", "5"))
    assert not torch.equal(weights(), weights())


def test_the_search_is_inside_the_promise_and_keeps_its_scores(file, tmp_path, monkeypatch):
    """Trials are scored on held-out examples; only the best one's rate, curve, model and report come out."""
    asked, drawn = [], []
    real, draw = comparison.correct, Trials.draw
    monkeypatch.setattr(comparison, "correct", lambda model, part: (asked.append(len(part)), real(model, part))[1])
    monkeypatch.setattr(Trials, "draw", lambda *given: (drawn.append(draw(*given)), drawn[-1])[1])
    monkeypatch.setattr(comparison, "GRID", (0.5, 1.0))
    monkeypatch.setattr(command, "TRIALS", 3.0)
    wanted = ["--out", str(tmp_path / "out"), "--baselines"]
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
    report = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert (report["epsilon_at_the_end"], report["epsilon_so_far"]) == (8.0, 8.0)
    assert "best of a random number of runs" in report["search"]
    plan = json.loads((tmp_path / "out" / "trial-plan.json").read_text())
    assert not (tmp_path / "out" / "plan.json").exists()
    kind = certified(plan["run"], plan["mechanisms"][0])
    assert plan["run"]["promise"]["epsilon"] < 7.0
    assert 7.7 < search_claim(Trials(3.0), [kind], 1e-3).epsilon <= 8.0


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
    "ending in .png, .svg or .pdf": ["--plot", "plot.foo"],
    "cannot make the folder": ["--out", "/dev/null/out"],
    "there is no folder": ["--plot", "nowhere/plot.png"],
    "larger than the data set": ["--batch-size", "1000"],
    "max_grad_norm": ["--clip", "0"],
    "seed=-1": ["--seed", "-1"],
    "number of trials is part of": ["--log", "runs"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_refused_before_training(file, message, monkeypatch):
    monkeypatch.setattr(command, "compare", lambda *_: pytest.fail("training began"))
    with pytest.raises(QuellError, match=message.replace(".", r"\.")):
        train(file, *WRONG[message])


@pytest.mark.slow
def test_the_readme_leads_from_a_table_to_predictions(tmp_path, monkeypatch):
    """Its commands as they stand, with the whole plan and the search, on the table that the example writes."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "README.md").read_text().partition("## Your own table")[2]
    text = section.partition("```sh\n")[2].partition("```")[0]
    runpy.run_path(str(ROOT / "examples" / "patients.py"))["write"]("patients.csv")
    for line in text.splitlines():
        result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
    truth = [row.rsplit(",", 1)[1] for row in Path("patients.csv").read_text().split()[1:]]
    found = [row.split(",")[0] for row in Path("predictions.csv").read_text().split()[1:]]
    assert np.mean([one == other for one, other in zip(found, truth, strict=True)]) > 0.8


@pytest.mark.slow
def test_on_digits_planned_runs_beat_dpsgd_on_average(tmp_path, monkeypatch):
    """The claim of `make demo`, by its own command, with the whole plan and the search over learning rates."""
    monkeypatch.undo()
    recipe = (ROOT / "Makefile").read_text()
    line = next(line for line in recipe.splitlines() if "quell train" in line)
    options = line.split("demo/digits.npz")[1].split("--out")[0].split()
    runpy.run_path(str(ROOT / "examples" / "digits.py"))["write"](str(tmp_path / "digits.npz"))
    result = CliRunner().invoke(
        cli.app, ["train", str(tmp_path / "digits.npz"), *options, "--json", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    plain, dpsgd, planned = json.loads(result.stdout)["arms"]
    assert len(planned["finals"]) == 3
    assert np.mean(plain["finals"]) > np.mean(planned["finals"]) > np.mean(dpsgd["finals"]) + 0.01
