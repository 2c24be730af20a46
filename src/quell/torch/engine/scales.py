"""Pieces of S∘g: every entry of a unit's gradient multiplied by a scale of its own, before it is measured and clipped.

S = r cᵀ over the parameter as a matrix, its first dimension by the rest. Then S∘(Σ_t g_t a_tᵀ) = Σ_t (r∘g_t)(c∘a_t)ᵀ:
scaled factors make a piece of the same kind, with all that is proven about its norms. Factors keep their precision, and
are scaled when they are asked for: the same operation on the same tensors gives the same bits for norms and sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quell.torch.engine.bounds import wide
from quell.torch.engine.patches import Patches
from quell.torch.engine.pieces import Outer, Piece, Rows, Stacked, Tokens
from quell.torch.engine.together import Tied


@dataclass(frozen=True, eq=False)
class Scale:
    """r and c, float32. They are overwritten from step to step, and never replaced: recordings read them."""

    rows: Tensor
    columns: Tensor

    @property
    def entries(self) -> Tensor:
        """S, flat."""
        return torch.outer(self.rows, self.columns).flatten()

    def undo_(self, total: Tensor) -> None:
        """Divide a sum of scaled gradients by S, in place."""
        total.view(len(self.rows), -1).div_(self.rows[:, None]).div_(self.columns)


@dataclass(eq=False)
class Scaled:
    """A piece whose factors are scaled anew whenever it is asked: scaled copies of all would fill the memory."""

    piece: Outer | Tokens | Tied
    scale: Scale

    @property
    def units(self) -> int:
        return self.piece.units

    def norms(self) -> Tensor:
        return self._made.norms()

    def sum(self, weights: Tensor) -> Tensor:
        return self._made.sum(weights)

    def of(self, units: slice) -> Scaled:
        return Scaled(self.piece.of(units), self.scale)

    @property
    def _made(self) -> Piece:
        made: Piece = _by_factors(self.piece, self.scale)
        return made


def scaled(piece: Piece, scale: Scale) -> Piece:
    """The piece of S∘gradient."""
    r, c = scale.rows, scale.columns
    if isinstance(piece, Rows):
        assert piece.allowed is None  # each position's own scale would need what the rows were made of
        return Rows(wide(piece.flat) * scale.entries)
    if isinstance(piece, (Outer, Tokens, Tied)):
        return Scaled(piece, scale)
    if isinstance(piece, Patches):  # makes its gradients a few units at a time
        before = piece.through
        return replace(piece, through=lambda made: (made if before is None else before(made)) * r[:, None] * c)
    assert isinstance(piece, Stacked)
    blocks = r.chunk(len(piece.parts))
    return Stacked([scaled(part, Scale(block, c)) for part, block in zip(piece.parts, blocks, strict=True)])


def _by_factors(piece: Any, scale: Scale) -> Any:
    r, c = scale.rows, scale.columns
    if isinstance(piece, Tied):
        return Tied(_by_factors(piece.tokens, scale), _by_factors(piece.outer, scale))
    if isinstance(piece, Outer):
        return Outer(_times(piece.g, r), _times(piece.a, c))
    return replace(piece, g=_times(piece.g, r[piece.tokens].unsqueeze(-1) * c))


def _times(values: Tensor, by: Tensor) -> Tensor:
    return (wide(values) * by).to(values.dtype)
