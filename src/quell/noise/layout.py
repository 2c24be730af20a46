"""Which random word belongs to which element: the bit-for-bit contract that every implementation follows.

A normal is addressed by (key, step, tensor, element), the element counted in C order over the *unsharded* tensor.
Elements come in tiles. A generator turns one counter into a block of W words (16 for ChaCha, 4 for Philox); a tile
is `LANES` consecutive blocks and covers W·LANES consecutive elements:

    element = tile·W·LANES + word·LANES + lane        block = tile·LANES + lane

so `LANES` neighbouring elements come from `LANES` neighbouring blocks: a GPU lane, or a CPU vector lane, computes one
block and all its stores are contiguous across lanes. Words 2i and 2i+1 of a block are the radius and the angle of one
Box–Muller pair, whose two normals take the elements of those two words.

The 128 counter bits are, in four 32-bit words, the same for all generators:

    block bits 0–31 | block bits 32–47 and, above them, the purpose (16 bits) | step | tensor

For ChaCha these are words 12–15 of the state (RFC 8439's counter and nonce) under the whole 256-bit key; for Philox
they are the counter, under a 64-bit key derived per tensor. Purpose 0 is the words of the tile, purpose 1 the second
radius word of the rare pairs that need one (`quell.noise.normal`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

from quell.errors import QuellError

LANES: Final = 32
CHACHA_ROUNDS: Final = {"chacha20": 20, "chacha8": 8}  # every other generator is not a ChaCha
WORDS: Final = {**dict.fromkeys(CHACHA_ROUNDS, 16), "philox": 4}  # words per block, by generator
DRAW, REFINE = 0, 1  # purposes

UNIT: Final = max(WORDS.values()) * LANES  # elements of the largest tile; every tile divides it

MOST_BLOCKS: Final = 2**48
MOST_ELEMENTS: Final = MOST_BLOCKS * min(WORDS.values())  # 2⁵⁰ per tensor
MOST_STEPS: Final = 2**32
MOST_TENSORS: Final = 2**32


@dataclass(frozen=True)
class Shard:
    """The elements [offset, offset + length) of tensor number `tensor`, in C order over the unsharded tensor."""

    tensor: int
    offset: int
    length: int

    def __post_init__(self) -> None:
        for name in ("tensor", "offset", "length"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 0:
                raise QuellError(f"shard {name}={value!r} must be a whole number of at least 0")
            object.__setattr__(self, name, int(value))
        if self.tensor >= MOST_TENSORS:
            raise QuellError(f"tensor={self.tensor:,} is beyond the {MOST_TENSORS:,} that a key can serve")
        if self.stop > MOST_ELEMENTS:
            raise QuellError(f"a tensor of {self.stop:,} elements is beyond the {MOST_ELEMENTS:,} that a key can serve")

    @property
    def stop(self) -> int:
        return self.offset + self.length

    def overlaps(self, other: Shard) -> bool:
        """Whether both hold some element of the same tensor."""
        return self.tensor == other.tensor and max(self.offset, other.offset) < min(self.stop, other.stop)


def whole(tensors: Sequence[Any]) -> tuple[Shard, ...]:
    """The shards of unsharded tensors, given as arrays, shapes or element counts, numbered in order.

    >>> whole([(3, 4), 5, ()])
    (Shard(tensor=0, offset=0, length=12), Shard(tensor=1, offset=0, length=5), Shard(tensor=2, offset=0, length=1))
    """
    return tuple(Shard(number, 0, element_count(tensor)) for number, tensor in enumerate(tensors))


def element_count(tensor: Any) -> int:
    """How many elements an array, a shape or a plain count stands for."""
    if isinstance(tensor, Integral):
        return int(tensor)
    return math.prod(int(size) for size in getattr(tensor, "shape", tensor))


def require_generator(name: str) -> str:
    if name not in WORDS:
        raise QuellError(f"generator={name!r} is not known: take {', '.join(WORDS)}")
    return name


def chacha_rounds(generator: str) -> int:
    """How many rounds of ChaCha make a block, which is what the kernels are told; 0 stands for Philox."""
    return CHACHA_ROUNDS.get(generator, 0)


def tile_size(generator: str) -> int:
    """Elements per tile."""
    return WORDS[generator] * LANES


def require_disjoint(shards: Sequence[Shard], advice: str = "give every rank its own slice") -> None:
    """No element twice: two shards that overlap would add the same noise to two gradients."""
    last: dict[int, Shard] = {}
    for shard in sorted(shards, key=lambda s: (s.tensor, s.offset)):
        before = last.get(shard.tensor)
        if before is not None and shard.length and before.stop > shard.offset:
            raise QuellError(f"two shards both hold element {shard.offset:,} of tensor {shard.tensor}: {advice}")
        if shard.length:
            last[shard.tensor] = shard
