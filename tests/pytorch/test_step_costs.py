"""What a step does not do: look at the device more than once, run layers again, make gradients for nothing."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quell.torch import make_private
from quell.torch.engine import pieces
from quell.watching import Log

from .conftest import small_plan
from .training import examples, network, reference_run, train, without_noise


class Operations(TorchDispatchMode):
    """Counts what is dispatched to a device, and the numbers in the largest result."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = Counter(), 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count[str(operation.overloadpacket)] += 1
        made = operation(*args, **(kwargs or {}))
        sizes = [
            value.untyped_storage().nbytes() for value in pytree.tree_leaves(made) if isinstance(value, torch.Tensor)
        ]
        self.largest = max([self.largest, *sizes])
        return made


def private(model, clipping, plan, **options):
    trained = [p for p in model.parameters() if p.requires_grad]
    return make_private(model, torch.optim.SGD(trained, lr=0.5), examples(), plan, 0.3, clipping=clipping, **options)


def later_step(model, optimizer, loader):
    """What is done in a step; the first three take a closer look."""
    for _, (x, y) in zip(range(4), itertools.chain(loader, loader), strict=False):
        with Operations() as operations:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return operations


@pytest.mark.parametrize(
    ("clipping", "log"), [("layers", None), ("microbatch", None), ("layers", False), ("microbatch", True)]
)
def test_a_step_waits_for_the_device_once(clipping, log, monkeypatch, tmp_path):
    """A CPU, which waits for nothing, also looks whether a unit has weight 0; a GPU takes it that one has.

    Nor does a log wait, with or without norms: not before a row is due, and then for numbers that have long arrived.
    """
    monkeypatch.setattr(pieces, "_weighty", lambda weights, *values: values)
    looks = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: looks.append(1) or plain(self))
    log = None if log is None else Log(tmp_path, every=100, norms=log)
    trio = private(network(), clipping, small_plan(), micro_batch=3, log=log)
    later_step(*trio)
    before = len(looks)
    done = later_step(*trio).count
    waits = sum(n for name, n in done.items() if "_local_scalar" in name or "nonzero" in name)
    assert waits + (len(looks) - before) / 4 == 1  # a GPU reads the norm of the sum a step later


def test_no_examples_whole_gradient_of_a_large_layer_is_made():
    model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))
    done = later_step(*private(model, "layers", small_plan()))
    assert done.largest < 2 * 200 * 200 * 4  # two such gradients in float32; the batch has 8


class Again(nn.Module):
    """A layer that is used twice, in a sum: its gradient, one tensor, is needed elsewhere after both calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.other, self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        other = self.other(x)
        return self.head(other + self.layer(torch.tanh(self.layer(x))))


class Foreign(nn.Module):
    """Something other than a parameter requires a gradient, as with frozen embeddings under gradient checkpoints."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.clone().requires_grad_())))


class Checkpointed(Foreign):
    reentrant = True

    def forward(self, x):
        x = x.clone().requires_grad_()  # as reentrant checkpoints want it
        return self.second(checkpoint(lambda h: torch.tanh(self.first(h)), x, use_reentrant=self.reentrant))


class CheckpointedAnew(Checkpointed):
    reentrant = False


@pytest.mark.parametrize("make", [Again, Foreign, Checkpointed, CheckpointedAnew])
def test_a_run_is_that_of_one_backward_pass_per_example(make):
    plan, twin = without_noise(small_plan()), make()
    model, optimizer, loader = private(make(), "layers", plan)
    train(model, optimizer, loader)
    reference_run(twin, torch.optim.SGD(twin.parameters(), lr=0.5), examples(), list(optimizer.run.batches), 8.0, 0.3)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(("make", "passes"), [(network, 1), (Again, 2), (Foreign, 1), (Checkpointed, 2)])
def test_no_layer_runs_again_and_autograd_makes_no_gradient_of_a_weight(make, passes):
    model, optimizer, loader = private(make(), "layers", small_plan())
    train(model, optimizer, loader, steps=3)  # the first batches are probed
    layer = next(m for name, m in model.named_modules() if name in ("0", "layer", "first"))
    computed, ran = [], []
    layer.weight.register_hook(computed.append)
    layer.register_forward_hook(lambda *_: ran.append(1))
    train(model, optimizer, loader, steps=3)
    assert len(ran) == 3 * passes
    assert not any(gradient is not None for gradient in computed)
