"""Files that a person could bring, right and wrong."""

from __future__ import annotations

import numpy as np
import pytest

from quell.errors import QuellError
from quell.train import data as reading
from quell.train.data import Data, Known

X, Y = np.random.default_rng(1).normal(size=(80, 5)), np.arange(80) % 3


def load(path, validate=True, **known) -> Data:
    return reading.load(path, Known(**known) if known else Known(classes="3"), validate)


def saved(folder, **arrays):
    path = folder / "data.npz"
    np.savez(path, **arrays)
    return path


def test_parts_share_no_example_and_lose_none(tmp_path):
    numbered = np.arange(80.0)[:, None]
    data = load(saved(tmp_path, x=numbered, y=Y))
    parts = [part.x.ravel() for part in (data.train, data.validation, data.test)]
    assert sorted(np.concatenate(parts)) == list(range(80))
    assert [len(part) for part in parts] == [51, 9, 20]
    for part in (data.train, data.validation, data.test):
        np.testing.assert_array_equal(part.y, part.x.ravel() % 3)


def test_own_test_arrays_are_used_and_nothing_is_held_out_without_need(tmp_path):
    data = load(saved(tmp_path, x=X, y=Y, x_test=X[:9], y_test=Y[:9]), validate=False)
    assert (len(data.train), len(data.validation), len(data.test)) == (80, 0, 9)
    assert data.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 8), (1, 8, 8)), ((3, 8, 8), (3, 8, 8)), ((8, 8, 3), (3, 8, 8)), ((5,), (5,))],
)
def test_images_get_their_channels_first(tmp_path, shape, expected):
    x = np.random.default_rng(2).integers(0, 255, (80, *shape), dtype=np.uint8)
    data = load(saved(tmp_path, x=x, y=Y, x_test=x, y_test=Y), validate=False)
    assert data.shape == expected
    pixels = x if shape != (8, 8, 3) else np.moveaxis(x, 3, 1)
    np.testing.assert_allclose(data.test.x, pixels.reshape(80, *expected) / 255, rtol=1e-6)


WRONG = {
    "y is missing beside x": {"x": X},
    "x is missing beside y, and there is y": {"y": Y},
    "x_test is missing beside y_test": {"x": X, "y": Y, "y_test": Y},
    "array of Python objects": {"x": X, "y": Y.astype(object)},
    "labels must be integers": {"x": X, "y": Y.astype(float)},
    "number the classes from 0": {"x": X, "y": Y - 1},
    "one integer per example": {"x": X, "y": Y[:, None]},
    "80 examples and y 79 labels": {"x": X, "y": Y[1:]},
    "x has shape (400,)": {"x": X.ravel(), "y": Y},
    "save real numbers": {"x": X.astype(complex), "y": Y},
    "x[0, 0] is not a finite number": {"x": np.where(np.arange(5) == 0, np.nan, X), "y": Y},
    "x[0, 1] is not a finite number": {"x": np.where(np.arange(5) == 1, 1e300, X), "y": Y},
    "they must agree": {"x": X, "y": Y, "x_test": X[:, :4], "y_test": Y},
    "a label 2, but --classes has 2": {"x": X, "y": Y, "classes": "2"},
    "state the classes, because": {"x": X, "y": Y, "classes": None},
    "2 to 10,000 different ones": {"x": X, "y": Y, "classes": "a,a"},
    "--target is about a column": {"x": X, "y": Y, "classes": "3", "target": "x"},
    "one --range for all": {"x": X, "y": Y, "classes": "3", "ranges": ["0:1", "0:2"]},
    "is no range": {"x": X, "y": Y, "classes": "3", "ranges": ["age=0:1"]},
    "leaves 0 examples to test on": {"x": X[:2], "y": Y[:2]},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arrays_are_refused_with_what_is_wrong(tmp_path, message):
    given = dict(WRONG[message])
    known = {name: given.pop(name) for name in ("classes", "target", "ranges") if name in given}
    path = saved(tmp_path, **given)
    with pytest.raises(QuellError) as refusal:
        load(path, **known)
    assert message in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"x,y\n1,2\n", b"PK\x03\x04 not really a zip", b"\x80\x04K\x01."])
def test_what_is_no_npz_file_is_refused(tmp_path, content):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(QuellError, match=r"is not an \.npz file"):
        load(path)


def test_a_bare_array_a_folder_and_nothing_at_all_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "x.npy", "no names"),
        (tmp_path, "y is missing beside x"),
        (tmp_path / "empty", "x is missing"),
        (tmp_path / "no", "no file"),
    ):
        with pytest.raises(QuellError, match=message):
            load(path)


def test_a_damaged_member_is_refused(tmp_path):
    path = saved(tmp_path, x=X, y=Y)
    content = bytearray(path.read_bytes())
    content[500] ^= 0xFF  # inside x: its checksum is wrong now
    path.write_bytes(content)
    with pytest.raises(QuellError, match="x is damaged"):
        load(path)


def test_a_folder_of_arrays_is_read_whatever_the_case_of_its_names(tmp_path):
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", Y)
    assert load(tmp_path).shape == (5,)
    np.save(tmp_path / "y.npy", Y.astype(object))
    with pytest.raises(QuellError, match="array of Python objects"):
        load(tmp_path)


def test_a_stated_range_scales_arrays_and_bounds_them(tmp_path):
    x = np.array([[-100.0, 0.0, 8.0, 16.0, 1e6]] * 80)
    data = load(saved(tmp_path, x=x, y=Y), classes="3", ranges=["0:16"])
    np.testing.assert_array_equal(data.train.x[0], [-1, -1, 0, 1, 1])
