"""What a step does not do: look at the device more than once, copy gradients, compute some for nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quell.torch import make_private

from .conftest import small_plan
from .training import examples, network, reference_run, train, without_noise


class Operations(TorchDispatchMode):
    """Counts what is dispatched to a device."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count[str(operation.overloadpacket)] += 1
        return operation(*args, **(kwargs or {}))


def private(model, clipping, plan, **options):
    trained = [p for p in model.parameters() if p.requires_grad]
    return make_private(model, torch.optim.SGD(trained, lr=0.5), examples(), plan, 0.3, clipping=clipping, **options)


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_a_step_waits_for_the_device_once(clipping):
    model, optimizer, loader = private(network(), clipping, small_plan(), micro_batch=3)
    batches = iter(loader)
    for counted in (False, True):  # the first step may take a closer look
        x, y = next(batches)
        with Operations() as operations:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if counted:
            waits = {name: n for name, n in operations.count.items() if "_local_scalar" in name or "nonzero" in name}
            assert waits == {"aten._local_scalar_dense": 1}


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
    def forward(self, x):
        return self.second(checkpoint(torch.tanh, self.first(x), use_reentrant=True))


def require_reference(make, clipping):
    """Without noise, a run is that of one backward pass per example."""
    plan, twin = without_noise(small_plan()), make()
    model, optimizer, loader = private(make(), clipping, plan)
    train(model, optimizer, loader)
    reference_run(twin, torch.optim.SGD(twin.parameters(), lr=0.5), examples(), list(optimizer.run.batches), 8.0, 0.3)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6, msg=name)
    return optimizer


def test_flat_adds_up_the_calls_of_a_layer_that_is_used_again():
    require_reference(Again, "flat")


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_flat_copies_no_gradient_of_a_layer_that_is_used_once():
    """Opacus as it is copies each of them into zeros."""
    model, _, loader = private(network(), "flat", small_plan())
    x, y = next(iter(loader))
    counts = []
    for kind in (model, GradSampleModule(network())):
        with Operations() as operations:
            nn.functional.cross_entropy(kind(x), y).backward()
        counts.append(operations.count["aten.zeros"])
    assert counts == [0, 6]


@pytest.mark.parametrize(("make", "passes"), [(network, 1), (Foreign, 2), (Checkpointed, 2)])
def test_ghost_computes_no_gradient_for_nothing(make, passes):
    """Where the graph ends in parameters alone, the pass for the norms leaves the weights' gradients out."""
    plan = small_plan()
    model, optimizer, loader = private(make(), "ghost", plan)
    train(model, optimizer, loader, steps=1)
    weight = next(p for p in model.parameters() if p.dim() == 2)
    computed = []
    weight.register_hook(lambda gradient: computed.append(1))
    train(model, optimizer, loader, steps=3)
    assert len(computed) == 3 * passes
    require_reference(make, "ghost")
