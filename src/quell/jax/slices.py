"""Which elements of the unsharded tensors a device holds, and which tiles of noise cover them.

A device's slice of a tensor is a box. Its elements, in C order, are runs of neighbours in the unsharded tensor, and
each run is cut from the tiles that cover it; where runs are so short that tiles would be made many times over, larger
boxes are cut from all the elements that they span. The tiles of all tensors make one list, so that one loop, compiled
once, makes the noise of any model. Element numbers are 32-bit: JAX's integers are, unless a program asks for more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from quell.errors import QuellError

MOST_ELEMENTS = 2**32  # of a tensor
u32 = jnp.uint32


@dataclass(frozen=True)
class Slice:
    """The slice of a tensor of `shape` on each device: dimension i is split over the mesh axes `axes[i]`."""

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    mesh: Mesh | None = None
    spec: Any = None

    @classmethod
    def of(cls, tensor: Any) -> Slice:
        """The slice of an array, or of anything with a shape and perhaps a sharding."""
        shape, sharding = tuple(tensor.shape), getattr(tensor, "sharding", None)
        if math.prod(shape) > MOST_ELEMENTS:
            raise QuellError(
                f"a parameter of shape {shape} has {math.prod(shape):,} elements: quell.jax numbers {MOST_ELEMENTS:,} "
                "at most, so split it into several"
            )
        if not isinstance(sharding, NamedSharding):
            if sharding is not None and len(sharding.device_set) > 1:
                raise QuellError(f"a parameter has a {type(sharding).__name__}: shard it with a NamedSharding")
            return cls(shape, ((),) * len(shape))
        entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        axes = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
        return cls(shape, axes, sharding.mesh, sharding.spec)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each dimension is split."""
        sizes = {} if self.mesh is None else self.mesh.shape
        return tuple(math.prod(sizes[axis] for axis in axes) for axes in self.axes)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return tuple(size // parts for size, parts in zip(self.shape, self.parts, strict=True))

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours of each dimension in the unsharded tensor."""
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def base(self, coordinate: Callable[[str], Array]) -> Array:
        """The number of the slice's first element; `coordinate` is the device's place along a mesh axis."""
        base = jnp.zeros((), u32)
        for axes, size, stride in zip(self.axes, self.local, self.strides, strict=True):
            place = jnp.zeros((), u32)
            for axis in axes:
                place = place * u32(self.mesh.shape[axis] if self.mesh else 1) + coordinate(axis).astype(u32)
            base = base + place * u32(size * stride)
        return base


@dataclass(frozen=True)
class Boxes:
    """A slice as boxes: one for each place along its first `level` dimensions, each covered by `tiles` tiles."""

    where: Slice
    level: int
    tile: int

    @classmethod
    def fewest(cls, where: Slice, tile: int) -> Boxes:
        """The boxes that take the fewest tiles in all; runs of neighbours, if those take no more."""
        whole = next((d for d in range(len(where.shape)) if where.local[d + 1 :] == where.shape[d + 1 :]), 0)
        return min((cls(where, level, tile) for level in range(whole, -1, -1)), key=lambda boxes: boxes.all_tiles)

    @cached_property
    def count(self) -> int:
        return math.prod(self.where.local[: self.level])

    @cached_property
    def length(self) -> int:
        """Elements of a box."""
        return math.prod(self.where.local[self.level :])

    @cached_property
    def span(self) -> int:
        """Elements of the unsharded tensor from a box's first element to its last."""
        sizes, strides = self.where.local[self.level :], self.where.strides[self.level :]
        return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))

    @cached_property
    def misaligned(self) -> int:
        """How far beyond the beginning of a tile a box can begin."""
        found = zip(self.where.strides, self.where.local, self.where.parts, strict=True)
        moves = [stride * size for stride, size, parts in found if parts > 1]
        return self.tile - math.gcd(self.tile, *moves, *self.where.strides[: self.level])

    @cached_property
    def tiles(self) -> int:
        return -(-(self.span + self.misaligned) // self.tile)

    @property
    def all_tiles(self) -> int:
        return self.count * self.tiles if math.prod(self.where.local) else 0

    def cut(self, made: Array, base: Array) -> Array:
        """The slice's own elements, flat, of everything that its tiles have made."""
        rows = made.reshape(self.count, self.tiles * self.tile)
        if not self.misaligned and self.span == self.length:
            return rows[:, : self.length].reshape(-1)
        local, strides = self.where.local, self.where.strides
        inside = _numbers(local[self.level :], strides[self.level :])
        begin = (base + _numbers(local[: self.level], strides[: self.level])) % u32(self.tile)
        if self.span == self.length and self.count == 1:
            return lax.dynamic_slice(rows[0], (begin[0].astype(jnp.int32),), (self.length,))
        return jnp.take_along_axis(rows, begin[:, None] + inside[None], axis=1).reshape(-1)


class Cover:
    """The list of all tiles that the slices of a device need, tensor by tensor and box by box."""

    def __init__(self, slices: Sequence[Slice], tile: int) -> None:
        self.boxes = [Boxes.fewest(where, tile) for where in slices]
        self.ends = np.cumsum([boxes.all_tiles for boxes in self.boxes])
        self._tile = tile
        self._depth = max(boxes.level for boxes in self.boxes)

    @property
    def tiles(self) -> int:
        return int(self.ends[-1])

    def addresses(self, numbers: Array, bases: Array) -> tuple[Array, Array]:
        """The tensor of each tile of the list and its number there; `bases` are the slices' first elements."""
        tensor = jnp.minimum(jnp.searchsorted(jnp.asarray(self.ends, u32), numbers, side="right"), len(self.boxes) - 1)
        of = self._table([boxes.tiles for boxes in self.boxes])[tensor]
        before = self._table([end - boxes.all_tiles for end, boxes in zip(self.ends, self.boxes, strict=True)])
        left, within = (numbers - before[tensor]) // of, (numbers - before[tensor]) % of
        start = bases[tensor]
        for i in range(self._depth):  # the box's place along its dimensions, the last of them first
            held = [
                (b.where.local[b.level - 1 - i], b.where.strides[b.level - 1 - i]) if i < b.level else (1, 0)
                for b in self.boxes
            ]
            size = self._table([size for size, _ in held])[tensor]
            start = start + left % size * self._table([stride for _, stride in held])[tensor]
            left = left // size
        return tensor, start // u32(self._tile) + within

    def cut(self, made: Array, bases: Array) -> list[Array]:
        """Each slice's elements, flat, of what the list of tiles has made."""
        flat = made.reshape(-1)
        found = []
        for number, (boxes, end) in enumerate(zip(self.boxes, self.ends, strict=True)):
            own = flat[(end - boxes.all_tiles) * self._tile : end * self._tile]
            found.append(boxes.cut(own, bases[number]) if boxes.all_tiles else own)
        return found

    def _table(self, values: Sequence[Any]) -> Array:
        return jnp.asarray(np.asarray(values, np.uint32))


def _numbers(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """(∏ sizes,) the element numbers of a box, from its first element on."""
    numbers = jnp.zeros((1,), u32)
    for size, stride in zip(sizes, strides, strict=True):
        numbers = (numbers[:, None] + jnp.arange(size, dtype=u32)[None] * u32(stride)).reshape(-1)
    return numbers
