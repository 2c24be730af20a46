"""Ghost norms are never below the real ones, whatever cancels, and hardly above them where nothing does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quell.torch import norms
from quell.torch.clipping import clip_factors
from quell.torch.ghost import GhostEngine
from quell.torch.norms import convolution_norms, embedding_norms, full_precision, linear_norms, outer_sum_norms

EXAMPLES = 40


def real_norms(g, a):
    return torch.linalg.vector_norm(torch.einsum("nti,ntj->nij", g.double(), a.double()), dim=(1, 2))


def cancelling(positions, width, out, size, rest, seed=0):
    """Pairs of positions with almost the same input, of norm `size`, and opposite gradients."""
    make = torch.Generator().manual_seed(seed)
    a = torch.randn(EXAMPLES, positions, width, generator=make) * size
    g = torch.randn(EXAMPLES, positions, out, generator=make)
    half = positions // 2
    a[:, half:] = a[:, :half] + rest * torch.randn(EXAMPLES, half, width, generator=make)
    g[:, half:] = -g[:, :half]
    return g, a


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4, 1e5, 1e7])
@pytest.mark.parametrize(("positions", "width", "out"), [(2, 16, 4), (16, 500, 300), (64, 16, 16)])
def test_norms_hold_where_positions_cancel(positions, width, out, size):
    g, a = cancelling(positions, width, out, size, 1.0)
    assert bool((outer_sum_norms(g, a)[:, 0] >= real_norms(g, a) * (1 - 1e-6)).all())


def test_without_the_bound_norms_do_not_hold():
    """The mutation: the norm as it is computed, the second column."""
    g, a = cancelling(2, 16, 4, 1e5, 1.0)
    assert bool((outer_sum_norms(g, a)[:, 1] < 0.1 * real_norms(g, a)).any())


def test_norms_hold_where_small_squares_are_rounded_away():
    """One large entry, and ten thousand whose squares vanish beside its own when added one after the other."""
    a = torch.full((1, 2, 10_000), 2e-4)
    a[:, :, 0] = 1.0
    a[:, 1, 0] = -1.0
    g = torch.ones(1, 2, 1)
    assert float(outer_sum_norms(g, a)[0, 0]) >= float(real_norms(g, a)) * (1 - 1e-6)


@pytest.mark.parametrize("scale", [1e-25, 1e-21, 1.0, 1e15])
def test_norms_hold_where_squares_underflow(scale):
    """Tiny gradients on huge inputs: their product is of ordinary size."""
    g, a = torch.randn(EXAMPLES, 3, 5) * scale, torch.randn(EXAMPLES, 3, 7) * min(1 / scale, 1e18)
    assert bool((outer_sum_norms(g, a)[:, 0] >= real_norms(g, a) * (1 - 1e-5)).all())


@pytest.mark.parametrize(("positions", "width", "out"), [(4, 16, 8), (128, 768, 768)])
def test_the_bound_is_hardly_above_the_norm_where_nothing_cancels(positions, width, out):
    torch.manual_seed(0)
    g, a = torch.randn(2, positions, out), torch.randn(2, positions, width)
    torch.testing.assert_close(outer_sum_norms(g, a)[:, 0].double(), real_norms(g, a), rtol=5e-3, atol=0)


def test_tokens_and_patches_that_cancel():
    torch.manual_seed(0)
    g = torch.randn(EXAMPLES, 6, 3) * 1e6
    g[:, 3:] = -g[:, :3]
    g += torch.randn_like(g)
    layer = nn.Embedding(3, 3)
    ids = torch.arange(6).remainder(3).expand(EXAMPLES, -1)
    real = (g[:, :3].double() + g[:, 3:].double()).flatten(1).norm(dim=1)
    found = embedding_norms(layer, [ids], g)[layer.weight]
    assert bool((found[:, 0] >= real * (1 - 1e-6)).all())
    # what the second pass may add by rounding another way is covered too
    assert bool((found[:, 0] >= 1e-7 * g.norm(dim=2).sum(1)).all())

    layer = nn.Conv1d(2, 3, 1)
    x, back = torch.full((EXAMPLES, 2, 6), 1e6), g.transpose(1, 2)
    gradient = torch.einsum("nct,ndt->ncd", back, x).unsqueeze(-1)
    sizes = back.norm(dim=1).sum(1)
    found = convolution_norms(layer, {layer.weight: gradient, layer.bias: back.sum(2)}, x, back)
    assert bool((found[layer.weight][:, 0] >= 1e-5 * sizes * x[:, :, 0].norm(dim=1)).all())
    assert bool((found[layer.bias][:, 0] >= 1e-5 * sizes).all())


def test_biases_of_sequences_and_of_single_positions():
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    for shape in ((EXAMPLES,), (EXAMPLES, 4), (EXAMPLES, 2, 4)):
        x, g = torch.randn(*shape, 5), torch.randn(*shape, 3)
        found = linear_norms(layer, [x], g)
        sums = g.reshape(EXAMPLES, -1, 3).double()
        real = {
            layer.bias: sums.sum(1).norm(dim=1),
            layer.weight: real_norms(sums, x.reshape(EXAMPLES, -1, 5)),
        }
        for parameter, norm in found.items():
            torch.testing.assert_close(norm.reshape(EXAMPLES, -1)[:, 0].double(), real[parameter], rtol=1e-4, atol=0)


def test_the_passes_of_ghost_clipping_are_in_full_precision_and_leave_the_settings():
    """TF32 and bfloat16 products are thousands of times coarser than what the bounds allow for."""
    matmul, convolution = torch.backends.mkldnn.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append((matmul.fp32_precision, convolution.fp32_precision, torch.backends.cuda.matmul.fp32_precision))
            return gradient

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return Looks.apply(self.layer(x))

    model = Model()
    engine = GhostEngine(model, dict(model.named_parameters()), 1.0, "sum")
    try:
        matmul.fp32_precision, convolution.fp32_precision = "bf16", "tf32"
        model(torch.randn(4, 3)).sum().backward()
        engine.collect()
        assert (matmul.fp32_precision, convolution.fp32_precision) == ("bf16", "tf32")
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before
    assert len(seen) >= 2
    assert set(seen) == {("ieee", "ieee", "ieee")}
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError
    assert (matmul.fp32_precision, convolution.fp32_precision) == before


def test_an_example_whose_first_batch_cancels_is_clipped_and_not_refused():
    """The comparison on the first batch allows for what was added to the norm."""
    torch.manual_seed(0)

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 4)

        def forward(self, x):
            h = self.body(x)
            return h[:, 0] - h[:, 1]

    model = nn.Sequential(Difference())
    engine = GhostEngine(model, dict(model.named_parameters()), 1.0, "sum")
    for _ in range(3):
        x = torch.randn(8, 1, 16) * 1e5 + torch.randn(8, 2, 16)
        model(x).sum().backward()
        seen, sums = engine.collect()
        assert seen == 8
        assert float(sum(total.square().sum() for total in sums)) > 0


def test_factors_of_norms_that_are_not_finite_are_zero():
    factors = clip_factors(torch.tensor([float("nan"), float("inf"), 4.0, 0.5]), 1.0)
    torch.testing.assert_close(factors, torch.tensor([0.0, 0.0, 0.25, 1.0]), rtol=1e-5, atol=0)


def test_gram_matrices_are_added_up_in_short_sums(monkeypatch):
    monkeypatch.setattr(norms, "_CHUNK", 2)
    values, widths, product = torch.randn(3, 4, 7), [], torch.bmm
    expected = values @ values.transpose(1, 2)
    monkeypatch.setattr(norms.torch, "bmm", lambda a, b: widths.append(a.shape[2]) or product(a, b))
    torch.testing.assert_close(norms._gram(values), expected)
    assert widths == [2]
    assert norms._roundings(7) == 2 + 4


def test_convolutions_are_measured_a_few_examples_at_a_time(monkeypatch):
    from quell.torch import ghost_hooks

    torch.manual_seed(0)
    layer, x, g = nn.Conv2d(3, 4, 3, padding=1), torch.randn(7, 3, 5, 5), torch.randn(7, 4, 5, 5)
    whole = ghost_hooks._whole_convolution_norms(layer, [x], g)
    monkeypatch.setattr(ghost_hooks, "_MOST_NUMBERS", 2 * 27 * 25)
    asked = []
    sampler = ghost_hooks.GradSampleHooks.GRAD_SAMPLERS[nn.Conv2d]

    def spy(layer, activations, backprops):
        asked.append(len(backprops))
        return sampler(layer, activations, backprops)

    monkeypatch.setitem(ghost_hooks.GradSampleHooks.GRAD_SAMPLERS, nn.Conv2d, spy)
    parts = ghost_hooks._whole_convolution_norms(layer, [x], g)
    assert asked == [2, 2, 2, 1]
    for parameter in layer.parameters():
        torch.testing.assert_close(parts[parameter], whole[parameter])


@pytest.mark.parametrize("most", [1, 1 << 26])
def test_what_is_added_for_convolutions_covers_each_example_alone(monkeypatch, most):
    """S = Σ_t |g_t||a_t| over the positions of an example, a_t its patches: bounded from each example's own numbers."""
    from quell.torch import ghost_hooks

    monkeypatch.setattr(ghost_hooks, "_MOST_NUMBERS", most)
    layer, sizes = nn.Conv2d(1, 1, 3), 10.0 ** torch.arange(4).view(4, 1, 1, 1)
    signs = (-1.0) ** (torch.arange(8)[:, None] + torch.arange(8))  # all patches alike: gradients cancel entirely
    x, g = sizes * torch.ones(4, 1, 10, 10), signs.expand(4, 1, 8, 8)
    found = ghost_hooks._whole_convolution_norms(layer, [x], g)
    patches = torch.linalg.vector_norm(nn.functional.unfold(x, 3).double(), dim=1)
    lengths = torch.linalg.vector_norm(g.flatten(2).double(), dim=1)
    for parameter, parts in ((layer.weight, patches * lengths), (layer.bias, lengths)):
        bound, value = found[parameter].double().unbind(1)
        unit = norms._ADDED_UP * torch.finfo(torch.float32).eps / 2
        assert not value.any()
        assert torch.all(bound * (1 + 1e-6) >= unit * parts.sum(1))
