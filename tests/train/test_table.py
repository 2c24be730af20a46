"""Tables that a person could bring; nothing about one row depends on another."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch

from quell.errors import QuellError
from quell.train import data as reading
from quell.train.data import Known
from quell.train.models import Features
from quell.train.table import Column, Columns, columns_of, encoded

ROWS = [[str(20 + i), "Oslo" if i % 2 else "Rome", str(i % 7), "", "yes" if i % 3 else "no"] for i in range(60)]
HEADER = ["age", "city", "code", "remark", "bought"]
KNOWN = Known("bought", "no,yes", ranges=["age=0:100"], categories=["code"])


def written(folder, rows=ROWS, header=HEADER, name="people.csv", delimiter=","):
    with open(folder / name, "w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return folder / name


def test_cells_become_numbers_or_features(tmp_path):
    path = written(tmp_path)
    data = reading.load(path, KNOWN, validate=True)
    assert (len(data.train), len(data.validation), len(data.test), data.classes) == (38, 7, 15, ("no", "yes"))
    first = encoded(path, data.columns)[0]
    np.testing.assert_allclose(first[:4], [-0.6, 0, 0, 0], atol=1e-6)  # age 20 of 0 to 100; the others are texts
    assert first[4] == 0
    assert (first[5:] > 0).all()
    features = Features(4, data.columns.buckets)(torch.from_numpy(first[None]))
    assert features.shape == (1, 4 + 64)
    assert float(features[0, 4:].sum()) == 3.0


@pytest.mark.parametrize("changed", [["999", "Paris", "n/a", "long", "yes"], ["", "", "", "", "no"]])
def test_no_row_changes_how_another_is_encoded(tmp_path, changed):
    """Kinds, scales and vocabularies that are looked up in the data would make all rows depend on each."""
    path, other = written(tmp_path), written(tmp_path, [changed, *ROWS[1:]], name="other.csv")
    described = (columns_of(each, "bought", {}) for each in (path, other))
    before, after = (encoded(each, columns) for each, columns in zip((path, other), described, strict=True))
    np.testing.assert_array_equal(before[1:], after[1:])
    assert (before[0] != after[0]).any()


def test_numbers_to_predict_are_cut_into_classes(tmp_path):
    data = reading.load(written(tmp_path), Known("age", cuts="30,50"), validate=False)
    assert data.classes == ("below 30", "30 to 50", "50 or more")
    assert np.bincount(np.concatenate([data.train.y, data.test.y])).tolist() == [10, 20, 30]  # ages 20 to 79


def test_a_cell_that_is_no_number_is_a_text_of_its_own():
    age = Column("age", (0.0, 50.0))
    assert [age.number(text) for text in ("25", "-7", "1e9", "nan", "", "ten")] == [0.0, -1.0, 1.0, None, None, None]
    assert Column("age").number("1e300") == math.asinh(1e300) / 4
    assert Column("code", category=True).number("7") is None


@pytest.mark.parametrize(("name", "delimiter"), [("a.tsv", "\t"), ("a.csv", ";")])
def test_other_separators_give_the_same(tmp_path, name, delimiter):
    one, two = (
        reading.load(path, KNOWN, validate=False)
        for path in (written(tmp_path), written(tmp_path, name=name, delimiter=delimiter))
    )
    np.testing.assert_array_equal(one.train.x, two.train.x)


def test_what_a_model_keeps_of_its_columns_comes_back():
    columns = Columns((Column("age", (0.0, 9.0)), Column("code", category=True), Column("x")))
    assert Columns.from_plain(columns.as_plain()) == columns


def test_what_is_no_table_of_the_model_is_named(tmp_path):
    columns = columns_of(written(tmp_path), "bought", {})
    (tmp_path / "plan.json").write_text('{\n  "format": "quell-plan"\n}\n')
    match = r"plan\.json has none of the columns that the model was trained with \(age, city, code, remark\): give a"
    with pytest.raises(QuellError, match=match):
        encoded(tmp_path / "plan.json", columns)
    with pytest.raises(QuellError, match=r"half\.csv has no column 'code', which the model was trained with"):
        encoded(written(tmp_path, [], HEADER[:2], "half.csv"), columns)


WRONG = {
    "with --target: it has age, city": Known(),
    "--classes 'no,yes' are those": Known("bought"),
    "quell train predicts classes": Known("age"),
    "is no column of": Known("price", "no,yes"),
    "--range 'size'": Known("bought", "no,yes", ranges=["size=0:1"]),
    "--drop 'size'": Known("bought", "no,yes", dropped=["size"]),
    "cannot be a --category and have a --range": Known("bought", "no,yes", ranges=["age=0:1"], categories=["age"]),
    "'bought' cannot be the --target and be left out by --drop": Known("bought", "no,yes", dropped=["bought"]),
    "'age' cannot have a --range and be left": Known("bought", "no,yes", ranges=["age=0:1"], dropped=["city", "age"]),
    "'code' cannot be a --category and be left": Known("bought", "no,yes", categories=["code"], dropped=["code"]),
    "is no range": Known("bought", "no,yes", ranges=["age=young:old"]),
    "9 must lie below 1": Known("bought", "no,yes", ranges=["age=9:1"]),
    "no column left": Known("bought", "no,yes", dropped=HEADER[:4]),
    "example 1 of": Known("bought", "maybe,yes"),
    "in none of the classes 'below 1', '1 or more'": Known("city", cuts="1"),
    "must be growing numbers": Known("age", cuts="20,10"),
    "it does not go with --classes": Known("age", "no,yes", cuts="20"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_description_is_refused_with_what_to_do(tmp_path, message):
    with pytest.raises(QuellError) as refusal:
        reading.load(written(tmp_path), WRONG[message], validate=True)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"age,age,bought\n", "two columns called 'age'"),
        (b"age,bought\n1,yes\n2\n", "row 3 of .* has 1 cells, the header 2"),
        (b"age,bought\n\xff\xfe,yes\n", "not a text file in UTF-8"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, content, message):
    (tmp_path / "people.csv").write_bytes(content)
    with pytest.raises(QuellError, match=message):
        reading.load(tmp_path / "people.csv", Known("bought", "no,yes"), validate=True)
