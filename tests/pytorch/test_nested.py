"""Batches may be mappings, sequences and dataclasses of tensors: all that looks into them finds the same tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from quell.errors import QuellError
from quell.torch import make_private
from quell.torch.nested import leaves, mapped

from .conftest import small_plan, unpriced_poisson_plan
from .training import examples, network, seeded, without_noise

Pair = namedtuple("Pair", ("x", "y"))


@dataclass(frozen=True)
class Example:
    x: Tensor
    y: Tensor


def defaulted(pairs):
    return defaultdict(list, pairs)


KINDS = {
    "dict": (dict, lambda b: b["x"]),
    "BatchEncoding": (lambda pairs: BatchEncoding(dict(pairs)), lambda b: b.x),
    "UserDict": (UserDict, lambda b: b["x"]),
    "OrderedDict": (OrderedDict, lambda b: b["x"]),
    "defaultdict": (defaulted, lambda b: b["x"]),
    "namedtuple": (lambda pairs: Pair(**dict(pairs)), lambda b: b.x),
    "list": (lambda pairs: [value for _, value in pairs], lambda b: b[0]),
    "tuple": (lambda pairs: tuple(value for _, value in pairs), lambda b: b[0]),
    "dataclass": (lambda pairs: Example(**dict(pairs)), lambda b: b.x),
    "nested": (lambda pairs: {"held": [Example(**dict(pairs))]}, lambda b: b["held"][0].x),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Structured:
    """A collate function that makes batches of one kind."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, rows):
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return KINDS[self.kind][0]([("x", x), ("y", y)])


@every_kind
def test_what_is_found_is_what_is_changed(kind):
    make, x_of = KINDS[kind]
    batch = make([("x", torch.ones(2)), ("y", torch.zeros(3))])
    assert [len(value) for value in leaves(batch)] == [2, 3]
    doubled = mapped(lambda value: 2 * value, batch)
    assert type(doubled) is type(batch)
    assert x_of(doubled).tolist() == [2.0, 2.0]
    assert x_of(batch).tolist() == [1.0, 1.0]


def test_other_values():
    batch = {"name": "train", "texts": ["a", "b"], "none": None, "read": MappingProxyType({"x": torch.ones(1)})}
    assert list(leaves(batch)) == ["train", ["a", "b"], None, torch.ones(1)]
    assert mapped(lambda value: value, batch) == batch
    found = torch.ones(2, 3).max(1)
    assert type(mapped(lambda value: value, found)) is type(found)


@every_kind
def test_batches_of_every_kind_are_filled_and_emptied(kind):
    plan = unpriced_poisson_plan()
    rows = set()
    for fixed in (True, False):
        data = DataLoader(examples(12), collate_fn=Structured(kind))
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        options = {"fixed_shape": fixed, "clipping": "layers" if fixed else "microbatch", "loss_reduction": "sum"}
        model, optimizer, loader = make_private(model, optimizer, data, plan, 0.3, key=seeded(3), **options)
        made = type(KINDS[kind][0]([("x", torch.ones(1)), ("y", torch.ones(1))]))
        for batch in loader:
            assert type(batch) is made
            real, x = optimizer.run.unfinished.received.examples, KINDS[kind][1](batch)
            assert bool(x[:real].any()) == bool(real)
            assert not bool(x[real:].any())
            rows.add((fixed, len(x)))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert (False, 0) in rows
    assert len([size for fixed, size in rows if fixed]) == 1


class Centred(nn.Module):
    """Takes the whole batch, and mixes its examples."""

    def __init__(self, kind, mixes):
        super().__init__()
        self.layer, self.x_of, self.mixes = nn.Linear(6, 3), KINDS[kind][1], mixes

    def forward(self, batch):
        x = self.x_of(batch)
        return self.layer(x - self.mixes * x.mean(0))


@every_kind
@pytest.mark.parametrize("mixes", [True, False])
def test_models_that_take_a_whole_batch_are_probed(kind, mixes):
    """What the probe replaces must reach the model, whatever it lies in."""
    model = Centred(kind, mixes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = DataLoader(examples(), collate_fn=Structured(kind))
    model, optimizer, loader = make_private(
        model, optimizer, data, without_noise(small_plan()), 0.3, key=seeded(3), loss_reduction="sum"
    )
    batch = next(iter(loader))
    optimizer.zero_grad()
    loss = model(batch).square().sum()
    if mixes:
        with pytest.raises(QuellError, match="the model mixes the examples"):
            loss.backward()
    else:
        loss.backward()
        optimizer.step()
        assert optimizer._engine._compared  # its gradients were compared with autograd's


@every_kind
def test_augmentation_sees_every_kind(kind):
    def reversed_rows(batch):
        return mapped(lambda value: value.flip(0), batch)

    from quell.torch.augmentation import Augmentation

    batch = KINDS[kind][0]([("x", torch.randn(8, 6)), ("y", torch.randn(8))])
    with pytest.raises(QuellError, match="augment makes an example's rows from other examples"):
        Augmentation(reversed_rows, 1)._changed(batch)
