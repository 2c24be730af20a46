"""Norms are never below those of what is added, whatever cancels, and hardly above them where nothing does."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from quell.torch.clip_norms import Bound, Bounds, clip_factors
from quell.torch.clipping import sum_clipped
from quell.torch.engine import bounds, patches, pieces
from quell.torch.engine.bounds import full_precision, gram_norms, row_norms, token_norms
from quell.torch.engine.layers import LayerEngine
from quell.torch.engine.patches import Patches, Window
from quell.torch.engine.pieces import Outer, Rows, Stacked, Tokens
from quell.torch.engine.scales import Scale, scaled
from quell.torch.engine.together import Tied, merged, sums_of, whole_norms
from quell.torch.standardised import StandardisedConv2d

EXAMPLES = 40
PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


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


# Bounds


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4, 1e5, 1e7])
@pytest.mark.parametrize(("positions", "width", "out"), [(2, 16, 4), (16, 500, 300), (64, 16, 16)])
def test_norms_hold_where_positions_cancel(positions, width, out, size):
    g, a = cancelling(positions, width, out, size, 1.0)
    assert bool((gram_norms(g, a) >= real_norms(g, a) * (1 - 1e-6)).all())


def test_without_the_bound_norms_do_not_hold(monkeypatch):
    """The mutation: the norm as it is computed."""
    monkeypatch.setattr(bounds, "roundings", lambda *lengths: 0)
    g, a = cancelling(2, 16, 4, 1e5, 1.0)
    assert bool((gram_norms(g, a) < 0.1 * real_norms(g, a)).any())


def test_norms_hold_where_small_squares_are_rounded_away():
    """One large entry, and ten thousand whose squares vanish beside its own when added one after the other."""
    a = torch.full((1, 2, 10_000), 2e-4)
    a[:, :, 0] = 1.0
    a[:, 1, 0] = -1.0
    g = torch.ones(1, 2, 1)
    assert float(gram_norms(g, a)) >= float(real_norms(g, a)) * (1 - 1e-6)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("scale", [1e-25, 3e-24, 1e-21, 1.0, 1e15])
def test_norms_hold_where_squares_underflow(scale, positions):
    """Tiny gradients on huge inputs: their product is of ordinary size."""
    torch.manual_seed(0)
    g = torch.randn(EXAMPLES, positions, 5) * scale
    a = torch.randn(EXAMPLES, positions, 7) * min(1 / scale, 1e18)
    for found in (gram_norms(g, a), Outer(g, a).norms()):
        assert bool((found >= real_norms(g, a) * (1 - 1e-5)).all())


@pytest.mark.parametrize(("positions", "width", "out"), [(4, 16, 8), (128, 768, 768)])
def test_the_bound_is_hardly_above_the_norm_where_nothing_cancels(positions, width, out):
    torch.manual_seed(0)
    g, a = torch.randn(2, positions, out), torch.randn(2, positions, width)
    torch.testing.assert_close(gram_norms(g, a).double(), real_norms(g, a), rtol=5e-3, atol=0)


def test_tokens_that_cancel():
    torch.manual_seed(0)
    g = torch.randn(EXAMPLES, 6, 3) * 1e6
    g[:, 3:] = -g[:, :3]
    g += torch.randn_like(g)
    ids = torch.arange(6).remainder(3).expand(EXAMPLES, -1)
    real = (g[:, :3].double() + g[:, 3:].double()).flatten(1).norm(dim=1)
    found = token_norms(g, ids)
    assert bool((found >= real * (1 - 1e-6)).all())
    assert bool((found >= 1e-7 * g.norm(dim=2).sum(1)).all())  # what the sum may add by rounding another way


LOST = 0.99 * 2.0**-24  # added to 1 in float32, it is rounded away


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("every", [1 << 10, 1 << 14])
def test_norms_of_rows_whose_squares_are_rounded_away(every, dtype):
    """A 1 in each of the sums that a processor adds up side by side, and squares that are lost beside it."""
    rows = torch.full((2, 50_000), LOST**0.5)
    rows[:, torch.arange(50_000) % every < 8] = 1.0
    found, real = row_norms(rows.to(dtype)), rows.to(dtype).double().norm(dim=1)
    assert bool((found >= real * (1 - 5e-6)).all())


def test_norms_over_many_layers_whose_squares_are_rounded_away():
    layers = [[Rows(torch.ones(2, 1))], *([Rows(torch.full((2, 1), LOST**0.5))] for _ in range(1000))]
    assert bool((whole_norms(layers, 3.0) >= 3 * (1 + 1000 * LOST) ** 0.5 * (1 - 1e-6)).all())
    gradients = {str(name): rows.values for name, (rows,) in enumerate(layers)}
    ((norms, _),) = summed_up(gradients).measured[0]
    assert bool((norms >= (1 + 1000 * LOST) ** 0.5 * (1 - 1e-6)).all())


def summed_up(gradients, bound=1e6, micro_batch=10_000_000):
    """Of given per-example gradients, as `clipped_sum` and clipping="microbatch" do it."""
    params = {name: torch.zeros(values.shape[1:]) for name, values in gradients.items()}
    parts = zip(*(values.split(micro_batch) for values in gradients.values()), strict=True)
    return sum_clipped((dict(zip(gradients, part, strict=True)) for part in parts), params, Bounds.of(bound, params))


@pytest.mark.parametrize("bound", [0.5, "automatic", {"w": 0.5, "": "automatic"}], ids=str)
@pytest.mark.parametrize("examples", [5, 300])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_given_gradients_are_bounded_and_those_that_are_not_finite_count_as_zero(dtype, examples, bound):
    torch.manual_seed(0)
    sizes = 10.0 ** torch.randint(-8, 4, (examples,))
    gradients = {name: torch.randn(examples, *shape) for name, shape in (("w", (3, 4)), ("b", ()), ("long", (2000,)))}
    gradients = {n: (v * sizes.view(-1, *[1] * (v.dim() - 1))).to(dtype) for n, v in gradients.items()}
    alone = [summed_up({n: v[place : place + 1] for n, v in gradients.items()}, bound) for place in range(examples)]
    most = Bounds.of(bound, gradients).norm
    for one in alone:
        assert sum(total.double().square().sum() for total in one.sums.values()).sqrt() <= most
    for name, place, value in (("w", (0, 1, 2), torch.inf), ("b", (1,), torch.nan), ("long", (3, 7), -torch.inf)):
        gradients[name][place] = value
    for micro_batch in (2, 1000):
        found = summed_up(gradients, bound, micro_batch)
        assert sum(len(norms) for ((norms, _), *_) in found.measured) == examples
        for name, total in found.sums.items():
            spoiled = {0, 1, 3} if not isinstance(bound, dict) else {0} if name == "w" else {1, 3}  # groups apart
            right = sum(one.sums[name].double() for place, one in enumerate(alone) if place not in spoiled)
            torch.testing.assert_close(total.double(), right, rtol=1e-3, atol=1e-4 * most)


def test_tokens_that_come_thousands_of_times():
    """Between two gradients that cancel, thousands that are rounded away one by one."""
    g = torch.full((1, 4096, 1), LOST)
    g[:, 0], g[:, -1] = 1.0, -1.0
    assert float(token_norms(g, torch.zeros(1, 4096, dtype=torch.long))) >= float(g.double().sum())


@pytest.mark.parametrize("positions", [500, 4096])
@pytest.mark.parametrize("width", [1, 8])
def test_positions_that_are_all_rounded_up(positions, width):
    """The sum adds 1 and then numbers just above half of its last place, each of which becomes twice as much."""
    g = torch.full((1, positions, width), 1.02 * 2.0**-24)
    g[:, 0] = 1.0
    piece = Outer(g, torch.ones(1, positions, width))
    assert float(piece.sum(torch.ones(1)).double().norm()) <= float(piece.norms())


def test_tokens_of_one_unit_do_not_meet_those_of_another():
    torch.manual_seed(0)
    g, ids = torch.randn(EXAMPLES, 9, 4), torch.randint(0, 3, (EXAMPLES, 9))
    real = torch.zeros(EXAMPLES, 3, 4, dtype=torch.float64)
    for unit in range(EXAMPLES):
        real[unit].index_add_(0, ids[unit], g[unit].double())
    torch.testing.assert_close(token_norms(g, ids).double(), real.flatten(1).norm(dim=1), rtol=1e-4, atol=0)


def test_gram_matrices_are_added_up_in_short_sums(monkeypatch):
    monkeypatch.setattr(bounds, "CHUNK", 2)
    values, widths, product = torch.randn(3, 4, 7), [], torch.bmm
    expected = values @ values.transpose(1, 2)
    monkeypatch.setattr(bounds.torch, "bmm", lambda a, b: widths.append(a.shape[2]) or product(a, b))
    torch.testing.assert_close(bounds._gram(values), expected)
    assert widths == [2]
    assert bounds.roundings(7) == 2 + 4 + bounds.SUMMING


def test_factors_of_norms_that_are_not_finite_are_zero():
    factors = clip_factors(torch.tensor([float("nan"), float("inf"), 4.0, 0.5]), 1.0)
    torch.testing.assert_close(factors, torch.tensor([0.0, 0.0, 0.25, 1.0]), rtol=2e-5, atol=0)
    factors = clip_factors(torch.tensor([float("nan"), float("inf"), 3.99, 0.0]), Bound(1.0, True, frozenset()))
    torch.testing.assert_close(factors, torch.tensor([0.0, 0.0, 0.25, 100.0]), rtol=2e-5, atol=0)


# Pieces: what `sum` adds is never above what `norms` said


def numbers(kind, *shape, seed=0):
    """Numbers for g and a: plain, one unit far beyond the others, or entries far apart within a unit."""
    make = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=make)
    if kind == "outlier":
        values[1] *= 1e3
    if kind == "uneven":
        values *= 10.0 ** torch.randint(-4, 3, shape, generator=make)
    if kind == "cancelling" and shape[1] > 1:  # along the second dimension, positions or rows
        half = shape[1] // 2
        values[:, half : 2 * half] = values[:, :half] * (-1 if seed else 1) + 1e-3 * torch.randn(
            values[:, :half].shape, generator=make
        )
    if kind == "subnormal":
        values *= 1e-39 if seed else 1e25
    return values


def outer(kind, dtype, positions):
    g, a = numbers(kind, 5, positions, 6, seed=1).to(dtype), numbers(kind, 5, positions, 4).to(dtype)
    return Outer(g, a), torch.einsum("nti,ntj->nij", g.double(), a.double())


def convolution(kind, dtype, unit, padding=0, **options):
    """Units of several rows, whose gradients torch's own convolution makes."""
    layer = nn.Conv1d(4, 6, 3, groups=2, padding=padding, bias=False, **options).double()
    x, g = (numbers(kind, 4, 8, unit, 4 + 2 * seed, seed=seed).to(dtype) for seed in (0, 1))
    x, g = x.permute(0, 2, 3, 1), g.permute(0, 2, 3, 1)[..., : 6 + 2 * padding]
    real = [
        torch.autograd.grad(layer(rows), layer.weight, back)[0]
        for rows, back in zip(x.double(), g.double(), strict=True)
    ]
    return Patches(g, x, Window.of(layer), groups=2), torch.stack(real)


def embedding(kind, dtype, padding):
    g = numbers(kind, 5, 6, 4, seed=1).to(dtype)
    ids = torch.randint(0, 3, (5, 6), generator=torch.Generator().manual_seed(3))
    ids[:, 3:] = ids[:, :3]  # so that what cancels is the same token's
    real = torch.zeros(5, 3, 4, dtype=torch.float64)
    for unit in range(5):
        real[unit].index_add_(0, ids[unit], g[unit].double())
    if padding >= 0:
        real[:, padding] = 0
    return Tokens(g, ids, 3, padding), real


def stacked(kind, dtype):
    made = [outer(kind, dtype, 4) for _ in range(3)]
    return Stacked([piece for piece, _ in made]), torch.stack([real for _, real in made], 1)


def tied(kind, dtype, positions):
    """An embedding of three words that is the output layer too."""
    tokens, real = embedding(kind, dtype, -1)
    g, a = numbers(kind, 5, positions, 3, seed=1).to(dtype), numbers(kind, 5, positions, 4).to(dtype)
    return Tied(tokens, Outer(g, a)), real + torch.einsum("nti,ntj->nij", g.double(), a.double())


def rows(kind, dtype):
    values = numbers(kind, 5, 8, 3).to(dtype)
    return Rows(values), values.double()


PIECES = {
    "rows": rows,
    "one position": partial(outer, positions=1),
    "positions": partial(outer, positions=6),
    "tokens": partial(embedding, padding=-1),
    "padded tokens": partial(embedding, padding=1),
    "patches": partial(convolution, unit=1),
    "patches of three rows": partial(convolution, unit=3),
    "patches around the edge": partial(convolution, unit=1, padding=1, padding_mode="circular"),
    "stacked": stacked,
    "tied": partial(tied, positions=6),
    "tied, one position": partial(tied, positions=1),
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "outlier", "uneven", "cancelling", "subnormal"])
@pytest.mark.parametrize("make", PIECES.values(), ids=PIECES)
def test_a_piece_adds_no_more_than_its_norms_say(make, kind, dtype):
    piece, real = make(kind, dtype)
    with torch.no_grad(), full_precision():
        norms = piece.norms().double()
        if not bool(torch.isfinite(norms).all()):
            return  # counts as zero
        real = real.flatten(1)
        size = real.norm(dim=1)
        for unit in range(piece.units):
            for weight in (1.0, 1 / 3, 0.6, 1e-3, 70.0):
                weights = torch.zeros(piece.units)
                weights[unit] = weight
                added = piece.sum(weights).double().flatten()
                allowed = float(weights.double()[unit] * norms[unit]) * (1 + 1e-5)
                assert float(added.norm()) <= allowed + 1e-18  # squares of less are lost, and do not matter
                coarse = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
                if kind in ("plain", "outlier"):
                    assert float((added - weight * real[unit]).norm()) <= coarse * weight * float(size[unit])
    if kind in ("plain", "outlier"):
        torch.testing.assert_close(norms, size, rtol=2e-2 if dtype == torch.bfloat16 else 3e-3, atol=0)


@pytest.mark.parametrize("make", PIECES.values(), ids=PIECES)
def test_a_normalised_unit_adds_no_more_than_its_bound(make):
    """Automatic clipping multiplies small gradients by more than 1, and what is added stays below the bound."""
    bound = Bound(1.0, True, frozenset())
    for dtype in PRECISIONS:
        for kind in ("plain", "outlier", "uneven", "cancelling", "subnormal"):
            piece, _ = make(kind, dtype)
            with torch.no_grad(), full_precision():
                factors = clip_factors(piece.norms() * (1 + 1e-5), bound)
                for unit in range(piece.units):
                    weights = torch.where(torch.arange(piece.units) == unit, factors, 0.0)
                    assert float(piece.sum(weights).double().norm()) <= 1.0


@pytest.mark.parametrize("make", PIECES.values(), ids=PIECES)
def test_a_scaled_piece_is_that_of_scaled_gradients(make):
    """Every entry times a scale of its own, and no more than the norms say."""
    torch.manual_seed(0)
    for dtype in PRECISIONS:
        for kind in ("plain", "cancelling"):
            piece, real = make(kind, dtype)
            real = real.flatten(1, 2) if make is stacked else real.flatten(2)
            scale = Scale(*(torch.randn(size).exp() for size in real.shape[1:]))
            right = (real * torch.outer(scale.rows, scale.columns)).flatten(1)
            with torch.no_grad(), full_precision():
                found = scaled(piece, scale)
                assert found.units == piece.units
                norms = found.norms().double()
                coarse = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 1e-5)
                for unit in range(piece.units):
                    added = found.sum((torch.arange(piece.units) == unit).float()).double().flatten()
                    assert float(added.norm()) <= float(norms[unit]) * (1 + 1e-5)
                    if kind == "plain":
                        assert float((added - right[unit]).norm()) <= coarse * float(right[unit].norm())
                if kind == "plain":
                    allowed = max(coarse, 3e-3) + torch.finfo(dtype).eps  # and what the bound allows for
                    torch.testing.assert_close(norms, right.norm(dim=1), rtol=allowed, atol=0)
                total = found.sum(torch.ones(piece.units)).flatten()
                undone = total.clone()
                scale.undo_(undone)
                torch.testing.assert_close(undone * scale.entries.to(undone.dtype), total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("positions", [1, 2])
def test_the_smallest_numbers_of_a_precision(dtype, positions):
    """A factor of 0.6 takes nothing from the smallest number there is, where their product is rounded to be one."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    g = torch.full((1, positions, 4), smallest, dtype=dtype)
    a = torch.full((1, positions, 4), min(torch.finfo(dtype).max, 2.0**58) / 2, dtype=dtype)
    piece, bound = Outer(g, a), 0.6 * float(real_norms(g, a))
    added = piece.sum(clip_factors(piece.norms() * (1 + 1e-5), bound))
    assert float(added.double().norm()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("bound", [Bound(1.0, False, frozenset()), 1e-6, Bound(1.0, True, frozenset())], ids=str)
def test_huge_factors_do_not_lift_weighted_gradients_that_are_rounded(dtype, positions, bound):
    """Weighted gradients below 1e-38 have few digits, and an input of 1e38 makes what rounding added ordinary."""
    most = bound if isinstance(bound, float) else bound.norm
    added = []
    for gradient in (-149.0, -140.0, -133.0, -120.0, -13.0, 50.0, 56.0):
        for size in np.arange(20.0, 127.9, 0.7):
            g = torch.full((1, positions, 1024), 2.0**gradient, dtype=dtype)
            piece = Outer(g, torch.full((1, positions, 64), 2.0**size, dtype=dtype))
            added.append(float(piece.sum(clip_factors(piece.norms(), bound)).double().norm()))
    assert 0.99 * most < max(added) <= most


@pytest.mark.parametrize("make", [rows, partial(outer, positions=1), partial(outer, positions=6), stacked])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_unit_of_weight_zero_adds_nothing(make, dtype):
    piece, real = make("plain", dtype)
    values = [piece.values] if isinstance(piece, Rows) else [p.g for p in getattr(piece, "parts", [piece])]
    for value in values:
        value[2] = float("nan")
    spoiled = torch.arange(piece.units) == 2
    expected = real[~spoiled].flatten(1).sum(0)
    found = piece.sum((~spoiled).float()).double().flatten()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2 if dtype.itemsize == 2 else 1e-5)


def test_pieces_of_one_parameter_are_measured_together_or_added():
    """Two calls of a layer whose gradients cancel: exactly measured where that is possible, never below."""
    torch.manual_seed(0)
    g, a, words = torch.randn(5, 3, 6), torch.randn(5, 3, 4), torch.randint(0, 7, (5, 3))
    turned = Rows(-torch.einsum("nti,ntj->nij", g, a))
    looked_up = Tokens(g, words, 7, -1), Tokens(-g, words, 7, -1)
    for parts in ([Outer(g, a), Outer(-g, a)], [Rows(g), Rows(-g)], [Outer(g, a), turned], [*looked_up]):
        (one,) = merged(parts)
        assert float(one.sum(torch.ones(5)).norm()) <= 1e-4
        assert float(one.norms().max()) <= 0.05 * float(parts[0].norms().max())
    padded = merged([Tokens(g, words, 7, 2), looked_up[1]])[0].sum(torch.ones(5))
    assert {int(word) for word in padded.view(7, 6).norm(dim=1).gt(1e-3).nonzero()} == {2}
    apart = [Outer(g, a), SimpleNamespace(units=5)]  # of another kind
    assert merged(apart) == apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-3, 1.0])
def test_an_embedding_that_is_the_output_layer_is_measured_exactly(rest, dtype):
    """What the outputs add undoes what the tokens add, up to a rest: far below the sum of their norms, never below."""
    torch.manual_seed(0)
    g, ids = torch.randn(5, 9, 6).to(dtype), torch.randint(0, 7, (5, 9))
    words = -nn.functional.one_hot(ids, 7).to(dtype)
    a = (g.float() + rest * torch.randn(5, 9, 6)).to(dtype)
    dense = torch.zeros(5, 7, 6, dtype=torch.float64)
    for unit in range(5):
        dense[unit].index_add_(0, ids[unit], g[unit].double())
    real = (dense + torch.einsum("nti,ntj->nij", words.double(), a.double())).flatten(1)
    halves = slice(0, 4), slice(4, 9)  # two calls of each
    tokens = [Tokens(g[:, half], ids[:, half], 7, -1) for half in halves]
    (one,) = merged([*tokens, *(Outer(words[:, half], a[:, half]) for half in halves)])
    assert isinstance(one, Tied)
    norms = one.norms().double()
    assert bool((norms >= real.norm(dim=1)).all())
    assert bool((norms <= 1.02 * real.norm(dim=1) + 2e-2 * (one.tokens.norms() + one.outer.norms())).all())
    for unit in range(5):
        added = one.sum((torch.arange(5) == unit).float()).double()
        assert float(added.norm()) <= float(norms[unit])
        torch.testing.assert_close(added, real[unit], rtol=0, atol=1e-5)
    (small,) = merged([Tokens(g, ids, 7, -1), Rows(torch.einsum("nti,ntj->nij", words.float(), a.float()))])
    torch.testing.assert_close(small.values.double(), real, rtol=0, atol=1e-5)


def test_a_convolution_that_is_used_twice_is_measured_exactly():
    """One use undoes the other, up to a rest."""
    torch.manual_seed(0)
    window, x = Window.of(nn.Conv2d(3, 4, 3, padding=1)), torch.randn(5, 1, 3, 6, 6)
    g, rest = torch.randn(5, 1, 4, 6, 6), 1e-2 * torch.randn(5, 1, 4, 6, 6)
    uses = [Patches(g, x, window, 1), Patches(rest - g, x, window, 1)]
    (one,) = merged(uses)
    torch.testing.assert_close(one.norms(), Patches(rest, x, window, 1).norms(), rtol=1e-3, atol=0)
    torch.testing.assert_close(one.sum(torch.ones(5)), sum(use.sum(torch.ones(5)) for use in uses), rtol=0, atol=1e-3)
    smaller = Patches(g[..., :4], x[..., :4], window, 1)
    wider = Patches(g, x, Window.of(nn.Conv2d(3, 4, 3, padding=2, dilation=2)), 1)
    scaled_after = Patches(g, x, window, 1, through=lambda made: 2 * made)
    for other in (smaller, wider, scaled_after):
        assert merged([uses[0], other]) == [uses[0], other]


def test_tied_norms_that_overflow_are_no_smaller():
    """The inner product is unknown there, and the norms are added."""
    g, ids = torch.full((1, 2, 4), 1e17), torch.zeros(1, 2, dtype=torch.long)
    piece = Tied(Tokens(g, ids, 3, -1), Outer(torch.full((1, 1, 3), -1e17), torch.full((1, 1, 4), 1e17)))
    apart = piece.tokens.norms() + piece.outer.norms()
    assert torch.isfinite(apart)
    torch.testing.assert_close(piece.norms(), apart)


@pytest.mark.parametrize("channels", [3, 40])
def test_convolutions_are_measured_a_few_examples_at_a_time(monkeypatch, channels):
    torch.manual_seed(0)
    layer, x, g = nn.Conv2d(channels, 4, 3, padding=1), torch.randn(7, 1, channels, 5, 5), torch.randn(7, 1, 4, 5, 5)
    asked, unfold = [], Window.unfold

    def watched(window, x):
        asked.append(len(x))
        return unfold(window, x)

    monkeypatch.setattr(Window, "unfold", watched)
    piece, weights = Patches(g, x, Window.of(layer), groups=1), torch.rand(7)
    norms, total = piece.norms(), piece.sum(weights)
    assert asked == [7, 7]
    monkeypatch.setattr(pieces, "_IN_CACHE", 2 * 9 * channels * 25)
    asked.clear()
    torch.testing.assert_close(piece.norms(), norms)
    torch.testing.assert_close(piece.sum(weights).float(), total)
    assert asked == [2, 2, 2, 1] * 2


def test_a_unit_hardly_changes_how_others_round():
    """A unit lifts the sum over a power of two, after which float32 rounds 4,096 others up instead of down."""
    large, tiny = torch.full((8192, 1), 0.5), torch.full((4096, 1), 0.51 * 2.0**-11)
    for unit in (1.0, 0.0):
        values = torch.cat([large, torch.tensor([[unit]]), tiny]).float()
        right = float(values.double().sum())
        pieces = [Rows(values), Outer(values.unsqueeze(1), torch.ones(len(values), 1, 1)), _one_pixel(values)]
        found = [*sums_of(pieces, torch.ones(len(values))), summed_up({"w": values}).sums["w"]]
        assert all(abs(float(each) - right) < 1e-3 for each in found)


def _one_pixel(values):
    """The same numbers as gradients of a convolution."""
    window = Window.of(nn.Conv2d(1, 1, 1))
    return Patches(values.view(-1, 1, 1, 1, 1), torch.ones(len(values), 1, 1, 1, 1), window, 1)


@pytest.mark.parametrize("physical", [None, 100])
def test_sums_of_many_units_and_parts_are_those_of_float64(physical):
    torch.manual_seed(0)
    x = torch.randn(300, 5)
    model = nn.Linear(5, 3)
    engine = LayerEngine(model, dict(model.named_parameters()), 0.7, "sum")
    for part in x.split(physical or 300):
        model(part).square().sum().backward()
        engine.flush()
    _, sums = engine.collect()
    right = torch.zeros(3, 5, dtype=torch.float64)
    for row in x:
        out = 2 * (model.weight.detach() @ row + model.bias.detach()).double()
        gradient = torch.cat([torch.outer(out, row.double()).flatten(), out])
        right += (gradient * min(1.0, 0.7 / float(gradient.norm())))[:15].view(3, 5)
    assert sums[0].dtype == torch.float32
    torch.testing.assert_close(sums[0].double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("numbers", [3 * 27 * 25, 200 * 27 * 25, 1 << 24])
def test_sums_of_convolutions_are_made_of_the_products_that_were_measured(monkeypatch, numbers):
    """Products of other sizes could be rounded otherwise, so both cut the units in the same places."""
    monkeypatch.setattr(pieces, "_IN_CACHE", numbers)
    made, unfold = [], Window.unfold
    monkeypatch.setattr(
        Window, "unfold", lambda window, x: (made.append((x.storage_offset(), len(x))), unfold(window, x))[1]
    )
    piece = Patches(
        torch.randn(300, 1, 4, 5, 5), torch.randn(300, 1, 3, 5, 5), Window.of(nn.Conv2d(3, 4, 3, padding=1)), 1
    )
    piece.norms()
    measured = made.copy()
    made.clear()
    sums_of([piece], torch.ones(300))
    assert made == measured


# In the engine


def test_clipping_is_in_full_precision_and_leaves_the_settings(monkeypatch):
    """TF32 and bfloat16 products are thousands of times coarser than what the bounds allow for."""
    matmul, convolution = torch.backends.mkldnn.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    seen = []

    def spying(plain):
        def spy(*arguments):
            seen.append((matmul.fp32_precision, convolution.fp32_precision, torch.backends.cuda.matmul.fp32_precision))
            return plain(*arguments)

        return spy

    for method in ("norms", "sum"):
        monkeypatch.setattr(Outer, method, spying(getattr(Outer, method)))
    model = nn.Sequential(nn.Linear(3, 2))
    engine = LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
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


def test_a_tied_embedding_with_one_position_in_bfloat16_is_clipped_to_its_bound():
    """The sum rounds the weight and then the product; both are allowed for."""
    random, longest = torch.Generator().manual_seed(0), 0.0
    for _ in range(300):
        level, height, ratio, scale = torch.rand(4, generator=random).tolist()
        a = torch.full((1, 1, 8), 0.5 + level, dtype=torch.bfloat16)
        h = torch.zeros(1, 1, 4, dtype=torch.bfloat16)
        h[0, 0, 2] = (1 + height) * (1 + 4 * scale)
        g = (a.float() * h[0, 0, 2].float() * (0.5 + ratio)).bfloat16()
        piece = Tied(Tokens(g, torch.tensor([[2]]), 4, -1), Outer(h, a))
        factors = clip_factors(whole_norms([[piece]]), Bound(1.0, False, frozenset()))
        longest = max(longest, float(piece.sum(factors).double().norm()))
    assert 0.99 < longest <= 1.0


def test_scales_merge_no_standardised_convolution_with_a_plain_one(monkeypatch):
    monkeypatch.setattr(patches, "_ROOM", 0)  # so that gradients are made anew each time, as those of large layers

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = StandardisedConv2d(4, 4, 3, padding=1, bias=False)
            self.b = nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return (self.a(x).tanh() + self.b(x).tanh()).flatten(1).sum(1)

    torch.manual_seed(0)
    model, x = Network(), torch.randn(4, 4, 3, 3)
    engine = LayerEngine(model, dict(model.named_parameters()), 1e6, "sum")
    engine.scales = {"a.weight": Scale(torch.ones(4), torch.ones(36))}
    model(x).sum().backward()
    ((found,),) = engine.collect()[1:]
    (right,) = engine.unwatched(lambda: torch.autograd.grad(model(x).sum(), [model.a.weight]))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
