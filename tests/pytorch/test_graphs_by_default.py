"""CUDA graphs by default: only where the GPU waits for Python, and nobody can tell but by the clock."""

from __future__ import annotations

import random
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from quell.errors import QuellError
from quell.noise import claims
from quell.torch import load_checkpoint
from quell.torch.engine import by_default, graphs

from .conftest import small_plan
from .recorded import DEVICE, OnTape, start
from .training import network, train

PLENTY = 1 << 40


class Event:
    def __init__(self, done):
        self.done, self.record = done, lambda: None

    def query(self):
        return self.done


@pytest.fixture
def host(monkeypatch):
    """Whether the GPU waits for it, what memory there is, and the replays."""

    class Host:
        slow, held, free = True, PLENTY, PLENTY
        replays: ClassVar[list] = []
        looks: ClassVar[list] = []  # at the memory, before a pass and after it

    def clipped(self):
        self.waited, self._sent = self.waited + 1 if Host.slow and self._sent else 0, None

    def memory(device):
        Host.looks.append(device)
        return (len(Host.looks) % 2 == 0) * Host.held, Host.free

    monkeypatch.setattr(graphs, "_USUAL_BY_DEFAULT", 2)
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "_DEVICE", "cpu")
        monkeypatch.setattr(graphs, "Recording", OnTape)
    monkeypatch.setattr(by_default.Pace, "sent", lambda self: setattr(self, "_sent", True))
    monkeypatch.setattr(by_default.Pace, "clipped", clipped)
    monkeypatch.setattr(by_default, "memory", memory)
    run = graphs.Recording.run
    monkeypatch.setattr(graphs.Recording, "run", lambda self, *given: (Host.replays.append(self), run(self, *given))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphs.NotRecordedWarning)
        yield Host


def trained(model=None, loop=train, plan=None, **options):
    torch.manual_seed(0)
    model, optimizer, loader = start(plan or small_plan(), network() if model is None else model, **options)
    loop(model, optimizer, loader)
    return [p.detach().cpu() for p in model.parameters()]


def test_by_default_where_the_gpu_waits(host):
    by_default = trained()
    assert len(host.replays) >= 3
    used = len(host.replays)
    torch.testing.assert_close(by_default, trained(cuda_graphs=False))
    assert len(host.replays) == used


def test_not_where_the_host_is_faster(host):
    host.slow = False
    trained()
    assert not host.replays


def test_the_optimizer_says_whether_passes_are_recorded(host):
    def told(model=None, slow=True, **options):
        host.slow = slow
        model, optimizer, loader = start(small_plan(), network() if model is None else model, **options)
        first = optimizer.cuda_graphs
        train(model, optimizer, loader)
        return first, optimizer.cuda_graphs

    waits = "not recorded: the GPU has not waited for Python"
    assert told() == (waits, "recorded, for 1 shape of batches")
    assert told(slow=False) == (waits, waits)
    assert told(Doing(keep))[1].startswith("not recorded: seen of the model is set to something else")
    assert told(Doing(lambda *_: random.random()))[1].startswith("not recorded: Python does more in a pass")
    assert told(cuda_graphs=True)[0] == "not recorded yet"
    assert told(cuda_graphs=False) == ("off", "off")


def test_the_gpu_must_wait_several_times_in_a_row(host):
    model, optimizer, loader = start(small_plan(), network())
    for step, (x, y) in enumerate(loader):
        host.slow = step % 3 > 0
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not host.replays


class Doing(nn.Module):
    """Does something beside its work."""

    def __init__(self, what, outputs=lambda made: made):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.what, self.outputs, self.seen, self.log = network(), what, outputs, None, []

    def forward(self, x):
        self.what(self, x)
        return self.outputs(self.layers(x))


def keep(model, x):
    model.seen = x


@pytest.mark.parametrize(
    "what",
    [
        keep,
        lambda model, x: model.log.append(1),
        lambda *_: random.random(),
        lambda *_: np.random.rand(),
        lambda *_: torch.rand(1),
    ],
    ids=["keeps", "appends", "python", "numpy", "torch"],
)
def test_a_model_of_which_python_does_more(host, what):
    trained(Doing(what))
    assert not host.replays
    trained(Doing(what), cuda_graphs=True)
    assert host.replays


class Holder:
    def __init__(self, made):
        self.made = made


@pytest.mark.parametrize(
    ("outputs", "recorded"),
    [
        (lambda made: (made, None), True),
        (lambda made: (made, made.detach()), True),
        (lambda made: (made, Holder(made)), False),
        (lambda made: (made, 1.0), False),
        (lambda made: (made, made * 2), False),  # which the loss does not use
    ],
)
def test_outputs_of_other_kinds(host, outputs, recorded):
    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x)[0], y).backward()
                optimizer.step()

    trained(Doing(lambda *_: None, outputs), loop)
    assert bool(host.replays) == recorded


class Doubled(torch.autograd.Function):
    """A gradient that Python decides."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Backwards(nn.Module):
    """Does something in its backward pass, or to its inputs."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.how = network(), how

    def forward(self, x):
        made = self.layers(x.mul_(1.0) if self.how == "inputs" else x)
        if self.how == "hook" and made.requires_grad:
            made.register_hook(lambda gradient: 2 * gradient)
        return Doubled.apply(made) if self.how == "function" else made


@pytest.mark.parametrize("how", ["function", "hook", "inputs"])
def test_backward_passes_that_run_python_and_inputs_that_change(host, how):
    trained(Backwards(how))
    assert not host.replays


@pytest.mark.parametrize(("held", "free"), [(2**10, PLENTY), (PLENTY, PLENTY - 1)])
def test_only_where_there_is_memory(host, monkeypatch, held, free):
    """Outputs and sums would be a large part of what a pass holds; or less than a pass would stay free."""
    monkeypatch.setattr(by_default, "_LITTLE", 0)
    host.held, host.free = held, free
    trained()
    assert not host.replays


def test_hooks_inside_the_model_are_called_in_every_pass(host):
    called, passes = [], []
    model, optimizer, loader = start(small_plan(epochs=3), network())
    for _ in range(3):
        for x, y in loader:
            if optimizer.run.step == 10:
                handle = model[0].register_forward_hook(lambda *_: called.append(True))
            if len(called) == 2:
                handle.remove()
            before = len(host.replays)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            passes.append(len(host.replays) > before)
    assert called == [True, True]
    assert passes[9:13] == [True, False, False, True]


@pytest.mark.parametrize("of_pass", [16, 5])
def test_another_pass_in_some_steps(host, monkeypatch, of_pass):
    """Some passes are waited for, to see whether a step sometimes has more of them. Later the error says what to do."""
    monkeypatch.setattr(graphs, "_USUAL_BY_DEFAULT", of_pass - 1)

    def loop(model, optimizer, loader):
        for _ in range(8):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                if optimizer.run.step % 16 == 15:
                    loss = loss + nn.functional.cross_entropy(model(x * 2), y)
                loss.backward()
                optimizer.step()

    plan = small_plan(epochs=8)
    if of_pass == 16:
        trained(loop=loop, plan=plan)
        assert not host.replays
    else:
        with pytest.raises(QuellError, match="pass cuda_graphs=False"):
            trained(loop=loop, plan=plan)


def test_a_step_that_was_refused_for_its_second_pass_comes_again(host):
    model, optimizer, loader = start(small_plan(epochs=4), network())
    train(model, optimizer, loader, 12)
    assert host.replays

    def twice():
        x, y = next(iter(loader))
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + nn.functional.cross_entropy(model(2 * x), y)).backward()
        optimizer.step()

    with pytest.raises(QuellError, match="pass cuda_graphs=False"):
        twice()
    twice()
    assert optimizer.run.step == 13


@pytest.mark.parametrize("first", [0, 12])
def test_parts_of_the_model_beside_it(host, first):
    """Nothing is recorded then. If they come later, the error says what to do, and the batch can come again."""

    def loop(model, optimizer, loader):
        refused = []
        while optimizer.run.step < 20:
            for x, y in loader:
                optimizer.zero_grad()
                made = model(x)
                if optimizer.run.step >= max(first, 3):
                    made = made + 0 * model[0](x)[:, :3]
                nn.functional.cross_entropy(made, y).backward()
                try:
                    optimizer.step()
                except QuellError as problem:
                    refused.append(str(problem))
                    break
        assert len(refused) == (first > 0)
        assert all("pass cuda_graphs=False" in each for each in refused)

    trained(loop=loop, plan=small_plan(epochs=4))
    assert bool(host.replays) == (first > 0)


def test_evaluations_with_gradients_are_no_passes_of_the_loop(host):
    def loop(model, optimizer, loader):
        for _ in range(3):
            for x, y in loader:
                model.eval()
                model(x)
                model.train()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    trained(loop=loop, plan=small_plan(epochs=3))
    assert len(host.replays) >= 5


def test_backward_inside_of_autocast(host):
    def loop(model, optimizer, loader):
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast(DEVICE, torch.bfloat16):
                    nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    trained(loop=loop, plan=small_plan(epochs=3))
    assert not host.replays


class Squeezing(nn.Module):
    """Mixes rows of short inputs, in a layer that gets fewer dimensions then."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inside, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.inside(x))
        if x.shape[1] == 1:
            return self.head(h[:, 0].roll(1, 0)).roll(-1, 0)
        return self.head(h).mean(1)


@pytest.mark.parametrize("asked", [None, True])
def test_a_layer_is_compared_before_it_is_recorded(host, asked):
    """Passes without gradients show nothing, so they must not lead to a recording."""
    model, optimizer, loader = start(small_plan(epochs=6), Squeezing(), cuda_graphs=asked)

    def step(x, y):
        number = optimizer.run.step
        optimizer.zero_grad()
        views = x[:, None].expand(-1, 1 if number >= 8 else 2, -1)
        loss = nn.functional.cross_entropy(model(views), y)
        (loss * float(number < 8 or number >= 25)).backward()
        optimizer.step()

    for _ in range(5):
        for x, y in loader:
            step(x, y)
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match="by autograd"):
        step(x, y)


def test_another_trial_after_an_attribute_was_set(host):
    """Then the model may do what it did not do in the first."""

    def draw(model, x):
        return random.random() if model.seen else None

    def loop(model, optimizer, loader):
        for _ in range(4):
            for x, y in loader:
                model.seen = True if optimizer.run.step > 10 else None
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    trained(Doing(draw), loop, small_plan(epochs=4))
    assert {replay.replays for replay in host.replays} == {len(host.replays)}
    assert 2 <= len(host.replays) <= 4


def test_what_an_evaluation_lets_the_model_set_drops_recordings(host):
    """Its passes were seen to set nothing, so this is as if the loop had set it."""

    def note_length(model, x):
        if model.seen != len(x):
            model.seen = len(x)

    def loop(model, optimizer, loader):
        for _ in range(5):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if optimizer.run.step == 12:
                    with torch.no_grad():
                        model(x[:3])

    trained(Doing(note_length), loop, small_plan(epochs=5))
    assert 0 < host.replays.count(host.replays[0]) < 8


class Times(nn.Module):
    """Its recordings hold for one number each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = network()

    def forward(self, x, times):
        return self.layers(x) * times


def test_what_the_loop_has_left_behind_does_not_stay_recorded(host, monkeypatch):
    monkeypatch.setattr(graphs, "_UNUSED", 3)
    held = []

    def loop(model, optimizer, loader):
        for _ in range(8):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x, 1 + optimizer.run.step // 14), y).backward()
                optimizer.step()
                held.append(len(model.forward._recordings))

    trained(Times(), loop, small_plan(epochs=8))
    assert held[13] == 1
    assert len(set(map(id, host.replays))) == 3
    assert max(held) == 1


def test_hooks_everywhere(host):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        trained()
    finally:
        handle.remove()
    assert not host.replays


def test_a_frozen_batch_norm_has_a_hook_of_quells_own(host):
    norm = nn.BatchNorm1d(8).requires_grad_(False).eval()
    trained(nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)))
    assert host.replays


def test_several_passes_in_a_step_say_nothing(host):
    def loop(model, optimizer, loader):
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x) + model(x * 2), y).backward()
                optimizer.step()

    trained(loop=loop)
    assert not host.replays


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
def test_compiled_models_run_as_compiled(host):
    trained(torch.compile(network(), backend="eager"))

    def loop(model, optimizer, loader):
        train(torch.compile(model, backend="eager"), optimizer, loader)

    def part(model, optimizer, loader):
        model[0].compile(backend="eager")
        train(model, optimizer, loader)

    trained(loop=loop)
    trained(loop=part)
    assert not host.replays


def test_what_cannot_be_recorded_says_nothing(host, monkeypatch):
    def fail(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.Recording, "__init__", fail)
    trained()
    assert not host.replays


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.norm = nn.Conv2d(1, 8, 2), nn.Conv2d(8, 8, 2, padding=1), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = torch.relu(self.first(x.view(-1, 1, 2, 3)))
        return self.head(torch.relu(self.norm(self.second(h))).mean((2, 3)))


@pytest.mark.parametrize("autocast", [False, True] if DEVICE == "cuda" else [False])  # CPUs round those otherwise
def test_a_step_that_comes_again_is_the_same_bit_for_bit(host, tmp_path, autocast):
    """It was recorded then and is not now: the ledger would refuse another sum."""
    torch.backends.cudnn.deterministic = True

    def run(steps):
        claims._claims.clear()
        model, optimizer, loader = start(small_plan(), Images(), key=tmp_path / "run.key")
        step = load_checkpoint(tmp_path / "checkpoint.pt", model, optimizer, loader)
        while step < steps:
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                    loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                step += 1
        optimizer.close()
        return [p.detach().clone() for p in model.parameters()]

    try:
        first = run(10)
        assert len(host.replays) >= 2
        host.replays.clear()
        host.slow = False
        again = run(10)
    finally:
        torch.backends.cudnn.deterministic = False
    assert not host.replays
    assert all(map(torch.equal, first, again))


def test_the_gpu_waits_if_it_is_done_when_the_clipping_is_sent(monkeypatch):
    pace = by_default.Pace()
    for done, waited, slow in [
        (True, 1, False),
        (True, 2, False),
        (True, 3, True),
        (False, 0, False),
        (True, 1, False),
    ]:
        monkeypatch.setattr(torch.cuda, "Event", lambda done=done: Event(done))
        pace.sent()
        pace.clipped()
        assert (pace.waited, pace.gpu_waits) == (waited, slow)
    pace.clipped()  # of a pass that took Python longer than others
    assert pace.waited == 0


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("size", [8, 8192])
def test_a_gpu_that_waits_and_one_that_does_not(size):
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(6)), nn.Linear(size, 3)).cuda()
    data = torch.utils.data.TensorDataset(torch.randn(40, 512, size), torch.randint(3, (40,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []

    def per_example(made, y):
        return nn.functional.cross_entropy(made.mean(1), y)

    model, optimizer, loader = start(small_plan(), model, data)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            per_example(model(x), y).backward()
            optimizer.step()
            found.append(optimizer._engine.pace.waited)
    assert (max(found[3:]) >= 3) == (size == 8)
