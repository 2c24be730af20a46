"""The ledger remembers through crashes, torn lines and second processes."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quell import QuellError
from quell.noise import Ledger


def test_the_last_exact_number_survives_a_clean_close(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(path, reserve=10) as ledger:
        for step in range(1, 8):
            ledger.record("a", step)
        ledger.record("b", 2)
        assert ledger.released("a") == 10
    with Ledger(path) as ledger:
        assert (ledger.released("a"), ledger.released("b"), ledger.released("c")) == (7, 2, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_crash_leaves_what_was_reserved(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path, reserve=10)
    ledger.record("a", 1)
    ledger.record("a", 11)
    crashed = tmp_path / "copy"
    crashed.write_bytes(path.read_bytes())
    assert Ledger(crashed).released("a") == 20
    ledger.settle()
    crashed.write_bytes(path.read_bytes())
    assert Ledger(crashed).released("a") == 11


def test_a_line_is_on_the_disk_before_the_step_is_released(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path, reserve=1)
    for step in range(1, 5):
        ledger.record("a", step)
        assert path.read_text().splitlines()[-1] == f'{{"key": "a", "released": {step}}}'
    ledger.close()


@pytest.mark.parametrize("torn", ["{", '{"key": "a", "rel', '{"key": "a", "released": 99}'])
def test_a_torn_last_line_is_dropped(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(path) as ledger:
        ledger.record("a", 3)
    with path.open("a") as file:
        file.write(torn)
    with Ledger(path) as ledger:
        assert ledger.released("a") == 3
        ledger.record("a", 4)
    with Ledger(path) as ledger:
        assert ledger.released("a") == 4


def test_damage_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for damage in ("garbage\n", "[1]\n", '{"key": "a"}\n'):
        path.write_text('{"key": "a", "released": 3}\n' + damage)
        with pytest.raises(QuellError, match=r"line 2 of the ledger .* is damaged"):
            Ledger(path)
    with pytest.raises(QuellError, match="cannot open the ledger"):
        Ledger(tmp_path / "nowhere" / "ledger")


def test_a_replay_does_not_lower_the_mark(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(path) as ledger:
        ledger.record("a", 100)
    with Ledger(path) as ledger:
        ledger.record("a", 40)
    with Ledger(path) as ledger:
        assert ledger.released("a") == 100


def test_another_process_is_kept_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    program = f"from quell.noise import Ledger\nLedger({str(path)!r})"
    with Ledger(path):
        second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert second.returncode != 0
        assert "in use by another process" in second.stderr
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_closed_ledger_says_so(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.close()
    ledger.close()
    with pytest.raises(QuellError, match="was closed"):
        ledger.record("a", 1)


def _no_sync(handle: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failed_settle_never_lets_steps_go_unrecorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower line may or may not have reached the disk, so nothing more is released by this ledger."""
    path = tmp_path / "ledger"
    ledger = Ledger(path, reserve=10)
    ledger.record("a", 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_sync)
        with pytest.raises(QuellError, match=r"cannot write the ledger .*Input/output error"):
            ledger.settle()
    with pytest.raises(QuellError, match="earlier write"):
        ledger.record("a", 4)  # covered by what was reserved, had the lower line not come after it
    ledger.close()
    with Ledger(path) as again:
        assert again.released("a") >= 3


def test_a_failed_record_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger", reserve=1)
    ledger.record("a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_sync)
        with pytest.raises(QuellError, match="cannot write"):
            ledger.record("a", 2)
    with pytest.raises(QuellError, match="mend the disk and open it again"):
        ledger.record("a", 2)
    ledger.close()


def test_a_failed_settle_still_closes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.record("a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_sync)
        with pytest.raises(QuellError, match="cannot write"):
            ledger.close()
    assert Ledger(tmp_path / "ledger").released("a") >= 1  # the lock is free


def test_a_new_ledger_s_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = os.fsync

    def watch(handle: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        real(handle)

    monkeypatch.setattr(os, "fsync", watch)
    with Ledger(tmp_path / "ledger"):
        assert synced == [True]


def test_a_deleted_ledger_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", reserve=1)
    ledger.record("a", 1)
    (tmp_path / "ledger").unlink()
    with pytest.raises(QuellError, match="was deleted while in use"):
        ledger.record("a", 2)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_ledger_is_never_copied(twin: Callable[[object], object], tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger, pytest.raises(QuellError, match="never pickled or copied"):
        twin(ledger)


def test_counts_that_are_none_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for value in ("-1", "2.5", "true", '"3"'):
        path.write_text(f'{{"key": "a", "released": {value}}}\n')
        with pytest.raises(QuellError, match="line 1 of the ledger"):
            Ledger(path)
