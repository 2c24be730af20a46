"""The secret behind the noise: 256 bits from the operating system, kept out of everything that is printed or saved.

Whoever knows the key can subtract the noise, so the privacy guarantee is worth exactly as much as the key is secret.
A `Key` shows only its `id`, a one-way hash that names it in checkpoints and ledgers; it refuses to be pickled or
copied, and its file is readable by its owner alone.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import warnings
from hashlib import blake2b
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from quell import files
from quell.errors import QuellError, require_count
from quell.noise.secrecy import never_copied

KEY_BYTES: Final = 32
LEAST_DISTINCT_BYTES: Final = 8  # a random key has fewer with probability below 10⁻³⁰
_FILE_MARK: Final = "quell-key-1"
_MOST_BYTES: Final = 256


class SeededKeyWarning(UserWarning):
    """A key was made from a seed, which anyone can repeat: there is no privacy guarantee."""


@final
class Key:
    """A 256-bit secret. Make one with `Key.generate()`; use it for one run on one sequence of gradients.

    >>> key = Key.generate()
    >>> key == Key.generate()
    False
    >>> repr(key).startswith("<Key ")
    True
    """

    __slots__ = ("_loaded", "_process", "_secret", "id", "seeded")

    id: str
    seeded: bool  # made from a seed, so it promises nothing

    def __init__(self, secret: bytes, *, _seeded: bool = False, _loaded: bool = False) -> None:
        if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:
            raise QuellError(f"a key is {KEY_BYTES} bytes: make one with Key.generate()")  # the value stays unnamed
        if len(set(secret)) < LEAST_DISTINCT_BYTES:
            raise QuellError("this key repeats a few byte values, so it can be guessed: make one with Key.generate()")
        self._secret = secret
        self.id = _digest(secret, b"quell key id", 8).hex()
        self._loaded, self.seeded, self._process = _loaded, _seeded, os.getpid()

    @property
    def loaded(self) -> bool:
        """Whether another process may have released steps under it: it is from a file, or from before a fork."""
        return self._loaded or os.getpid() != self._process

    @classmethod
    def generate(cls) -> Key:
        """A fresh key from the operating system's entropy."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: int) -> Key:
        """A repeatable key for tests and demonstrations. It voids the privacy guarantee, and warns so."""
        seed = require_count("seed", seed, least=0)
        warnings.warn(
            "this key comes from a seed, so anyone can repeat the noise and subtract it: the run has NO privacy "
            "guarantee; for real data leave seed= out, or use Key.generate()",
            SeededKeyWarning,
            stacklevel=2,
        )
        size = max(1, (seed.bit_length() + 7) // 8)
        return cls(_digest(seed.to_bytes(size, "little"), b"quell test seed", KEY_BYTES), _seeded=True)

    @classmethod
    def load(cls, path: str | Path) -> Key:
        """Read a key file; one that others can read is refused."""
        source = Path(path)
        try:
            with files.opened(source, _MOST_BYTES) as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                content = file.read()
        except OSError as problem:
            raise QuellError(f"cannot read the key file {source}: {problem.strerror}") from None
        if os.name == "posix" and mode & 0o077:
            raise QuellError(f"{source} can be read by others (mode {mode:o}): chmod 600 it, and consider a new key")
        secret, seeded = _parse(content)
        if secret is None:
            raise QuellError(f"{source} is not a Quell key file: make one with Key.generate().save(path)")
        return cls(secret, _seeded=seeded, _loaded=True)

    def save(self, path: str | Path) -> None:
        """Write the key to a new file that only its owner can read; an existing file is never overwritten."""
        target = Path(path)
        kind = "seeded" if self.seeded else "secret"
        try:
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(f"{_FILE_MARK} {kind} {self._secret.hex()}\n".encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise QuellError(f"{target} exists already: a key file is never overwritten, choose another name") from None
        except OSError as problem:
            raise QuellError(f"cannot write the key file {target}: {problem.strerror}") from None

    def reveal(self) -> bytes:
        """The secret itself, to hand to another rank of the same run over a trusted channel: `Key(that)` there."""
        return self._secret

    def words(self) -> NDArray[np.uint32]:
        """(8,) the key as ChaCha takes it: little-endian words."""
        return np.frombuffer(self._secret, dtype="<u4").astype(np.uint32)

    def philox_words(self, tensor: int) -> NDArray[np.uint32]:
        """(2,) a 64-bit Philox key of its own for each tensor, derived by keyed BLAKE2b."""
        message = tensor.to_bytes(8, "little")
        derived = blake2b(message, digest_size=8, key=self._secret, person=b"quell philox").digest()
        return np.frombuffer(derived, dtype="<u4").astype(np.uint32)

    def derive(self, purpose: str) -> bytes:
        """32 secret bytes for another use of the same run, such as drawing its batches: independent of the noise."""
        return blake2b(purpose.encode(), digest_size=KEY_BYTES, key=self._secret, person=b"quell derive").digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Key {self.id}{' from a seed: NO privacy' if self.seeded else ''}>"

    __reduce_ex__ = never_copied(
        "a key is never pickled or copied: keep it apart with key.save(path) and Key.load(path)"
    )


def _digest(content: bytes, person: bytes, size: int) -> bytes:
    return blake2b(content, digest_size=size, person=person).digest()


def _parse(content: bytes) -> tuple[bytes | None, bool]:
    parts = content.split()
    if len(parts) != 3 or parts[0] != _FILE_MARK.encode() or parts[1] not in (b"secret", b"seeded"):
        return None, False
    try:
        secret = bytes.fromhex(parts[2].decode("ascii"))
    except ValueError:
        return None, False
    return (secret if len(secret) == KEY_BYTES else None), parts[1] == b"seeded"
