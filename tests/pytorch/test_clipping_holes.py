"""What a reviewer got past the clipping: examples that move the sum by far more than the clip norm, lost gradients.

Refusing is as good as measuring rightly.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quell.errors import QuellError
from quell.torch.hooks import FlatEngine, GhostEngine

BATCH = 200  # the sum of so many is only refused when it is above 200 clip norms


def _norm_of_sum(engine, loss) -> float:
    loss.backward()
    try:
        _, sums = engine.collect()
    except QuellError:
        return 0.0
    return float(torch.sqrt(sum(total.double().square().sum() for total in sums)))


class Difference(nn.Module):
    """Two positions of a sequence whose gradients nearly cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 4, bias=False)

    def forward(self, x):
        h = self.body(x)
        return h[:, 0] - h[:, 1]


def test_ghost_norms_hold_where_positions_cancel():
    """|Σ_t g_t a_tᵀ|² as Σ_ts (g_t·g_s)(a_t·a_s) loses all its digits; clamped at 0, it clips nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(Difference())
    try:
        engine = GhostEngine(model, dict(model.named_parameters()), 1.0, "sum")
    except QuellError:
        return
    norms = []
    for _ in range(20):
        x = torch.zeros(BATCH, 2, 16)
        x[1, 1] = torch.randn(16) * 3e4
        x[1, 0] = x[1, 1] + torch.randn(16)
        norms.append(_norm_of_sum(engine, (model(x) * 10).sum()))
    assert max(norms) <= 1.01


def test_ghost_norms_hold_for_padding_that_is_not_zeros():
    """Opacus unfolds with zeros. The one example that is compared need not show the difference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular", bias=False))
    try:
        engine = GhostEngine(model, dict(model.named_parameters()), 1.0, "sum")
    except QuellError:
        return
    x = torch.zeros(BATCH, 1, 6, 6)
    x[0, :, 2:4, 2:4] = 0.01  # black borders
    x[1, :, 5] = 10.0  # seen from row 0 only around the edge
    weights = torch.zeros(BATCH, 2, 6, 6)
    weights[0], weights[1, :, 0] = 1.0, 1.0
    assert _norm_of_sum(engine, (model(x) * weights).sum()) <= 2.01


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x):
        return self.left(x), self.right(x)


def test_flat_a_head_that_one_loss_left_out_trains_in_the_next_batch():
    torch.manual_seed(0)
    model = Heads()
    engine = FlatEngine(model, dict(model.named_parameters()), 1.0, "sum")
    model(torch.randn(8, 5))[0].sum().backward()
    engine.collect()
    sum(model(torch.randn(8, 5))).sum().backward()
    _, sums = engine.collect()
    assert all(bool(total.any()) for total in sums)


def test_flat_an_example_of_an_earlier_batch_does_not_come_back():
    """Activations that no backward pass fetched must not meet the gradients of a later batch."""

    def second_sums(first_batch):
        torch.manual_seed(0)
        model = Heads()
        engine = FlatEngine(model, dict(model.named_parameters()), 1.0, "sum")
        model(first_batch)[0].sum().backward()
        engine.collect()
        right = model(torch.ones(8, 5))[1]
        right.sum().backward(retain_graph=True)
        right.square().sum().backward()  # refused where the head had been used in the first batch
        return engine.collect()[1]

    try:
        torch.testing.assert_close(second_sums(torch.zeros(8, 5)), second_sums(torch.full((8, 5), 50.0)))
    except QuellError:
        return


class Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Breaks.armed:
            raise MemoryError
        return gradient


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(Breaks.apply(self.first(x)))


def _train(model, engine, x):
    model(x).sum().backward()
    return engine.collect()[1]


@pytest.mark.parametrize("kind", [FlatEngine, GhostEngine])
def test_a_backward_pass_that_failed_leaves_nothing_behind(kind, monkeypatch):
    """The promise of docs/pytorch.md: the batch comes again, and counts as if nothing had happened."""
    torch.manual_seed(0)
    model, x = Fragile(), torch.randn(8, 5)
    engine = kind(model, dict(model.named_parameters()), 1.0, "sum")
    expected = _train(model, engine, x)
    monkeypatch.setattr(Breaks, "armed", True)
    with pytest.raises(MemoryError):
        _train(model, engine, x)
    monkeypatch.setattr(Breaks, "armed", False)
    engine.discard()
    torch.testing.assert_close(_train(model, engine, x), expected)


class Checkpointed(Fragile):
    def forward(self, x):
        return self.second(checkpoint(lambda h: self.first(h).tanh(), x, use_reentrant=False))


def test_flat_checkpointed_layers_are_trained_or_refused():
    torch.manual_seed(0)
    model = Checkpointed()
    engine = FlatEngine(model, dict(model.named_parameters()), 1.0, "sum")
    x = torch.randn(8, 5, requires_grad=True)
    model(x).sum().backward()
    try:
        _, sums = engine.collect()
    except QuellError:
        return
    assert all(bool(total.any()) for total in sums)
