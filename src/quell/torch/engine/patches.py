"""The weight of a convolution: its gradients by the patches of the input that lie under the kernel, place by place.

Patches are unfolded a few units at a time. (A Triton kernel that makes and measures the gradients tile by tile without
unfolding, so that none is kept, was tried on an H200: its loads of single numbers took twice as long in all.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quell.torch.engine import kernels
from quell.torch.engine.bounds import IN_A_ROW, wide
from quell.torch.engine.pieces import Outer, Piece, Rows, chunk_of, norms_of_rows, sum_of_rows, whole

# Per-unit gradients are kept, because making them twice takes time, if they take at most so many times the memory of
# what they are made from on a GPU, or no more than that or than so many numbers on a CPU.
_WORTH_MEMORY, _ROOM = 1.5, 1 << 24


@dataclass(frozen=True)
class Window:
    """A convolution's kernel, and how it moves over the input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]  # before and after the last dimension, before and after the one before it, ...
    mode: str  # of padding, as `functional.pad` calls it

    @classmethod
    def of(cls, layer: Any) -> Window:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padding = tuple(layer._reversed_padding_repeated_twice)
        return cls(layer.kernel_size, layer.stride, layer.dilation, padding, mode)

    def padded(self, x: Tensor) -> Tensor:
        return functional.pad(x, self.padding, mode=self.mode) if any(self.padding) else x

    def unfold(self, x: Tensor) -> Tensor:
        """(rows, channels in × kernel, places of the output), group by group, as the layer pads, strides and dilates.

        Places come last because neighbours there are neighbours in `x` too: the copy reads and writes in order.
        """
        padding, by_kernel = self.padding, kernels.take_rows(x) and x.dim() == 4
        if not (by_kernel and self.mode == "constant"):
            x, padding = self.padded(x), (0,) * len(padding)
        sizes = [n + sum(padding[2 * i : 2 * i + 2]) for i, n in enumerate(reversed(x.shape[2:]))][::-1]
        spans = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        places = [(n - s) // step + 1 for n, s, step in zip(sizes, spans, self.stride, strict=True)]
        if by_kernel:
            return kernels.unfold(x, self, padding, places)
        moves = [s * step for s, step in zip(x.stride()[2:], self.stride, strict=True)]
        within = [s * d for s, d in zip(x.stride()[2:], self.dilation, strict=True)]
        view = x.as_strided((*x.shape[:2], *self.kernel, *places), (*x.stride()[:2], *within, *moves))
        return view.reshape(len(x), -1, math.prod(places))


@dataclass(eq=False)
class Patches:
    """Σ over places of (gradient of the output)·(patch of the input)ᵀ."""

    g: Tensor  # (units, rows of one unit, channels out, *places)
    x: Tensor  # (units, rows of one unit, channels in, *sizes)
    window: Window
    groups: int
    through: Callable[[Tensor], Tensor] | None = None  # applied to gradients (units, channels out, rest) when made
    standardised: bool = False  # whether `through` takes them back through the standardisation of the weight
    held: int | None = None  # how many numbers the whole piece has, where this is a part

    @property
    def units(self) -> int:
        return int(self.g.shape[0])

    @property
    def kind(self) -> tuple[Any, ...]:
        """What pieces of one weight must share to be one piece with more rows."""
        way = (self.standardised, self.through is None)
        return self.g.shape[2:], self.x.shape[2:], self.window, self.groups, way

    def norms(self) -> Tensor:
        return torch.cat(list(self._of_each(lambda rows, some: norms_of_rows(rows))))

    def sum(self, weights: Tensor) -> Tensor:
        first, *others = self._of_each(lambda rows, some: sum_of_rows(rows, weights[some]))
        for other in others:
            first = first.double().add_(other)
        return first

    def of(self, units: slice) -> Patches:
        return replace(self, g=self.g[units], x=self.x[units], held=self._held)

    @property
    def _held(self) -> int:
        return self.held or self.g.numel() + self.x.numel()

    def kept(self, shape: torch.Size) -> Piece:
        """This piece, or its per-unit gradients where those take less memory than what they are made from."""
        held = self._held
        if shape.numel() * self.units > (held * _WORTH_MEMORY if self.g.is_cuda else max(held, _ROOM)):
            return self
        if self.through is not None:
            return Rows(torch.cat(list(self._of_each(lambda rows, some: rows))).view(self.units, *shape))
        made, first = self.g.new_empty(self.units * self.groups, shape[0] // self.groups, shape[1:].numel()), 0
        for part in self._outer():
            whole(part, made[first : first + part.units])
            first += part.units
            del part  # before the next is made
        return Rows(made.view(self.units, *shape))

    def _of_each(self, work: Callable[[Tensor, slice], Tensor]) -> Iterator[Tensor]:
        """What `work` makes of (some units, elements of the weight) gradients and of which units they are.

        The gradients have the same bits each time: nothing is to be allowed for.
        """
        first = 0
        for part in self._outer():
            made = whole(part).view(part.units // self.groups, self.g.shape[2], -1)
            del part  # this and what was made of it, before the next is made
            some = slice(first, first := first + made.shape[0])
            found = work((made if self.through is None else self.through(wide(made))).flatten(1), some)
            del made
            yield found

    def _outer(self) -> Iterator[Outer]:
        """A few units at a time, each group of channels as a unit of its own."""
        width = self.x.shape[2] * math.prod(self.window.kernel)
        unfolded = self.g[:1, :, 0].numel() * width
        weight = self.g.shape[2] * width // self.groups
        count = chunk_of(self.g, max(unfolded, weight), self._held)
        if not kernels.take_rows(self.g):  # then sums take some units at a time, which must be cut in the same places
            count = min(IN_A_ROW, 1 << count.bit_length() - 1)
        for g, x in zip(self.g.split(count), self.x.split(count), strict=True):
            yield _as_outer(g, self.window.unfold(x.flatten(0, 1)), self.groups)


def _as_outer(g: Tensor, a: Tensor, groups: int) -> Outer:
    """(units, rows, channels, *places) and (units·rows, width, places) as (units·groups, rows·places, ·)."""
    (units, rows), places = g.shape[:2], a.shape[2]

    def by_group(values: Tensor) -> Tensor:
        if rows > 1:
            values = values.reshape(units, rows, groups, -1, places).permute(0, 2, 3, 1, 4)
        return values.reshape(units * groups, -1, rows * places).transpose(1, 2)  # no copy of units of one row

    return Outer(by_group(g), by_group(a))
