"""Fingerprints of sums: equal where the bits are, different where one is not, the same on every device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from quell.noise import Key, Shard, fingerprint
from quell.noise.fingerprint import BLOCK, Fingerprint, compress, words_of
from quell.noise.layout import whole

KEYS = np.random.default_rng(1).integers(0, 2**32, (2, BLOCK), dtype=np.uint32)


def by_the_book(words: list[int], keys: list[int]) -> int:
    """NH of one block, in Python's integers."""
    padded = words + [0] * (BLOCK - len(words))
    added = [(word + key) % 2**32 for word, key in zip(padded, keys, strict=True)]
    return sum(a * b for a, b in zip(added[: BLOCK // 2], added[BLOCK // 2 :], strict=True)) % 2**64


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
def test_compression_is_nh(size: int) -> None:
    words = np.random.default_rng(2).integers(0, 2**32, size, dtype=np.uint32)
    expected = [
        by_the_book(words[start : start + BLOCK].tolist(), keys)
        for start in range(0, size, BLOCK)
        for keys in KEYS.tolist()
    ]
    assert compress(words, KEYS).view(np.uint64).tolist() == expected


def sums(*sizes: int) -> list[Any]:
    maker = np.random.default_rng(3)
    return [maker.standard_normal(size).astype(np.float32) for size in sizes]


def test_one_bit_anywhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "FEW", 4)  # several levels
    sizes = (5 * BLOCK + 3, 1, 700)
    made = Fingerprint(Key.generate(), whole(sizes), None)
    given = sums(*sizes)
    first = made(given)
    assert first == made([array.copy() for array in given])
    seen = {first}
    for number, array in enumerate(given):
        for at in {0, array.size // 2, array.size - 1}:
            for bit in (0, 13, 31):
                changed = [other.copy() for other in given]
                changed[number].view(np.uint32)[at] ^= np.uint32(1 << bit)
                seen.add(made(changed))
    assert len(seen) == 1 + 3 * (3 + 1 + 3)
    swapped = [other.copy() for other in given]
    swapped[0][:BLOCK], swapped[0][BLOCK : 2 * BLOCK] = given[0][BLOCK : 2 * BLOCK], given[0][:BLOCK]
    assert made(swapped) not in seen


def test_keys_layouts_and_dtypes_have_their_own() -> None:
    key, given = Key.generate(), sums(8)
    layouts = [whole([8]), (Shard(0, 8, 8),), (Shard(1, 0, 8),)]
    found = {Fingerprint(key, layout, None)(given) for layout in layouts}
    found.add(Fingerprint(Key.generate(), layouts[0], None)(given))
    found.add(Fingerprint(key, layouts[0], None)([given[0].astype(np.float64)]))
    found.add(Fingerprint(key, layouts[0], None)([given[0].astype(np.float16)]))
    assert len(found) == 6


def test_words_are_those_of_the_values_in_order() -> None:
    torch = pytest.importorskip("torch")
    table = torch.arange(12.0).reshape(3, 4)
    expected = np.arange(12, dtype=np.float32).view(np.uint32).tolist()
    for made in (
        table,
        table.half(),
        table.bfloat16(),
        table.T.contiguous().T,
        table.numpy(),
        table.numpy().T.copy().T,
    ):
        assert words_of(made).tolist() == expected
    assert words_of(table.double()).size == 24


@pytest.mark.parametrize("few", [4, 4096])
def test_triton_compresses_to_the_same_words(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1 before it is imported")
    from quell.noise import triton_fingerprint

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(fingerprint, "FEW", few)
    monkeypatch.setattr(triton_fingerprint, "BLOCKS", 2)
    sizes = (5 * BLOCK + 3, 0, 1, 700)
    key = Key.generate()
    given = [torch.from_numpy(array).to(device) for array in sums(*sizes)]
    given[3] = given[3].bfloat16()
    host = Fingerprint(key, whole(sizes), None)
    there = Fingerprint(key, whole(sizes), None)
    there._gpu = triton_fingerprint.GpuCompression(there._keys, device)
    assert there(given) == host([tensor.cpu() for tensor in given])
