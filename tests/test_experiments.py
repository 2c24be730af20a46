"""The parts of `experiments/` that numbers on the results page depend on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
torch = pytest.importorskip("torch")

import cifar10  # noqa: E402
import common  # noqa: E402
import imdb_users  # noqa: E402
import plans  # noqa: E402
import results_page  # noqa: E402
import training  # noqa: E402

from quell import privacy, strategy, workload  # noqa: E402
from quell.adapters.scheme import scheme_of  # noqa: E402
from quell.analysis.error import error  # noqa: E402
from quell.noise import NoiseSpec  # noqa: E402
from quell.schemes import BallsInBins, Cyclic  # noqa: E402
from quell.torch import CorrelatedNoise  # noqa: E402

TASKS = {
    **dict.fromkeys(("cifar10", "predictors", "lambda_sweep", "epsilons"), plans.CIFAR10),
    "imdb": plans.IMDB,
}


def test_strategies_of_plan_files_are_those_that_were_certified() -> None:
    """Their noise multipliers buy (ε, δ) only for the very same C: without amplification σ = sensitivity·σ_(ε,δ)."""
    from quell.privacy import gaussian_delta

    for name, plan in common.read_json(common.PLANS / "cifar10.json").items():
        matrix = common.strategy_of(plan).matrix()
        if plan["sampling"] == "cyclic":
            moved = np.linalg.norm(matrix[:, :: plan["separation"]].sum(1))
            delta = gaussian_delta(plan["noise_multiplier"] / moved, plan["epsilon"])
            assert delta == pytest.approx(plan["delta"], rel=1e-3), name


def test_results_survive_a_kill_and_are_not_made_twice(tmp_path: Path) -> None:
    first = common.Results(tmp_path / "runs.json")
    first.add("a", accuracy=1.0)
    again = common.Results(tmp_path / "runs.json")
    assert again.missing(["a", "b"]) == ["b"]
    assert again.runs["a"]["made"]["versions"]["quell"]


def clipped_sum(model: object, images: object, labels: object, max_norm: float) -> list:
    """The dumb way: one gradient per example by automatic differentiation, clipped, added up.

    The forward pass is that of the batch: alone, an example may have a ReLU on the other side of zero by rounding.
    """
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for loss in torch.nn.functional.cross_entropy(model(images), labels, reduction="none"):
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        for sum_, grad in zip(total, grads, strict=True):
            sum_ += grad * min(1.0, max_norm / float(norm))
    return total


@pytest.mark.parametrize("clip", [0.5, 50.0])
def test_training_steps_are_the_papers_with_clipped_gradients_and_the_planned_noise(clip: float) -> None:
    """m ← 0.9 m + 0.1 (clipped sum + noise)/8, then w ← 0.9999 w − rate·m; the noise is the plan's, made apart."""
    line = common.read_json(common.PLANS / "cifar10.json")["BISR p=4 | ε=9 | cyclic | full"]
    line["noise_multiplier"] = 1e-3  # as large as the gradients themselves, so that both show
    draws = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(776, 3, 32, 32, generator=draws), torch.arange(776) % 10)
    job = training.Job("plan", "full", clip=clip, rate=0.5, he=True, seed=1)
    model, optimizer, loader = training.prepared(job, line, data)
    twin = training.convnet(seed=1, he=True)
    params = list(twin.parameters())
    spec = NoiseSpec(common.strategy_of(line).recurrence, 970, clip * line["noise_multiplier"])
    noise = CorrelatedNoise(spec, params, key=common.seeded_key(job.name))
    moments = [torch.zeros_like(p) for p in params]
    for _, (x, y) in zip(range(2), loader, strict=False):
        assert len(y) == 8
        with torch.no_grad():  # likewise
            for ours, theirs in zip(model.parameters(), params, strict=True):
                theirs.copy_(ours)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        total = clipped_sum(twin, x, y, clip)
        noise.add_(total)
        with torch.no_grad():
            for p, moment, grad in zip(params, moments, total, strict=True):
                moment.mul_(0.9).add_(grad, alpha=0.1 / 8)
                p.mul_(0.9999).sub_(0.5 * moment)
        for ours, theirs in zip(model.parameters(), params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_every_line_of_the_plan_files_is_a_plan_with_its_own_batches_and_noise() -> None:
    for file, task in TASKS.items():
        lines = list(common.read_json(common.PLANS / f"{file}.json").items())
        for name, line in lines[:: 10 if file == "epsilons" else 1]:
            examples = task.examples if name.endswith("full") else task.examples * 4 // 5
            plan = common.plan_of(line, examples)
            scheme = scheme_of(plan, plan.mechanism)
            assert (plan.steps, scheme.steps, plan.run.steps_per_epoch) == (line["steps"],) * 2 + (line["separation"],)
            assert (scheme.name, plan.mechanism.noise_multiplier) == (line["sampling"], line["noise_multiplier"]), name
            promised = plan.mechanism.guarantee
            assert (promised.epsilon, promised.delta, promised.adjacency, promised.failure_probability) == tuple(
                line["guarantee"][key] for key in ("epsilon", "delta", "adjacency", "failure_probability")
            )
            assert (plan.run.epsilon, plan.run.delta) == (promised.epsilon, promised.delta)
            assert plan.mechanism.rmse == pytest.approx(line["rmse"], rel=1e-6), name


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_over_the_longer_last_epoch_reports_ten_epochs(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    line = common.read_json(common.PLANS / "cifar10.json")["DP-SGD | ε=9 | balls_in_bins | held-out"]
    monkeypatch.setattr(training, "convnet", lambda seed, he: torch.nn.Sequential(torch.nn.Linear(3, 10)))
    data = torch.utils.data.TensorDataset(torch.randn(780, 3), torch.arange(780) % 10)
    found = training.trained(training.Job("p", "held-out", 1.0, 0.1, True, 1, bf16), line, data, data)
    assert len(found) == 10
    assert all(0 <= value <= 100 for value in found)


@pytest.mark.slow
def test_the_script_trains_chooses_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    content = {}
    for part in ("train", "test"):
        content[f"x_{part}"] = random.integers(0, 256, (cifar10.SMOKE, 32, 32, 3), dtype=np.uint8)
        content[f"y_{part}"] = random.integers(0, 10, cifar10.SMOKE, dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", **content)
    options = ["--smoke", "--lanes", "1", "--results", str(tmp_path), "--stages", "explore,paper"]
    monkeypatch.setattr(sys, "argv", ["cifar10.py", str(tmp_path), *options])
    cifar10.main()
    assert capsys.readouterr().out.count("%") == 2
    cifar10.main()
    assert "%" not in capsys.readouterr().out
    run = common.read_json(tmp_path / "cifar10.json")["runs"][0]
    kept = common.read_json(common.RESULTS / "cifar10.json")["runs"][0]
    assert set(run) - {"bf16"} == set(kept) - {"bf16"}


def test_the_results_page_is_made_from_the_result_files() -> None:
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.render()


def test_the_readme_shows_the_measured_headline() -> None:
    assert results_page.headline() in (results_page.PAGE.parents[1] / "README.md").read_text(encoding="utf-8")


def test_optimised_banded_inverses_against_table_4() -> None:
    """At or below print where they are without amplification, but for one value that contradicts its own row."""
    runs = common.read_json(common.RESULTS / "table4.json")["runs"]
    plain = {run["row"]: run for run in runs if run["column"].endswith("without amplification")}
    above = {
        (run["row"], run["column"])
        for run in runs
        if run["row"].startswith("BandInvMF") and run["paper"] and run["rmse"]
        if plain[run["row"]]["rmse"] <= plain[run["row"]]["paper"] + 0.005 and run["rmse"] > run["paper"] + 0.005
    }
    assert above == {("BandInvMF p=2", "ε=0.25")}


@pytest.mark.slow
def test_no_two_bands_have_both_the_first_and_the_last_value_printed_for_them() -> None:
    """With p = 2 there is one coefficient, −λ: 12.69 without amplification rules 125.87 at ε = 0.25 out."""
    n, b, delta = 3900, 390, 1e-5
    prefix, fixed, bins = workload.prefix(n), Cyclic(n, b), BallsInBins(n, b)

    def two(value: float, scheme: Cyclic | BallsInBins, epsilon: float) -> float:
        built = strategy.build("lambda_cgd", prefix, fixed.participation, None, **{"lambda": value})
        return privacy.estimate(built, scheme, epsilon, delta).noise_multiplier * error(built, prefix).rmse

    small, large = 0.9762, 0.9789
    assert min(two(small, fixed, 8.0), two(large, fixed, 8.0)) > 12.695  # what is printed as 12.69 lies between
    assert two(small, bins, 0.25) < two(large, bins, 0.25)
    assert two(small, bins, 0.25) > 1.02 * 125.87


def test_made_up_users_learn_sentiment_under_a_promise_per_user() -> None:
    """A small version of experiments/imdb_users.py: 400 made-up reviews of two kinds of words."""
    random = np.random.default_rng(0)
    labels = np.arange(400) % 2
    users = imdb_users.made_up_users(labels)
    people, counts = np.unique(users, return_counts=True)
    assert np.array_equal(people, np.arange(len(people)))
    assert counts.max() > 3 * np.median(counts)
    kinds = (["dull", "bad", "weak"], ["great", "fine", "strong"])
    texts = [" ".join(random.choice([*kinds[label], "film", "plot", "the"], 12)) for label in labels]
    data = torch.utils.data.TensorDataset(imdb_users.features(texts), torch.as_tensor(labels))
    assert data.tensors[0].shape == (400, imdb_users.WORDS)
    setting = imdb_users.Setting("user", 2)
    plan = imdb_users.plan_for(setting, 400, len(people), epochs=2, epsilon=50.0, sampling="cyclic", draws=1)
    assert (plan.run.drawn, plan.run.examples) == ("user", len(people))
    found = imdb_users.accuracy(imdb_users.train(setting, plan, data, users, 3.0, seed=1), data)
    assert found > 80


def test_the_page_about_users_has_the_numbers_of_the_experiment() -> None:
    runs = common.read_json(common.RESULTS / "imdb_users.json")["runs"]
    page = (Path(__file__).parents[1] / "docs" / "users.md").read_text(encoding="utf-8")
    for setting in imdb_users.SETTINGS:
        final = [run for run in runs if run["setting"] == setting.name and run["seed"] in imdb_users.SEEDS]
        found = [run["accuracy"] for run in final]
        noise = "" if setting.unit is None else f"{final[0]['noise_multiplier']:.3g}"
        how = final[0]["mechanism"] or ""
        row = f"| {setting.name} | {how} | {noise} | {np.mean(found):.1f} ({min(found):.1f} to {max(found):.1f}) |"
        assert len(found) == 3
        assert row in page, row
