"""Random numbers for batches: a cryptographic stream in NumPy arrays, the same on every machine.

Amplification assumes that nobody can predict who is in a batch, so the numbers come from SHAKE-256 keyed with the
run's 256-bit key rather than from a statistical generator: about 40 million 64-bit words a second from the standard
library, addressed by (purpose, counter), so that any part can be made without the parts before it.

Everything that turns words into indices uses integers and the four basic operations of IEEE arithmetic only. The
logarithms of mathematical libraries differ in the last bit between machines, and one index that differs between two
workers would silently break a distributed batch; hence `_log`.
"""

from __future__ import annotations

from hashlib import shake_256

import numpy as np
from numpy.typing import NDArray

from quell._types import Array
from quell.errors import QuellError

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

KEY_BYTES = 32
_BLOCK = 1 << 18  # examples per call of the hash: two megabytes


def checked_key(key: bytes) -> bytes:
    """The key, refused unless it has 256 bits; its value never enters a message."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise QuellError(f"a sampling key is {KEY_BYTES} bytes: make one with secrets.token_bytes({KEY_BYTES})")
    return key


def words(key: bytes, purpose: str, counter: int, count: int) -> Words:
    """(count,) uniform 64-bit words."""
    label = b"quell sampling 1\0" + purpose.encode() + b"\0" + counter.to_bytes(16, "little")
    return np.frombuffer(shake_256(checked_key(key) + label).digest(8 * count), dtype="<u8").astype(np.uint64)


def grouped(key: bytes, purpose: str, examples: int, groups: int) -> tuple[NDArray[np.unsignedinteger], Indices]:
    """Every example in one of `groups` groups, uniformly and independently: all examples in the order of their
    groups, and the (groups + 1,) boundaries between them.

    Keeps 4 bytes per example below 2³² examples, 8 above. A group's probability is 1/groups to within 2⁻⁶⁴.
    """
    starts = np.zeros(groups + 1, dtype=np.int64)
    for block, first in enumerate(range(0, examples, _BLOCK)):
        starts[1:] += np.bincount(_groups_of(key, purpose, block, first, examples, groups), minlength=groups)
    starts = np.cumsum(starts)
    order: NDArray[np.unsignedinteger] = np.empty(examples, dtype=np.uint32 if examples < 2**32 else np.uint64)
    free = starts[:-1].copy()
    for block, first in enumerate(range(0, examples, _BLOCK)):
        chosen = _groups_of(key, purpose, block, first, examples, groups)
        inside = np.argsort(chosen, kind="stable")
        size = np.bincount(chosen, minlength=groups)
        offset = np.arange(len(chosen)) - np.repeat(np.cumsum(size) - size, size)
        order[np.repeat(free, size) + offset] = first + inside
        free += size
    return order, starts


def permuted(key: bytes, purpose: str, examples: int) -> NDArray[np.unsignedinteger]:
    """All examples in a uniformly random order: random buckets, each sorted by random words."""
    buckets = max(1, examples // _BLOCK)
    order, starts = grouped(key, f"{purpose} buckets", examples, buckets)
    for bucket in range(buckets):
        part = slice(int(starts[bucket]), int(starts[bucket + 1]))
        tickets = words(key, f"{purpose} tickets", bucket, part.stop - part.start)
        order[part] = order[part][np.argsort(tickets, kind="stable")]
    return order


def coin_flips(key: bytes, purpose: str, counter: int, count: int, rate: float) -> Indices:
    """The indices below `count` whose coin shows heads, each with probability `rate`, in increasing order.

    Heads are a geometric gap apart, so the work is that of the heads, not of the coins. Exact to within 2⁻⁵² per coin.
    """
    if rate >= 1.0:
        return np.arange(count, dtype=np.int64)
    expected = count * rate
    size = int(expected + 8.0 * expected**0.5) + 32
    log_tail = float(_log(np.array([1.0 - rate]))[0]) if rate > 1e-4 else -rate * (1 + rate / 2 * (1 + rate * 2 / 3))
    heads: list[Indices] = []
    last = -1
    while last < count:
        block = words(key, purpose, (counter << 32) + len(heads), size)
        uniform = ((block >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
        gaps = np.minimum(np.floor(_log(uniform) / log_tail), float(count)).astype(np.int64)
        heads.append(last + np.cumsum(gaps + 1))
        last = int(heads[-1][-1])
    together = np.concatenate(heads)
    return together[: int(np.searchsorted(together, count))]


def unit_interval(block: Words) -> Array:
    """Words as numbers in [0, 1) with 53 bits."""
    return (block >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _groups_of(key: bytes, purpose: str, block: int, first: int, examples: int, groups: int) -> Indices:
    return (words(key, purpose, block, min(_BLOCK, examples - first)) % np.uint64(groups)).astype(np.int64)


def _log(values: Array) -> Array:
    """Natural logarithm by IEEE basic operations alone: 2·artanh((m−1)/(m+1)) with m in [√½, √2]."""
    mantissa, exponent = np.frexp(values)
    low = mantissa < 0.7071067811865476
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    exponent = exponent - low
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.zeros_like(square)
    for power in range(25, 0, -2):  # ratio ≤ 0.1716: the first term left out is below 2⁻⁶⁸
        series = series * square + 1.0 / power
    return np.asarray(exponent * 0.6931471805599453 + 2.0 * ratio * series)
