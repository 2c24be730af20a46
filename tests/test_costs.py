"""What noise costs, and the limits that follow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import quell
from quell import bench, costs
from quell.costs import DEVICES, NoiseCost, TimeLimit
from quell.errors import QuellError
from quell.run import Run

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
SMALL = {"examples": 1000, "batch_size": 50, "epochs": 4, "epsilon": 4.0, "delta": 1e-5, "sampling": "cyclic"}


def measured(device: str) -> list[tuple[int, int, float]]:
    """(buffers, draws, ns per parameter) of the committed benchmark, ChaCha20."""
    shapes = {"independent": (0, 1), "λCGD": (0, 2), "BISR p=4": (0, 4), "BISR p=16": (0, 16), "BLT d=4": (4, 1)}
    rings = {"ring b=4": (3, 1), "ring b=16": (15, 1)}
    if device == "cpu":
        text, parameters = (RESULTS / "noise_cpu.md").read_text(), 1e7
        rows = re.findall(r"^(\S.*?)\s+chacha20\s+([\d.]+)", text, re.MULTILINE)
    else:
        text, parameters = (RESULTS / "noise_gpu.md").read_text().split("## 100,000,000")[1].split("##")[0], 1e8
        rows = re.findall(r"^\| (.*?) \| chacha20 \| ([\d.]+)", text, re.MULTILINE)
    known = {**shapes, **rings}
    return [(*known[name], float(ms) * 1e6 / parameters) for name, ms in rows if name in known]


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_the_cost_model_fits_its_benchmark(device):
    """Never below what was measured by much, and at most twice as much, which is what rings of buffers are granted."""
    rows = measured(device)
    assert len(rows) == 7
    for buffers, draws, nanoseconds in rows:
        assert 0.85 * nanoseconds < DEVICES[device].of(buffers, draws) < 2.1 * nanoseconds


def test_costs_of_chacha8():
    """On a GPU a draw as measured, and the rest linear in the rounds beyond Philox's; on the CPU 0.61 times a draw."""
    text = (RESULTS / "noise_gpu.md").read_text()
    small, large = (
        text.split(f"## {size}")[1].split("##")[0] for size in ("100,000,000", "1,000,000,000 float32 parameters, 16")
    )
    one = float(re.search(r"^\| independent \| philox \| ([\d.]+)", small, re.MULTILINE)[1]) * 1e-2  # ms at 10⁸ to ns
    sixteen = float(re.search(r"^\| BISR p=16 \| chacha8 \| ([\d.]+)", large, re.MULTILINE)[1]) * 1e-3
    many, few = DEVICES["h200"], DEVICES["h200-chacha8"]
    assert few.base == pytest.approx(one + 8 / 20 * (many.base - one), rel=0.03)
    assert few.of(0, 16) == pytest.approx(sixteen, rel=0.03)
    assert DEVICES["cpu-chacha8"].draw == pytest.approx(0.61 * DEVICES["cpu"].draw, rel=0.03)
    for device in ("h200", "cpu"):
        assert DEVICES[f"{device}-chacha8"].base < DEVICES[device].base
        assert DEVICES[f"{device}-chacha8"].buffer == DEVICES[device].buffer


def test_a_time_limit_is_a_share_of_the_step():
    limit = TimeLimit.of_share(0.02, step_seconds=0.1, parameters=10**8, device_name="h200")
    assert limit.most == pytest.approx(0.02)  # 2 ms for 10⁸ parameters
    assert limit.allows(0, 4)
    assert not limit.allows(0, 16)


def test_noise_must_fit_memory_draws_and_time():
    run = Run.from_data(**SMALL, memory=2, draws=4, time_limit=TimeLimit(NoiseCost(1.0, 1.0, 1.0), most=4.5))
    fitting = {(b, d) for b in range(8) for d in range(1, 8) if run.limits.fits(SimpleNamespace(buffers=b, draws=d))}
    assert fitting == {(b, d) for b in range(3) for d in range(1, 5) if 1 + b + d - 1 <= 4.5}
    plan = quell.plan(**SMALL, time_limit=TimeLimit(NoiseCost(1.0, 1.0, 1.0), most=3.5))
    copies = [int(found) for found in re.findall(r"Best with (\d+) model cop", plan.explain())]
    assert copies
    assert max(copies) <= 2  # more memory would be of no use


def test_plans_keep_their_time_limit_and_verify_anywhere(tmp_path):
    tight = TimeLimit(NoiseCost(1.0, 1.0, 1.0), most=3.5)
    plan = quell.plan(**SMALL, time_limit=tight)
    assert plan.mechanism.buffers + plan.mechanism.draws - 1 <= 2
    assert any(m.buffers + m.draws - 1 > 2 for m in plan.alternatives)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert quell.Plan.load(path).run == plan.run
    content = json.loads(path.read_text())
    content["run"]["limits"]["time_limit"]["most"] = 100.0  # then something else would have been recommended
    path.write_text(json.dumps(content))
    assert any(not check.holds for check in quell.verify(path))


def test_measuring_writes_what_plans_read(tmp_path, monkeypatch):
    monkeypatch.setenv("QUELL_CACHE", str(tmp_path))
    with pytest.raises(QuellError, match="run quell bench first"):
        costs.device("measured")
    cost = bench.measure(parameters=20_000, repeats=2)
    costs.keep(cost, "a test")
    assert costs.device("measured") == cost
    costs.measured_file().write_text("{}")
    with pytest.raises(QuellError, match="run quell bench again"):
        costs.device("measured")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: costs.device("abacus"), "no noise costs for the device 'abacus'"),
        (lambda: TimeLimit.of_share(0, 1, 1, "cpu"), "noise_share=0 must lie between 0 and 1"),
        (lambda: TimeLimit.of_share(0.1, 0, 1, "cpu"), "step_seconds=0 must be positive"),
        (lambda: bench.measure(10, "tpu"), "nothing to measure on 'tpu'"),
        (lambda: NoiseCost(1.0, -1.0, 1.0), "noise cost draw=-1"),
        (lambda: Run.from_data(**SMALL, objective="accuracy"), "there is no objective 'accuracy'"),
    ],
)
def test_bad_costs_get_one_clear_sentence(call, message):
    with pytest.raises(QuellError, match=message):
        call()
