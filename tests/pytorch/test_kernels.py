"""The Triton kernels, by the interpreter on a CPU or on a GPU, against float64."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton")

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1 before it is imported", allow_module_level=True)

from quell.torch.engine import kernels, pieces  # noqa: E402
from quell.torch.engine.patches import Patches, Window  # noqa: E402
from quell.torch.engine.pieces import Outer, Rows, Tokens  # noqa: E402
from quell.torch.engine.together import merged, norms_of, sums_of  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies bfloat16 wrongly
SHAPES = [(3, 5, 7, 9), (2, 130, 24, 33), (1, 20, 150, 1100)]  # units, positions, outputs, inputs


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(kernels, "interpreted", DEVICE.type == "cpu")


def factors(units, positions, outputs, inputs, cancel=False):
    make = torch.Generator().manual_seed(units + positions)
    g, a = torch.randn(units, positions, outputs, generator=make), torch.randn(units, positions, inputs, generator=make)
    if cancel:  # the second half of the positions undoes the first, almost
        half = positions // 2
        g[:, half : 2 * half], a[:, half : 2 * half] = -g[:, :half], a[:, :half] * (1 + 2.0**-7)
    return g.to(HALF).to(DEVICE), a.to(HALF).to(DEVICE)


def gradients(g, a):
    return torch.einsum("uto,uti->uoi", g.double(), a.double())


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_never_below_and_hardly_above(shape, cancel):
    g, a = factors(*shape, cancel)
    real = gradients(g, a).flatten(1).norm(dim=1)
    found = kernels.gram_norms([(g, a)])[0].double()
    assert bool((found >= real * (1 - 1e-6)).all())
    if not cancel:
        assert bool((found <= real * 1.02).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_weighted_in_float32(shape):
    g, a = factors(*shape)
    weights = torch.linspace(0.0, 1.3, shape[0]).to(DEVICE)
    total = kernels.weighted_sums([(g, a)], weights)[0]
    right = torch.einsum("u,uoi->oi", weights.double(), gradients(g, a))
    torch.testing.assert_close(total.double(), right, rtol=1e-5, atol=1e-4)


def test_a_unit_of_weight_zero_adds_nothing_whatever_is_in_it():
    g, a = factors(3, 5, 7, 9)
    g[1] = float("nan")
    weights = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
    total = kernels.weighted_sums([(g, a)], weights)[0]
    whole = torch.einsum("uto,uti->uoi", g.float(), a.float()).to(HALF).flatten(1)
    rows = kernels.sums_of_rows([whole], weights)[0]
    assert bool(torch.isfinite(total).all())
    torch.testing.assert_close(rows.view(7, 9), total, rtol=0.02, atol=0.1)


def test_many_rows_are_added_up_in_float64():
    rows = torch.cat([torch.full((512, 3), 0.5), torch.ones(1, 3), torch.full((512, 3), 0.51 * 2.0**-15)]).to(DEVICE)
    total = kernels.sums_of_rows([rows], torch.ones(len(rows), device=DEVICE))[0]
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, rows.double().sum(0), rtol=0, atol=2e-5)
    few = kernels.sums_of_rows([rows[:64]], torch.ones(64, device=DEVICE))[0]
    assert few.dtype == torch.float32


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 6), (1, 40, 130)])
def test_gradients_of_scales(shape, centred):
    torch.manual_seed(0)
    x, g = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE).to(HALF)
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    right = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3) * g.double()).sum(1)
    scale, shift = kernels.scale_gradients(x, g, 1e-3, centred)
    torch.testing.assert_close(scale.double(), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shift.double(), g.double().sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "groups", "places"), [(6, 2, 35), (3, 3, 1030), (5, 1, 1)])
def test_gradients_of_scales_of_channels(channels, groups, places):
    torch.manual_seed(0)
    x = (torch.randn(3, channels, places) + 5).to(HALF).to(DEVICE)
    g = torch.randn(3, channels, places, device=DEVICE)
    normalised = torch.nn.functional.group_norm(x.double(), groups, eps=1e-3)
    scale, shift = kernels.channel_scale_gradients(x, g, groups, 1e-3)
    torch.testing.assert_close(scale.double(), (normalised * g.double()).sum(2), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(shift.double(), g.double().sum(2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [(3, {"padding": 1}), ((2, 3), {"stride": (2, 1), "dilation": (1, 2), "padding": (0, 3)}), (1, {"stride": 2})],
)
def test_patches_are_copied_as_they_are(kernel, options, format):
    x = torch.randn(2, 30, 9, 11, device=DEVICE).to(HALF).contiguous(memory_format=format)
    layer = torch.nn.Conv2d(30, 4, kernel, **options)
    right = torch.nn.functional.unfold(x.float(), layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    assert torch.equal(Window.of(layer).unfold(x).float(), right)


def test_patches_around_which_are_no_zeros():
    x = torch.randn(2, 3, 5, 6, device=DEVICE)
    layer = torch.nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular")
    right = torch.nn.functional.unfold(torch.nn.functional.pad(x, (1, 1, 1, 1), mode="circular"), 3)
    assert torch.equal(Window.of(layer).unfold(x), right)


def test_convolutions_are_summed_by_the_products_that_were_measured(monkeypatch):
    """Products of other sizes could be rounded otherwise, so norms and sums cut the units in the same places."""
    made, unfold = [], Window.unfold

    def watched(window, x):
        made.append((x.storage_offset(), len(x)))
        return unfold(window, x)

    monkeypatch.setattr(Window, "unfold", watched)
    monkeypatch.setattr(pieces, "_IN_CACHE", 50 * 2 * 9)
    monkeypatch.setattr(pieces, "_FEW_NUMBERS", 50 * 2 * 9)
    g, x = (torch.randn(130, 1, channels, 3, 3, device=DEVICE).to(HALF) for channels in (1, 2))
    piece = Patches(g, x, Window.of(torch.nn.Conv2d(2, 1, 3, padding=1)), 1)
    piece.norms()
    measured = made.copy()
    made.clear()
    (total,) = sums_of([piece], torch.ones(130, device=DEVICE))
    assert made == measured
    assert total.dtype == torch.float64


def test_tokens_that_repeat():
    g, _ = factors(3, 140, 12, 1)
    tokens = torch.randint(0, 9, (3, 140), device=DEVICE)
    sums = torch.zeros(3, 9, 12, dtype=torch.float64, device=DEVICE)
    for unit in range(3):
        sums[unit].index_add_(0, tokens[unit], g[unit].double())
    found = Tokens(g, tokens, 9, -1).norms().double()
    real = sums.flatten(1).norm(dim=1)
    assert bool((found >= real * (1 - 1e-6)).all())
    assert bool((found <= real * 1.02).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_measured_bounds_what_is_added(shape):
    """Unit by unit, with weight 1."""
    for cancel in (False, True):
        g, a = factors(*shape, cancel)
        whole = torch.bmm(g.transpose(1, 2), a)
        for piece in (Outer(g, a), Rows(whole)):
            norms = piece.norms().double()
            for unit in range(shape[0]):
                total = piece.sum((torch.arange(shape[0], device=DEVICE) == unit).float())
                assert float(total.double().norm()) <= float(norms[unit]) * (1 + 1e-6)


def test_norms_allow_for_the_roundings_of_long_sums():
    """All products are exact here, so what is above the norm is what is allowed for."""
    ones = torch.ones(1, 1024, 8, device=DEVICE, dtype=HALF)
    # As for 4096 positions: how many there are may depend on the longest example of the batch.
    assert 1024 * 8 * (1 + 6.1e-5) <= float(kernels.gram_norms([(ones, ones)])[0]) <= 1024 * 8 * (1 + 6.6e-5)
    tokens = torch.zeros(1, 1024, dtype=torch.long, device=DEVICE)
    assert 1024 * 8**0.5 * (1 + 1.2e-4) <= float(kernels.token_norms(ones, tokens)) <= 1024 * 8**0.5 * (1 + 2e-4)


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("longest", [150, 300])
def test_longer_units_change_no_norms_of_others(longest, cancel):
    """Where positions are padded, and where gradients are kept because there are more of them."""
    g, a = factors(2, 130, 24, 33, cancel)
    more = [torch.nn.functional.pad(values, (0, 0, 0, longest - 130)) for values in (g, a)]
    short, long = Outer(g, a), Outer(*more)
    tokens = torch.randint(0, 9, (2, 130), device=DEVICE)
    behind = torch.nn.functional.pad(tokens, (0, longest - 130))
    for found in (long, Rows(short.flat, short.allowed), Rows(long.flat, long.allowed)):
        torch.testing.assert_close(norms_of([found])[0], short.norms(), rtol=1e-4 if cancel else 2e-5, atol=0)
    few, many = Tokens(g, tokens, 9, -1), Tokens(more[0], behind, 9, -1)
    torch.testing.assert_close(many.norms(), few.norms(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("first", [0, 1])
def test_uses_of_a_weight_inside_and_outside_of_autocast_are_allowed_for_together(first):
    """Those in half precision are measured by kernels, which know no number of positions of each unit."""
    g, a = factors(3, 130, 8, 8, False)
    uses = [pieces.kept(Outer(*each), torch.Size((8, 8))) for each in ((g, a), (g.float(), a.float()))]
    assert [isinstance(use.allowed.positions, torch.Tensor) for use in uses] == [False, True]
    (both,) = merged([uses[first], uses[1 - first]])
    assert torch.all(both.norms() > both.flat.float().norm(dim=1))


def test_layers_of_one_shape_share_a_launch():
    torch.manual_seed(0)
    several, weights = [], torch.tensor([0.5, 1.0, 0.0], device=DEVICE)
    for _ in range(2):
        several += [Outer(*factors(3, 5, 7, 9)), Outer(*factors(3, 6, 7, 9))]
        several.append(Rows(torch.randn(3, 11).to(HALF).to(DEVICE)))
    for found, piece in zip(norms_of(several), several, strict=True):
        torch.testing.assert_close(found, piece.norms(), rtol=1e-3, atol=0)
    for found, piece in zip(sums_of(several, weights), several, strict=True):
        torch.testing.assert_close(found.view(-1), piece.sum(weights).view(-1), rtol=1e-3, atol=1e-5)
