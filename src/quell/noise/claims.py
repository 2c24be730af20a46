"""What this process has already released under each key: a step's noise must never cover two different gradients.

The difference of two releases that share their noise is noise-free. Across processes the ledger file
(`quell.noise.ledger`) remembers; inside one process this register does, by key id, so loading the same key twice does
not help. Keys made from a seed are left out: they promise nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from quell.noise.key import Key
from quell.noise.layout import Shard


@dataclass(eq=False)
class Claim:
    """One stream's releases: steps below `released` of these shards."""

    shards: tuple[Shard, ...]
    released: int = 0


_claims: dict[str, list[Claim]] = {}


def register(key: Key, shards: tuple[Shard, ...]) -> Claim:
    claim = Claim(shards)
    if not key.seeded:
        _claims.setdefault(key.id, []).append(claim)
    return claim


def released(key: Key, own: Claim) -> int:
    """How many steps of any of `own`'s elements were released under this key, by its stream or another."""
    return max(own.released, released_by_others(key, own))


def released_by_others(key: Key, own: Claim) -> int:
    """How many steps of any of `own`'s elements other streams of this process have released under this key."""
    most = 0
    for claim in _claims.get(key.id, ()):
        if claim is not own and claim.released > most and _overlap(claim.shards, own.shards):
            most = claim.released
    return most


def _overlap(a: tuple[Shard, ...], b: tuple[Shard, ...]) -> bool:
    by_tensor: dict[int, list[Shard]] = {}
    for shard in a:
        by_tensor.setdefault(shard.tensor, []).append(shard)
    return any(shard.overlaps(other) for shard in b for other in by_tensor.get(shard.tensor, ()))
