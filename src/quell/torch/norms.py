"""Norms of per-example gradients without the gradients, never smaller than they are: what `clipping="ghost"` rests on.

A linear layer's gradient of one example is Σ_t g_t a_tᵀ over its positions t, and its squared norm is
Σ_ts (g_t·g_s)(a_t·a_s). Where positions nearly cancel, that sum has no correct digit: it is small, its terms are not.
So every norm here is raised by what rounding may have taken, in terms of S = Σ_t |g_t||a_t|, which does not cancel. The
second backward pass rounds in its own way, by some multiple of 10⁻⁷·S: what was added to the norms covers that too.
Where nothing cancels the addition is invisible; where it does, an example is clipped more than need be, never less.

Norms are (examples,) where nothing was added, else (examples, 2): the bound, and the norm as it was computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quell.torch.clipping import row_norms

Norms = dict[nn.Parameter, Tensor]

_CHUNK = 512  # so many products are added in a row before they join a sum: rounding grows with it
_SUMMING = 64  # roundings in a sum that torch makes in a cascade, and in what surrounds it
_ADDED_UP = 1024  # roundings allowed for in gradients that are added up entry by entry, here and in the second pass
_UNDERFLOW = 1e-32  # squares below 10⁻³⁸ are lost, however large what they are multiplied with


def linear_norms(layer: Any, activations: list[Tensor], backprops: Tensor) -> Norms:
    """Of a linear layer on (examples, ..., features)."""
    inputs = activations[0].to(backprops.dtype)
    found: Norms = {}
    if backprops.dim() == 2:  # one position: the norm of g aᵀ is a product
        gradient_norms = row_norms(backprops)
        if layer.weight.requires_grad:
            found[layer.weight] = gradient_norms * row_norms(inputs)
        if layer.bias is not None and layer.bias.requires_grad:
            found[layer.bias] = gradient_norms
        return found
    backprops, inputs = backprops.flatten(1, -2), inputs.flatten(1, -2)
    if layer.weight.requires_grad:
        found[layer.weight] = outer_sum_norms(backprops, inputs)
    if layer.bias is not None and layer.bias.requires_grad:
        sizes = torch.linalg.vector_norm(backprops, dim=-1).sum(-1)
        found[layer.bias] = _raised(row_norms(backprops.sum(1)), sizes)
    return found


def outer_sum_norms(g: Tensor, a: Tensor) -> Tensor:
    """(examples, 2) bound and value of |Σ_t g_t a_tᵀ|, for g (examples, positions, ·) and a alike.

    An entry of a Gram matrix is off by at most (number of roundings)·u·|g_t||g_s|, with u the unit of rounding; over
    all pairs of positions, that is so many u·S².
    """
    products, others = _gram(g), _gram(a)
    sizes = [
        gram.diagonal(dim1=1, dim2=2) + _UNDERFLOW * values.shape[2] for gram, values in ((products, g), (others, a))
    ]
    bound = (sizes[0].sqrt() * sizes[1].sqrt()).sum(-1).double().square()
    roundings = _roundings(g.shape[2]) + _roundings(a.shape[2]) + _SUMMING
    square = products.mul_(others).sum(-1).double().sum(-1).clamp_(min=0.0)
    return torch.stack([square + roundings * _unit(g) * bound, square], dim=1).sqrt().to(g.dtype)


def embedding_norms(layer: Any, activations: list[Tensor], backprops: Tensor) -> Norms:
    """Of an embedding: the gradients of equal tokens are added, those of different tokens are orthogonal."""
    tokens = activations[0].flatten(1) if activations[0].dim() > 1 else activations[0].unsqueeze(1)
    examples, positions = tokens.shape
    g = backprops.reshape(examples * positions, -1)
    if layer.padding_idx is not None:
        g = g.masked_fill((tokens == layer.padding_idx).view(-1, 1), 0.0)
    rows = torch.arange(examples, device=g.device).repeat_interleave(positions)
    pairs, place = torch.unique(rows * layer.num_embeddings + tokens.reshape(-1), return_inverse=True)
    sums = g.new_zeros(len(pairs), g.shape[1]).index_add_(0, place, g)
    sizes = g.new_zeros(len(pairs)).index_add_(0, place, torch.linalg.vector_norm(g, dim=1))
    norms = _raised(torch.linalg.vector_norm(sums, dim=1), sizes)
    owners = pairs // layer.num_embeddings
    squares = torch.zeros(examples, 2, dtype=torch.float64, device=g.device)
    return {layer.weight: squares.index_add_(0, owners, norms.double().square()).sqrt().to(g.dtype)}


def convolution_norms(layer: Any, gradients: Mapping[nn.Parameter, Tensor], inputs: Tensor, backprops: Tensor) -> Norms:
    """Of a convolution, whose per-example gradients are made whole.

    Here |a_t| is the norm of a patch, every input is in as many patches as the kernel has places at most, and
    S ≤ √(Σ_t |g_t|²)·√(Σ_t |a_t|²).
    """
    if not len(inputs):
        return {parameter: backprops.new_zeros(0) for parameter in gradients}
    out = row_norms(backprops.flatten(1))
    weight = math.sqrt(math.prod(layer.kernel_size)) * out * row_norms(inputs.to(backprops.dtype).flatten(1))
    bias = math.sqrt(math.prod(backprops.shape[2:])) * out
    sizes = {parameter: weight if parameter is layer.weight else bias for parameter in gradients}
    return {
        parameter: _raised(row_norms(gradient.flatten(1)), sizes[parameter].to(gradient.dtype))
        for parameter, gradient in gradients.items()
    }


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 and no bfloat16 inside of float32 products: both are thousands of times coarser than what is bounded."""
    settings = _precisions()
    before = [getattr(place, name) for place, name, _ in settings]
    try:
        for place, name, value in settings:
            setattr(place, name, value)
        yield
    finally:
        for (place, name, _), value in zip(settings, before, strict=True):
            setattr(place, name, value)


def _precisions() -> list[tuple[Any, str, Any]]:
    """Where float32 may mean less, the name it goes by in this version of torch, and its value for float32."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    if not hasattr(cudnn, "conv"):
        return [(cuda.matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    places = (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv)
    return [(place, "fp32_precision", "ieee") for place in places]


def _gram(values: Tensor) -> Tensor:
    """(examples, t, s) values_t · values_s, in short sums."""
    first, *rest = values.split(_CHUNK, dim=2)
    gram = torch.bmm(first, first.transpose(1, 2))
    for part in rest:
        gram.baddbmm_(part, part.transpose(1, 2))
    return gram


def _roundings(length: int) -> int:
    return min(length, _CHUNK) + -(-length // _CHUNK)


def _unit(values: Tensor) -> float:
    return float(torch.finfo(values.dtype).eps) / 2


def _raised(norms: Tensor, sizes: Tensor) -> Tensor:
    """Bound and value of a norm, where a gradient was added up from parts whose norms add up to `sizes`.

    The norm n is off by kuS at most, with k roundings in a row, and √(n² + (cuS)²) ≥ (n + kuS)/√(1 + k²/c²) for all n.
    """
    return torch.stack([torch.hypot(norms, _ADDED_UP * _unit(sizes) * sizes), norms], dim=1)
