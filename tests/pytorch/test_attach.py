"""`attach`: the same run as make_private's, from sums that the loop computed."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from quell.errors import QuellError
from quell.torch import attach, clipped_sum, make_private
from tests.pytorch.training import examples, network, seeded, train


def start(plan, key=None, **options):
    model = network()
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    optimizer, loader = attach(optimizer, params, examples(), plan, 0.7, key=key, **options)
    return model, params, optimizer, loader


def loss_of(model):
    def loss(params, x, y):
        return torch.nn.functional.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    return loss


def epoch(model, params, optimizer, loader, bound=None):
    loss = loss_of(model)
    for x, y in loader:
        optimizer.zero_grad()
        sums = clipped_sum(loss, params, (x, y), optimizer.max_grad_norm if bound is None else bound)
        optimizer.take(sums, examples=len(x))
        optimizer.step()


@pytest.mark.parametrize(("physical", "memory"), [(None, 0), (3, 3)])
def test_the_run_is_that_of_make_private(plan, physical, memory):
    key = seeded(3)
    run = start(plan, key, physical_batch_size=physical, noise_memory=memory)
    epoch(*run)
    epoch(*run)
    assert run[2].run.noise.buffers == memory
    assert run[2].run.step == plan.steps
    key = seeded(3)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(*make_private(model, optimizer, examples(), plan, 0.7, clipping="microbatch", key=key))
    for ours, theirs in zip(run[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_goes_on(plan):
    key = seeded(4)
    straight = start(plan, key)
    epoch(*straight)
    saved = [straight[0].state_dict(), straight[2].state_dict(), straight[3].state_dict()]
    saved[0] = {name: value.clone() for name, value in saved[0].items()}
    epoch(*straight)
    model, params, optimizer, loader = start(plan, key)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1], replay=True)
    loader.load_state_dict(saved[2])
    epoch(model, params, optimizer, loader)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), straight[0].parameters(), strict=True))


def test_sums_that_cannot_be_clipped_gradients_are_refused(plan):
    with pytest.raises(QuellError, match="clip every example's gradient before adding up"):
        epoch(*start(plan), bound=50.0)
    _, params, optimizer, loader = start(plan)
    x, _ = next(iter(loader))
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    with pytest.raises(QuellError, match="clip every example's gradient"):
        optimizer.take({**sums, "0.bias": torch.full((8,), torch.nan)}, len(x))
    with pytest.raises(QuellError, match=r"differ in 0\.bias"):
        optimizer.take({name: value for name, value in sums.items() if name != "0.bias"}, len(x))
    with pytest.raises(QuellError, match=r"0\.bias is torch\.bfloat16"):
        optimizer.take({**sums, "0.bias": sums["0.bias"].bfloat16()}, len(x))
    with pytest.raises(QuellError, match=r"of 0 examples.*call optimizer\.take\(\)"):
        optimizer.step()
    x, _ = next(iter(loader))
    optimizer.take(sums, len(x) - 1)
    with pytest.raises(QuellError, match="the gradients are those of 7 examples"):
        optimizer.step()


def test_what_is_not_trained_is_named(plan):
    params = {"w": torch.nn.Parameter(torch.zeros(3))}
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(QuellError, match="not the tensors that the optimizer trains"):
        attach(other, params, examples(), plan)
    plain = {"w": torch.zeros(3)}
    with pytest.raises(QuellError, match="w does not require a gradient"):
        attach(torch.optim.SGD(plain.values(), lr=0.1), plain, examples(), plan)
    optimizer, _ = attach(torch.optim.SGD(params.values(), lr=0.1), params, examples(), plan)
    with pytest.raises(QuellError, match="private already"):
        attach(optimizer, params, examples(), plan)


@pytest.mark.parametrize("takes", [1, 2])
def test_sums_that_the_loop_writes_over(plan, takes):
    """They were kept as they lay: the last ones counted in the place of those before them, so twice."""
    _, params, optimizer, loader = start(plan, physical_batch_size=3)
    held = {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}
    seen: list[torch.Tensor] = []
    optimizer.run.noise.add_ = lambda sums: seen.extend(total.clone() for total in sums)
    for part, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        rows = [len(x)] if takes == 1 else [1, len(x) - 1]
        for number, count in enumerate(rows):
            for total in held.values():
                total.zero_()
            next(iter(held.values())).view(-1)[2 * part + number] = 0.5 * count
            optimizer.take(held, examples=count)
        optimizer.step()
        if optimizer.acted:
            break
    assert seen[0].sum() == 0.5 * 8
    assert seen[0].max() <= 0.5 * 3
