"""Every layer and option has the per-example gradients of autograd, whatever route they take."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from quell.errors import QuellError
from quell.torch.clip_norms import clip_factors
from quell.torch.engine.layers import LayerEngine
from quell.torch.engine.microbatch import MicrobatchEngine
from quell.torch.standardised import StandardisedConv2d


def numbers(*shape):
    return lambda: torch.randn(shape)


def tokens(*shape):
    return lambda: torch.randint(0, 5, shape)


class First(nn.Module):
    """The first output of a layer that has several, on one input or as many as it takes."""

    def __init__(self, layer, inputs=1) -> None:
        super().__init__()
        self.layer, self.inputs = layer, inputs

    def forward(self, x):
        return self.layer(*[x] * self.inputs)[0]


class Crossed(nn.Module):
    """Attention whose queries and keys differ, with masks, positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2)

    def forward(self, x):
        x = x.transpose(0, 1)
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        padding = torch.zeros(x.shape[1], 5, dtype=torch.bool)
        padding[:, 4] = True
        return self.layer(x, x.flip(0), x.square(), padding, attn_mask=mask)[0].transpose(0, 1)


class Whole(nn.Module):
    """A model with parameters of its own beside its layers, as vision transformers have."""

    def __init__(self, repeats=False) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(1, 6, 6))
        self.layer, self.repeats = nn.Linear(6, 6), repeats

    def forward(self, x):
        token = self.token.repeat(len(x), 1, 1) if self.repeats else self.token.expand(len(x), -1, -1)
        return self.layer(torch.cat([token, x], dim=1) + self.places)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x * self.scale


class Block(nn.Module):
    """As torchvision's ConvNeXt: a scale beside layers with rules."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 1, 1))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4))

    def forward(self, x):
        return x + self.scale * self.block(x)


class Pairs(nn.Module):
    """An encoder that sees two sentences of each example, of different lengths, as sentence-transformers have it."""

    def __init__(self):
        super().__init__()
        self.words, self.mixed = nn.Embedding(5, 6, padding_idx=0), nn.Linear(6, 4)

    def encoded(self, tokens):
        held = (tokens > 0).float().unsqueeze(-1)
        return (self.mixed(self.words(tokens)) * held).sum(1) / held.sum(1).clamp(min=1)

    def forward(self, x):
        return nn.functional.cosine_similarity(self.encoded(x[:, :3]), self.encoded(x[:, 3:]))[:, None]


class Positions(nn.Module):
    """One row of position numbers for all examples."""

    def __init__(self, flat) -> None:
        super().__init__()
        self.words, self.places, self.flat = nn.Embedding(5, 3), nn.Embedding(4, 3), flat

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return self.words(x) + self.places(places if self.flat else places[None])


class Twice(nn.Module):
    """A layer used twice, and an embedding that is the output layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class HuggingFaceLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.layer = Conv1D(3, 6)

    def forward(self, x):
        return self.layer(x)


def llama_norm():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(6, eps=0.1)


def convolutions(**options):
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    settings = {"kernel_size": 3, **options}
    return [(lambda k=kind: k(4, 4, **settings), numbers(4, 4, *[6] * d)) for d, kind in enumerate(kinds, 1)]


LAYERS = [
    *convolutions(padding=1),
    *convolutions(stride=2, dilation=2, padding=2, groups=2),
    *convolutions(padding="same", kernel_size=4),
    *convolutions(padding="valid", padding_mode="circular", bias=False),
    *convolutions(padding=1, padding_mode="circular"),
    *convolutions(padding="same", padding_mode="reflect"),
    *convolutions(padding=1, padding_mode="replicate"),
    (lambda: nn.Conv2d(4, 4, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(1, 2)), numbers(4, 4, 7, 6)),
    (lambda: StandardisedConv2d(4, 6, 3, groups=2, stride=2), numbers(4, 4, 7, 7)),
    (lambda: StandardisedConv2d(40, 40, 3), numbers(4, 40, 4, 4)),
    (lambda: nn.Conv2d(40, 40, 3), numbers(4, 40, 4, 4)),  # few places: patches are unfolded again for the sum
    (lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1), numbers(4, 4, 5, 5)),
    *[(lambda: nn.Linear(6, 3), numbers(*shape)) for shape in ((4, 6), (4, 5, 6), (4, 2, 5, 6))],
    (lambda: nn.Linear(300, 200), numbers(4, 5, 300)),  # Gram matrices in several parts
    (HuggingFaceLinear, numbers(4, 5, 6)),
    *[(lambda: nn.Embedding(5, 3, padding_idx=1), tokens(*shape)) for shape in ((4,), (4, 6), (4, 2, 3))],
    (lambda: nn.EmbeddingBag(5, 3, mode="sum"), tokens(4, 6)),
    (lambda: Positions(flat=True), tokens(5, 4)),
    (lambda: Positions(flat=False), tokens(4, 4)),
    (lambda: nn.LayerNorm(6), numbers(4, 2, 3, 6)),
    (lambda: nn.LayerNorm((3, 6)), numbers(4, 2, 3, 6)),
    (lambda: nn.LayerNorm(6, bias=False), numbers(4, 6)),
    (lambda: nn.GroupNorm(2, 4), numbers(4, 4, 5, 5)),
    (lambda: nn.InstanceNorm2d(4, affine=True), numbers(4, 4, 5, 5)),
    (lambda: nn.RMSNorm(6, eps=0.1), numbers(4, 5, 6)),
    (llama_norm, numbers(4, 5, 6)),
    (lambda: nn.PReLU(4), numbers(4, 4, 5)),
    (Scaled, numbers(4, 5, 6)),
    (Block, numbers(4, 4, 5, 5)),
    (Pairs, tokens(4, 14)),
    (Whole, numbers(4, 5, 6)),
    (lambda: Whole(repeats=True), numbers(4, 5, 6)),
    (Twice, numbers(4, 5, 6)),
    (Twice, numbers(4, 6)),
    (lambda: First(nn.MultiheadAttention(6, 2, batch_first=True), inputs=3), numbers(4, 5, 6)),
    (Crossed, numbers(5, 5, 6)),
    (lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True), numbers(4, 5, 6)),
    (lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True, norm_first=True), numbers(4, 5, 6)),
    *[(lambda k=kind: First(k(6, 3, batch_first=True)), numbers(4, 5, 6)) for kind in (nn.RNN, nn.LSTM, nn.GRU)],
    (lambda: First(nn.LSTM(6, 3, 2, batch_first=True, bidirectional=True)), numbers(4, 5, 6)),
    (lambda: First(nn.GRU(6, 3, 2, batch_first=True, bidirectional=True)), numbers(4, 5, 6)),
    (lambda: nn.GRUCell(6, 3), numbers(4, 6)),
    (lambda: First(nn.LSTMCell(6, 3)), numbers(4, 6)),
]


def named(case):
    return type(case).__name__


def alone_gradients(model, x, weights, unit=1):
    found = []
    for i in range(0, len(x), unit):
        loss = (model(x[i : i + unit]) * weights[i : i + unit]).sum() / unit
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    return found


def clipped(alone):
    """Clipped at the second smallest norm: a gradient, or a norm, that is wrong for one example shows in the sum."""
    norms = [torch.sqrt(sum(part.double().square().sum() for part in gradient)) for gradient in alone]
    bound = float(sorted(norms)[1])
    return bound, [
        sum(part * min(1.0, bound / float(norm)) for part, norm in zip(column, norms, strict=True))
        for column in zip(*alone, strict=True)
    ]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize(("make", "inputs"), LAYERS)
def test_layers_have_the_gradients_of_autograd(make, inputs, unit):
    torch.manual_seed(0)
    model, x = nn.Sequential(make()), inputs()
    x = torch.cat([x, x.flip(0).clone() if x.dtype == torch.int64 else 2 * x.flip(0)])[: len(x) // unit * unit * unit]
    weights = torch.randn_like(model(x))
    bound, expected = clipped(alone_gradients(model, x, weights, unit))
    model = copy.deepcopy(model)
    engine = LayerEngine(model, dict(model.named_parameters()), bound, "sum", unit)
    (model(x) * weights).sum().backward()
    seen, sums = engine.collect()
    assert seen == len(x) // unit
    for found, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4 * bound)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("instead", ["zeros", "another"])
@pytest.mark.parametrize(("make", "inputs"), LAYERS)
def test_presence_changes_nobody_elses_bits(make, inputs, instead):
    """With other numbers in one example's row, the norms, factors and sums of the others are bitwise the same."""
    torch.manual_seed(0)
    x, gone = inputs(), 1
    replaced = x.clone()
    replaced[gone] = 0 if instead == "zeros" else x[2]
    found = []
    for rows in (x, replaced):
        torch.manual_seed(0)
        model = nn.Sequential(make())
        engine = LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
        output = model(rows)
        (output * torch.linspace(1, 2, output.numel()).view(output.shape)).sum().backward()
        pieces, units = engine.pieces_of(engine.take_finished()[0])
        engine.clipped(pieces, units, units)
        ((norms, bound),) = engine.measured
        others = torch.arange(units) != gone
        factors = clip_factors(norms, bound)
        sums = _weighted(engine, pieces, factors * others)  # made of all rows, of which one counts for nothing
        own = _weighted(engine, pieces, (~others).float())
        found.append(((norms[others], factors[others], sums), own))
    (seen, own), (seen_now, own_now) = found
    torch.testing.assert_close(seen, seen_now, rtol=0, atol=0)
    assert any(not torch.equal(own[name], own_now[name]) for name in own)  # it is another example


OPTIONS = {
    "kdim and vdim": {"kdim": 4, "vdim": 5},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
}


class Attended(nn.Module):
    """Attention with keys and values of other widths than the queries, if it has options for that."""

    def __init__(self, **options):
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x, x[..., : self.layer.kdim].square(), x[..., : self.layer.vdim])[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_attention_with_options_goes_by_micro_batches(options):
    torch.manual_seed(0)
    model, x = Attended(**options).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    weights = torch.randn_like(model(x))
    alone = alone_gradients(model, x, weights)
    bound, expected = clipped(alone)
    refused, made = copy.deepcopy(model), copy.deepcopy(model)
    engine = MicrobatchEngine(made, dict(made.named_parameters()), bound, "sum", 3)
    engine.keeps_norms = True
    (made(x) * weights).sum().backward()
    seen, sums = engine.collect()
    assert seen == 4
    norms = torch.stack([torch.cat([part.flatten() for part in gradient]).norm() for gradient in alone])
    torch.testing.assert_close(torch.cat(engine.take_norms())[:, 0].double(), norms, rtol=1e-6, atol=0)
    for found, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-4 * bound)
    LayerEngine(refused, dict(refused.named_parameters()), 1.0, "sum")
    with pytest.raises(QuellError, match=r"layer \(MultiheadAttention\) has kdim, vdim, add_bias_kv.*microbatch"):
        refused(x)


def test_a_projected_lstm_is_refused():
    """Also by micro-batches: vmap has no rule for nn.LSTM."""
    model = First(nn.LSTM(6, 4, proj_size=2, batch_first=True))
    LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
    with pytest.raises(QuellError, match=r"layer \(LSTM\) has proj_size: use an LSTM without it"):
        model(torch.randn(4, 5, 6))


def test_positions_that_might_be_tokens_are_refused_unless_they_were_seen_to_be_positions():
    """torch.arange(4) in a batch of four: one row for all examples, or one token of each?"""
    model = Positions(flat=True)
    LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
    with pytest.raises(QuellError, match=r"places \(Embedding\) is given the numbers 0 to 3 in a batch of 4 rows"):
        model(torch.zeros(4, 4, dtype=torch.int64))
    model(torch.zeros(3, 4, dtype=torch.int64))
    assert model(torch.zeros(4, 4, dtype=torch.int64)).shape == (4, 4, 3)


class Dropped(nn.Module):
    """A layer that the engine writes out, with dropout inside, and after it by a function."""

    def __init__(self, layer, inputs=1):
        super().__init__()
        self.layer, self.inputs = layer, inputs

    def forward(self, x):
        found = self.layer(*[x] * self.inputs)
        return nn.functional.dropout(found[0] if isinstance(found, tuple) else found, 0.3, self.training)


def test_attention_that_is_causal_needs_the_mask_also_beside_one_for_padding():
    """torch refuses it too: a padding mask alone would let tokens see later ones."""

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x):
            padding = torch.zeros(x.shape[:2], dtype=torch.bool)
            return self.layer(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=False)[0]

    model = Causal()
    LayerEngine(model, dict(model.named_parameters()), 1.0, "mean")
    with pytest.raises(QuellError, match="needs its attn_mask too"):
        model(torch.randn(4, 5, 6))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dropped(nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True), inputs=3),
        lambda: Dropped(nn.TransformerEncoderLayer(6, 2, 12, 0.3, batch_first=True)),
        lambda: Dropped(nn.LSTM(6, 3, 2, dropout=0.3, batch_first=True)),
        lambda: Dropped(nn.GRU(6, 3, 2, dropout=0.3, batch_first=True, bidirectional=True)),
    ],
)
def test_dropout_around_written_out_layers_passes_the_look_at_the_first_batch(make):
    torch.manual_seed(0)
    model = make()
    shares = [(m, m.dropout) for m in model.modules() if isinstance(m, (nn.RNNBase, nn.MultiheadAttention))]
    engine = LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
    model(torch.randn(4, 5, 6)).square().sum().backward()
    assert engine.collect()[0] == 4
    assert all(module.dropout == share == 0.3 for module, share in shares)


def _weighted(engine, pieces, weights):
    from quell.torch.engine.together import sums_of

    made = iter(sums_of([piece for parts in pieces.values() for piece in parts], weights))
    sums = {}
    for names, parts in pieces.items():
        whole = sum(next(made) for _ in parts).float()
        sizes = [engine.params[name].numel() for name in names]
        sums |= {n: t.view(engine.params[n].shape) for n, t in zip(names, whole.split(sizes), strict=True)}
    return sums
