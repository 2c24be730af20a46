"""What one call of a layer adds to the gradient of a parameter, unit by unit, without building those gradients.

A unit is what is clipped as one: an example, or a block of rows that belong to it. A piece answers two questions.
`norms()` bounds the norm of every unit's gradient from above. `sum(weights)` is Σ_u weights_u · gradient_u in float32.
A unit of weight 0 adds nothing, even if its gradient is not finite.
What privacy rests on is that the first bounds what the second adds (docs/pytorch.md, "Why the norms can be trusted").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from quell.torch.clipping import row_norms
from quell.torch.engine import kernels
from quell.torch.engine.bounds import gram_norms, token_norms

# Numbers of per-unit gradients or unfolded images in a chunk: on a GPU no more than the layer has, but enough to be
# worth a launch; on a CPU what stays in its cache.
_MOST_NUMBERS, _FEW_NUMBERS = 1 << 26, 1 << 25
_IN_CACHE = 1 << 19

_ROOM = 1 << 24  # numbers that a CPU may keep in any case, because making gradients of convolutions twice is slow there
_WORTH_MEMORY = 1.25  # so much more a GPU may keep, because adding up ready gradients is far faster there


_FAR = 1e18
_SMALL = 1 << 14  # numbers of a unit's gradient that are gathered with others

Names = tuple[str, ...]  # of the parameters whose gradients are one piece, in its order


class Piece(Protocol):
    @property
    def units(self) -> int: ...

    def norms(self) -> Tensor:
        """(units,) float32, never below the norms of what `sum` adds with weight 1."""

    def sum(self, weights: Tensor) -> Tensor:
        """The weighted sum of the units' gradients, a tensor of its own with as many elements as the parameter."""


@dataclass(eq=False)
class Rows:
    """Per-unit gradients themselves: of biases, scales, and weights that are smaller than what they are made from."""

    values: Tensor  # (units, *shape of the parameter)

    @property
    def units(self) -> int:
        return int(self.values.shape[0])  # len() of a tensor is slow, and this is asked often

    def norms(self) -> Tensor:
        return row_norms(self.flat).float()

    @property
    def flat(self) -> Tensor:
        """(units, elements of the parameter), also for no units and for parameters without dimensions."""
        return self.values.reshape(self.units, math.prod(self.values.shape[1:]))

    def sum(self, weights: Tensor) -> Tensor:
        return _sum_of_rows(self.flat, weights)


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
            finest = torch.finfo(self.g.dtype).tiny * _unit(self.g)  # what entries below the normal ones are rounded to
            found = (norms[0] + finest * self.g.shape[2] ** 0.5) * norms[1] * (1 + _unit(self.g))
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
        scaled = _weighty(g, weights) * weights.to(g.dtype)[:, None, None]
        return _product(scaled.flatten(0, 1), _weighty(a, weights).flatten(0, 1))


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
        g = self._padded()
        return kernels.token_norms(g, self.tokens) if kernels.take(g) else token_norms(g, self.tokens)

    def sum(self, weights: Tensor) -> Tensor:
        scaled = wide(_weighty(self._padded(), weights)) * weights.unsqueeze(-1).unsqueeze(-1)
        # Sorted by token inside, so that the same sum comes out every time; index_add_ on a GPU adds in any order.
        return torch.ops.aten.embedding_dense_backward(scaled, self.tokens, self.vocabulary, -1, False)

    def _padded(self) -> Tensor:
        if self.padding < 0:
            return self.g
        return self.g.masked_fill((self.tokens == self.padding).unsqueeze(-1), 0.0)


@dataclass(eq=False)
class Patches:
    """The weight of a convolution, by the patches of its input under the kernel, unfolded a few units at a time."""

    g: Tensor  # (units, rows of one unit, channels out, *places)
    x: Tensor  # (units, rows of one unit, channels in, *places)
    unfold: Callable[[Tensor], Tensor]  # (rows, channels in, *places) to (rows, width, places)
    width: int  # of a patch: channels in × kernel
    groups: int
    through: Callable[[Tensor], Tensor] | None = None  # what (units, channels out, rest) gradients still go through

    @property
    def units(self) -> int:
        return int(self.g.shape[0])

    def norms(self) -> Tensor:
        found = [row_norms(self._whole(part)).float() for part in self._outer()]
        return torch.cat(found) if found else torch.zeros(0, device=self.g.device)

    def sum(self, weights: Tensor) -> Tensor:
        found, first = torch.zeros((), device=weights.device), 0
        for part in self._outer():
            chosen = weights[first : first + part.units // self.groups]
            first += len(chosen)
            found = found + _sum_of_rows(self._whole(part), chosen)
        return found

    def rows(self, shape: torch.Size) -> Rows:
        """The per-unit gradients, to be kept instead of this piece."""
        made = [self._whole(part).view(-1, *shape) for part in self._outer()]
        return Rows(torch.cat(made) if made else self.g.new_zeros(0, *shape))

    def _whole(self, part: Outer) -> Tensor:
        """(units, elements of the weight) gradients, the same bits for norms and sums: nothing is to be allowed for."""
        made = whole(part).view(part.units // self.groups, self.g.shape[2], -1)
        return (made if self.through is None else self.through(wide(made))).flatten(1)

    def _outer(self) -> Iterator[Outer]:
        """A few units at a time, each group of channels as a unit of its own."""
        unfolded = self.g[:1, :, 0].numel() * self.width
        weight = self.g.shape[2] * self.width // self.groups
        most = _IN_CACHE
        if self.g.is_cuda:
            most = min(_MOST_NUMBERS, max(_FEW_NUMBERS, self.g.numel() + self.x.numel()))
        count = max(1, most // max(unfolded, weight))
        for g, x in zip(self.g.split(count), self.x.split(count), strict=True):
            yield _as_outer(g, self.unfold(x.flatten(0, 1)), self.groups)


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


def _as_outer(g: Tensor, a: Tensor, groups: int) -> Outer:
    """(units, rows, channels, *places) and (units·rows, width, places) as (units·groups, rows·places, ·)."""

    def by_group(values: Tensor) -> Tensor:
        units, rows, channels = values.shape[:3]
        values = values.reshape(units, rows, groups, channels // groups, -1).permute(0, 2, 3, 1, 4)
        return values.reshape(units * groups, channels // groups, -1).transpose(1, 2)  # no copy of units of one row

    return Outer(by_group(g), by_group(a.unflatten(0, g.shape[:2])))


def whole(part: Outer) -> Tensor:
    """(units, outputs, inputs) the per-unit gradients, made by one batched product: the same bits every time."""
    return torch.bmm(part.g.transpose(1, 2), part.a)


def norms_of(pieces: Sequence[Piece]) -> list[Tensor]:
    """The norms of many pieces, those of one shape by one launch, because every launch costs the host time."""
    found: dict[int, Tensor] = {}
    for group in _groups(pieces):
        first = pieces[group[0]]
        if isinstance(first, Outer):
            norms = kernels.gram_norms([(pieces[i].g, pieces[i].a) for i in group])  # type: ignore[attr-defined]
        else:
            norms = kernels.row_norms([pieces[i].flat for i in group])  # type: ignore[attr-defined]
        found.update(zip(group, norms, strict=True))
    return [found[i] if i in found else piece.norms() for i, piece in enumerate(pieces)]


def sums_of(pieces: Sequence[Piece], weights: Tensor) -> list[Tensor]:
    """The weighted sums of many pieces, likewise."""
    found: dict[int, Tensor] = {}
    for group in _groups(pieces):
        first = pieces[group[0]]
        if isinstance(first, Outer):
            sums = kernels.weighted_sums([(pieces[i].g, pieces[i].a) for i in group], weights)  # type: ignore[attr-defined]
        else:
            sums = kernels.sums_of_rows([pieces[i].flat for i in group], weights)  # type: ignore[attr-defined]
        found.update(zip(group, sums, strict=True))
    return [found[i] if i in found else piece.sum(weights) for i, piece in enumerate(pieces)]


def _groups(pieces: Sequence[Piece]) -> Iterable[list[int]]:
    """Places of pieces that one kernel can serve together: of one kind and one shape."""
    found: dict[Any, list[int]] = {}
    for place, piece in enumerate(pieces):
        if isinstance(piece, Outer) and piece.positions > 1 and kernels.take(piece.g, piece.a):
            found.setdefault((piece.g.shape, piece.a.shape, piece.g.dtype), []).append(place)
        elif isinstance(piece, Rows) and kernels.take_rows(piece.values):
            found.setdefault((piece.units, piece.values.numel(), piece.values.dtype), []).append(place)
    return found.values()


def merged(pieces: list[Piece]) -> list[Piece]:
    """The pieces of one parameter as one piece where that makes the norm exact.

    Otherwise the norms of several pieces are added, which the triangle inequality allows.
    """
    if len(pieces) == 1 or len({piece.units for piece in pieces}) > 1:
        return pieces
    rows = [piece for piece in pieces if isinstance(piece, Rows)]
    outer = [piece for piece in pieces if isinstance(piece, Outer)]
    tokens = [piece for piece in pieces if isinstance(piece, Tokens)]
    if rows and len(rows) + len(outer) == len(pieces):  # of sentences so short that rows were smaller, and of others
        values = [*(piece.values for piece in rows), *(whole(piece).view_as(rows[0].values) for piece in outer)]
        return [Rows(torch.stack([each.float() for each in values]).sum(0))]
    if len(outer) == len(pieces):
        return [Outer(torch.cat([piece.g for piece in outer], dim=1), torch.cat([piece.a for piece in outer], dim=1))]
    if len(tokens) == len(pieces):
        g, looked_up = torch.cat([piece._padded() for piece in tokens], 1), torch.cat([p.tokens for p in tokens], 1)
        return [Tokens(g, looked_up, tokens[0].vocabulary, -1)]
    return pieces


def gathered(found: Mapping[str, list[Piece]]) -> dict[Names, list[Piece]]:
    """The pieces by the parameters they are for; those of biases and scales as one: each costs the host time."""
    pieces: dict[Names, list[Piece]] = {}
    small: dict[str, Tensor] = {}
    for name, parts in found.items():
        one = merged(parts)
        if len(one) == 1 and isinstance(one[0], Rows) and one[0].values.numel() <= _SMALL * one[0].units:
            small[name] = one[0].flat
        else:
            pieces[name,] = one
    if len({rows.shape[0] for rows in small.values()}) > 1:
        return {**pieces, **{(name,): [Rows(rows)] for name, rows in small.items()}}
    if small:
        pieces[tuple(small)] = [Rows(torch.cat([wide(rows) for rows in small.values()], dim=1))]
    return pieces


def whole_norms(pieces: Iterable[list[Piece]]) -> Tensor:
    """(units,) a bound of every unit's norm over all parameters; several pieces of one parameter add theirs."""
    groups = list(pieces)
    made = iter(norms_of([piece for parts in groups for piece in parts]))
    norms = [sum(rest, first) for first, *rest in (list(islice(made, len(parts))) for parts in groups)]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def kept(piece: Outer | Patches, shape: torch.Size) -> Piece:
    """The piece, or its per-unit gradients where those take less memory than what they are made from."""
    if not piece.units:
        return Rows(piece.g.new_zeros(0, *shape))
    if isinstance(piece, Patches):
        room = max(piece.g.numel() + piece.x.numel(), 0 if piece.g.is_cuda else _ROOM)
        return piece.rows(shape) if shape.numel() * piece.units <= room else piece
    held = piece.g.numel() + piece.a.numel()
    if piece.positions > 1 and shape.numel() * piece.units <= held * (_WORTH_MEMORY if kernels.take(piece.g) else 1):
        return Rows(whole(piece).view(-1, *shape))
    return piece


def _weighty(values: Tensor, weights: Tensor) -> Tensor:
    """The values with zeros in the units of weight 0: 0 times infinity is not a number.

    On a GPU zeros are always written, because the host would have to wait for an answer whether there is such a unit.
    """
    weightless = weights == 0.0
    if not values.is_cuda and not bool(weightless.any()):
        return values
    return values.masked_fill(weightless.view(-1, *[1] * (values.dim() - 1)), 0.0)


def _sum_of_rows(rows: Tensor, weights: Tensor) -> Tensor:
    if kernels.take_rows(rows):
        return kernels.sums_of_rows([rows], weights)[0]
    rows = wide(_weighty(rows, weights))
    return torch.mv(rows.t(), weights.to(rows.dtype))


def _unit(values: Tensor) -> float:
    return float(torch.finfo(values.dtype).eps)


def wide(values: Tensor) -> Tensor:
    """In float32, or float64 if it is that."""
    return values if values.dtype == torch.float64 else values.float()


def _product(g: Tensor, a: Tensor) -> Tensor:
    """gᵀ a, added up in float32 or better whatever the precision of the factors."""
    if g.is_cuda and g.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(g.t(), a, out_dtype=torch.float32)
    return wide(g).t() @ wide(a)
