"""The disk cache: instant, honest, and unharmed by crashes and rivals."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from quell import cache, strategy, workload
from quell.participation import Participation

QUESTION = {"family": "test", "bands": 3}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("QUELL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer() -> cache.Entry:
    return np.array([1.0, 2.0]), {"iterations": 7}


def refuse() -> cache.Entry:
    raise AssertionError("solved again")


def test_the_second_call_does_not_solve(home):
    cache.remember(QUESTION, answer)
    array, facts = cache.remember(QUESTION, refuse)
    np.testing.assert_array_equal(array, [1.0, 2.0])
    assert facts == {"iterations": 7}
    with pytest.raises(AssertionError, match="solved again"):
        cache.remember({**QUESTION, "bands": 4}, refuse)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:100] + b"x" + b[101:]])
def test_damaged_entries_are_made_anew(home, damage):
    cache.remember(QUESTION, answer)
    (entry,) = home.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    array, _ = cache.remember(QUESTION, answer)
    np.testing.assert_array_equal(array, [1.0, 2.0])
    cache.remember(QUESTION, refuse)


def test_an_entry_with_another_question_or_array_is_not_believed(home):
    cache.remember(QUESTION, answer)
    (entry,) = home.iterdir()
    with np.load(entry) as stored:
        content = dict(stored)
    np.savez(entry, **{**content, "array": np.array([3.0, 4.0])})
    with pytest.raises(AssertionError, match="solved again"):
        cache.remember(QUESTION, refuse)
    np.savez(entry, **{**content, "question": "another"})
    with pytest.raises(AssertionError, match="solved again"):
        cache.remember(QUESTION, refuse)


def test_interruption_leaves_nothing_behind(home, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.np, "savez", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.remember(QUESTION, answer)
    assert list(home.iterdir()) == []


def test_a_disk_that_cannot_be_written_costs_nothing_else(monkeypatch):
    monkeypatch.setenv("QUELL_CACHE", "/proc/nowhere")
    array, _ = cache.remember(QUESTION, answer)
    assert len(array) == 2


def test_off_is_off(monkeypatch):
    monkeypatch.setenv("QUELL_CACHE", "off")
    assert cache.folder() is None
    cache.remember(QUESTION, answer)


def _rival(folder: str) -> float:
    import os

    os.environ["QUELL_CACHE"] = folder
    built = strategy.build("band_inv", workload.prefix(200), Participation(200, 20), bands=4)
    return float(built.noising[1])


@pytest.mark.slow
def test_concurrent_writers_agree(home):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(_rival, [str(home)] * 4)
    assert len(set(found)) == 1
    assert [path.suffix for path in home.iterdir()] == [".npz"]


@pytest.mark.parametrize(
    "entry",
    [
        (np.ones(7), {}),
        (np.ones((2, 2)), {}),
        (np.ones(4), {}),
        (np.ones(4), {"converged": "no"}),
        (np.ones(4), []),
        (np.zeros(0), {}),
    ],
)
def test_entries_of_the_wrong_kind_are_searched_again(home, entry):
    """A well-formed file with the right name but wrong content is a miss, whatever it holds."""
    sums, pattern = workload.prefix(100), Participation(100, 10)
    honest = strategy.build("band_inv", sums, pattern, bands=4)
    (path,) = home.iterdir()
    with np.load(path) as stored:
        question = str(stored["question"])
    cache._store(path, question, *entry)
    again = strategy.build("band_inv", sums, pattern, bands=4)
    np.testing.assert_array_equal(again.noising, honest.noising)
