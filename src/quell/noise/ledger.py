"""A small append-only file beside the key: which steps it has released, and a keyed digest of each of them.

A checkpoint is older than the crash it survives. Resuming from it releases some steps a second time, and if anything
differs (other dropout masks, another batch, other code) the difference of the two releases is free of noise. The
ledger knows better than the checkpoint: a step that comes again must have the digest that is written here.

The file is a header and records of `RECORD.size` bytes: how many steps are released with this one, the digest of the
last of them (zeros: nobody knows as what they were released), and a checksum of everything up to here. A record with 0
steps names the run that the ledger belongs to; it is written with the first step.

A record is on the disk *before* its step is released, one `fsync` per step. If the last record is torn, a crash
came before its step was released, or someone has cut the file after it was; so the step counts as released, nobody
knows as what, and cannot come again. Damage before the end is refused, and so is a file without its header. A lock
keeps a second process out, and a file that was moved, replaced, cut or added to while in use is noticed at the next
step. Whether whole records are missing at the end of a file that nobody has in use, only a checkpoint can tell: it
knows how many steps were released when it was saved.

After a failed write nobody knows which records the disk holds (an fsync that failed may succeed when tried again, with
the data gone), so the ledger releases nothing more. Either outcome is safe to open again: the record that failed
claims no less than was released until then.
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Final
from zlib import crc32

from quell.errors import QuellError, require_count
from quell.files import keep_name, require_folder
from quell.noise.releases import DIGEST_BYTES, UNKNOWN, Releases
from quell.noise.secrecy import never_copied

try:
    import fcntl
except ImportError:  # Windows has no flock: there the lock is the operator's duty
    fcntl = None  # type: ignore[assignment]

HEADER: Final = b"quell-ledger-2\n\0"
RECORD: Final = struct.Struct(f"<Q{DIGEST_BYTES}sI")
_SUMMED: Final = RECORD.size - 4  # bytes of a record before its checksum


class Ledger:
    """The ledger file of one run, which remembers what was released (one file per rank where ranks keep their own).

    `make_private(..., key="run.key")` makes one beside the key. You need this class only to look into a ledger, or to
    enter steps that were released without one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "noise.ledger"
    >>> with Ledger(path) as ledger:
    ...     ledger.record(1, b"sixteen bytes...")
    >>> with Ledger(path) as ledger:
    ...     ledger.released, ledger.digest(0)
    (1, b'sixteen bytes...')
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handle, self._process, self._failed = -1, os.getpid(), False
        self._made = Releases()
        self._run: bytes | None = None
        self._checksum, self._size = crc32(HEADER), 0
        require_folder(self.path)
        try:
            _create(self.path)
            self._handle = os.open(self.path, os.O_RDWR | os.O_APPEND)
            self._lock()
            self._read()
        except OSError as problem:
            self._release_handle()
            raise QuellError(f"cannot open the ledger {self.path}: {problem.strerror}") from problem
        except QuellError:
            self._release_handle()
            raise

    @property
    def released(self) -> int:
        """How many steps count as released."""
        return self._made.released

    def digest(self, step: int) -> bytes | None:
        """What the step was released as: `UNKNOWN` if nobody knows, None if it was not released."""
        return self._made.digest(step)

    def require_run(self, run: bytes) -> None:
        """Refuse a ledger that belongs to another run, by the 16 bytes that name them."""
        if self._run not in (None, run):
            raise QuellError(
                f"the ledger {self.path} was written under another key, plan, max_grad_norm, generator or set of "
                "parameters: go on with exactly those, or start a new run with a new key and a new ledger"
            )

    def record(self, released: int, digest: bytes = UNKNOWN, run: bytes | None = None) -> None:
        """Make sure, before they are released, that the first `released` steps are on the disk, the last as `digest`.

        Steps that are there already stay as they are. Without a digest the steps can never come again.
        """
        self._require_open()
        until = require_count("released", released)
        records = []
        if run is not None:
            self.require_run(run)
            if self._run is None:
                records.append((0, run))
        if until > self.released:
            records.append((until, digest))
        if records:
            self._write(records)

    def close(self) -> None:
        """Let go of the file, so that another run may open it."""
        self._release_handle()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._release_handle()

    __reduce_ex__ = never_copied("a ledger is never pickled or copied: open its file where it is needed")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise QuellError(
                    f"the ledger {self.path} is in use by another process, or by an earlier run of this one: end that "
                    "process, or call close() on the earlier run's optimizer (in JAX, on what privatize returned)"
                ) from None

    def _read(self) -> None:
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            content = memoryview(file.read())
        if bytes(content[: len(HEADER)]) != HEADER:
            raise QuellError(
                f"the ledger {self.path} {_not_a_ledger(bytes(content[: len(HEADER)]))}: restore the run's own ledger, "
                "or start a new run with a new key and a new ledger"
            )
        self._size = len(HEADER)
        while self._size + RECORD.size <= len(content):
            record = content[self._size : self._size + RECORD.size]
            until, digest, stated = RECORD.unpack(record)
            checksum = crc32(record[:_SUMMED], self._checksum)
            sound = (self._run is None) if until == 0 else until > self.released
            if checksum != stated or not sound:
                break
            self._note(until, digest)
            self._checksum = checksum
            self._size += RECORD.size
        left = len(content) - self._size
        if left > RECORD.size * (2 if self._run is None else 1):  # what one write may leave half done
            number = (self._size - len(HEADER)) // RECORD.size + 1
            raise QuellError(
                f"record {number:,} of the ledger {self.path} is damaged: restore the file, or start a new run with a "
                "new key and a new ledger"
            )
        if left:
            os.ftruncate(self._handle, self._size)
            self._write([(self.released + 1, UNKNOWN)])

    def _write(self, records: list[tuple[int, bytes]]) -> None:
        self._require_same_file()
        content, checksum = b"", self._checksum
        for until, digest in records:
            summed = struct.pack(f"<Q{DIGEST_BYTES}s", until, digest)
            checksum = crc32(summed, checksum)
            content += summed + struct.pack("<I", checksum)
        try:
            if os.write(self._handle, content) < len(content):
                os.ftruncate(self._handle, self._size)  # half a record in the middle would damage the file
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._handle)
        except OSError as problem:
            self._failed = True
            raise QuellError(f"cannot write the ledger {self.path}: {problem.strerror}") from problem
        for until, digest in records:
            self._note(until, digest)
        self._checksum = checksum
        self._size += len(content)

    def _note(self, until: int, digest: bytes) -> None:
        if until:
            self._made.note(self.released, until, digest)
        else:
            self._run = digest

    def _require_same_file(self) -> None:
        """A copy that is put in the place of the ledger would know less, and this run would go on in the old one."""
        ours = os.fstat(self._handle)
        try:
            named = os.stat(self.path)
        except OSError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino) or ours.st_size != self._size:
            raise QuellError(
                f"the ledger {self.path} was deleted, moved, replaced or changed while in use: put the file back that "
                "this run has written, or start a new run with a new key and a new ledger"
            )

    def _require_open(self) -> None:
        if os.getpid() != self._process:
            raise QuellError(f"the ledger {self.path} belongs to the parent process: a forked child needs its own run")
        if self._handle < 0:
            raise QuellError(f"the ledger {self.path} was closed: open it again to release more steps")
        if self._failed:
            raise QuellError(f"an earlier write to the ledger {self.path} failed: mend the disk and open it again")

    def _release_handle(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _create(path: Path) -> None:
    """A new ledger has its header, and its name survives a crash as its records do."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    try:
        os.write(handle, HEADER)
        os.fsync(handle)
    finally:
        os.close(handle)
    keep_name(path)


def _not_a_ledger(start: bytes) -> str:
    if not start:
        return "is empty, and even a new one is not"
    if start.startswith(b'{"key"'):
        return "is of an older version of Quell, which did not write down what it released"
    return "does not begin as a ledger does"
