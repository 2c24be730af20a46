"""The generators against published vectors, the layout against its definition, the normals against mathematics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from quell.noise import Key, cpu_kernels, generators, layout, normal
from quell.noise.layout import LANES, WORDS
from quell.noise.spec import NO_GRID

GENERATORS = tuple(WORDS)
KEY = Key(bytes(range(32)))


def _words(*values: int) -> tuple[NDArray[np.uint32], ...]:
    return tuple(np.array([value], np.uint32) for value in values)


def _compiled(generator: str, step: int, tensor: int, offset: int, length: int) -> NDArray[np.float32]:
    """The normals by the CPU kernels, neither scaled nor rounded."""
    made, one = np.zeros(length, np.float32), np.ones(1, np.float32)
    key, rounds = generators.key_words(generator, KEY, tensor), layout.chacha_rounds(generator)
    first, last = offset // layout.UNIT, -(-(offset + length) // layout.UNIT)
    nothing = np.zeros((0, length), np.float32)
    where = (made, offset, first, last, rounds, key, tensor, step)
    cpu_kernels.ring(*where, one, one[0], NO_GRID, nothing, 0, True)
    return made


# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_matches_random123(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = generators.philox4x32(np.array(key, np.uint32), _words(*counter))
    assert tuple(words[:, 0]) == expected


def test_chacha20_matches_rfc_8439_section_2_3_2() -> None:
    counter = _words(1, 0x09000000, 0x4A000000, 0)
    expected = (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )
    words = generators.chacha_block(20, KEY.words(), counter)[:, 0]
    assert " ".join(f"{word:08x}" for word in words) == expected


# RFC 8439, appendix A.1, test vectors 1 to 5: key, counter, nonce, the first 16 bytes of the key stream.
RFC_A1 = [
    (bytes(32), 0, bytes(12), "76b8e0ada0f13d90405d6ae55386bd28"),
    (bytes(32), 1, bytes(12), "9f07e7be5551387a98ba977c732d080d"),
    (bytes(31) + b"\x01", 1, bytes(12), "3aeb5224ecf849929b9d828db1ced4dd"),
    (b"\x00\xff" + bytes(30), 2, bytes(12), "72d54dfbf12ec44b362692df94137f32"),
    (bytes(32), 0, bytes(11) + b"\x02", "c2c64d378cd536374ae204b9ef933fcd"),
]


@pytest.mark.parametrize(("key", "counter", "nonce", "expected"), RFC_A1)
def test_chacha20_matches_rfc_8439_appendix_a1(key: bytes, counter: int, nonce: bytes, expected: str) -> None:
    state = _words(counter, *np.frombuffer(nonce, "<u4").tolist())
    words = generators.chacha_block(20, np.frombuffer(key, "<u4"), state)[:, 0]
    assert words.astype("<u4").tobytes()[:16].hex() == expected


# draft-strombergson-chacha-test-vectors-01, 256-bit keys, 8 rounds: test case, key, 64-bit nonce, the first 64 bytes of
# the key stream and the first 16 of its second block.
CHACHA8_VECTORS = {
    "TC1": (
        "00" * 32,
        "00" * 8,
        "3e00ef2f895f40d67f5bb8e81f09a5a12c840ec3ce9a7f3b181be188ef711a1e"
        "984ce172b9216f419f445367456d5619314a42a3da86b001387bfdb80e0cfe42",
        "d2aefa0deaa5c151bf0adb6c01f2a5ad",
    ),
    "TC4": (
        "ff" * 32,
        "ff" * 8,
        "e163bbf8c9a739d18925ee8362dad2cdc973df05225afb2aa26396f2a9849a4a"
        "445e0547d31c1623c537df4ba85c70a9884a35bcbf3dfab077e98b0f68135f54",
        "81d4933f8b322ac0cd762c27235ce2b3",
    ),
    "TC8": (
        "c46ec1b18ce8a878725a37e780dfb7351f68ed2e194c79fbc6aebee1a667975d",
        "1ada31d5cf688221",
        "838751b42d8ddd8a3d77f48825a2ba752cf4047cb308a5978ef274973be374c9"
        "6ad848065871417b08f034e681fe46a93f7d5c61d1306614d4aaf257a7cff08b",
        "16f2fda170cc18a4b58a2667ed962774",
    ),
}


@pytest.mark.parametrize("case", CHACHA8_VECTORS)
def test_chacha8_matches_the_published_vectors(case: str) -> None:
    """A 64-bit block counter and a 64-bit nonce there: words 12, 13 and 14, 15."""
    key, nonce, first, second = map(bytes.fromhex, CHACHA8_VECTORS[case])
    for block, expected in enumerate((first, second)):
        state = _words(block, 0, *np.frombuffer(nonce, "<u4").tolist())
        words = generators.chacha_block(8, np.frombuffer(key, "<u4"), state)[:, 0]
        assert words.astype("<u4").tobytes()[: len(expected)] == expected


def _plain_chacha(rounds: int, key: bytes, counter: list[int]) -> list[int]:
    """ChaCha from its paper, with Python's whole numbers: quarter-rounds on the columns of a matrix, then diagonals."""
    start = [*np.frombuffer(b"expand 32-byte k" + key, "<u4").tolist(), *counter]
    x = list(start)
    for number in range(rounds):
        for column in range(4):
            a, b, c, d = (4 * row + (column + row * (number % 2)) % 4 for row in range(4))
            for one, two, three, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[one] = (x[one] + x[two]) % 2**32
                x[three] ^= x[one]
                x[three] = (x[three] << turn | x[three] >> (32 - turn)) % 2**32
    return [(end + begin) % 2**32 for end, begin in zip(x, start, strict=True)]


@pytest.mark.parametrize(("generator", "rounds"), [("chacha20", 20), ("chacha8", 8)])
def test_chacha_words_equal_a_plain_implementation(generator: str, rounds: int) -> None:
    random = np.random.default_rng(7)
    for _ in range(20):
        key = Key(random.bytes(32))
        block, step, tensor = int(random.integers(2**48)), *map(int, random.integers(2**32, size=2))
        for purpose in (layout.DRAW, layout.REFINE):
            words = generators.words(generator, key, step, tensor, np.array([block], np.uint64), purpose)[:, 0]
            counter = [block % 2**32, block >> 32 | purpose << 16, step, tensor]
            assert words.tolist() == _plain_chacha(rounds, key.reveal(), counter)


def test_generators_share_no_words_under_one_key() -> None:
    """Key and counters are the same; a different number of rounds must not leave related words."""
    blocks = np.arange(2**14, dtype=np.uint64)
    few, many = (generators.words(name, KEY, 1, 2, blocks, layout.DRAW) for name in ("chacha8", "chacha20"))
    assert not np.any(np.all(few == many, axis=0))
    for related in (few ^ many, few - many):
        ones = np.unpackbits(related.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(32 * related.size)
    a, b = (generators.normals(name, KEY, 1, 2, 0, 2**18).astype(np.float64) for name in ("chacha8", "chacha20"))
    assert abs(np.mean(a * b)) < 5 / np.sqrt(2**18)


def test_chacha20_tiles_are_openssl_s_key_stream() -> None:
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    step, tensor, first = 12, 34, 5 * LANES
    blocks = np.arange(first, first + 2 * LANES, dtype=np.uint64)
    words = generators.words("chacha20", KEY, step, tensor, blocks, layout.DRAW)
    start = np.array([first, 0, step, tensor], "<u4").tobytes()
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(KEY.reveal(), start), mode=None)
    stream = cipher.encryptor().update(bytes(64 * len(blocks)))
    assert words.T.astype("<u4").tobytes() == stream


@pytest.mark.parametrize("generator", GENERATORS)
def test_elements_follow_the_layout(generator: str) -> None:
    count, step, tensor = WORDS[generator], 3, 9
    size = count * LANES
    row = generators.normals(generator, KEY, step, tensor, 0, 3 * size)
    for element in (0, 1, LANES, 2 * LANES + 7, size - 1, size, 2 * size + 3 * LANES + 5):
        tile, within = divmod(element, size)
        word, lane = divmod(within, LANES)
        block = np.array([tile * LANES + lane], np.uint64)
        words = generators.words(generator, KEY, step, tensor, block, layout.DRAW)[:, 0]
        pair = normal.pairs(
            words[word & ~1 : (word & ~1) + 1], words[word | 1 : (word | 1) + 1], np.zeros(1, np.uint32)
        )
        assert row[element] == pair[word & 1][0]


@pytest.mark.parametrize("generator", GENERATORS)
def test_counters_never_collide(generator: str) -> None:
    """Different (block, step, tensor, purpose), at the limits of each, give different counters."""
    seen = set()
    for block in (0, 1, 2**32 - 1, 2**32, 2**47, 2**48 - 1):
        for step in (0, 1, 2**16, 2**32 - 1):
            for tensor in (0, 1, 2**32 - 1):
                for purpose in (layout.DRAW, layout.REFINE):
                    words = generators.words(generator, KEY, step, tensor, np.array([block], np.uint64), purpose)
                    seen.add(words.tobytes())
    assert len(seen) == 6 * 4 * 3 * 2


@given(
    st.sampled_from(GENERATORS),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, layout.MOST_ELEMENTS - 3000),
    st.integers(1, 2500),
)
def test_the_compiled_path_equals_the_reference(
    generator: str, step: int, tensor: int, offset: int, length: int
) -> None:
    expected = generators.normals(generator, KEY, step, tensor, offset, length)
    np.testing.assert_array_equal(_compiled(generator, step, tensor, offset, length), expected)


@pytest.mark.parametrize("generator", GENERATORS)
def test_normals_are_standard_normal(generator: str) -> None:
    row = generators.normals(generator, KEY, 1, 0, 0, 2**19).astype(np.float64)
    assert stats.kstest(row, "norm").pvalue > 1e-4
    counts, _ = np.histogram(stats.norm.cdf(row), bins=512, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-4


def test_pairs_are_accurate_to_float32_everywhere() -> None:
    random = np.random.default_rng(1)
    w, angle, second = (random.integers(0, 2**32, 400_000, dtype=np.uint32) for _ in range(3))
    w[:8000] = np.arange(8000)
    w[8000:16000] = ~w[:8000]
    w[16000:17000] = normal.NEAR_ONE - 500 + np.arange(1000)
    u = np.where(w < normal.REFINE_BELOW, (w + (second + 0.5) / 2**32) / 2**32, (w + 0.5) / 2**32)
    radius = np.sqrt(-2 * np.where(w >= 2**31, np.log1p(-((~w) + 0.5) / 2**32), np.log(u)))
    phi = np.pi / 2 * ((angle << np.uint32(2)) | np.uint32(2)).view(np.int32) / 2**32
    cosine = np.cos(phi) * np.where(angle >> np.uint32(31), -1, 1)
    swap = (angle >> np.uint32(30)) & 1
    for made, true in zip(
        normal.pairs(w, angle, second),
        (radius * np.where(swap, np.sin(phi), cosine), radius * np.where(swap, cosine, np.sin(phi))),
        strict=True,
    ):
        assert np.max(np.abs(made / true - 1)) < 4e-7


def test_tails_reach_past_nine_sigma_and_zero_words_are_harmless() -> None:
    zero = np.zeros(1, np.uint32)
    first, second = normal.pairs(zero, zero, zero)
    assert first[0] == pytest.approx(np.sqrt(2 * 65 * np.log(2)), rel=1e-6)
    assert first[0] > 9.49
    assert np.isfinite(second[0])
    smallest, _ = normal.pairs(~zero, zero, zero)
    assert 0 < smallest[0] < 2e-5


def test_a_refined_radius_continues_the_unrefined_one() -> None:
    """Where refinement begins the radius neither jumps nor repeats, and it falls steadily with (w, w')."""
    w = np.repeat(np.array([0, 1, 2, 4094, 4095], np.uint32), 1000)
    second = np.tile(np.linspace(0, 2**32 - 1, 1000).astype(np.uint32), 5)
    angle = np.full_like(w, 0)
    radius, _ = normal.pairs(w, angle, second)
    assert np.all(np.diff(radius.astype(np.float64)) <= 1e-6)
    after, _ = normal.pairs(np.array([4096], np.uint32), angle[:1], second[:1])
    assert 0 <= radius[-1] - after[0] < 5e-5


@pytest.mark.parametrize("generator", GENERATORS)
def test_refinement_is_used_by_every_path(generator: str) -> None:
    """Somewhere in 2²² elements a radius word is small; there the reference and the compiled path must refine alike."""
    blocks = np.arange(2**22 // WORDS[generator], dtype=np.uint64)
    words = generators.words(generator, KEY, 0, 0, blocks, layout.DRAW)
    small = np.argwhere(words[0::2] < normal.REFINE_BELOW)
    assert len(small), "enlarge the search"
    for pair, block in small[:3]:
        tile, lane = divmod(int(block), LANES)
        offset = tile * WORDS[generator] * LANES + 2 * int(pair) * LANES + lane
        reference = generators.normals(generator, KEY, 0, 0, offset, 1)
        made = _compiled(generator, 0, 0, offset, 1)
        assert made[0] == reference[0]
        w, angle = words[2 * pair, block], words[2 * pair + 1, block]
        unrefined = np.sqrt(-2 * np.log((float(w) + 0.5) / 2**32)) * np.cos(
            np.pi / 2 * np.int32((angle << 2) | 2) / 2**32
        )
        assert abs(made[0]) != pytest.approx(abs(unrefined), rel=1e-7)
