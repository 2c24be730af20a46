"""Every layer and option that flat and ghost clipping take has the per-example gradients of autograd, or is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import nn

from quell.errors import QuellError
from quell.torch.flat import FlatEngine
from quell.torch.ghost import GhostEngine

ENGINES = {"flat": FlatEngine, "ghost": GhostEngine}


def numbers(*shape):
    return lambda: torch.randn(shape)


def tokens(*shape):
    return lambda: torch.randint(0, 5, shape)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = DPLSTM(6, 3, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.cells(x)[0]


class Attention(nn.Module):
    def __init__(self, batch_first) -> None:
        super().__init__()
        self.heads = DPMultiheadAttention(6, 2, batch_first=batch_first)

    def forward(self, x):
        return self.heads(x, x, x)[0]


def convolutions(**options):
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    settings = {"kernel_size": 3, **options}
    return [(lambda k=kind: k(4, 4, **settings), numbers(4, 4, *[6] * d)) for d, kind in enumerate(kinds, 1)]


MEASURED = [
    *convolutions(padding=1),
    *convolutions(stride=2, dilation=2, padding=2, groups=2),
    *convolutions(padding="same", kernel_size=4),
    *convolutions(padding="valid", padding_mode="circular", bias=False),
    (lambda: nn.Conv2d(4, 4, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(1, 2)), numbers(4, 4, 7, 6)),
    (lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1), numbers(4, 4, 5, 5)),
    *[(lambda: nn.Linear(6, 3), numbers(*shape)) for shape in ((4, 6), (4, 5, 6), (4, 2, 5, 6))],
    (lambda: nn.Linear(300, 200), numbers(4, 5, 300)),  # Gram matrices in several parts
    *[(lambda: nn.Embedding(5, 3, padding_idx=1), tokens(*shape)) for shape in ((4,), (4, 6), (4, 2, 3))],
    (lambda: nn.LayerNorm(6), numbers(4, 2, 3, 6)),
    (lambda: nn.GroupNorm(2, 4), numbers(4, 4, 5, 5)),
    (lambda: nn.InstanceNorm2d(4, affine=True), numbers(4, 4, 5, 5)),
    (lambda: nn.RMSNorm(6, eps=0.1), numbers(4, 5, 6)),
    (lambda: nn.PReLU(4), numbers(4, 4, 5)),
    (lambda: Attention(batch_first=True), numbers(4, 5, 6)),
]
REFUSED = [
    *convolutions(padding=1, padding_mode="circular"),
    *convolutions(padding="same", padding_mode="reflect"),
    *convolutions(padding=1, padding_mode="replicate"),
    (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), tokens(4, 6)),
    (lambda: nn.Embedding(5, 3, sparse=True), tokens(4, 6)),
    (lambda: nn.EmbeddingBag(5, 3, mode="sum"), tokens(4, 6)),
    (lambda: nn.LayerNorm(6, bias=False), numbers(4, 6)),
    (lambda: Attention(batch_first=False), numbers(5, 5, 6)),
]


def require_autograd(kind, make, inputs):
    """Clipped at the second smallest norm: a gradient, or a norm, that is wrong for one example shows in the sum."""
    torch.manual_seed(0)
    model, x = nn.Sequential(make()), inputs()
    weights = torch.randn_like(model(x))
    alone = []
    for i in range(len(x)):
        loss = (model(x[i : i + 1]) * weights[i : i + 1]).sum()
        alone.append(torch.autograd.grad(loss, list(model.parameters())))
    norms = [torch.sqrt(sum(part.double().square().sum() for part in gradient)) for gradient in alone]
    bound = float(sorted(norms)[1])
    expected = [
        sum(part * min(1.0, bound / float(norm)) for part, norm in zip(column, norms, strict=True))
        for column in zip(*alone, strict=True)
    ]
    model = copy.deepcopy(model)
    engine = kind(model, dict(model.named_parameters()), bound, "sum")
    (model(x) * weights).sum().backward()
    seen, sums = engine.collect()
    assert seen == len(x)
    for found, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4 * bound)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(("make", "inputs"), MEASURED)
def test_layers_have_the_gradients_of_autograd(kind, make, inputs):
    require_autograd(ENGINES[kind], make, inputs)


def test_flat_takes_recurrent_layers():
    require_autograd(FlatEngine, Recurrent, numbers(4, 5, 6))


def test_flat_takes_sequences_of_different_lengths():
    """The cells see fewer and fewer examples, the longest sequences last; each has the gradient it has alone."""
    torch.manual_seed(0)
    cells = DPLSTM(6, 3, batch_first=True, bidirectional=True)
    sequences = [torch.randn(length, 6) for length in (5, 3, 1)]

    def loss(parts):
        packed = nn.utils.rnn.pack_sequence(parts)
        return nn.utils.rnn.pad_packed_sequence(cells(packed)[0], batch_first=True)[0].square().sum()

    parameters = {name: p for name, p in cells.named_parameters() if p.requires_grad}
    expected = [torch.zeros_like(p) for p in parameters.values()]
    for sequence in sequences:
        alone = torch.autograd.grad(loss([sequence]), list(parameters.values()))
        norm = torch.sqrt(sum(part.square().sum() for part in alone))
        for total, part in zip(expected, alone, strict=True):
            total += part * min(1.0, 0.1 / float(norm))
    engine = FlatEngine(cells, parameters, 0.1, "sum")
    loss(sequences).backward()
    seen, sums = engine.collect()
    assert seen == 3
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(("make", "inputs"), REFUSED)
def test_options_that_would_give_wrong_gradients_are_refused(kind, make, inputs):
    model = nn.Sequential(make())
    model(inputs())  # torch itself takes it
    with pytest.raises(QuellError, match="get its per-example gradients wrong; use clipping='microbatch'"):
        ENGINES[kind](model, dict(model.named_parameters()), 1.0, "sum")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    ENGINES[kind](nn.Sequential(model, nn.Linear(3, 3)), {}, 1.0, "sum")  # frozen, there is nothing to get wrong
