"""The ledger remembers through crashes, torn records, second processes and hands that touch it."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quell import QuellError
from quell.noise import Ledger
from quell.noise.ledger import HEADER, RECORD
from quell.noise.releases import UNKNOWN, Releases


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def written(path: Path, steps: int, run: bytes | None = None) -> bytes:
    with Ledger(path) as ledger:
        for step in range(steps):
            ledger.record(step + 1, digest(step + 1), run)
    return path.read_bytes()


def test_steps_and_digests_survive(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    content = written(path, 5, run=digest(99))
    assert len(content) == len(HEADER) + 6 * RECORD.size
    assert path.stat().st_mode & 0o777 == 0o600
    with Ledger(path) as ledger:
        assert ledger.released == 5
        assert [ledger.digest(step) for step in range(6)] == [*(digest(step + 1) for step in range(5)), None]
        ledger.require_run(digest(99))
        for refused in (lambda: ledger.require_run(digest(98)), lambda: ledger.record(6, digest(6), digest(98))):
            with pytest.raises(QuellError, match="under another key, plan, max_grad_norm"):
                refused()
        ledger.record(3, digest(77))  # a replay changes nothing
    assert path.read_bytes() == content


def test_steps_without_digests(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.record(3)
        ledger.record(4, digest(4))
        ledger.record(9)
    with Ledger(tmp_path / "ledger") as ledger:
        assert [ledger.digest(step) == UNKNOWN for step in range(9)] == [True] * 3 + [False] + [True] * 5
        assert (ledger.released, ledger.digest(3), ledger.digest(9)) == (9, digest(4), None)


def test_steps_may_be_noted_in_any_order() -> None:
    made = Releases()
    for step in (7, 8, 2, 5):
        made.note(step, step + 1, digest(step))
    assert [made.digest(step) for step in (2, 5, 7, 8)] == [digest(step) for step in (2, 5, 7, 8)]
    assert [made.digest(step) for step in (0, 3, 6, 9)] == [None] * 4
    assert made.released == 9


def test_a_record_is_on_the_disk_before_the_step_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "ledger", []
    real = os.fsync

    def watch(handle: int) -> None:
        synced.append(None if stat.S_ISDIR(os.fstat(handle).st_mode) else os.fstat(handle).st_size)
        real(handle)

    monkeypatch.setattr(os, "fsync", watch)
    with Ledger(path) as ledger:
        assert synced == [len(HEADER), None]  # the header, and the file's name
        for step in range(1, 4):
            ledger.record(step, digest(step))
            assert synced[-1] == path.stat().st_size == len(HEADER) + step * RECORD.size


@pytest.mark.parametrize("left", range(RECORD.size))
def test_a_torn_last_record_counts_as_released(left: int, tmp_path: Path) -> None:
    """A crash came before its step was released, or someone has cut the file: it must not come again."""
    path = tmp_path / "ledger"
    content = written(path, 4, run=digest(99))
    for torn in (
        content[: len(content) - RECORD.size + left],
        content[: left - RECORD.size] + bytes(RECORD.size - left),
    ):
        path.write_bytes(torn)
        for _ in range(2):  # and it stays so
            with Ledger(path) as ledger:
                whole = left == 0 and len(torn) < len(content)  # then nothing is torn
                assert (ledger.released, ledger.digest(3)) == ((3, None) if whole else (4, UNKNOWN))
                assert ledger.digest(2) == digest(3)


def test_the_first_write_may_be_torn_too(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    content = written(path, 1, run=digest(99))
    for size in range(len(HEADER) + 1, len(content)):
        path.write_bytes(content[:size])
        with Ledger(path) as ledger:
            whole = size == len(HEADER) + RECORD.size  # the name of the run, and no step
            assert (ledger.released, ledger.digest(0)) == ((0, None) if whole else (1, UNKNOWN))


def test_an_empty_or_foreign_file_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    old = b'{"key": "a", "released": 3}\n'
    for content, message in ((b"", "is empty"), (HEADER[:-1], "does not begin"), (old, "older version of Quell")):
        path.write_bytes(content)
        for _ in range(2):
            with pytest.raises(QuellError, match=message):
                Ledger(path)
        assert path.read_bytes() == content
    with pytest.raises(QuellError, match=r"there is no folder .*nowhere; make it first"):
        Ledger(tmp_path / "nowhere" / "ledger")


def test_damage_before_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    content = written(path, 4, run=digest(99))
    size = RECORD.size
    middle = len(HEADER) + size
    for damaged in (
        content[:middle] + b"\x07" + content[middle + 1 :],
        content[:middle] + content[middle + size :],  # a record is missing
        content[:middle] + content[middle + 5 :],
        content[:middle] + content[middle - size : middle] + content[middle:],  # one is there twice
        content + bytes(size + 1),
    ):
        path.write_bytes(damaged)
        with pytest.raises(QuellError, match=r"record \d+ of the ledger .* is damaged"):
            Ledger(path)


def test_a_million_steps_load_in_seconds(tmp_path: Path) -> None:
    """28 MB; here a hundredth of it, in a loop without fsync."""
    import time
    from zlib import crc32

    path = tmp_path / "ledger"
    content, checksum = bytearray(HEADER), crc32(HEADER)
    for step in range(1, 10_001):
        record = RECORD.pack(step, digest(step % 256), 0)[:-4]
        checksum = crc32(record, checksum)
        content += record + checksum.to_bytes(4, "little")
    path.write_bytes(content)
    start = time.process_time()
    with Ledger(path) as ledger:
        assert ledger.released == 10_000
        assert ledger.digest(9_999) == digest(10_000 % 256)
    assert time.process_time() - start < 1


def test_another_process_is_kept_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    program = f"from quell.noise import Ledger\nLedger({str(path)!r})"
    with Ledger(path):
        second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert second.returncode != 0
        assert "in use by another process" in second.stderr
        assert "end that process, or call close()" in second.stderr
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_closed_ledger_says_so(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.close()
    ledger.close()
    with pytest.raises(QuellError, match="was closed"):
        ledger.record(1)


def _no_sync(handle: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failed_record_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.record(1, digest(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_sync)
        with pytest.raises(QuellError, match=r"cannot write the ledger .*Input/output error"):
            ledger.record(2, digest(2))
    with pytest.raises(QuellError, match="mend the disk and open it again"):
        ledger.record(2, digest(2))
    ledger.close()
    assert Ledger(tmp_path / "ledger").released >= 1  # the lock is free


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.record(1, digest(1))
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, content: real(handle, content[:5]))
        with pytest.raises(QuellError, match="No space left"):
            ledger.record(2, digest(2))
    ledger.close()
    assert Ledger(tmp_path / "ledger").released == 1


@pytest.mark.parametrize("what", ["deleted", "moved", "replaced", "cut", "added to"])
def test_hands_that_touch_a_ledger_in_use_are_noticed(what: str, tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "ledger", tmp_path / "elsewhere"
    ledger = Ledger(path)
    ledger.record(1, digest(1))
    shutil.copy(path, tmp_path / "old")
    ledger.record(2, digest(2))
    if what == "deleted":
        path.unlink()
    elif what in ("moved", "replaced"):
        path.rename(elsewhere)
        if what == "replaced":
            shutil.copy(tmp_path / "old", path)
    elif what == "cut":
        os.truncate(path, path.stat().st_size - RECORD.size)
    else:
        path.write_bytes(path.read_bytes() + bytes(RECORD.size))
    with pytest.raises(QuellError, match="was deleted, moved, replaced or changed while in use"):
        ledger.record(3, digest(3))
    if what in ("moved", "replaced"):
        elsewhere.replace(path)
        ledger.record(3, digest(3))  # put back, as the message says
        assert ledger.released == 3


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_ledger_is_never_copied(twin: Callable[[object], object], tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger, pytest.raises(QuellError, match="never pickled or copied"):
        twin(ledger)
