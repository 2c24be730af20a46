"""Many pieces at once: those of one parameter as one, those of one shape by one launch, and the norms over all.

Where an embedding is the output layer too, its gradient is that of the tokens and that of the outputs together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from operator import add
from typing import Any

import torch
from torch import Tensor

from quell.torch.clip_norms import Bounds, Measured, clip_factors
from quell.torch.engine import kernels
from quell.torch.engine.bounds import IN_A_ROW, Allowance, filled, stacked, wide, wide_type
from quell.torch.engine.patches import Patches
from quell.torch.engine.pieces import Outer, Piece, Rows, Tokens, chunk_of, norms_of_rows

_SMALL = 1 << 14  # numbers of a unit's gradient that are gathered with others

Names = tuple[str, ...]  # of the parameters whose gradients are one piece, in its order


@dataclass(eq=False)
class Tied:
    """An embedding that is the output layer too. Its gradient is E + O, where E is that of the tokens.

    |E + O|² = |E|² + |O|² + 2⟨E, O⟩, and ⟨E, O⟩ = Σ_tp (output gradient of position p at token t)·(a_p·g_t).
    """

    tokens: Tokens
    outer: Outer

    @property
    def units(self) -> int:
        return self.outer.units

    def norms(self) -> Tensor:
        own, other = self.tokens.norms().double(), self.outer.norms().double()
        square = own.square() + other.square() + 2 * self._inner()
        return torch.minimum(square.clamp_(min=0.0).sqrt(), own + other).float()

    def sum(self, weights: Tensor) -> Tensor:
        return self.tokens.sum(weights).view(-1) + self.outer.sum(weights).view(-1)

    def of(self, units: slice) -> Tied:
        return Tied(self.tokens.of(units), self.outer.of(units))

    def _inner(self) -> Tensor:
        """(units,) float64, a bound of ⟨E, O⟩ from above, for E and O as the sum makes them; infinite if unknown.

        Products of a and g are off by width·u·|a_p||g_t|. E and O are off by u·|g_t| and u·|output gradient||a_p| for
        each of their positions, which are added up in any order.
        """
        g, a, made, numbers = wide(self.tokens.padded), wide(self.outer.a), self.outer.g, self.tokens.tokens
        (units, places, width), positions = g.shape, self.outer.positions
        found, count = [], chunk_of(g, places * positions)
        for first in range(0, units, count):
            here = slice(first, first + count)
            picked = made[here].gather(2, numbers[here].unsqueeze(1).expand(-1, positions, -1))
            products = torch.bmm(a[here], g[here].transpose(1, 2)).mul_(wide(picked))
            found.append(products.flatten(1).sum(1, dtype=torch.float64))
        sizes = [torch.linalg.vector_norm(values, dim=2, dtype=g.dtype) + 1e-16 * width**0.5 for values in (g, made, a)]
        size = sizes[0].double().sum(1) * (sizes[1].double() * sizes[2].double()).sum(1)
        off = (width + filled(g) + filled(made) + 8) * (torch.finfo(g.dtype).eps / 2)
        if positions == 1:  # weights, and what they are multiplied with, are rounded to the precision of this gradient
            off += torch.finfo(made.dtype).eps
        return torch.cat(found).nan_to_num(torch.inf, torch.inf, torch.inf) + 1.001 * off * size


def norms_of(pieces: Sequence[Piece]) -> list[Tensor]:
    """The norms of many pieces, those of one kind and shape by one launch, because every launch costs the host time."""

    def alone(piece: Piece) -> Tensor:
        return norms_of_rows(piece.flat) if isinstance(piece, Rows) else piece.norms()

    found = _in_groups(pieces, kernels.gram_norms, kernels.row_norms, alone)
    groups: dict[Any, list[tuple[int, Allowance]]] = {}
    for place, piece in enumerate(pieces):
        if isinstance(piece, Rows) and piece.allowed is not None:
            groups.setdefault(piece.allowed.kind, []).append((place, piece.allowed))
    for group in groups.values():
        raised = stacked([allowed for _, allowed in group]).raised(torch.stack([found[place] for place, _ in group]))
        for (place, _), norms in zip(group, raised, strict=True):
            found[place] = norms
    return found


def sums_of(pieces: Sequence[Piece], weights: Tensor) -> list[Tensor]:
    """The weighted sums of many pieces, flat; in float64 where there are many units.

    A unit can change how every addition after it rounds, so only a few of them are added up in float32.
    """
    if len(weights) <= IN_A_ROW:
        return [total.view(-1) for total in _sums_of(pieces, weights)]
    at_once = [place for place, piece in enumerate(pieces) if _takes_care(piece)]
    by_few = [place for place in range(len(pieces)) if place not in at_once]
    sums = dict(zip(at_once, _sums_of([pieces[place] for place in at_once], weights), strict=True))
    for first in range(0, len(weights), IN_A_ROW):
        some = slice(first, first + IN_A_ROW)
        made = _sums_of([pieces[place].of(some) for place in by_few], weights[some])
        for place, part in zip(by_few, made, strict=True):
            sums[place] = sums[place].add_(part) if place in sums else part.double()
    return [sums[place].view(-1) for place in range(len(pieces))]


def _takes_care(piece: Piece) -> bool:
    """Whether its sum is made a few units at a time, such as by the kernel that adds up rows."""
    if isinstance(piece, Outer):
        return piece.adds_few
    if isinstance(piece, Patches):
        return kernels.take_rows(piece.g)
    return isinstance(piece, Rows) and kernels.take_rows(piece.values)


def _sums_of(pieces: Sequence[Piece], weights: Tensor) -> list[Tensor]:
    """By one launch for those of one kind and shape, as `norms_of`."""
    of_outer = partial(kernels.weighted_sums, weights=weights)
    of_rows = partial(kernels.sums_of_rows, weights=weights)
    return _in_groups(pieces, of_outer, of_rows, lambda piece: piece.sum(weights))


def _in_groups(pieces: Sequence[Any], of_outer: Any, of_rows: Any, alone: Callable[[Piece], Tensor]) -> list[Tensor]:
    groups: dict[Any, list[int]] = {}
    for place, piece in enumerate(pieces):
        if isinstance(piece, Outer) and piece.positions > 1 and kernels.take(piece.g, piece.a):
            groups.setdefault((piece.g.shape, piece.a.shape, piece.g.dtype), []).append(place)
        elif isinstance(piece, Rows) and kernels.take_rows(piece.values):
            groups.setdefault((piece.units, piece.values.numel(), piece.values.dtype), []).append(place)
    found: dict[int, Tensor] = {}
    for group in groups.values():
        own = [pieces[place] for place in group]
        outer = isinstance(own[0], Outer)
        made = of_outer([(piece.g, piece.a) for piece in own]) if outer else of_rows([piece.flat for piece in own])
        found.update(zip(group, made, strict=True))
    return [found[place] if place in found else alone(piece) for place, piece in enumerate(pieces)]


def merged(pieces: list[Piece]) -> list[Piece]:
    """The pieces of one parameter as one piece where that makes the norm exact.

    Otherwise the norms of several pieces are added, which the triangle inequality allows.
    """
    if len(pieces) == 1 or len({piece.units for piece in pieces}) > 1:
        return pieces
    tokens = [piece for piece in pieces if isinstance(piece, Tokens)]
    rows = [piece for piece in pieces if isinstance(piece, Rows)]
    outer = [piece for piece in pieces if isinstance(piece, Outer)]
    if rows and len(rows) + len(tokens) + len(outer) == len(pieces):  # some uses were so short that rows are kept
        small: list[Rows | Tokens | Outer] = [*rows, *tokens, *outer]
        made = [piece.flat for piece in small]
        given = [piece.allowed for piece in rows] + [piece.allowed for piece in outer]
        allowed = [each for each in given if each is not None]
        total = torch.stack([values.float() for values in made]).sum(0)
        return [Rows(total, _with_tokens(reduce(add, allowed), tokens) if allowed else None)]
    patches = [piece for piece in pieces if isinstance(piece, Patches)]
    if len(patches) == len(pieces) and len({piece.kind for piece in patches}) == 1:
        g, x = (torch.cat(parts, dim=1) for parts in zip(*((p.g, p.x) for p in patches), strict=True))
        return [replace(patches[0], g=g, x=x)]
    if len(tokens) + len(outer) < len(pieces):
        return pieces
    if len(tokens) > 1:
        g, numbers = (torch.cat(parts, dim=1) for parts in zip(*((t.padded, t.tokens) for t in tokens), strict=True))
        tokens = [Tokens(g, numbers, tokens[0].vocabulary, -1)]
    if len(outer) > 1:
        g, a = (torch.cat(parts, dim=1) for parts in zip(*((o.g, o.a) for o in outer), strict=True))
        outer = [Outer(g, a)]
    return [Tied(tokens[0], outer[0])] if tokens and outer else [*tokens, *outer]


def _with_tokens(allowed: Allowance, tokens: list[Tokens]) -> Allowance:
    """What `Tied` allows for where an embedding is the output layer too."""
    for g in (piece.padded for piece in tokens):
        size = torch.linalg.vector_norm(g, dim=2, dtype=wide_type(g)).double().sum(1)
        off = (g.shape[2] + filled(g) + allowed.positions + 8) * allowed.unit
        allowed = replace(allowed, square=allowed.square + 2 * off * size * allowed.size)
    return allowed


def gathered(found: Mapping[str, list[Piece]]) -> dict[Names, list[Piece]]:
    """The pieces by the parameters they are for; those of biases and scales as one: each costs the host time."""
    pieces: dict[Names, list[Piece]] = {}
    small: dict[str, Tensor] = {}
    for name, parts in found.items():
        one = merged(parts)
        first = one[0]
        if len(one) == 1 and isinstance(first, Rows) and _is_small(first):
            small[name] = first.flat
        else:
            pieces[name,] = one
    if len({rows.shape[0] for rows in small.values()}) > 1:
        return {**pieces, **{(name,): [Rows(rows)] for name, rows in small.items()}}
    if small:
        pieces[tuple(small)] = [Rows(torch.cat([wide(rows) for rows in small.values()], dim=1))]
    return pieces


def _is_small(rows: Rows) -> bool:
    return rows.allowed is None and rows.values.numel() <= _SMALL * rows.units


def whole_norms(pieces: Iterable[list[Piece]], scale: float = 1.0) -> Tensor:
    """(units,) a bound of every unit's norm over all parameters, times `scale`.

    Several pieces of one parameter add theirs. Each addition of a square may lose 2⁻²⁴ of the sum.
    """
    groups = list(pieces)
    made = iter(norms_of([piece for parts in groups for piece in parts]))
    norms = [sum(rest, first) for first, *rest in (list(islice(made, len(parts))) for parts in groups)]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0) * (scale * (1 + 2.0**-24 * len(norms)))


def clipped(
    pieces: Mapping[Names, list[Piece]], bounds: Bounds, scale: float = 1.0, counts: Tensor | None = None
) -> tuple[dict[Names, Tensor], Measured]:
    """Flat sums of `scale` times the gradients, clipped, of the units that count; and norms of all before clipping.

    The host waits for nothing here. A unit whose gradient is not finite gets the factor 0.
    """
    sums: dict[Names, Tensor] = {}
    measured: Measured = []
    for bound in bounds.groups:
        own = {names: parts for names, parts in pieces.items() if names[0] in bound.names}
        if not own:  # in a pass that did not use these parameters
            continue
        norms = whole_norms(own.values(), scale)
        measured.append((norms, bound))
        factors = clip_factors(norms, bound) * scale
        if counts is not None:
            factors = factors * counts
        made = iter(sums_of([piece for parts in own.values() for piece in parts], factors))
        sums |= {names: reduce(add, islice(made, len(parts))) for names, parts in own.items()}
    return sums, measured
