"""How long the longest example of a batch is changes no one else's norm, where padding counts for nothing.

It decides how many positions a layer sees, whether per-unit gradients are kept, and what rounding is allowed for.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from quell.torch.engine.layers import LayerEngine
from quell.torch.engine.pieces import Outer, Rows, kept
from quell.torch.engine.scales import Scale
from quell.torch.engine.together import gathered, merged, norms_of

WIDTH, WORDS, OWN = 24, 40, 9  # a weight of WIDTH² numbers is kept from WIDTH/2 positions on


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, words, lengths):
        return self.layer(torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0))[words])


class Twice(Line):
    """One weight for two uses, of which the second is short."""

    def forward(self, words, lengths):
        out = super().forward(words, lengths)
        return out + self.layer(out[:, :2].tanh()).sum(1, keepdim=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words, lengths):
        return self.head(self.embedding(words).tanh())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(WORDS, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, words, lengths):
        x = self.embedding(words)
        return self.layer(x, x, x, torch.arange(words.shape[1]) >= lengths[:, None], need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


def norms(kind, longest, scaled=False):
    """Of the gradients of three examples beside one of this length, or of what they are as AdamW scales them."""
    torch.manual_seed(0)
    model = kind()
    words = torch.zeros(4, longest, dtype=torch.long)  # word 0 is padding, and a word
    words[:3, :OWN], words[3] = torch.randint(0, 5, (3, OWN)), 1
    lengths = torch.tensor([OWN] * 3 + [longest])
    engine = LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
    if scaled:
        shapes = {name: p.reshape(len(p), -1).shape for name, p in model.named_parameters()}
        few = torch.tensor([0])  # entries that have moved hardly at all
        scale = {name: [torch.ones(size).index_fill(0, few, 30.0) for size in shape] for name, shape in shapes.items()}
        engine.scales = {name: Scale(*both) for name, both in scale.items()}
    engine.keeps_norms = True
    out = model(words, lengths)
    inside = torch.arange(longest) < lengths[:, None]
    (out * inside.unsqueeze(-1) * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    engine.collect()
    return engine.take_norms()[0][:3, 0].double()


@pytest.mark.parametrize("longest", [OWN + 4, 4 * OWN, 600])
@pytest.mark.parametrize("kind", [Line, Twice, Tied, Attention, Recurrent])
@pytest.mark.parametrize("scaled", [False, True])
def test_one_long_example(kind, longest, scaled):
    torch.testing.assert_close(norms(kind, longest, scaled), norms(kind, OWN, scaled), rtol=4e-6, atol=0)


def padded(values, longest):
    return torch.cat([values, values.new_zeros(len(values), longest - values.shape[1], values.shape[2])], dim=1)


@pytest.mark.parametrize("longest", [OWN + 4, 600])
def test_gradients_that_are_kept_have_the_norms_of_those_that_are_not(longest):
    """Of many positions that cancel, where most of the norm is what is allowed for."""
    make = torch.Generator().manual_seed(1)
    g, a = (torch.randn(3, OWN, WIDTH, generator=make) for _ in range(2))
    g[:, 1::2], a[:, 1::2] = -g[:, :-1:2], a[:, :-1:2] + 1e-3
    short, long = (kept(Outer(padded(g, n), padded(a, n)), torch.Size((WIDTH, WIDTH))) for n in (OWN, longest))
    assert isinstance(short, Outer)
    assert isinstance(long, Rows)
    close = torch.testing.assert_close
    close(long.norms(), short.norms(), rtol=1e-5, atol=0)
    close(long.of(slice(1, 3)).norms(), short.norms()[1:], rtol=1e-5, atol=0)
    bias = Rows(g.sum(1))
    assert ("weight", "bias") not in gathered({"weight": [long], "bias": [bias]})
    close(torch.stack(norms_of([long, bias])), torch.stack([short.norms(), bias.norms()]), rtol=1e-5, atol=0)
    close(merged([long, long])[0].norms(), merged([short, short])[0].norms(), rtol=1e-5, atol=0)
