"""A small append-only file beside the checkpoints: how far each key has been released.

A checkpoint is older than the crash it survives. Resuming from it would release some steps a second time, and if the
gradients differ (another data order, another batch) the difference of the two releases is free of noise. The ledger
knows better than the checkpoint: a stream that would fall behind it is refused, unless replay is declared harmless.

A line is written and flushed to the disk *before* the steps it covers are released, `reserve` steps ahead so that the
disk is not in every step; a checkpoint or a clean close writes the exact number. The last line of a key counts. A last
line torn by a crash covers nothing that was released, and is dropped. A lock keeps a second process out.

After a failed write nobody knows which lines the disk holds (an fsync that failed may succeed when tried again, with
the data gone), so the ledger releases nothing more. Either outcome is safe to open again: the line that failed claims
no less than was released until then.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import TracebackType

from quell.errors import QuellError, require_count
from quell.noise.secrecy import never_copied

try:
    import fcntl
except ImportError:  # Windows has no flock: there the lock is the operator's duty
    fcntl = None  # type: ignore[assignment]


class Ledger:
    """The ledger file of one run (one file per rank where ranks keep their own).

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "noise.ledger"
    >>> with Ledger(path) as ledger:
    ...     ledger.record("a-key-id", released=3)
    >>> with Ledger(path) as ledger:
    ...     ledger.released("a-key-id")
    3
    """

    def __init__(self, path: str | Path, reserve: int = 64) -> None:
        self.path = Path(path)
        self._reserve = require_count("reserve", reserve)
        self._handle, self._process, self._failed = -1, os.getpid(), False
        try:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            _sync_folder(self.path)  # a new file's name must survive a crash as its lines do
            self._lock()
            self._bounds = self._read()
        except OSError as problem:
            self._release_handle()
            raise QuellError(f"cannot open the ledger {self.path}: {problem.strerror}") from problem
        except QuellError:
            self._release_handle()
            raise
        self._exact = dict(self._bounds)  # without what this process reserves ahead

    def released(self, key_id: str) -> int:
        """How many steps of this key must count as released."""
        return self._bounds.get(key_id, 0)

    def accounted(self, key_id: str) -> int:
        """The same without what this process has only reserved."""
        return self._exact.get(key_id, 0)

    def record(self, key_id: str, released: int) -> None:
        """Make sure, before they are released, that the first `released` steps of this key are on the disk."""
        self._require_open()
        if released > self.released(key_id):
            self._write(key_id, released + self._reserve - 1)
        self._exact[key_id] = max(released, self._exact.get(key_id, 0))

    def settle(self) -> None:
        """Take back what was reserved but not released, so that an exact checkpoint can resume."""
        if os.getpid() != self._process:
            return  # a forked child knows nothing of what its parent has released since
        for key_id, exact in self._exact.items():
            if exact < self.released(key_id):
                self._write(key_id, exact)

    def close(self) -> None:
        try:
            if self._handle >= 0 and not self._failed:
                self.settle()
        finally:
            self._release_handle()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):  # forgotten rather than closed: what was reserved stays reserved
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
                    f"the ledger {self.path} is in use by another process, or by a run of this one that was not "
                    "closed (optimizer.close()): one run, one ledger"
                ) from None

    def _read(self) -> dict[str, int]:
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._handle, whole)
        bounds: dict[str, int] = {}
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                entry = json.loads(line)
                bounds[str(entry["key"])] = require_count("released", entry["released"], least=0)
            except (ValueError, TypeError, KeyError):
                raise QuellError(
                    f"line {number} of the ledger {self.path} is damaged: restore the file, or start a new key"
                ) from None
        return bounds

    def _write(self, key_id: str, bound: int) -> None:
        self._require_open()
        line = (json.dumps({"key": key_id, "released": bound}) + "\n").encode()
        before = os.fstat(self._handle)
        if not before.st_nlink:
            raise QuellError(f"the ledger {self.path} was deleted while in use: restore it, or start a new key")
        try:
            if os.write(self._handle, line) < len(line):
                os.ftruncate(self._handle, before.st_size)  # half a line in the middle would damage the file
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._handle)
        except OSError as problem:
            self._failed = True
            raise QuellError(f"cannot write the ledger {self.path}: {problem.strerror}") from problem
        self._bounds[key_id] = bound

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


def _sync_folder(path: Path) -> None:
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
