"""The average of the weights is the weighted mean of the weights after each step, and outlives a crash."""

from __future__ import annotations

import copy

import pytest
import torch

from quell.errors import QuellError
from quell.noise import Key, Ledger, claims
from quell.torch import load_checkpoint, make_private, save_checkpoint

from .conftest import small_plan
from .training import examples, network, seeded, train

RATE = 0.7


def private(key, model=None, several=False, **options):
    model = model or network()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.2)
    if several:
        optimizer = [torch.optim.SGD(params[:3], lr=0.2), torch.optim.SGD(params[3:], lr=0.2)]
    return make_private(model, optimizer, examples(), small_plan(), key=key, ema=RATE, **options)


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def inside(model, optimizer):
    with optimizer.averaged():
        return weights(model)


@pytest.mark.parametrize("several", [False, True])
def test_the_average_is_that_of_all_steps(several):
    model, optimizer, loader = private(seeded(1), several=several, physical_batch_size=3)
    start = weights(model)
    assert torch.equal(inside(model, optimizer), start)  # nothing to average yet
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if optimizer.acted:
            seen.append(weights(model))
    shares = torch.tensor([RATE**age for age in reversed(range(len(seen)))], dtype=torch.float64)
    expected = (shares / shares.sum()) @ torch.stack(seen)
    torch.testing.assert_close(inside(model, optimizer), expected, rtol=0, atol=1e-6)
    assert torch.equal(weights(model), seen[-1])  # the trained weights are back


def test_averages_of_bfloat16_weights_are_finer_than_they_are():
    model, optimizer, loader = private(seeded(1), network().bfloat16(), clipping="layers")
    train(model, optimizer, ((x.bfloat16(), y) for x, y in loader), steps=4)
    assert {value.dtype for value in optimizer._averages._values} == {torch.float32}
    assert not torch.equal(inside(model, optimizer), weights(model))


def test_a_run_that_goes_on_has_the_same_average(tmp_path):
    found = {}
    key = Key.generate()
    for name in ("straight", "resumed"):
        key.save(tmp_path / name)
        Ledger(tmp_path / f"{name}.ledger").close()
        claims._claims.clear()
        path = tmp_path / f"{name}.pt"
        model, optimizer, loader = private(tmp_path / name)
        load_checkpoint(path, model, optimizer, loader)
        train(model, optimizer, loader, steps=4)
        save_checkpoint(path, model, optimizer, loader)
        if name == "resumed":
            optimizer.close()
            claims._claims.clear()
            model, optimizer, loader = private(tmp_path / name)
            assert load_checkpoint(path, model, optimizer, loader) == 4
        train(model, optimizer, loader)
        found[name] = inside(model, optimizer)
        optimizer.close()
    assert torch.equal(*found.values())
    claims._claims.clear()
    model, optimizer, loader = private(tmp_path / "resumed")
    state = optimizer.state_dict()
    state["quell"]["averages"]["rate"] = 0.9
    with pytest.raises(QuellError, match=r"saved with ema=0.9 and this run has ema=0.7"):
        optimizer.load_state_dict(state)


def test_averaged_weights_are_not_trained_or_saved_as_the_trained_ones():
    model, optimizer, loader = private(seeded(1))
    train(model, optimizer, loader, steps=2)
    with optimizer.averaged():
        evaluated = copy.deepcopy(model)  # a plain model with the averaged weights
        with pytest.raises(QuellError, match="leave `with"):
            optimizer.state_dict()
        with pytest.raises(QuellError, match="leave `with"):
            train(model, optimizer, loader, steps=1)
        with pytest.raises(QuellError, match="one `with"), optimizer.averaged():
            pass
    assert torch.equal(weights(evaluated), inside(model, optimizer))
    assert optimizer.run.step == 2
    train(model, optimizer, loader, steps=1)


@pytest.mark.parametrize("rate", [0.0, 1.0, float("nan"), "fast"])
def test_rates_that_average_nothing_are_refused(rate, tmp_path):
    for _ in range(2):  # the key is free again after the refusal
        with pytest.raises(QuellError, match="ema="):
            make_private(
                model := network(),
                torch.optim.SGD(model.parameters(), lr=0.1),
                examples(),
                small_plan(),
                key=tmp_path / "key",
                ema=rate,
            )


def test_a_run_without_averages_says_what_to_pass():
    model = network()
    _, optimizer, _ = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), small_plan(), key=seeded(2)
    )
    with pytest.raises(QuellError, match=r"pass ema=0.98"):
        optimizer.averaged()
