"""What one call of a layer adds to the gradient of a parameter, unit by unit, without building those gradients.

A unit is what is clipped as one: an example, or a block of rows that belong to it. A piece answers two questions.
`norms()` bounds the norm of every unit's gradient from above. `sum(weights)` is Σ_u weights_u · gradient_u in float32.
A unit of weight 0 adds nothing, even if its gradient is not finite.
What privacy rests on is that the first bounds what the second adds (docs/pytorch.md, "Why the norms can be trusted").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quell.torch.engine import bounds, kernels
from quell.torch.engine.bounds import IN_A_ROW, Allowance, gram_norms, row_norms, token_norms, wide

# Numbers of per-unit gradients or unfolded images in a chunk: on a GPU a quarter of what the layer has, because CUDA
# graphs hold them between steps, but enough to be worth a launch; on a CPU what stays in its cache. Recorded passes
# have the chunks of others: they decide how sums round, and a step that comes again must be the same bit for bit.
_MOST_NUMBERS, _FEW_NUMBERS = 1 << 26, 1 << 24
_IN_CACHE = 1 << 19

_FEW_SUMS = 1 << 22  # numbers of sums over a few units each that may be held at once
_WORTH_MEMORY = 1.25  # so much more a GPU may keep, because adding up ready gradients is far faster there
_FAR = 1e18  # norms of factors beyond which a weighted sum of them could be longer than it was measured


class Piece(Protocol):
    @property
    def units(self) -> int: ...

    def norms(self) -> Tensor:
        """(units,) float32, never below the norms of what `sum` adds with weight 1."""

    def sum(self, weights: Tensor) -> Tensor:
        """The weighted sum of the units' gradients, a tensor of its own with as many elements as the parameter."""

    def of(self, units: slice) -> Piece:
        """The same of some units only."""


@dataclass(eq=False)
class Rows:
    """Per-unit gradients themselves: of biases, scales, and weights that are smaller than what they are made from."""

    values: Tensor  # (units, *shape of the parameter)
    allowed: Allowance | None = None  # what they would be raised by if they were sums over positions, and not kept

    @property
    def units(self) -> int:
        return int(self.values.shape[0])  # len() of a tensor is slow, and this is asked often

    def norms(self) -> Tensor:
        found = norms_of_rows(self.flat)
        return found if self.allowed is None else self.allowed.raised(found)

    @property
    def flat(self) -> Tensor:
        """(units, elements of the parameter), also for no units and for parameters without dimensions."""
        return self.values.reshape(self.units, math.prod(self.values.shape[1:]))

    def sum(self, weights: Tensor) -> Tensor:
        return sum_of_rows(self.flat, weights)

    def of(self, units: slice) -> Rows:
        return Rows(self.values[units], None if self.allowed is None else self.allowed.of(units))


@dataclass(eq=False)
class Outer:
    """Σ_t g_t a_tᵀ over the positions t of a unit: the weight of a linear layer, or of a convolution by its patches.

    `g` is (units, positions, outputs), `a` (units, positions, inputs).
    """

    g: Tensor
    a: Tensor

    @property
    def units(self) -> int:
        return int(self.g.shape[0])

    @property
    def positions(self) -> int:
        return int(self.g.shape[1])

    def norms(self) -> Tensor:
        if self.positions == 1:
            # The sum multiplies g by the weight in g's own precision: one rounding of every entry. In float64, because
            # the product of a norm whose squares underflow with a large one is of ordinary size.
            norms = [torch.linalg.vector_norm(values[:, 0], dim=1, dtype=torch.float64) for values in (self.g, self.a)]
            finest = torch.finfo(self.g.dtype).tiny * _spacing(self.g)  # what subnormal entries are rounded to
            found = (norms[0] + finest * self.g.shape[2] ** 0.5) * norms[1] * (1 + _spacing(self.g))
            # Beside a longer factor, weighted entries of the other can be so small that rounding makes them larger.
            # Norms by Gram matrices are not finite there either, because squares overflow.
            return found.masked_fill(torch.maximum(*norms) > _FAR, torch.inf).float()
        if kernels.take(self.g, self.a):
            return kernels.gram_norms([(self.g, self.a)])[0]
        return gram_norms(wide(self.g), wide(self.a))

    def sum(self, weights: Tensor) -> Tensor:
        if self.positions > 1 and kernels.take(self.g, self.a):
            return kernels.weighted_sums([(self.g, self.a)], weights)[0]
        exact = self.positions > 1 or self.g.dtype == torch.float16  # which would round small products to nothing
        g, a = (wide(self.g), wide(self.a)) if exact else (self.g, self.a)
        g, a = _weighty(weights, g, a)
        scaled = g * weights.to(g.dtype)[:, None, None]
        return _product(scaled.flatten(0, 1), a.flatten(0, 1), IN_A_ROW if self.adds_few else None)

    @property
    def allowed(self) -> Allowance | None:
        """What its norms are raised by."""
        if self.positions == 1:
            return None
        by_kernel = kernels.take(self.g, self.a)
        return kernels.allowance(self.g, self.a) if by_kernel else bounds.allowance(self.g, self.a)

    @property
    def adds_few(self) -> bool:
        """Whether its sum adds up a few units at a time, which takes memory for every such few."""
        return self.positions == 1 and self.units // IN_A_ROW * self.g.shape[2] * self.a.shape[2] <= _FEW_SUMS

    def of(self, units: slice) -> Outer:
        return Outer(self.g[units], self.a[units])

    @property
    def flat(self) -> Tensor:
        """(units, elements of the weight) the per-unit gradients, in float32 or better."""
        return _product(self.g, self.a).flatten(1)


@dataclass(eq=False)
class Tokens:
    """The weight of an embedding: g_t is added to the row of token t. Positions of the padding token add nothing."""

    g: Tensor  # (units, positions, width)
    tokens: Tensor  # (units, positions)
    vocabulary: int
    padding: int  # -1 where there is none

    @property
    def units(self) -> int:
        return int(self.g.shape[0])

    def norms(self) -> Tensor:
        g = self.padded
        return kernels.token_norms(g, self.tokens) if kernels.take(g) else token_norms(g, self.tokens)

    def sum(self, weights: Tensor) -> Tensor:
        (g,) = _weighty(weights, self.padded)
        scaled = wide(g) * weights.unsqueeze(-1).unsqueeze(-1)
        # Sorted by token inside, so that the same sum comes out every time; index_add_ on a GPU adds in any order.
        return torch.ops.aten.embedding_dense_backward(scaled, self.tokens, self.vocabulary, -1, False)

    def of(self, units: slice) -> Tokens:
        return replace(self, g=self.g[units], tokens=self.tokens[units])

    @property
    def flat(self) -> Tensor:
        """(units, elements of the weight) the per-unit gradients."""
        apart = self.tokens + self.vocabulary * torch.arange(self.units, device=self.g.device).unsqueeze(1)
        count = self.vocabulary * self.units
        found = torch.ops.aten.embedding_dense_backward(wide(self.padded), apart, count, -1, False)
        return found.view(self.units, -1)

    @property
    def padded(self) -> Tensor:
        if self.padding < 0:
            return self.g
        return self.g.masked_fill((self.tokens == self.padding).unsqueeze(-1), 0.0)


@dataclass(eq=False)
class Stacked:
    """Several pieces of equal size, each of which is a block of the parameter's rows."""

    parts: Sequence[Piece]

    @property
    def units(self) -> int:
        return self.parts[0].units

    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(torch.stack([part.norms() for part in self.parts]), dim=0)

    def sum(self, weights: Tensor) -> Tensor:
        return torch.cat([part.sum(weights).reshape(-1) for part in self.parts])

    def of(self, units: slice) -> Stacked:
        return Stacked([part.of(units) for part in self.parts])


def whole(part: Outer, out: Tensor | None = None) -> Tensor:
    """(units, outputs, inputs) the per-unit gradients, made by one batched product: the same bits every time."""
    return torch.bmm(part.g.transpose(1, 2), part.a, out=out)


def kept(piece: Piece, shape: Sequence[int]) -> Piece:
    """The piece, or its per-unit gradients where those take less memory than what they are made from.

    Which one it is depends on the longest unit of the batch. So gradients are kept in float32: rounded to bfloat16 they
    would change with it, by up to 2⁻⁹ of each. For the same reason nothing is kept that is scaled later: what norms are
    raised by is a sum over positions, which kept gradients do not know any more.
    """
    if isinstance(piece, Stacked):
        part = shape[0] // len(piece.parts), *shape[1:]
        return Stacked([kept(each, part) for each in piece.parts])
    if not isinstance(piece, Outer):
        return piece
    size = piece.g.element_size()
    held = (piece.g.numel() + piece.a.numel()) * size * (_WORTH_MEMORY if kernels.take(piece.g) else 1)
    if piece.positions > 1 and math.prod(shape) * piece.units * max(4, size) <= held:
        return Rows(piece.flat.view(-1, *shape), piece.allowed)
    return piece


def chunk_of(values: Tensor, numbers: int, held: int = 0) -> int:
    """How many units to work on at a time that need so many numbers each, in a layer that holds `held` of them."""
    if not values.is_cuda:
        return max(1, _IN_CACHE // numbers)
    return max(1, min(_MOST_NUMBERS, max(_FEW_NUMBERS, held // 4)) // numbers)


def _weighty(weights: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """The values with zeros in the units of weight 0: 0 times infinity is not a number.

    On a GPU zeros are always written, because the host would have to wait for an answer whether there is such a unit.
    """
    weightless = weights == 0.0
    if not weights.is_cuda and not bool(weightless.any()):
        return values
    return tuple(each.masked_fill(weightless.view(-1, *[1] * (each.dim() - 1)), 0.0) for each in values)


def norms_of_rows(rows: Tensor) -> Tensor:
    return kernels.row_norms([rows])[0] if kernels.take_rows(rows) else row_norms(rows).float()


def sum_of_rows(rows: Tensor, weights: Tensor) -> Tensor:
    if kernels.take_rows(rows):
        return kernels.sums_of_rows([rows], weights)[0]
    rows = wide(*_weighty(weights, rows))
    return torch.mv(rows.t(), weights.to(rows.dtype))


def _spacing(values: Tensor) -> float:
    """From 1 to the next number: twice the unit of rounding."""
    return float(torch.finfo(values.dtype).eps)


def _product(g: Tensor, a: Tensor, few: int | None = None) -> Tensor:
    """gᵀ a, added up in float32 or better whatever the precision of the factors; in float64 over each `few` rows."""
    count = g.shape[0]
    if few is not None and count > few:
        if count % few:
            g, a = (functional.pad(values, (0, 0, 0, -count % few)) for values in (g, a))
        g, a = (values.unflatten(0, (-1, few)) for values in (g, a))
        return _product(g, a).sum(0, dtype=torch.float64)
    if g.is_cuda and g.dtype in (torch.bfloat16, torch.float16):
        by = torch.mm if g.dim() == 2 else torch.bmm
        return by(g.mT, a, out_dtype=torch.float32)
    return wide(g).mT @ wide(a)
