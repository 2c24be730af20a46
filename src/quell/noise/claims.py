"""What this process has already released under each key: a step's noise must never cover two different gradients.

The difference of two releases that share their noise is noise-free. Across processes the ledger file
(`quell.noise.ledger`) remembers; inside one process this register does, by key id, so loading the same key twice does
not help. Keys made from a seed are left out: they promise nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quell.noise.key import Key
from quell.noise.layout import Shard
from quell.noise.releases import Releases


@dataclass(eq=False)
class StreamClaim:
    """What one stream has released of these shards."""

    shards: tuple[Shard, ...]
    made: Releases = field(default_factory=Releases)


_claims: dict[str, list[StreamClaim]] = {}


def register(key: Key, shards: tuple[Shard, ...]) -> StreamClaim:
    claim = StreamClaim(shards)
    if not key.seeded:
        _claims.setdefault(key.id, []).append(claim)
    return claim


def overlapping(key: Key, own: StreamClaim) -> Iterator[Releases]:
    """What was released of any of `own`'s elements under this key, by its stream and by others of this process."""
    yield own.made
    for claim in _claims.get(key.id, ()):
        if claim is not own and claim.made.released and _overlap(claim.shards, own.shards):
            yield claim.made


def _overlap(a: tuple[Shard, ...], b: tuple[Shard, ...]) -> bool:
    by_tensor: dict[int, list[Shard]] = {}
    for shard in a:
        by_tensor.setdefault(shard.tensor, []).append(shard)
    return any(shard.overlaps(other) for shard in b for other in by_tensor.get(shard.tensor, ()))
