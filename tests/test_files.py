"""Paths that name no ordinary file, or too much of one, are refused with a sentence wherever Quell reads."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

import quell
from quell import cache, costs, files
from quell.errors import QuellError
from quell.noise import Key
from quell.planning import file as plan_file
from quell.train import data

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes and devices by name")

READERS = {
    "plan": quell.verify,
    "load": quell.Plan.load,
    "data": lambda path: data.load(path, data.Known(classes="2"), validate=False),
    "key": Key.load,
}


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)  # nobody writes to it: reading would wait forever
    return path


@pytest.fixture
def zeros(tmp_path):
    path = tmp_path / "zeros"
    path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_pipes_and_devices_are_refused(reader, kind, request):
    with pytest.raises(QuellError, match="is not an ordinary file but a pipe or a device") as refusal:
        READERS[reader](request.getfixturevalue(kind))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"data"}))  # which may be a folder of arrays
def test_folders_are_refused(reader, tmp_path):
    with pytest.raises(QuellError, match="cannot read"):
        READERS[reader](tmp_path)


def test_a_file_that_is_too_long_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "long.json"
    with path.open("wb") as file:
        file.truncate(plan_file.MOST_BYTES + 1)  # takes no room on the disk
    with pytest.raises(QuellError, match="has more than the 134,217,728 bytes"):
        quell.verify(path)
    assert files.read(path, plan_file.MOST_BYTES + 1)[:1] == b"\0"


def test_what_a_file_grows_by_while_it_is_read_counts():
    """Files under /proc have size 0 and content all the same."""
    assert os.stat("/proc/self/status").st_size == 0
    with pytest.raises(QuellError, match="more than the 10 bytes"):
        files.read("/proc/self/status", 10)


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_cache_entries_that_are_no_files_are_ignored(kind, request):
    assert cache._load(request.getfixturevalue(kind), "question") is None


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_measured_costs_that_are_no_file_are_refused(kind, request, monkeypatch):
    path = request.getfixturevalue(kind)
    monkeypatch.setattr(costs, "measured_file", lambda: path)
    with pytest.raises(QuellError, match="is damaged: run quell bench again"):
        costs.device("measured")


@pytest.mark.parametrize(
    "text", ["[" * 9_000, '{"cost": 7}', '{"cost": [1, 2]}', '{"cost": {"base": "x"}}', "\x00", "7"]
)
def test_damaged_costs_are_refused(text, tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text(text)
    monkeypatch.setattr(costs, "measured_file", lambda: path)
    with pytest.raises(QuellError, match="is damaged: run quell bench again"):
        costs.device("measured")


def test_costs_that_cannot_be_written_are_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(costs, "measured_file", lambda: tmp_path / "file" / "costs.json")
    with pytest.raises(QuellError, match="cannot write the measured costs"):
        costs.keep(costs.DEVICES["cpu"], "here")


@pytest.mark.parametrize("compressed", [False, True])
def test_no_damage_to_an_archive_escapes(compressed, tmp_path):
    """Bytes changed at random in a file of arrays: a sentence, or arrays, from `quell train` and from the cache."""
    import numpy as np

    random, path = np.random.default_rng(0), tmp_path / "arrays.npz"
    array = random.normal(size=(12, 3))
    facts = {"question": "q", "facts": "{}", "digest": cache.digest(array)}
    (np.savez_compressed if compressed else np.savez)(path, x=array, y=np.arange(12) % 2, array=array, **facts)
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), random.integers(1, 4)):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        stored = cache._load(path, "q")
        assert stored is None or np.array_equal(stored[0], array)
        with suppress(QuellError):
            data.load(path, data.Known(classes="2"), validate=False)
