"""What one call of a layer adds to the gradient of a parameter, unit by unit, without building those gradients.

A unit is what is clipped as one: an example, or a block of rows that belong to it. A piece answers two questions.
`norms()` bounds the norm of every unit's gradient from above. `add_to(total, weights)` adds Σ_u weights_u · gradient_u
to a float32 sum. What privacy rests on is that the first bounds what the second adds (docs/pytorch.md, "Why the norms
can be trusted").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quell.torch.clipping import row_norms
from quell.torch.engine import kernels
from quell.torch.engine.bounds import gram_norms, token_norms

_MOST_NUMBERS = 1 << 26  # that a chunk of per-unit gradients or unfolded images may have


class Piece(Protocol):
    @property
    def units(self) -> int: ...

    def norms(self) -> Tensor:
        """(units,) float32, never below the norms of what `add_to` adds with weight 1."""

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        """Add the weighted sum of the units' gradients to `total`, which has the parameter's shape."""

    def without(self, spoiled: Tensor) -> Piece:
        """The same piece with nothing in the units that are marked."""


@dataclass(eq=False)
class Rows:
    """Per-unit gradients themselves: of biases, scales, and weights that are smaller than what they are made from."""

    values: Tensor  # (units, *shape of the parameter)

    @property
    def units(self) -> int:
        return len(self.values)

    def norms(self) -> Tensor:
        return row_norms(self.values.reshape(self.units, -1)).float()

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        total.view(-1).addmv_(self.values.reshape(self.units, -1).to(total.dtype).t(), weights.to(total.dtype))

    def without(self, spoiled: Tensor) -> Rows:
        return Rows(cleared(self.values, spoiled))


@dataclass(eq=False)
class Outer:
    """Σ_t g_t a_tᵀ over the positions t of a unit: the weight of a linear layer, or of a convolution by its patches.

    `g` is (units, positions, outputs), `a` (units, positions, inputs).
    """

    g: Tensor
    a: Tensor

    @property
    def units(self) -> int:
        return len(self.g)

    @property
    def positions(self) -> int:
        return self.g.shape[1]

    def norms(self) -> Tensor:
        if self.positions == 1:
            # The sum multiplies g by the weight in g's own precision: one rounding of every entry.
            return row_norms(self.g[:, 0]).float() * row_norms(self.a[:, 0]).float() * (1 + _unit(self.g))
        if kernels.take(self.g, self.a):
            narrow = self.positions * (self.g.shape[2] + self.a.shape[2]) < 2 * self.g.shape[2] * self.a.shape[2]
            return kernels.gram_norms(self.g, self.a) if narrow else kernels.direct_norms(self.g, self.a)
        return gram_norms(_wide(self.g), _wide(self.a))

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        flat = total.view(self.g.shape[2], self.a.shape[2])
        if self.positions > 1 and kernels.take(self.g, self.a):
            kernels.add_weighted(flat, self.g, self.a, weights)
            return
        g, a = (self.g, self.a) if self.positions == 1 else (_wide(self.g), _wide(self.a))
        scaled = g * weights.to(g.dtype)[:, None, None]
        _add_product(flat, scaled.flatten(0, 1), a.flatten(0, 1))

    def without(self, spoiled: Tensor) -> Outer:
        return Outer(cleared(self.g, spoiled), cleared(self.a, spoiled))


@dataclass(eq=False)
class Tokens:
    """The weight of an embedding: g_t is added to the row of token t. Positions of the padding token add nothing."""

    g: Tensor  # (units, positions, width)
    tokens: Tensor  # (units, positions)
    padding: int  # -1 where there is none

    @property
    def units(self) -> int:
        return len(self.g)

    def norms(self) -> Tensor:
        g = self._padded()
        return kernels.token_norms(g, self.tokens) if kernels.take(g) else token_norms(g, self.tokens)

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        scaled = self._padded().to(total.dtype) * weights.to(total.dtype)[:, None, None]
        # Sorted by token inside, so that the same sum comes out every time; index_add_ on a GPU adds in any order.
        total += torch.ops.aten.embedding_dense_backward(scaled, self.tokens, len(total), -1, False)

    def without(self, spoiled: Tensor) -> Tokens:
        return Tokens(cleared(self.g, spoiled), self.tokens, self.padding)

    def _padded(self) -> Tensor:
        if self.padding < 0:
            return self.g
        return self.g.masked_fill((self.tokens == self.padding).unsqueeze(-1), 0.0)


@dataclass(eq=False)
class Patches:
    """The weight of a convolution, by the patches of its input under the kernel, unfolded a few units at a time."""

    g: Tensor  # (units, rows of one unit, channels out, *places)
    x: Tensor  # (units, rows of one unit, channels in, *places)
    unfold: Callable[[Tensor], Tensor]  # (rows, channels in, *places) to (rows, places, channels in × kernel)
    groups: int

    @property
    def units(self) -> int:
        return len(self.g)

    def norms(self) -> Tensor:
        found = [_grouped_norms(part, self.groups) for part in self._outer()]
        return torch.cat(found) if found else torch.zeros(0, device=self.g.device)

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        flat = total.view(self.groups, -1, total[0].numel())
        first = 0
        for part in self._outer():
            chosen = weights[first : first + part.units // self.groups]
            first += len(chosen)
            values = _whole(part).unflatten(0, (-1, self.groups)).to(total.dtype)
            flat.view(-1).addmv_(values.flatten(1).t(), chosen.to(total.dtype))

    def without(self, spoiled: Tensor) -> Patches:
        return Patches(cleared(self.g, spoiled), cleared(self.x, spoiled), self.unfold, self.groups)

    def rows(self, shape: torch.Size) -> Rows:
        """The per-unit gradients, to be kept instead of this piece."""
        made = [_whole(part).reshape(-1, *shape) for part in self._outer()]
        return Rows(torch.cat(made) if made else self.g.new_zeros(0, *shape))

    def _outer(self) -> Iterator[Outer]:
        """A few units at a time, each group of channels as a unit of its own."""
        inside = self.g.shape[1] * self.g[0, 0, 0].numel() * self.unfolded_width if self.units else 1
        weight = self.g.shape[2] * self.unfolded_width // self.groups
        count = max(1, _MOST_NUMBERS // max(inside, weight, 1))
        for g, x in zip(self.g.split(count), self.x.split(count), strict=True):
            yield _as_outer(g, self.unfold(x.flatten(0, 1)), self.groups)

    @property
    def unfolded_width(self) -> int:
        probe = self.unfold(self.x[:1, 0].new_empty(self.x[:1, 0].shape, device="meta"))
        return int(probe.shape[2])


@dataclass(eq=False)
class Stacked:
    """Several pieces of equal size, each of which is a block of the parameter's rows."""

    parts: Sequence[Piece]

    @property
    def units(self) -> int:
        return self.parts[0].units

    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(torch.stack([part.norms() for part in self.parts]), dim=0)

    def add_to(self, total: Tensor, weights: Tensor) -> None:
        for part, block in zip(self.parts, total.chunk(len(self.parts)), strict=True):
            part.add_to(block, weights)

    def without(self, spoiled: Tensor) -> Stacked:
        return Stacked([part.without(spoiled) for part in self.parts])


def _as_outer(g: Tensor, a: Tensor, groups: int) -> Outer:
    """(units, rows, channels, *places) and (units·rows, places, groups·width) as (units·groups, rows·places, ·)."""
    units, rows, channels = g.shape[:3]
    g = g.reshape(units, rows, groups, channels // groups, -1).permute(0, 2, 1, 4, 3)
    a = a.reshape(units, rows, a.shape[1], groups, -1).permute(0, 3, 1, 2, 4)
    return Outer(g.reshape(units * groups, -1, g.shape[-1]), a.reshape(units * groups, -1, a.shape[-1]))


def _whole(part: Outer) -> Tensor:
    """(units, outputs, inputs) the per-unit gradients, made by one batched product: the same bits every time."""
    return torch.bmm(part.g.transpose(1, 2), part.a)


def _grouped_norms(part: Outer, groups: int) -> Tensor:
    """Norms of whole per-unit gradients. `add_to` makes the same numbers again, so nothing has to be allowed for."""
    return row_norms(_whole(part).view(part.units // groups, -1)).float()


def merged(pieces: list[Piece]) -> list[Piece]:
    """The pieces of one parameter as one piece where that makes the norm exact.

    Otherwise the norms of several pieces are added, which the triangle inequality allows.
    """
    if len(pieces) > 1 and all(isinstance(piece, Rows) for piece in pieces):
        return [Rows(torch.stack([piece.values.float() for piece in pieces]).sum(0))]  # type: ignore[attr-defined]
    if len(pieces) > 1 and all(isinstance(piece, Outer) for piece in pieces):
        gs, as_ = zip(*((piece.g, piece.a) for piece in pieces), strict=True)  # type: ignore[attr-defined]
        return [Outer(torch.cat(gs, dim=1), torch.cat(as_, dim=1))]
    return pieces


def kept(piece: Outer | Patches, shape: torch.Size) -> Piece:
    """The piece, or its per-unit gradients where those take less memory than what they are made from."""
    if not piece.units:
        return Rows(piece.g.new_zeros(0, *shape))
    if isinstance(piece, Patches):
        return piece.rows(shape) if shape.numel() <= piece.g[0].numel() + piece.x[0].numel() else piece
    if piece.positions > 1 and shape.numel() <= piece.g[0].numel() + piece.a[0].numel():
        return Rows(_whole(piece).view(-1, *shape))
    return piece


def cleared(values: Tensor, spoiled: Tensor) -> Tensor:
    return values.masked_fill(spoiled.view(-1, *[1] * (values.dim() - 1)), 0.0)


def _unit(values: Tensor) -> float:
    return float(torch.finfo(values.dtype).eps)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _add_product(total: Tensor, g: Tensor, a: Tensor) -> None:
    """total += gᵀ a, added up in float32 whatever the precision of the factors."""
    if g.dtype == total.dtype:
        total.addmm_(g.t(), a)
    elif g.is_cuda and g.dtype in (torch.bfloat16, torch.float16):
        total += torch.mm(g.t(), a, out_dtype=torch.float32)
    else:
        total += (g.to(torch.float64) if g.dtype == torch.float64 else g.float()).t() @ _wide(a)
