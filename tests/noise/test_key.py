"""Keys: 256 bits of entropy that never show."""

from __future__ import annotations

import copy
import os
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest

from quell import QuellError
from quell.noise import Key, NoiseSpec, NoiseStream, SeededKeyWarning, UnrecordedKeyWarning
from quell.strategy.recurrence import Regenerate


def test_generated_keys_differ_and_have_256_bits() -> None:
    keys = [Key.generate() for _ in range(20)]
    assert len({key.reveal() for key in keys}) == 20
    assert all(len(key.reveal()) == 32 for key in keys)


def test_a_seed_warns_loudly_and_is_repeatable() -> None:
    with pytest.warns(SeededKeyWarning, match="NO privacy guarantee"):
        key = Key.from_seed(7)
    with pytest.warns(SeededKeyWarning):
        assert key == Key.from_seed(7)
    with pytest.warns(SeededKeyWarning):
        assert key != Key.from_seed(2**100)
    assert key.seeded
    assert "NO privacy" in repr(key)
    with pytest.raises(QuellError, match="seed=-1"):
        Key.from_seed(-1)


def test_derived_secrets_depend_on_key_and_purpose_and_reveal_neither() -> None:
    one, other = Key.generate(), Key.generate()
    assert one.derive("batches") == Key(one.reveal()).derive("batches")
    secrets = {one.reveal(), one.derive("batches"), one.derive("workers"), other.derive("batches")}
    assert len(secrets) == 4
    assert all(len(secret) == 32 for secret in secrets)


def _stream(key: Key) -> NoiseStream:
    return NoiseStream(NoiseSpec(Regenerate(np.ones(1)), 5, 1.0), [4], key=key)


def test_a_key_never_shows() -> None:
    key = Key.generate()
    forms = {
        key.reveal().hex(),
        repr(key.reveal()),
        str(int.from_bytes(key.reveal(), "little")),
        str(list(key.words())),
    }
    stream = _stream(key)
    stream.add_(np.zeros(4, np.float32))
    engine = stream._engine
    shown = [repr(key), str(key), f"{key}", repr(stream), repr(stream.state_dict()), key.id]
    for call in (
        lambda: pickle.dumps(key),
        lambda: copy.deepcopy(key),
        lambda: pickle.dumps(stream),
        lambda: copy.copy(stream),
        lambda: pickle.dumps(engine),
        lambda: copy.deepcopy(engine),
        lambda: pickle.dumps(engine.add),
    ):
        with pytest.raises(QuellError) as caught:
            call()
        shown.append("".join(traceback.format_exception(caught.value)))
    for text in shown:
        assert not any(form in text for form in forms)
    assert key.reveal() not in pickle.dumps(stream.state_dict())


def test_errors_do_not_quote_a_key_of_the_wrong_kind() -> None:
    secret = b"not thirty-two bytes"
    with pytest.raises(QuellError) as caught:
        Key(secret)
    assert "thirty" not in str(caught.value)
    with pytest.raises(QuellError) as caught:
        _stream(secret)
    assert "thirty" not in str(caught.value)


@pytest.mark.parametrize(
    "secret",
    [bytes(32), b"\xff" * 32, b"\x01\x02\x03\x04" * 8, bytes(31) + b"\x01"],
    ids=["zeros", "ones", "repeated", "nearly zeros"],
)
def test_keys_that_can_be_guessed_are_refused(secret: bytes, tmp_path: Path) -> None:
    with pytest.raises(QuellError, match="can be guessed") as caught:
        Key(secret)
    assert repr(secret) not in str(caught.value)
    path = tmp_path / "run.key"
    path.write_text(f"quell-key-1 secret {secret.hex()}\n")
    path.chmod(0o600)
    with pytest.raises(QuellError, match="can be guessed"):
        Key.load(path)


def test_a_key_file_is_private_and_comes_back(tmp_path: Path) -> None:
    key, path = Key.generate(), tmp_path / "run.key"
    key.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Key.load(path) == key
    assert not Key.load(path).seeded
    assert Key.load(path).loaded
    assert not key.loaded
    with pytest.raises(QuellError, match="never overwritten"):
        key.save(path)


def test_a_seeded_key_stays_marked_in_its_file(tmp_path: Path) -> None:
    with pytest.warns(SeededKeyWarning):
        Key.from_seed(3).save(tmp_path / "demo.key")
    assert Key.load(tmp_path / "demo.key").seeded


def test_bad_key_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    with pytest.raises(QuellError, match="cannot read"):
        Key.load(path)
    Key.generate().save(path)
    path.chmod(0o644)
    with pytest.raises(QuellError, match="chmod 600"):
        Key.load(path)
    for content in ("", "quell-key-1 secret zz\n", "quell-key-1 secret 00ff\n", "password\n"):
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(QuellError, match="not a Quell key file") as caught:
            Key.load(path)
        assert "00ff" not in str(caught.value)
    with pytest.raises(QuellError, match="cannot write"):
        Key.generate().save(tmp_path / "nowhere" / "run.key")


def test_philox_keys_differ_by_tensor() -> None:
    key = Key(bytes(range(32)))
    assert len({tuple(key.philox_words(tensor)) for tensor in range(1000)}) == 1000


def test_a_key_from_before_a_fork_may_be_in_use_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each child would begin with the same noise, and what is remembered in a process stays there."""
    key = Key.generate()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert key.loaded
    with pytest.warns(UnrecordedKeyWarning, match="made before a fork"):
        NoiseStream(NoiseSpec(Regenerate(np.array([1.0])), steps=2, scale=1.0), [3], key=key)
