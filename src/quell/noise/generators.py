"""The generators in plain NumPy: the reference that every fast path is tested against.

`chacha20` is the block function of RFC 8439 under the full 256-bit key: predicting a word without the key means
breaking the cipher. `chacha8` is the same function with 8 of the 20 rounds (Bernstein, "ChaCha, a variant of Salsa20",
2008): faster, and with a smaller margin; nobody has published an attack on it that beats guessing the key. Key and
counters are the same for both. The same counter under the same key gives unrelated words, because each round count is
a function of its own; streams refuse to use a key twice all the same. `philox` is Philox4x32-10 (Salmon et al., SC'11),
faster still on a GPU and statistically excellent, but not a cipher: it makes no promise against someone who works to
recover its 64-bit key.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quell.noise import normal
from quell.noise.key import Key
from quell.noise.layout import DRAW, LANES, REFINE, WORDS, chacha_rounds, require_generator, tile_size
from quell.noise.normal import Floats, Words

CHACHA_CONSTANTS: Final = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
QUARTER_ROUND: Final = ((0, 1, 3, 16), (2, 3, 1, 12), (0, 1, 3, 8), (2, 3, 1, 7))  # what `mix` does to a, b, c, d
PHILOX_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)


def normals(generator: str, key: Key, step: int, tensor: int, offset: int, length: int) -> Floats:
    """(length,) the standard normals of elements [offset, offset + length) of one tensor at one step.

    >>> key = Key(bytes(range(32)))
    >>> row = normals("chacha20", key, step=7, tensor=0, offset=0, length=1000)
    >>> bool(np.array_equal(row[300:400], normals("chacha20", key, step=7, tensor=0, offset=300, length=100)))
    True
    """
    size = tile_size(require_generator(generator))
    first, last = offset // size, -(-(offset + length) // size)
    blocks = np.arange(first * LANES, last * LANES, dtype=np.uint64)
    drawn = words(generator, key, step, tensor, blocks, DRAW)
    radius, angle = drawn[0::2], drawn[1::2]
    refinement = np.zeros_like(radius)
    if np.any(radius < normal.REFINE_BELOW):
        refinement = words(generator, key, step, tensor, blocks, REFINE)[0::2]
    both = np.stack(normal.pairs(radius, angle, refinement), axis=1)  # (W/2, 2, blocks)
    by_tile = both.reshape(WORDS[generator], -1, LANES).transpose(1, 0, 2)
    start = offset - first * size
    return by_tile.reshape(-1)[start : start + length]


def words(
    generator: str, key: Key, step: int, tensor: int, blocks: NDArray[np.uint64], purpose: int
) -> NDArray[np.uint32]:
    """(W, len(blocks)) the raw words of the given blocks, addressed as in `quell.noise.layout`."""
    high = (blocks >> np.uint64(32)) | np.uint64(purpose << 16)
    same = np.ones(len(blocks), np.uint32)
    counter = (
        blocks.astype(np.uint32),
        high.astype(np.uint32),
        same * np.uint32(step),
        same * np.uint32(tensor),
    )
    made_by = key_words(generator, key, tensor)
    rounds = chacha_rounds(generator)
    return chacha_block(rounds, made_by, counter) if rounds else philox4x32(made_by, counter)


def key_words(generator: str, key: Key, tensor: int) -> Words:
    """What a generator takes of the key for this tensor: all 8 words for ChaCha, 2 derived ones for Philox."""
    return key.words() if chacha_rounds(generator) else key.philox_words(tensor)


def chacha_block(rounds: int, key: Words, counter: tuple[Words, Words, Words, Words]) -> Words:
    """(16, m) the block function of RFC 8439 for m values of (counter, three nonce words); 20 rounds there."""
    like = np.ones_like(counter[0])
    start = [like * np.uint32(value) for value in (*CHACHA_CONSTANTS, *key)] + list(counter)
    x = list(start)
    for _ in range(rounds // 2):
        double_round(x)
    return np.stack([end + begin for end, begin in zip(x, start, strict=True)])


def double_round(x: list[Any]) -> None:
    """Two rounds of ChaCha on its 16 words, which are arrays, NumPy's or JAX's."""
    for a in range(4):
        _quarter_round(x, a, a + 4, a + 8, a + 12)
    for a in range(4):
        _quarter_round(x, a, (a + 1) % 4 + 4, (a + 2) % 4 + 8, (a + 3) % 4 + 12)


def _quarter_round(x: list[Any], *places: int) -> None:
    for first, second, third, turn in QUARTER_ROUND:
        mix(x, places[first], places[second], places[third], turn)


def mix(x: list[Any], first: int, second: int, third: int, turn: int) -> None:
    """A quarter of a quarter round, on entries of x: words, or arrays of them, NumPy's or JAX's."""
    x[first] = x[first] + x[second]
    mixed = x[third] ^ x[first]
    x[third] = (mixed << np.uint32(turn)) | (mixed >> np.uint32(32 - turn))


def philox4x32(key: Words, counter: tuple[Words, Words, Words, Words]) -> Words:
    """(4, m) Philox4x32-10 for m counters."""
    c0, c1, c2, c3 = counter
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        low0, high0 = _multiply(c0, PHILOX_MULTIPLIERS[0])
        low1, high1 = _multiply(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint32(k0), low1, high0 ^ c3 ^ np.uint32(k1), low0
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) % 2**32, (k1 + PHILOX_KEY_STEPS[1]) % 2**32
    return np.stack([c0, c1, c2, c3])


def _multiply(x: Words, factor: int) -> tuple[Words, Words]:
    product = x.astype(np.uint64) * np.uint64(factor)
    return product.astype(np.uint32), (product >> np.uint64(32)).astype(np.uint32)
