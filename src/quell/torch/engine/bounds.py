"""Norms of sums over positions, taken without building the sums, never smaller than they are.

A linear layer's gradient of one unit is Σ_t g_t a_tᵀ over its positions t, and its squared norm is
Σ_ts (g_t·g_s)(a_t·a_s). Where positions nearly cancel, that sum has no correct digit: it is small, its terms are not.
So the norm of every such sum is raised by what rounding may have taken, in terms of S = Σ_t |g_t||a_t|, which does not
cancel. The clipped sum rounds in its own way, by u·S at most for every position, in whatever order it adds them: that
is added too. Where nothing cancels the addition is invisible; where it does, a unit is clipped more than need be, never
less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

IN_A_ROW = 128  # examples whose gradients are added up in float32: 2·128² roundings of 2⁻²³ are 0.004 of a clip norm
CHUNK = 512  # so many products are added in a row before they join a sum: rounding grows with it
SUMMING = 64  # roundings in a sum that torch makes in a cascade, and in what surrounds it
UNDERFLOW = 1e-32  # squares below 10⁻³⁸ are lost, however large what they are multiplied with


@dataclass(frozen=True, eq=False)
class Allowance:
    """What the norm of a sum over positions is raised by, for each unit.

    It is a function of the unit's own positions. Where examples are padded to the longest of a batch, that one decides
    how many positions there are, and whether per-unit gradients are kept: neither may change the norms of the others.
    """

    size: Tensor  # (units,) S
    positions: Any  # a number, or (units,) of them: roundings in the sum, one for each that is not zero
    rate: float  # of S², which Gram matrices may be off by
    unit: float  # of rounding
    square: Any = 0.0  # (units,) what else squares may be off by

    def raised(self, norms: Tensor) -> Tensor:
        size = self.size.double()
        found = (norms.double().square() + self.rate * size.square() + self.square).sqrt()
        return (found + (self.positions + 2) * self.unit * size).float()

    @property
    def kind(self) -> Any:
        """What those have in common that can be one, by `stacked`."""
        known = isinstance(self.positions, Tensor)
        return len(self.size), self.rate, self.unit, known or self.positions, isinstance(self.square, Tensor)

    def of(self, units: slice) -> Allowance:
        positions, square = (v[units] if isinstance(v, Tensor) else v for v in (self.positions, self.square))
        return replace(self, size=self.size[units], positions=positions, square=square)

    def __add__(self, other: Allowance) -> Allowance:
        """That of both sums together."""
        known = isinstance(self.positions, Tensor) or isinstance(other.positions, Tensor)
        # Two numbers are as many as there may be in all.
        positions = self.positions + other.positions if known else max(self.positions, other.positions)
        rate, unit = max(self.rate, other.rate), max(self.unit, other.unit)
        return Allowance(self.size + other.size, positions, rate, unit, self.square + other.square)


def stacked(allowed: Sequence[Allowance]) -> Allowance:
    """Several of one kind as one, with (layers, units) in the place of (units,)."""
    first, sizes = allowed[0], torch.stack([each.size for each in allowed])
    positions, square = (
        torch.stack(values) if isinstance(values[0], Tensor) else values[0]
        for values in ([each.positions for each in allowed], [each.square for each in allowed])
    )
    return replace(first, size=sizes, positions=positions, square=square)


def allowance(g: Tensor, a: Tensor) -> Allowance:
    """What `gram_norms` raises norms by."""
    sizes = [torch.linalg.vector_norm(values, dim=2, dtype=wide_type(values)) for values in (g, a)]
    return _allowance(sizes[0] * sizes[1], g, a)


def _allowance(sizes: Tensor, g: Tensor, a: Tensor) -> Allowance:
    unit = _unit(wide(g[:0]))
    return Allowance(sizes.sum(-1).double(), filled(g), roundings(g.shape[2], a.shape[2]) * unit, unit)


def filled(values: Tensor) -> Tensor:
    """(units,) how many positions are not zero. To add zeros rounds nothing."""
    return values.any(2).sum(1)


def gram_norms(g: Tensor, a: Tensor) -> Tensor:
    """(units,) a bound of |Σ_t g_t a_tᵀ|, for g (units, positions, ·) and a alike, in float32 or float64.

    An entry of a Gram matrix is off by at most (number of roundings)·u·|g_t||g_s|, with u the unit of rounding; over
    all pairs of positions, that is so many u·S².
    """
    products, others = _gram(g), _gram(a)
    sizes = [
        gram.diagonal(dim1=1, dim2=2) + UNDERFLOW * values.shape[2] for gram, values in ((products, g), (others, a))
    ]
    allowed = _allowance(sizes[0].sqrt() * sizes[1].sqrt(), g, a)
    return allowed.raised(products.mul_(others).sum(-1).double().sum(-1).clamp_(min=0.0).sqrt())


def token_norms(g: Tensor, tokens: Tensor) -> Tensor:
    """(units,) a bound of the norm of an embedding's gradient.

    The gradients of equal tokens are added, those of different tokens are orthogonal. Adding k of them rounds by
    (k − 1)·u·S at most, here and in the clipped sum.
    """
    units, positions = tokens.shape
    flat = wide(g).reshape(units * positions, -1)
    owners = torch.arange(units, device=g.device).repeat_interleave(positions)
    # Each unit's tokens, sorted: equal ones are neighbours, and every one of them knows the first of its kind.
    ordered, order = tokens.sort(dim=1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    place = new.view(-1).cumsum(0) - 1
    source = (order + torch.arange(units, device=g.device)[:, None] * positions).view(-1)
    sums = flat.new_zeros(units * positions, flat.shape[1]).index_add_(0, place, flat[source])
    sizes = flat.new_zeros(units * positions).index_add_(0, place, row_norms(flat).to(flat)[source])
    numbers = torch.zeros_like(sizes).index_add_(0, place, flat.any(1).to(sizes)[source])
    norms = row_norms(sums) + (2 * numbers + SUMMING) * _unit(flat) * sizes
    squares = torch.zeros(units, dtype=torch.float64, device=g.device)
    return squares.index_add_(0, owners, norms[place].double().square() * new.view(-1)).sqrt().float()


def row_norms(rows: Tensor) -> Tensor:
    """(rows,) norms, in float32 or better, less than 5·10⁻⁶ too small.

    A float32 norm of ten million elements can come out a percent too small, because late squares are rounded away
    against the sum of the early ones; clipping would then let a percent too much through. So rows are cut into blocks,
    float32 within and float64 over them. A CPU adds up eight sums at once or more, a GPU two thousand: of a block, 128
    squares in a row, each of which loses 2⁻²⁴ of the sum at most.
    """
    block = 1 << (18 if rows.is_cuda else 10)
    if rows.shape[1] <= block or rows.dtype == torch.float64:
        return torch.linalg.vector_norm(rows, dim=1, dtype=wide_type(rows))
    whole = rows.shape[1] // block * block
    blocks = rows[:, :whole].unflatten(1, (-1, block))
    parts = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in (blocks, rows[:, None, whole:])]
    return torch.linalg.vector_norm(torch.cat(parts, dim=1), dim=1, dtype=torch.float64)


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """() the norm of all tensors together."""
    held = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not held:
        return torch.zeros(())
    if held[0].is_cuda:
        norms = list(torch._foreach_norm(held))  # a few launches, however many tensors
    else:
        norms = [row_norms(tensor.reshape(1, -1))[0] for tensor in held]
    return torch.linalg.vector_norm(torch.stack(norms))


def roundings(*lengths: int) -> int:
    """How many roundings in a row the products of two Gram matrices have seen, their sums included."""
    return sum(min(length, CHUNK) + -(-length // CHUNK) for length in lengths) + SUMMING


def wide_type(values: Tensor) -> torch.dtype:
    """float32, or float64 if it is that."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def wide(values: Tensor) -> Tensor:
    return values.to(wide_type(values))


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 and no bfloat16 inside of float32 products: both are thousands of times coarser than what is bounded."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    places: tuple[Any, ...] = (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _gram(values: Tensor) -> Tensor:
    """(units, t, s) values_t · values_s, in short sums."""
    first, *rest = values.split(CHUNK, dim=2)
    gram = torch.bmm(first, first.transpose(1, 2))
    for part in rest:
        gram.baddbmm_(part, part.transpose(1, 2))
    return gram


def _unit(values: Tensor) -> float:
    return float(torch.finfo(values.dtype).eps) / 2
