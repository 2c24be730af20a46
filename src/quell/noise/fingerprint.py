"""A short keyed fingerprint of gradient sums, made where they lie in one reading: two sums that differ differ in it.

Copying 10⁹ numbers to the host to hash them would take longer than their noise, so they are first compressed by NH,
the universal hash of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway, CRYPTO 1999). A block of 1,024 words m of 32
bits, under secret random words k, becomes Σ_i (m_i + k_i mod 2³²)·(m_{i+512} + k_{i+512} mod 2³²) mod 2⁶⁴, once for
each of two independent k. Words are the bits of the numbers, so −0 is not 0, and a NaN is itself.

Two different blocks have equal NH with probability at most 2⁻³² over k (Theorem 1 there), so 2⁻⁶⁴ for both k. The
results, 256 times fewer words, are compressed again under keys of their own, until `FEW` words are left, which BLAKE2b
takes. Two different inputs of one layout collide if they do at one of the at most 7 levels that 2⁵⁰ words need: with
probability at most 7·2⁻⁶⁴ < 2⁻⁶¹ per comparison. Nobody can look for collisions, because the keys follow from the
run's secret and neither they nor a fingerprint leave the process (`quell.noise.guard` writes keyed digests of them).
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b, shake_256
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from quell.noise.arrays import is_torch
from quell.noise.key import Key
from quell.noise.layout import Shard

BLOCK: Final = 1024  # words
LEVELS: Final = 7
FEW: Final = 4096  # words

Words = NDArray[np.uint32]


class Fingerprint:
    """Of the tensors of a stream. `device` is where they lie, None for NumPy arrays."""

    def __init__(self, key: Key, shards: tuple[Shard, ...], device: Any) -> None:
        content = shake_256(key.derive("quell fingerprint")).digest(LEVELS * 2 * BLOCK * 4)
        self._keys = np.frombuffer(content, "<u4").reshape(LEVELS, 2, BLOCK)
        self._layout = repr([(shard.tensor, shard.offset, shard.length) for shard in shards]).encode()
        self._gpu: Any = None
        if device is not None and device.type == "cuda":
            from quell.noise.triton_fingerprint import GpuCompression

            self._gpu = GpuCompression(self._keys, device)

    def __call__(self, tensors: Sequence[Any]) -> bytes:
        """(16,) secret bytes."""
        digest = blake2b(self._layout, digest_size=16)
        digest.update(repr([str(tensor.dtype) for tensor in tensors]).encode())
        digest.update(self._few(tensors).tobytes())
        return digest.digest()

    def _few(self, tensors: Sequence[Any]) -> Words:
        if self._gpu is not None:
            few: Words = self._gpu(tensors, FEW)
            return few
        words = np.concatenate([compress(words_of(tensor), self._keys[0]) for tensor in tensors] or [_NOTHING])
        level = 1
        while words.size > FEW:
            words = compress(words, self._keys[level])
            level += 1
        return words


def words_of(tensor: Any) -> Words:
    """The bits of an array or a torch CPU tensor; half precision is widened, which changes no value."""
    if is_torch(tensor):
        flat = tensor.detach().reshape(-1)
        tensor = (flat.float() if flat.element_size() == 2 else flat).numpy()
    flat32 = np.ascontiguousarray(tensor.astype(np.float32) if tensor.itemsize == 2 else tensor).reshape(-1)
    return np.asarray(flat32.view(np.uint32))


def compress(words: Words, keys: Words) -> Words:
    """(4·blocks,) the two NH of every block, low half first; missing words of the last block are zeros."""
    out = np.zeros((-(-words.size // BLOCK), 2), np.uint64)
    _compress(words, keys, out)
    return out.view(np.uint32).reshape(-1)


@njit(nogil=True, cache=True)
def _compress(words: Any, keys: Any, out: Any) -> None:  # pragma: no cover - compiled
    half = keys.shape[1] // 2
    padded = np.zeros(keys.shape[1], np.uint32)
    for block in range(out.shape[0]):
        start = block * keys.shape[1]
        m = words[start : start + keys.shape[1]]
        if m.size < padded.size:
            padded[: m.size] = m
            m = padded
        for number in range(2):
            k = keys[number]
            total = np.uint64(0)
            for i in range(half):
                left = np.uint64(np.uint32(m[i] + k[i]))
                right = np.uint64(np.uint32(m[i + half] + k[i + half]))
                total += left * right
            out[block, number] = total


_NOTHING: Words = np.zeros(0, np.uint32)
