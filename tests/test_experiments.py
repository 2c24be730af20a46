"""The parts of `experiments/` that numbers on the results page depend on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
torch = pytest.importorskip("torch")

import common  # noqa: E402
import convnet  # noqa: E402
import results_page  # noqa: E402
import training  # noqa: E402

from quell import privacy, strategy, workload  # noqa: E402
from quell.error import error  # noqa: E402
from quell.sampling import BallsInBins, Cyclic  # noqa: E402

CPU = torch.device("cpu")


def vmapped_sum(params: list, images: object, labels: object, max_norm: float) -> list:
    """The dumb way: one gradient per example by automatic differentiation, clipped, added up."""

    def loss(parameters: tuple, image: object, label: object) -> object:
        output = convnet.logits(list(parameters), image[None])
        return torch.nn.functional.cross_entropy(output, label[None])

    total = [torch.zeros_like(p) for p in params]
    for image, label in zip(images, labels, strict=True):
        grads = torch.func.grad(loss)(tuple(params), image, label)
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        for sum_, grad in zip(total, grads, strict=True):
            sum_ += grad * min(1.0, max_norm / float(norm))
    return total


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipped_sums_equal_example_by_example_differentiation(max_norm: float) -> None:
    params = convnet.init(seed=3, he=True, device=CPU)
    images, labels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(3)
    found = convnet.clipped_sum(params, images, labels, torch.tensor([1.0, 1, 0]), max_norm)
    expected = vmapped_sum(params, images[:2], labels[:2], max_norm)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


def test_bfloat16_passes_still_clip_in_float32() -> None:
    params = convnet.init(seed=3, he=True, device=CPU)
    images, labels = torch.randn(1, 3, 32, 32), torch.tensor([3])
    found = convnet.clipped_sum(params, images.bfloat16(), labels, torch.ones(1), 0.5)
    assert all(part.dtype == torch.float32 for part in found)
    assert float(torch.cat([part.flatten() for part in found]).norm()) == pytest.approx(0.5, rel=1e-5)
    exact = torch.cat([part.flatten() for part in convnet.clipped_sum(params, images, labels, torch.ones(1), 0.5)])
    assert float(torch.cat([part.flatten() for part in found]) @ exact) / 0.25 > 0.99


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


def test_a_training_step_is_clipped_gradients_plus_the_planned_noise() -> None:
    plan = next(iter(common.read_json(common.PLANS / "cifar10.json").values()))
    data = training.Images(torch.randn(776, 32, 32, 3), torch.arange(776) % 10)
    job = training.Job("plan", "full", clip=1.0, rate=0.5, he=True, seed=1)
    run = training.Training(job, plan, data)
    before = [p.clone() for p in run.params]
    run.put_gradients()
    clean = [g.clone() for g in run.grads]
    run.one_step()
    noise = torch.cat([(noisy - g).flatten() for noisy, g in zip(run.grads, clean, strict=True)])
    assert float(noise.std()) == pytest.approx(plan["noise_multiplier"], rel=0.01)
    for p, old, grad in zip(run.params, before, run.grads, strict=True):
        torch.testing.assert_close(p, 0.9999 * old - 0.5 * 0.1 * grad / 8.0, rtol=1e-4, atol=1e-6)


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
