"""Gradients scaled by Adam's second moments: a function of releases, one sensitivity, and the same after a crash."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from quell.errors import QuellError
from quell.noise import claims
from quell.torch import load_checkpoint, make_private, save_checkpoint
from quell.torch.adam import SecondMoments

from .conftest import small_plan
from .training import examples, network, seeded, without_noise

BETAS = (0.8, 0.9)
LEAST, ASSUMED = 1e-3, 100

pytestmark = pytest.mark.filterwarnings("ignore:the plan's noise is shaped for SGD")


def private(key=None, plan=None, several=False, **options):
    model = network()
    params = list(model.parameters())
    make = {"lr": 0.05, "betas": BETAS}
    optimizer = torch.optim.AdamW(params, **make)
    if several:
        optimizer = [torch.optim.AdamW(params[:3], **make), torch.optim.Adam(params[3:], **make)]
    options = {"scale_gradients": True, "max_grad_norm": 0.3, **options}
    return make_private(model, optimizer, examples(), plan or small_plan(), key=key or seeded(1), **options)


def scales_of(released):
    """S for every parameter from the released gradients of all steps so far: plain loops, in float64."""
    moments = {}
    for name in released[0]:
        v = torch.zeros_like(released[0][name].double())
        for gradients in released:
            v = BETAS[1] * v + (1 - BETAS[1]) * gradients[name].double() ** 2
        moments[name] = v / (1 - BETAS[1] ** len(released))
    mean = sum(float(v.sum()) for v in moments.values()) / sum(v.numel() for v in moments.values())
    shares = [BETAS[1] ** age for age in range(len(released))]
    seen = sum(shares) ** 2 / sum(share**2 for share in shares)  # equal shares that would make as steady a mean

    def share(value, whole, entries):
        weight = LEAST + ASSUMED / (seen * entries)
        return (value / whole + weight) / (1 + weight)

    found = {}
    wholes = {name: share(float(v.mean()), mean, v.numel()) for name, v in moments.items()}
    total = sum(wholes[n] * v.numel() for n, v in moments.items()) / sum(v.numel() for v in moments.values())
    for name, v in moments.items():
        rows = v.reshape(len(v), -1)
        level = float(rows.mean())
        square = torch.empty_like(rows)
        for i in range(rows.shape[0]):
            for j in range(rows.shape[1]):
                row, column = float(rows[i].mean()), float(rows[:, j].mean())
                square[i, j] = share(row, level, rows.shape[1]) * share(column, level, len(rows))
                square[i, j] *= wholes[name] / total
        found[name] = square.rsqrt().view(v.shape)
    return found


def entries(optimizer, model):
    held = optimizer._engine.scales
    return {name: held[name].entries.view(p.shape).double() for name, p in model.named_parameters()}


def run_and_compare(optimizer, model, loader, steps=4):
    """Train; at every step the scales must be those of what was released before it."""
    released, batches = [], iter(loader)
    for step in range(steps):
        x, y = next(batches)
        if step:
            right = scales_of(released)
            for name, scale in entries(optimizer, model).items():
                torch.testing.assert_close(scale, right[name], rtol=1e-4, atol=0, msg=f"{name} at {step}")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        released.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return released


@pytest.mark.parametrize("several", [False, True])
def test_scales_are_a_function_of_what_was_released(several):
    model, optimizer, loader = private(several=several)
    assert all(bool((scale == 1).all()) for scale in entries(optimizer, model).values())
    run_and_compare(optimizer, model, loader)
    squares = torch.cat([(1 / scale**2).flatten() for scale in entries(optimizer, model).values()])
    assert float(squares.mean()) == pytest.approx(1.0, rel=1e-5)  # noise keeps its power
    assert float(squares.std()) > 0.01


def test_scales_of_gradients_without_noise_are_noticed(monkeypatch):
    """The mutation: second moments of the clipped sums before they get their noise."""
    model, optimizer, loader = private()
    clean = {id(p): torch.zeros_like(p) for p in model.parameters()}
    collect = optimizer._engine.collect

    def spied():
        seen, sums = collect()
        for parameter, total in zip(optimizer.params, sums, strict=True):
            clean[id(parameter)].lerp_((total / 8) ** 2, 1 - BETAS[1])
        return seen, sums

    monkeypatch.setattr(optimizer._engine, "collect", spied)
    real = SecondMoments._moments
    monkeypatch.setattr(
        SecondMoments, "_moments", lambda self, p, beta: (clean[id(p)].reshape(len(p), -1), real(self, p, beta)[1])
    )
    with pytest.raises(AssertionError, match="at 1"):
        run_and_compare(optimizer, model, loader)


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_a_step_is_that_of_scaled_clipped_gradients(clipping):
    """Without noise: clip S∘g of every example, add up, divide by S, let AdamW step."""
    model, optimizer, loader = private(plan=without_noise(small_plan()), clipping=clipping)
    twin = network()
    adam = torch.optim.AdamW(twin.parameters(), lr=0.05, betas=BETAS)
    released, batches = [], []
    for x, y in loader:
        batches.append((x, y))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for x, y in batches:
        scales = scales_of(released) if released else {n: torch.ones_like(p) for n, p in twin.named_parameters()}
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in twin.named_parameters()}
        for row, label in zip(x, y, strict=True):
            twin.zero_grad()
            nn.functional.cross_entropy(twin(row[None]), label[None]).backward()
            gradient = {name: scales[name] * p.grad.double() for name, p in twin.named_parameters()}
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
            for name, g in gradient.items():
                sums[name] += g * min(1.0, 0.3 / norm)
        for name, p in twin.named_parameters():
            p.grad = (sums[name] / scales[name] / 8).float()
        released.append({name: p.grad.clone() for name, p in twin.named_parameters()})
        adam.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-4)


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
@pytest.mark.parametrize("size", [1e-6, 1e4])
@pytest.mark.parametrize("bound", [0.3, "automatic"])
def test_scaling_does_not_change_the_sensitivity(clipping, size, bound):
    model, optimizer, _ = private(clipping=clipping, max_grad_norm=bound, loss_reduction="sum")
    most = optimizer.run.noise.max_grad_norm
    assert most == (1.0 if bound == "automatic" else bound)
    torch.manual_seed(2)
    for scale in optimizer._engine.scales.values():
        scale.rows.copy_((3 * torch.randn_like(scale.rows)).exp())
        scale.columns.copy_((3 * torch.randn_like(scale.columns)).exp())
    for x, y in zip(*examples(4).tensors, strict=True):
        (size * nn.functional.cross_entropy(model(x[None]), y[None])).backward()
        _, sums = optimizer._engine.collect()
        norm = math.sqrt(sum(float(total.double().square().sum()) for total in sums))
        assert norm <= most * (1 + 1e-6)
        if size > 1:
            assert norm >= 0.99 * most


def test_noise_is_added_before_scales_are_undone():
    """Gradients of zero: what is released is the noise of a plain run, divided by S. Noise added later is smaller."""
    released = {}
    for scaled in (False, True):
        model, optimizer, loader = private(scale_gradients=scaled)
        torch.manual_seed(2)
        for scale in optimizer._engine.scales.values():
            scale.rows.copy_(torch.randn_like(scale.rows).exp())
            scale.columns.copy_(torch.randn_like(scale.columns).exp())
        right = entries(optimizer, model) if scaled else {}
        x, _ = next(iter(loader))
        optimizer.zero_grad()
        (model(x) * 0).sum(1).mean().backward()
        optimizer.step()
        released[scaled] = {name: p.grad.double() for name, p in model.named_parameters()}
    for name, plain in released[False].items():
        torch.testing.assert_close(released[True][name] * right[name], plain, rtol=1e-5, atol=0)


def test_a_run_that_goes_on_has_the_same_scales(tmp_path):
    """Steps after the checkpoint come again, and are compared with the ledger's digests."""

    def start():
        claims._claims.clear()
        trio = private(tmp_path / "key", physical_batch_size=3)
        return trio, load_checkpoint(tmp_path / "run.pt", *trio)

    def go_on(trio, steps):
        model, optimizer, loader = trio
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if optimizer.run.step == steps:
                return

    trio, _ = start()
    go_on(trio, 2)
    save_checkpoint(tmp_path / "run.pt", *trio)
    go_on(trio, 4)
    straight = [p.detach().clone() for p in trio[0].parameters()]
    trio[1].close()
    trio, step = start()
    assert step == 2
    go_on(trio, 4)
    assert all(torch.equal(p, q) for p, q in zip(straight, trio[0].parameters(), strict=True))


def test_other_optimizers_are_refused():
    model = network()
    with pytest.raises(QuellError, match="takes Adam or AdamW, not SGD"):
        make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            examples(),
            small_plan(),
            key=seeded(1),
            scale_gradients=True,
        )


def test_moments_of_steps_before_the_run_are_refused():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.zeros(1, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(QuellError, match="has taken no step"):
        make_private(model, optimizer, examples(), small_plan(), key=seeded(1), scale_gradients=True)
