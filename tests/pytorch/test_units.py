"""What is clipped is a unit, and rows that fill a batch up count for nobody."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from quell import QuellError
from quell.torch import make_private
from quell.torch.engine.pieces import Rows
from quell.torch.engine.together import gathered, sums_of, whole_norms

from .conftest import small_plan, unpriced_poisson_plan
from .training import clipped_gradient, examples, network, seeded, train, without_noise


def run(plan, data=None, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with_key = {"key": seeded(3), **options}
    return make_private(model, optimizer, data or examples(), plan, 0.3, **with_key)


@pytest.mark.parametrize("physical", [None, 3])
def test_filled_batches_give_the_same_model(physical):
    plan = without_noise(small_plan())
    weights = []
    for fixed in (False, True):
        model, optimizer, loader = run(plan, fixed_shape=fixed, physical_batch_size=physical)
        train(model, optimizer, loader)
        weights.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_filled_batches_have_one_shape_and_zeros_behind_the_examples():
    plan = unpriced_poisson_plan()
    data = examples(12)
    model, optimizer, loader = run(plan, data, fixed_shape=True)
    shapes, filled = set(), 0
    for x, y in loader:
        shapes.add((x.shape, y.shape))
        real = optimizer.run.unfinished.received.examples
        assert not bool(x[real:].any())
        assert bool(x[:real].any()) == bool(real)
        filled += len(x) - real
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(shapes) == 1
    assert filled


@pytest.mark.parametrize("cuts", [[5, 3], [3, 5]])
def test_a_filled_batch_is_taken_whole(cuts):
    """Taken in parts, in another order, rows of zeros would count and examples would not."""
    model, optimizer, loader = run(without_noise(small_plan()), fixed_shape=True, loss_reduction="sum")
    x, y = next(iter(loader))
    optimizer.zero_grad()
    for part, labels in reversed(list(zip(x.split(cuts), y.split(cuts), strict=True))):
        nn.functional.cross_entropy(model(part), labels, reduction="sum").backward()
    with pytest.raises(QuellError, match="places of a filled batch"):
        optimizer.step()
    assert optimizer.run.step == 0


def doubled(rows):
    return default_collate([row for row in rows for _ in range(2)])


def test_a_filled_batch_has_one_row_of_each_item():
    """Zeros must not hide that there are more rows than examples: the first of them would be one example's twice."""
    data = DataLoader(examples(12), collate_fn=doubled)
    _model, _optimizer, loader = run(unpriced_poisson_plan(), data, fixed_shape=True)
    with pytest.raises(QuellError, match=r"a tensor of shape \(\d+, 6\) from \d+ items"):
        list(loader)


@pytest.mark.parametrize("change", [lambda v: v.repeat_interleave(2, 0), lambda v: v[:-1]])
def test_every_row_of_a_filled_batch_is_used_once(change):
    model, optimizer, loader = run(unpriced_poisson_plan(), examples(12), fixed_shape=True)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(change(x)), change(y)).backward()
    with pytest.raises(QuellError, match=r"was filled up to|places of a filled batch"):
        optimizer.step()
    assert optimizer.run.step == 0


def test_presence_changes_nobody_elses_bits():
    """Without one example, the others' factors are bitwise the same: their rows meet the same shapes."""
    torch.manual_seed(0)
    found = []
    for left_out in (None, 2):
        model, optimizer, _loader = run(without_noise(small_plan()), fixed_shape=True, loss_reduction="sum")
        x, y = examples().tensors[0][:8].clone(), examples().tensors[1][:8].clone()
        if left_out is not None:
            x[left_out], y[left_out] = 0.0, 0
        engine = optimizer._engine

        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        (pieces,) = engine.take_finished()
        found.append(whole_norms(gathered(pieces).values()))
    others = torch.arange(8) != 2
    assert torch.equal(found[0][others], found[1][others])
    assert found[0][2] != found[1][2]


def test_parts_of_a_batch_are_rounded_once():
    """In float32 a part of 1 beside a sum of 2²⁴ is lost, as many of them as there are."""
    data = TensorDataset(torch.tensor([[2.0**24], [1.0], [1.0], [1.0]]))
    plan = without_noise(small_plan("identity", alone=True, examples=4, batch_size=4, epochs=1))
    model = nn.Linear(1, 1, bias=False)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(model.weight.grad)))
    options = {"physical_batch_size": 1, "loss_reduction": "sum", "key": seeded(3)}
    model, optimizer, loader = make_private(model, optimizer, data, plan, 2.0**25, **options)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert seen == [(2.0**24 + 4) / 4]  # 2²⁴ + 3, rounded to float32 once


@pytest.mark.parametrize(("gradients", "allowed"), [("random", 1e-4), ("patterned", 0.004 * 20)])
def test_an_example_that_is_absent_moves_sums_by_little_more_than_its_gradient(gradients, allowed):
    """Those after it move up a place, so every 128 may round differently (docs/pytorch.md)."""
    random = torch.Generator().manual_seed(0)
    if gradients == "random":
        values = nn.functional.normalize(torch.randn(2560, 200, generator=random) + 0.5)
    else:  # the same numbers in every 128, so that roundings add up
        values = (1 - torch.rand(128, 1, generator=random)).repeat(20, 1)

    def total(rows):
        return sums_of([Rows(rows)], torch.ones(len(rows)))[0].double()

    beyond = float((total(values) - total(values[1:]) - values[0].double()).norm())
    assert 0 < beyond < allowed


class Noisy(Dataset):
    """An example looks different every time: a counter stands in for random augmentation."""

    def __init__(self):
        self.x, self.y = examples().tensors
        self.asked = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.asked += 1
        return self.x[index] + 0.1 * (self.asked % 4), self.y[index]


def test_rows_of_one_example_are_clipped_as_one():
    data = Noisy()
    model, optimizer, loader = run(without_noise(small_plan()), data, rows_per_example=4)
    x, y = next(iter(loader))
    assert len(x) == 32
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    twin = network()

    def unit_loss(outputs, labels):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

    expected = clipped_gradient(twin, unit_loss, (x.view(8, 4, 6), y.view(8, 4)), 0.3)
    optimizer.step()
    for (name, p), right in zip(model.named_parameters(), expected.values(), strict=True):
        torch.testing.assert_close(p.grad * 8, right, rtol=0, atol=1e-5, msg=name)


def test_batches_in_memory_are_indexed_at_once():
    class Counted(TensorDataset):
        def __getitem__(self, index):
            raise AssertionError("one by one")

    x, y = examples().tensors
    _model, _optimizer, loader = run(small_plan(), TensorDataset(x, y))
    batch = next(iter(loader))
    assert isinstance(batch, list)
    assert len(batch[0]) == 8
    with pytest.raises(AssertionError, match="one by one"):  # a data set of one's own is asked as it wants to be
        next(iter(run(small_plan(), Counted(x, y))[2]))


def test_microbatches_have_neither(plan):
    for options in ({"fixed_shape": True}, {"rows_per_example": 2}):
        with pytest.raises(QuellError, match="need clipping='layers'"):
            run(plan, clipping="microbatch", **options)
