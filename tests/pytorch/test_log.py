"""`make_private(..., log=...)`: what is logged, what it costs, and what it never tells."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from quell.adapters.so_far import expected_norms
from quell.errors import QuellError
from quell.noise import Key, claims
from quell.planning import Plan, Prices
from quell.run import Run
from quell.torch import attach, load_checkpoint, make_private, save_checkpoint
from quell.torch.transfer import Awaited
from quell.watching import Log
from quell.watching.log import COLUMNS, NORMS, TIMES, RunLog

from .conftest import small_plan, unpriced_poisson_plan
from .training import clipped_gradient, examples, logged_rows, network, seeded, train, without_noise

BOUND = 0.3


def private(log, plan=None, clipping="layers", model=None, **options):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return make_private(
        model, optimizer, examples(), plan or small_plan(), BOUND, clipping=clipping, log=log, **options
    )


def test_nothing_that_depends_on_single_examples_is_logged_unless_asked_for(tmp_path):
    trio = private(tmp_path / "run")
    train(*trio)
    (row,) = logged_rows(tmp_path / "run")
    assert set(row) == {*COLUMNS, *TIMES}
    assert not trio[1]._engine._norms
    text = (tmp_path / "run" / "run.json").read_text() + (tmp_path / "run" / "log.csv").read_text()
    assert "clipped" not in text
    assert "median" not in text
    assert set(NORMS) & set(Log("x", norms=True).columns) == set(NORMS)
    assert all("not_private" in name and "NOT covered" in meaning for name, meaning in NORMS.items())
    assert set(Log("x", times=False).columns) == set(COLUMNS)


def test_rows_count_steps_and_say_what_was_released(tmp_path):
    model, optimizer, loader = private(Log(tmp_path, every=4))
    norms = []
    optimizer.step_hook = lambda opt: norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in opt.params)))
    train(model, optimizer, loader)
    rows = logged_rows(tmp_path)
    assert [(row["step"], row["steps_left"]) for row in rows] == [("4", "6"), ("8", "2"), ("10", "0")]
    for row, first, stop in zip(rows, (0, 4, 8), (4, 8, 10), strict=True):
        mean = math.sqrt(np.mean(np.square(norms[first:stop])))
        assert float(row["gradient_norm"]) == pytest.approx(mean, rel=1e-5)
        assert float(row["step_seconds"]) > 0
        assert float(row["noise_seconds"]) > 0


MECHANISMS = {
    "identity": {},
    "bisr": {"bands": 3},
    "bsr": {"bands": 3},
    "blt": {"buffers": 2},
    "tree": {},
    "band": {"bands": 4},
    "lambda_cgd": {"lambda": 0.9, "column_normalise": True},
    "bisr ": {"bands": 3, "column_normalise": True},
    "bsr ": {"bands": 3, "column_normalise": True},
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_expected_noise_is_that_of_the_rows_of_the_inverse(name):
    prices = Prices(Run.from_data(examples=90, batch_size=9, epochs=2, epsilon=8.0, delta=1e-4, sampling="cyclic"))
    mechanism = prices.price(name.strip(), **MECHANISMS[name])
    inverse = np.linalg.inv(mechanism.strategy.matrix())
    dumb = 0.7 * mechanism.noise_multiplier * math.sqrt(50) * np.sqrt(np.sum(inverse**2, axis=1))
    np.testing.assert_allclose(expected_norms(mechanism, 0.7, 50), dumb, rtol=1e-9)


def test_pure_noise_hides_the_gradient_and_no_noise_shows_it(tmp_path):
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 3))
    trio = private(Log(tmp_path / "noise", every=2), model=wide, key=seeded(3))
    train(*trio, criterion=lambda out, y: 0.0 * out.sum())
    for row in logged_rows(tmp_path / "noise"):
        assert float(row["gradient_norm"]) == pytest.approx(float(row["noise_norm"]), rel=0.05)
        assert row["noise_to_signal"] == ""
    trio = private(Log(tmp_path / "signal", every=2), without_noise(small_plan()))
    train(*trio)
    assert all(float(row["noise_to_signal"]) < 1e-20 for row in logged_rows(tmp_path / "signal"))


def test_the_estimate_finds_the_gradient(tmp_path):
    """A loss whose gradients do not depend on the weights, so that they are known for every step."""
    model, plan, data = nn.Linear(6, 3000), small_plan(), examples()
    claim = dataclasses.replace(plan.mechanism.guarantee, noise_multiplier=0.1)
    plan = Plan(plan.run, (dataclasses.replace(plan.mechanism, claim=claim),), 0)

    def criterion(out, y):
        return 100.0 * out.mean()

    model, optimizer, loader = private(Log(tmp_path, every=5), plan, model=model, key=seeded(4))
    batches = [[tensor[torch.as_tensor(indices)] for tensor in data.tensors] for indices in optimizer.run.batches]
    train(model, optimizer, loader, criterion=criterion)
    twin = nn.Linear(6, 3000)
    for row, first in zip(logged_rows(tmp_path), (0, 5), strict=True):
        sums = [clipped_gradient(twin, criterion, batch, BOUND) for batch in batches[first : first + 5]]
        true = math.sqrt(np.mean([sum(float(g.square().sum()) for g in each.values()) for each in sums])) / 8
        assert float(row["noise_to_signal"]) == pytest.approx(float(row["noise_norm"]) / true, rel=0.2)


def test_epsilon_is_an_upper_bound_and_says_of_what(tmp_path):
    plan = small_plan(epochs=6)
    model, optimizer, loader = private(Log(tmp_path, every=1), plan)
    exact = []
    optimizer.step_hook = lambda opt: exact.append(opt.privacy_report().epsilon_so_far if opt.run.step > 14 else None)
    train(model, optimizer, loader, steps=20)
    for row, epsilon in list(zip(logged_rows(tmp_path), exact, strict=True))[14:]:
        assert epsilon * (1 - 1e-6) <= float(row["epsilon_at_most"]) <= plan.run.epsilon
        same = float(row["epsilon_at_most"]) == pytest.approx(epsilon, rel=1e-6)
        assert same == (row["epsilon_is"] == "certified for these steps") or "upper bound" in row["epsilon_is"]


def test_epsilon_of_random_batches_is_that_of_the_whole_run(tmp_path):
    plan, model = unpriced_poisson_plan(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(*make_private(model, optimizer, examples(12), plan, log=Log(tmp_path, every=8)))
    rows = logged_rows(tmp_path)
    assert {row["epsilon_at_most"] for row in rows} == {"8"}
    assert [row["epsilon_is"] for row in rows] == ["the whole run's, an upper bound"] * 2 + ["the whole run's"]


@pytest.mark.parametrize(("clipping", "part"), [("layers", 3), ("microbatch", None)])
def test_norms_that_were_asked_for_are_those_of_the_examples(clipping, part, tmp_path):
    """Against one backward pass per example; the plan's first batches, before anything was trained."""
    bound, model = 3.0, network()
    reference = []
    dataset = examples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    log = Log(tmp_path, every=2, norms=True)
    model, optimizer, loader = make_private(
        model, optimizer, dataset, small_plan(), bound, clipping=clipping, physical_batch_size=part, log=log
    )
    for indices in list(optimizer.run.batches)[:2]:
        for index in indices:
            one = [tensor[int(index)][None] for tensor in dataset.tensors]
            sums = clipped_gradient(network(), nn.functional.cross_entropy, one, 1e9)
            reference.append(math.sqrt(sum(float(g.square().sum()) for g in sums.values())))
    parts = iter(loader)
    while optimizer.run.step < 2:
        x, y = next(parts)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    row = logged_rows(tmp_path)[0]
    assert float(row["median_norm_not_private"]) == pytest.approx(np.median(reference), rel=1e-4)
    assert float(row["clipped_share_not_private"]) == pytest.approx(np.mean(np.array(reference) > bound))
    assert 0 < float(row["clipped_share_not_private"]) < 1


def test_norms_of_a_dropped_part_are_dropped(tmp_path):
    model, optimizer, loader = private(Log(tmp_path, norms=True), physical_batch_size=3)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert len(optimizer.run.unfinished.norms) == 1
    optimizer.run.restart_step()
    assert not optimizer.run.unfinished.norms
    assert not optimizer._engine._norms


def test_a_loop_that_clips_its_own_has_a_log_without_norms(tmp_path, plan):
    params = {"w": nn.Parameter(torch.zeros(4))}
    given = torch.optim.SGD(params.values(), lr=0.1), params, examples(), plan
    with pytest.raises(QuellError, match="clips its own"):
        attach(*given, log=Log(tmp_path / "norms", norms=True))
    optimizer, loader = attach(*given, log=Log(tmp_path / "run", every=5))
    for x, _ in loader:
        optimizer.zero_grad()
        optimizer.take({"w": torch.zeros(4)}, examples=len(x))
        optimizer.step()
    assert len(logged_rows(tmp_path / "run")) == 1


def resumable(folder, name, every=2):
    """A run in `folder`, from its last checkpoint."""
    claims._claims.clear()  # as in a new process
    trio = private(Log(folder / name, every=every), key=folder / "key")
    load_checkpoint(folder / "checkpoint", *trio)
    return trio


def untimed(folder):
    """The rows without times, which are never the same."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in logged_rows(folder)]


def test_a_resumed_run_goes_on_with_its_log_without_repeating_a_step(tmp_path):
    model, optimizer, loader = resumable(tmp_path, "log")
    train(model, optimizer, loader, steps=3)
    save_checkpoint(tmp_path / "checkpoint", model, optimizer, loader)
    train(model, optimizer, loader, steps=4)  # to step 7: rows of steps 4 and 6 come again
    optimizer.close()
    path = tmp_path / "log" / "log.csv"
    before = path.read_text()
    path.write_text(before + '8,2,"torn')
    model, optimizer, loader = resumable(tmp_path, "log")
    assert optimizer.run.step == 3
    train(model, optimizer, loader)
    optimizer.close()
    assert path.read_text().startswith(before)
    assert Counter(row["step"] for row in logged_rows(tmp_path / "log")) == Counter(["2", "4", "6", "8", "10"])
    (tmp_path / "straight").mkdir()
    claims._claims.clear()
    straight = private(
        Log(tmp_path / "straight" / "log", every=2), key=Key.load(tmp_path / "key"), ledger=tmp_path / "l"
    )
    train(*straight)
    assert untimed(tmp_path / "log") == untimed(tmp_path / "straight" / "log")


def test_a_folder_is_for_one_run(tmp_path):
    trio = private(tmp_path / "run", key=seeded(1))
    train(*trio)
    with pytest.raises(QuellError, match="another run"):
        private(tmp_path / "run")
    with pytest.raises(QuellError, match="other columns"):
        private(Log(tmp_path / "run", norms=True), key=seeded(1))
    again = private(tmp_path / "run", key=seeded(1))
    with pytest.raises(QuellError, match="nothing says that the same steps come again"):
        train(*again)
    assert again[1].run.step == 0
    with pytest.raises(QuellError, match="pass the path of a folder"):
        private(3)
    for _ in range(2):  # a run that never came to its first row leaves a folder that is free
        private(tmp_path / "unused", key=seeded(5)), private(Log(tmp_path / "unused", norms=True))


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    trio = private(Log(tmp_path, every=2))
    monkeypatch.setattr("quell.watching.log.os.write", lambda file, text: 1)
    with pytest.warns(UserWarning, match="ends here: no space left"):
        train(*trio)
    assert trio[1].run.step == 10


class Board:
    """What TensorBoard and Weights & Biases offer, as far as it is used."""

    def __init__(self, fails=False):
        self.fails, self.rows, self.options, self.config, self.metrics = fails, [], [], {}, []
        self.run = None

    def Writer(self, folder):  # noqa: N802 - TensorBoard's name
        self.options.append(folder)
        return self

    def add_scalar(self, tag, data, step, *, description):
        if self.fails:
            raise RuntimeError("the board is gone")
        self.rows.append((tag, data, step, description))

    def init(self, **options):
        self.options.append(options)
        return types.SimpleNamespace(
            config=self.config,
            define_metric=lambda *a, **k: self.metrics.append((a, k)),
            log=self.rows.append,
            finish=lambda: self.options.append("finished"),
        )

    def flush(self):
        pass

    close = flush


def test_boards_get_the_rows_of_the_file(tmp_path, monkeypatch):
    board, bees = Board(), Board()
    bees.config = types.SimpleNamespace(update=lambda values, allow_val_change: bees.options.append(values))
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", board)
    monkeypatch.setitem(sys.modules, "wandb", bees)
    trio = private(Log(tmp_path, every=5, tensorboard=True, wandb="mine"), key=seeded(2))
    train(*trio)
    trio[1].close()
    rows = logged_rows(tmp_path)
    steps = {(step, data) for tag, data, step, _ in board.rows if tag == "quell/epsilon_at_most"}
    assert steps == {(int(row["step"]), float(row["epsilon_at_most"])) for row in rows}
    assert board.options == [str(tmp_path)]
    first = bees.options[0]
    assert (first["project"], first["resume"]) == ("mine", "allow")
    assert first["id"].endswith(trio[1].run.noise.key.id)
    assert [row["quell/step"] for row in bees.rows] == [5, 10]
    assert bees.options[-1] == "finished"
    told = {tag for tag, *_ in board.rows} | {tag for row in bees.rows for tag in row}
    assert not any("norm_not" in tag or "clipped" in tag for tag in told)


def test_a_board_that_fails_is_left_and_a_missing_one_refused(tmp_path, monkeypatch):
    with pytest.raises(QuellError, match=r"quell\[wandb\]"):
        private(Log(tmp_path / "none", wandb="mine"))
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", Board(fails=True))
    trio = private(Log(tmp_path / "run", every=5, tensorboard=True))
    with pytest.warns(UserWarning, match="no more rows go to TensorBoard: the board is gone"):
        train(*trio)
    assert [row["step"] for row in logged_rows(tmp_path / "run")] == ["5", "10"]


def test_a_writer_never_takes_a_step_twice(tmp_path):
    """Also where a crash left a half line, or the header alone."""
    about = {"key": "k", "steps": 9, "delta": 0.1, "epsilon_at_the_end": 1.0}
    log = Log(tmp_path, times=False)
    for content in (None, ",".join(log.columns)[:20], None):
        if content is not None:
            (tmp_path / "log.csv").write_text(content)
        writer = RunLog(log, about)
        for step in (1, 2, 2, 1, 3):
            writer.write({"step": step, "steps_left": 9 - step})
        writer.close()
        assert [row["step"] for row in logged_rows(tmp_path)] == ["1", "2", "3"]


class Slow(Awaited):
    """Numbers that arrive when they have been asked after twice, as from a device that is behind."""

    asked = 0

    @property
    def arrived(self):
        self.asked += 1
        return self.asked > 2


@pytest.mark.parametrize("every", [1, 2, 4])
def test_rows_wait_for_a_device_that_is_behind_and_none_is_lost(every, tmp_path, monkeypatch):
    monkeypatch.setattr("quell.torch.watch.Awaited", Slow)
    model, optimizer, loader = private(Log(tmp_path, every=every))
    behind = []
    path = tmp_path / "log.csv"
    optimizer.step_hook = lambda opt: behind.append(opt.run.step - len(path.read_text().splitlines()[1:]) * every)
    train(model, optimizer, loader)
    assert [row["step"] for row in logged_rows(tmp_path)] == [*map(str, range(every, 10, every)), "10"]
    assert behind[every - 1] == every  # the row that was due is not written yet, and nobody has waited


def test_norms_of_groups_that_are_clipped_apart(tmp_path):
    """A mapping of clip norms: a gradient counts as clipped where one of its groups was."""
    bounds = {"0": 1000.0, "": 0.5}
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    log = Log(tmp_path, every=1, norms=True)
    model, optimizer, loader = make_private(model, optimizer, examples(), small_plan(), bounds, log=log)
    train(model, optimizer, loader, steps=1)
    data = examples()
    one, head = [], []
    for index in next(iter(optimizer.run.batches)):
        example = [tensor[int(index)][None] for tensor in data.tensors]
        sums = clipped_gradient(network(), nn.functional.cross_entropy, example, 1e9)
        one.append(math.sqrt(sum(float(g.square().sum()) for g in sums.values())))
        head.append(math.sqrt(sum(float(g.square().sum()) for n, g in sums.items() if not n.startswith("0."))))
    (row,) = logged_rows(tmp_path)
    assert float(row["median_norm_not_private"]) == pytest.approx(np.median(one), rel=1e-4)
    assert float(row["clipped_share_not_private"]) == pytest.approx(np.mean(np.array(head) > 0.5))


def test_norms_that_are_not_finite_are_logged_as_infinite(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    log = Log(tmp_path, every=1, norms=True)
    model, optimizer, loader = make_private(model, optimizer, examples(), small_plan(), 1.0, log=log)
    x, y = next(iter(loader))
    (nn.functional.cross_entropy(model(x), y) * 1e37).backward()
    optimizer.step()
    optimizer.close()
    (row,) = logged_rows(tmp_path)
    assert row["median_norm_not_private"] == "inf"
