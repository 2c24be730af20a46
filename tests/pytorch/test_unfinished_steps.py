"""Steps that are refused, interrupted, passed over or out of order: nothing but the due batch is ever released."""

from __future__ import annotations

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from quell.errors import QuellError
from quell.torch import make_private

from .training import clipped_gradient, examples, network

MODES = ["layers", "microbatch"]
criterion = nn.functional.cross_entropy


def private(plan, clipping="layers", data=None, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, data or examples(), plan, clipping=clipping, **options)


def gradients(model, optimizer, x, y):
    optimizer.zero_grad()
    criterion(model(x), y).backward()


def one_step(model, optimizer, batch):
    gradients(model, optimizer, *batch)
    optimizer.step()


def released(optimizer) -> list[torch.Tensor]:
    """The sums that noise is added to, as they come."""
    found: list[torch.Tensor] = []
    add = optimizer.run.noise.add_

    def spy(sums):
        found.append(torch.cat([total.flatten() for total in sums]).clone())
        add(sums)

    optimizer.run.noise.add_ = spy
    return found


def due_sum(optimizer, step=0):
    """What the batch of a step should add up to at the first weights, one backward pass per example."""
    chosen = torch.as_tensor(optimizer.run.batches.at(step))
    sums = clipped_gradient(network(), criterion, [t[chosen] for t in examples().tensors], 1.0)
    return torch.cat([total.flatten() for total in sums.values()])


def assert_released_once(found, optimizer):
    assert len(found) == 1
    torch.testing.assert_close(found[0], due_sum(optimizer), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clipping", MODES)
def test_a_refused_step_leaves_nothing_behind(clipping, plan):
    model, optimizer, loader = private(plan, clipping)
    found = released(optimizer)
    next(iter(loader))
    gradients(model, optimizer, *examples()[:16])
    with pytest.raises(QuellError, match="of 16 examples"):
        optimizer.step()
    one_step(model, optimizer, next(iter(loader)))
    assert_released_once(found, optimizer)


@pytest.mark.parametrize("clipping", MODES)
def test_a_refused_step_takes_the_parts_before_it_along(clipping, plan):
    """Stepping on once more is no way around: the batch has to come again from its first part."""
    model, optimizer, loader = private(plan, clipping, physical_batch_size=4)
    found = released(optimizer)
    batches = iter(loader)
    one_step(model, optimizer, next(batches))
    second = next(batches)
    gradients(model, optimizer, *examples()[:16])
    with pytest.raises(QuellError, match="of 16 examples"):
        optimizer.step()
    assert optimizer.run.unfinished.sums is None
    with pytest.raises(QuellError, match="without a batch of the plan"):
        one_step(model, optimizer, second)
    with pytest.raises(QuellError, match="but part 1 of step 0 is due"):
        next(batches)
    assert not found


@pytest.mark.parametrize("clipping", MODES)
def test_half_a_batch_that_was_interrupted_is_forgotten(clipping, plan):
    model, optimizer, loader = private(plan, clipping, physical_batch_size=4)
    found = released(optimizer)
    one_step(model, optimizer, next(iter(loader)))  # and then Ctrl-C
    for batch in loader:
        one_step(model, optimizer, batch)
        if optimizer.run.step:
            break
    assert_released_once(found, optimizer)


def test_half_a_batch_of_the_memory_manager_is_forgotten(plan):
    model, optimizer, loader = private(plan)
    found = released(optimizer)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as parts:
        one_step(model, optimizer, next(iter(parts)))
        for batch in parts:
            one_step(model, optimizer, batch)
            if optimizer.run.step:
                break
    assert_released_once(found, optimizer)


@pytest.mark.parametrize("clipping", MODES)
def test_gradients_of_a_loop_that_was_interrupted_are_forgotten(clipping, plan):
    """Also where zero_grad comes after the step, not before the next backward pass."""
    model, optimizer, loader = private(plan, clipping)
    found = released(optimizer)
    gradients(model, optimizer, *next(iter(loader)))  # and then Ctrl-C
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.step()
    assert_released_once(found, optimizer)


class Words(nn.Module):
    """A model whose weights no backward pass needs, so that autograd does not notice that they have changed."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 3)

    def forward(self, x):
        return self.words(x.long().remainder(7)).mean(1)


@pytest.mark.parametrize("make", [Words, network])
@pytest.mark.parametrize("clipping", MODES)
def test_a_backward_pass_that_comes_a_step_late(clipping, make, plan):
    """Its examples are those of another step: sizes do not tell them apart."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, examples(), plan, clipping=clipping)
    batches = iter(loader)
    x, y = next(batches)
    late = criterion(model(x), y)
    one_step(model, optimizer, (x, y))
    next(batches)
    found = released(optimizer)
    optimizer.zero_grad()
    with pytest.raises((QuellError, RuntimeError)):
        late_step(optimizer, late)
    assert not found


def late_step(optimizer, loss):
    loss.backward()
    optimizer.step()


def test_noise_that_fails_leaves_nothing_behind(plan):
    model, optimizer, loader = private(plan)
    add = optimizer.run.noise.add_

    def interrupted(sums):
        raise KeyboardInterrupt

    optimizer.run.noise.add_ = interrupted
    with pytest.raises(KeyboardInterrupt):
        one_step(model, optimizer, next(iter(loader)))
    optimizer.run.noise.add_ = add
    found = released(optimizer)
    one_step(model, optimizer, next(iter(loader)))
    assert_released_once(found, optimizer)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("physical", [None, 4])
def test_a_batch_that_is_passed_over(workers, physical, plan):
    """All batches have 8 examples, so their sizes tell nothing."""
    data = DataLoader(examples(), num_workers=workers)
    model, optimizer, loader = private(plan, data=data, physical_batch_size=physical)
    batches = iter(loader)
    one_step(model, optimizer, next(batches))
    next(batches)  # "the loss looks wrong"
    with pytest.raises(QuellError, match=r"was asked for before optimizer\.step\(\) was called for the batch of step"):
        next(batches)
    for batch in loader:  # goes on with the batch that was passed over
        one_step(model, optimizer, batch)
    assert optimizer.run.step == 5


def test_batches_that_are_collected_first(plan):
    _, _, loader = private(plan)
    with pytest.raises(QuellError, match=r"list\(loader\)"):
        list(loader)


def test_a_part_that_the_memory_manager_passed_over(plan):
    model, optimizer, loader = private(plan)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as parts:
        batches = iter(parts)
        next(batches)
        one_step(model, optimizer, next(batches))
        with pytest.raises(QuellError, match="take one step for every batch, in order"):
            next(batches)
    assert optimizer.run.step == 0


def test_an_iterator_that_has_fallen_behind(plan):
    model, optimizer, loader = private(plan)
    behind, ahead = iter(loader), iter(loader)
    one_step(model, optimizer, next(behind))
    one_step(model, optimizer, next(ahead))
    with pytest.raises(QuellError, match="step 1 comes from the loader, but part 1 of step 2 is due"):
        next(behind)


def test_another_look_at_a_batch_is_harmless(plan):
    model, optimizer, loader = private(plan)
    for batch in loader:
        next(iter(loader))  # to print its shapes, say
        one_step(model, optimizer, batch)
    assert optimizer.run.step == 5
