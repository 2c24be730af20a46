"""Recorded passes train the same model as passes that run as usual, whatever the loop does with them.

With a GPU these are CUDA graphs, without one a stand-in (`recorded.py`): what is tested then is when a pass is
recorded, when it is replayed, and who may hold what.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from quell import QuellError
from quell.torch.engine import graphs, layers

from .conftest import small_plan, unpriced_poisson_plan
from .recorded import DEVICE, OnTape, start
from .training import examples, network, train, without_noise


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    """How often a forward pass was replayed."""
    made = []
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "_DEVICE", "cpu")
        monkeypatch.setattr(graphs, "Recording", OnTape)
    run = graphs.Recording.run
    monkeypatch.setattr(graphs.Recording, "run", lambda self, *given: (made.append(self), run(self, *given))[1])
    return made


def both(plan, loop=train, make=network, **options):
    """The weights after training as usual, and with recorded passes."""
    found = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model, optimizer, loader = start(plan, make(), cuda_graphs=recorded, **options)
        torch.manual_seed(7)
        loop(model, optimizer, loader)
        found.append([p.detach().cpu() for p in model.parameters()])
    return found


def same(found):
    torch.testing.assert_close(*found, rtol=1e-4 if DEVICE == "cuda" else 0, atol=1e-5 if DEVICE == "cuda" else 1e-7)


def with_dropout():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.parametrize("physical", [None, 3, 4])
@pytest.mark.parametrize("make", [network, with_dropout])
def test_the_same_model_comes_out(replays, physical, make):
    same(both(small_plan(), make=make, physical_batch_size=physical, fixed_shape=True))
    assert len(replays) >= 5


def test_batches_of_random_size_that_are_filled_up(replays):
    plan = without_noise(unpriced_poisson_plan())
    same(both(plan, data=examples(12), fixed_shape=True))
    assert len(replays) >= 5
    assert len(set(map(id, replays))) == 1


def test_the_mean_over_rows_of_an_example(replays):
    same(both(small_plan(), rows_per_example=2, fixed_shape=True))
    assert replays


def test_several_passes_in_a_step_run_as_usual(replays):
    """Their gradients are clipped as one."""

    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                first, second = model(x), model(x.flip(1))
                nn.functional.cross_entropy(first + second, y).backward()
                optimizer.step()

    with pytest.warns(graphs.NotRecordedWarning, match="several of them in a step"):
        same(both(small_plan(), loop))
    assert not replays


def test_a_second_pass_after_recording_is_refused(replays):
    model, optimizer, batches = recorded_run(5)
    optimizer.zero_grad()
    x, y = next(batches)
    losses = [nn.functional.cross_entropy(model(x), y) for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert len(replays) == 1
    with pytest.raises(QuellError, match="clipped as one: pass cuda_graphs=False"):
        optimizer.step()


def test_passes_for_nothing_and_outputs_that_are_kept(replays):
    kept = []

    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                out = model(x)
                if optimizer.run.step > 6:
                    model(x * 2)  # for nothing
                kept.append((out, out.detach().clone()))
                optimizer.zero_grad()
                nn.functional.cross_entropy(out, y).backward()
                optimizer.step()

    same(both(small_plan(), loop))
    assert len(replays) == 5
    for out, before in kept:
        assert torch.equal(out, before)


def recorded_run(steps=6, **options):
    model, optimizer, loader = start(small_plan(), cuda_graphs=True, **options)
    train(model, optimizer, loader, steps)
    return model, optimizer, iter(loader)


def test_a_gradient_from_before_the_last_step_is_refused(replays):
    model, optimizer, batches = recorded_run(5)
    optimizer.zero_grad()
    x, y = next(batches)
    old = model(x).sum()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert replays
    with pytest.raises(QuellError, match="before the last optimizer"):
        old.backward()


def test_a_second_backward_pass_is_refused(replays):
    model, optimizer, batches = recorded_run(5)
    optimizer.zero_grad()
    x, y = next(batches)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    assert replays
    with pytest.raises(QuellError, match="second backward pass"):
        loss.backward()


def test_a_gradient_that_comes_to_an_older_pass_is_refused(replays):
    """Its activations are those of the newer one by now."""
    model, optimizer, batches = recorded_run(5)
    x, y = next(batches)
    old = nn.functional.cross_entropy(model(x), y)
    old.backward(retain_graph=True)
    optimizer.zero_grad()
    model(x * 2)
    assert len(replays) == 2
    with pytest.raises(QuellError, match="second backward pass"):
        old.backward()


class Counting(nn.Module):
    """Counts its passes in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = network()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.layers(x)


def test_buffers_are_written_once_a_pass(replays):
    counted = []

    def loop(model, optimizer, loader):
        before = 0.0
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                out = model(x)
                counted.append(float(model.passes) - before)
                nn.functional.cross_entropy(out, y).backward()
                optimizer.step()
                before = float(model.passes)

    same(both(small_plan(), loop, make=Counting))
    assert counted == [1.0] * 20
    assert replays


class Sparse(nn.Module):
    """Has a buffer that does not lie in one place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = network()
        self.register_buffer("edges", torch.eye(6).to_sparse())

    def forward(self, x):
        return self.layers(torch.sparse.mm(self.edges, x.t()).t())


@pytest.mark.filterwarnings("ignore::quell.torch.engine.graphs.NotRecordedWarning")
def test_a_sparse_buffer_is_no_obstacle():
    same(both(small_plan(), make=Sparse))


def test_gradients_that_were_dropped_do_not_count(replays):
    model, optimizer, batches = recorded_run(5)
    x, y = next(batches)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.run.step == 6
    assert len(replays) >= 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_adds_nothing(replays, bad):
    plan = without_noise(small_plan())
    model, optimizer, loader = start(plan, cuda_graphs=True)
    train(model, optimizer, loader, 5)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    x[2] = bad
    optimizer.zero_grad()
    used = len(replays)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert len(replays) == used + 1
    moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before, strict=True)]).norm().detach()
    assert 0 < float(moved) <= 0.5 * 0.3 * 7 / 8 * (1 + 1e-4)


def test_weights_that_move_are_recorded_anew(replays):
    def loop(model, optimizer, loader):
        step = 0
        for _ in range(2):
            for x, y in loader:
                step += 1
                if step == 5:
                    for p in model.parameters():
                        p.data = p.data.clone()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    same(both(small_plan(), loop))
    assert len(replays) < 6


def test_a_mode_that_changes_is_another_recording(replays):
    def loop(model, optimizer, loader):
        for epoch in range(2):
            model[2].train(epoch == 0)  # the dropout
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    same(both(small_plan(), loop, make=with_dropout))
    assert replays


class Undecided(nn.Module):
    """Asks the device, which cannot be recorded."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        out = self.layer(x)
        return out * 2 if float(out.detach().sum()) > 1e9 else out


def test_what_cannot_be_recorded_runs_as_usual(replays, monkeypatch):
    def made():
        torch.manual_seed(1)
        return Undecided()

    if DEVICE == "cpu":

        def fail(*_):
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(OnTape, "__init__", fail)
    with pytest.warns(graphs.NotRecordedWarning, match="run as usual"):
        same(both(small_plan(), make=made))
    assert not replays


def test_a_recording_that_fails_once_is_tried_again(replays, monkeypatch):
    make, failed = graphs.Recording.__init__, []

    def fail_first(*arguments):
        if not failed:
            failed.append(True)
            raise RuntimeError("operation failed due to a previous error during capture")
        make(*arguments)

    monkeypatch.setattr(graphs.Recording, "__init__", fail_first)
    same(both(small_plan()))
    assert len(replays) == 4


TOLD = {}


class Told(nn.Module):
    """Reads what the loop has told it, where nobody looks for changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = network()

    def forward(self, x):
        return self.layers(x + TOLD["now"])


class Reading(nn.Module):
    """What it makes depends on a variable that is no attribute."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.what = network(), what

    def forward(self, x):
        made, now = self.layers(x), TOLD["now"]
        if self.what == "shape":
            return torch.cat([made, made[:, :1]], 1) if now else made
        if self.what == "masked":
            return torch.cat([made * (1 + now), made.new_full((len(x), 1), -1e9)], 1)
        return made * (1 + now), now


@pytest.mark.parametrize("what", ["shape", "masked", "number"])
def test_what_replays_are_compared_with(replays, what):
    def loop(model, optimizer, loader):
        while optimizer.run.step < 10:
            for x, y in loader:
                TOLD["now"] = float(optimizer.run.step >= 6)  # from the second replay on
                optimizer.zero_grad()
                made = model(x)
                nn.functional.cross_entropy(made[0] if what == "number" else made, y).backward()
                optimizer.step()

    with pytest.warns(graphs.NotRecordedWarning, match="differs from a pass that runs as usual"):
        same(both(small_plan(), loop, make=lambda: Reading(what)))
    assert len(replays) == 2


@pytest.mark.parametrize(("first", "used"), [(0, 2), (7, 4)])
def test_a_model_that_reads_more_than_its_arguments_is_not_replayed(replays, first, used):
    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                TOLD["now"] = x.mean(1, keepdim=True) if optimizer.run.step >= first else 0.0
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    with pytest.warns(graphs.NotRecordedWarning, match="differs from a pass that runs as usual"):
        found = both(small_plan(), loop, make=Told)
    assert len(replays) == used
    if not first:  # later, some replays came before the one that was compared
        same(found)


class Phases(nn.Module):
    """Computes with numbers that the loop sets, and counts its passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.factor, self.passes = network(), 1.0, 0

    def forward(self, x):
        self.passes += 1
        return self.layers(x) * self.factor


def in_phases(of_step, steps=10):
    def loop(model, optimizer, loader):
        while optimizer.run.step < steps:
            for x, y in loader:
                model.factor = of_step(optimizer.run.step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    return loop


def test_an_attribute_that_is_set_drops_recordings(replays):
    same(both(small_plan(), in_phases(lambda step: 1.0 if step < 7 else 2.0), make=Phases))
    assert 2 <= len(replays) < 5


def test_what_the_model_sets_itself_is_not_the_loops(replays):
    """Also not in an evaluation."""

    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                with torch.no_grad():
                    model(x)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    same(both(small_plan(), loop, make=Phases))
    assert len(replays) >= 3
    assert len(set(map(id, replays))) == 1


def test_a_part_that_takes_the_place_of_another_drops_recordings(replays):
    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                if optimizer.run.step == 7:
                    model[1] = nn.ReLU()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    same(both(small_plan(), loop))
    assert len(replays) == 2


@pytest.mark.parametrize(
    ("config", "read", "write"),
    [
        ({"scale": 1.0}, lambda held: held["scale"], lambda held: held.update(scale=2.0)),
        (SimpleNamespace(scale=1.0), lambda held: held.scale, lambda held: setattr(held, "scale", 2.0)),
        ([1.0], lambda held: held[0], lambda held: held.__setitem__(0, 2.0)),
        (
            {"train": [{"scale": 1.0}]},
            lambda held: held["train"][0]["scale"],
            lambda held: held["train"][0].clear() or held["train"][0].update(scale=2.0),
        ),
    ],
    ids=["mapping", "object", "list", "nested"],
)
def test_contents_of_an_attribute_drop_recordings(replays, config, read, write):
    class Configured(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers, self.config = network(), copy.deepcopy(config)

        def forward(self, x):
            return self.layers(x) * read(self.config)

    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                if optimizer.run.step == 7:
                    write(model.config)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    same(both(small_plan(), loop, make=Configured))
    assert [recording.replays for recording in dict.fromkeys(replays)] == [2, 1]


def test_a_setting_that_was_never_compared_is_not_recorded(replays, monkeypatch):
    monkeypatch.setattr(layers, "_MOST_WAYS", 1)
    same(both(small_plan(), in_phases(lambda step: 1.0 if step < 7 else "2"), make=Doubling))
    assert len(replays) == 2


class Doubling(Phases):
    def forward(self, x):
        return self.layers(x) * float(self.factor)


def test_replays_with_other_random_numbers_train_nothing(replays, monkeypatch):
    """The first one is compared too: a step that comes again would draw others."""
    monkeypatch.setattr(graphs, "_agree", lambda *_: False)
    with pytest.warns(graphs.NotRecordedWarning, match="differs"):
        same(both(small_plan(), make=with_dropout))
    assert len(replays) == 1


def test_an_attribute_that_is_set_at_every_step_ends_it(replays):
    with pytest.warns(graphs.NotRecordedWarning, match="factor of the model is set"):
        same(both(small_plan(), in_phases(lambda step: 1.0 + step), make=Phases))
    assert not replays


def test_objects_among_the_arguments_are_not_recorded(replays):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = network()

        def forward(self, batch):
            return self.layers(batch.x)

    class Batch:
        pass

    batch = Batch()

    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                batch.x = x
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), y).backward()
                optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(both(small_plan(), loop, make=Takes))
    assert not replays


def test_parts_under_opacus_batch_memory_manager_add_up(replays):
    """Each part's sums are its own: a recording has one set of buffers."""
    opacus = pytest.importorskip("opacus.utils.batch_memory_manager")

    def loop(model, optimizer, loader):
        for _ in range(2):
            with opacus.BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as parts:
                for x, y in parts:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()

    same(both(without_noise(small_plan()), loop, fixed_shape=False))  # which parts of a batch cannot have
    assert len(replays) >= 4


def test_copies_run_as_usual_and_nothing_is_pickled(replays):
    model, _, _ = recorded_run(5)
    used = len(replays)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 6, device=DEVICE)
    assert torch.equal(twin(x), model(x))
    assert len(replays) == used
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    with pytest.raises(QuellError, match="pickled"):
        pickle.dumps(model)


def test_refusals(monkeypatch):
    monkeypatch.setattr(graphs, "_DEVICE", "elsewhere")
    with pytest.raises(QuellError, match="CUDA GPU"):
        start(small_plan(), cuda_graphs=True)
    with pytest.raises(QuellError, match="clipping='layers'"):
        start(small_plan(), cuda_graphs=True, clipping="microbatch")


class Dictionary(nn.Module):
    """Outputs in a dictionary, one of them without a gradient and one that the loss does not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = network()

    def forward(self, x, scale=1.0):
        out = self.layers(x) * scale
        return {"logits": out, "best": out.argmax(1), "unused": out * 3, "name": "mine"}


def test_outputs_of_any_shape(replays):
    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                made = model(x=x, scale=0.5)
                assert made["name"] == "mine"
                assert torch.equal(made["best"], made["logits"].argmax(1))
                optimizer.zero_grad()
                nn.functional.cross_entropy(made["logits"], y).backward()
                optimizer.step()

    same(both(small_plan(), loop, make=Dictionary))
    assert replays


@pytest.mark.parametrize(
    ("usual", "others"),
    [
        ("", ""),
        ("max_split_size_mb:64", "max_split_size_mb:64,"),
        ("expandable_segments:False,a:[1:2,3:4]", "a:[1:2,3:4],"),
    ],
)
def test_memory_grows_while_a_pass_is_recorded_and_settings_come_back(usual, others, monkeypatch):
    set_to = []
    settings = {"PYTORCH_CUDA_ALLOC_CONF": usual, "expandable_segments": False}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": settings})
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_to.append, raising=False)
    with graphs._growing_segments():
        assert set_to == [f"{others}expandable_segments:True"]
    assert set_to[1:] == [f"{others}expandable_segments:False"]


@pytest.mark.parametrize(("usual", "grow"), [("backend:cudaMallocAsync", False), ("expandable_segments:True", True)])
def test_settings_of_ones_own_are_left_alone(usual, grow, monkeypatch):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": usual, "expandable_segments": grow}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": settings})
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", pytest.fail, raising=False)
    with graphs._growing_segments():
        pass


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_bfloat16_autocast_and_every_kind_of_layer(replays):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.embed, self.norm = nn.Embedding(50, 64), nn.LayerNorm(64)
            self.inner, self.mix = nn.Linear(64, 96), nn.MultiheadAttention(64, 4, batch_first=True)
            self.conv, self.out = nn.Conv1d(96, 64, 3, padding=1), nn.Linear(64, 3)

        def forward(self, x):
            h = self.norm(self.embed(x))
            h = h + self.mix(h, h, h, need_weights=False)[0]
            h = self.conv(torch.relu(self.inner(h)).transpose(1, 2))
            return self.out(h.mean(2))

    maker = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(50, (40, 24), generator=maker), torch.randint(3, (40,), generator=maker))

    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error", graphs.NotRecordedWarning)
        found = both(small_plan(), loop, make=Words, data=data)
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-3)
    assert replays


def test_a_number_that_changes_at_every_step_does_not_fill_the_memory(monkeypatch, replays):
    monkeypatch.setattr(graphs, "_REMEMBERED", 3)

    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x, time):
            return self.layers(x) * time

    model, optimizer, loader = start(small_plan(), Timed(), cuda_graphs=True)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, 1.0 + step), y).backward()
        optimizer.step()
        assert len(model.forward._seen) <= 3
    assert not replays


def test_true_and_one_are_recorded_apart():
    assert len({graphs._described(value) for value in (True, 1, 1.0)}) == 3


def test_a_way_of_calling_the_model_is_compared_before_it_is_recorded(replays):
    """What is recorded shows nothing of its layers any more, so passes without a loss must not lead to it."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x, rolled=False):
            return self.layers(x.roll(1, 0)).roll(-1, 0) if rolled else self.layers(x)

    model, optimizer, loader = start(small_plan(), Two(), cuda_graphs=True)
    for step, (x, y) in enumerate(loader):
        if step >= 3:
            for _ in range(4):
                model(x, True)  # of which no loss is made
            break
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not any(len(recording.args) == 2 for recording in replays if isinstance(recording, OnTape))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x, True), y).backward()
    with pytest.raises(QuellError, match="by autograd"):
        optimizer.step()


class Masked(nn.Module):
    """Attends to all rows of an example, with a mask that it makes for one length at a time, and keeps."""

    def __init__(self, cached):
        super().__init__()
        torch.manual_seed(1)
        self.query, self.layers = nn.Linear(6, 6), network()
        self.mask, self.cached = None, lru_cache(maxsize=1)(mask_for) if cached else None

    def forward(self, x):
        x = x[:, None] * torch.linspace(-1, 1, 3 if self.training else 5, device=x.device)[:, None]
        if self.cached is None and (self.mask is None or len(self.mask) != x.shape[1]):
            self.mask = mask_for(x.shape[1])
        mask = self.mask if self.cached is None else self.cached(x.shape[1])
        return self.layers(((self.query(x) @ x.mT + mask).softmax(-1) @ x).mean(1))


def mask_for(length):
    return torch.full((length, length), -30.0, device=DEVICE).triu(1)


@pytest.mark.parametrize("cached", [False, True])
def test_masks_that_a_model_keeps_stay_what_they_were_recorded_with(replays, cached):
    """An evaluation of another length frees them, and others use their memory."""

    def loop(model, optimizer, loader):
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if optimizer.run.step in (5, 11):
                    model.eval()
                    with torch.no_grad():
                        model(x)
                    model.train()
                    held.append([torch.full((length, length), 1e3, device=DEVICE) for length in (3, 5) * 20])

    held = []
    same(both(small_plan(epochs=3), loop, make=lambda: Masked(cached)))
    assert len(replays) >= 8


def test_what_is_read_and_not_made_is_kept():
    weight, table = torch.ones(3), [torch.ones(3, 3), torch.eye(3)]
    with graphs.ReadMemory() as read:
        made = torch.zeros(3) + weight
        torch.stack([table[0][1:].sum(0) * made, made.view(1, 3)[0]])
        table[0].add_(1)
    outside = {value.untyped_storage().data_ptr() for value in (weight, table[0])}
    assert set(read.kept) == outside
    memory = table[0].untyped_storage().data_ptr()
    del table[0]
    assert all(torch.empty(3, 3).untyped_storage().data_ptr() != memory for _ in range(20))


@pytest.mark.parametrize("again", [False, True])
def test_a_pass_that_keeps_what_it_makes_is_not_replayed(replays, monkeypatch, again):
    """What it has made in a recording's memory would be written over."""
    held = iter([0] * 6 + [0, 8, 8] + [0, 8, 8] * 9 * again)
    monkeypatch.setattr(graphs.Recording, "_held", lambda self: next(held, 0))
    warned = pytest.warns(graphs.NotRecordedWarning, match="keep tensors") if again else nullcontext()
    with warned:
        same(both(small_plan(epochs=6), in_phases(lambda step: 1.0, 30), make=Phases))
    assert len(set(map(id, replays))) == (4 if again else 2)


def test_a_way_of_calling_a_layer_that_begins_while_it_is_recorded(replays, monkeypatch):
    """It was not compared with autograd yet, and a replay would not show it."""
    begun = []
    record = graphs.Recording.__init__
    monkeypatch.setattr(graphs.Recording, "__init__", lambda *given: (begun.append(1), record(*given))[1])

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            h = torch.tanh(self.inside(x))
            return self.head(h.roll(1, 0)[:, None])[:, 0].roll(-1, 0) if begun else self.head(h)

    with pytest.raises(QuellError, match="by autograd"):
        train(*start(small_plan(), Late(), cuda_graphs=True))
    assert not replays
