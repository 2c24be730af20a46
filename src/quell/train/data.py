"""The examples of a run: read, checked, encoded and split.

What is said about them (classes, ranges, which columns are categories) is the user's to state and counts as public.
Nothing is looked up in the data except to say what is missing. Those errors are for the owner of the data.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quell.errors import QuellError, require_finite, short
from quell.train import arrays, table
from quell.train.table import Columns

_MOST_CLASSES = 10_000
_MOST_SHOWN = 20
_TEST_SHARE, _VALIDATION_SHARE = 0.25, 0.15


@dataclass(frozen=True)
class Known:
    """What the user states about a file; each a text as the command line takes it.

    Args:
        target: The column to predict. Tables only.
        classes: The classes, separated by commas; for arrays also their number.
        cuts: Instead of classes: "10,20" makes the classes below 10, 10 to 20 and 20 or more of a number. Tables only.
        ranges: "low:high" for arrays, "column=low:high" for a column of a table.
        categories: Columns whose numbers are names, such as postcodes.
        dropped: Columns that the model does not see, such as names.
    """

    target: str | None = None
    classes: str | None = None
    cuts: str | None = None
    ranges: Sequence[str] = ()
    categories: Sequence[str] = ()
    dropped: Sequence[str] = ()


@dataclass(frozen=True)
class Rows:
    """Examples (float32) and their labels (int64)."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    def cut(self, share: float) -> tuple[Rows, Rows]:
        """Split off a share of the examples as a second part: always the same positions, whatever the data are."""
        order = np.random.default_rng(0).permutation(len(self))
        kept, taken = np.split(order, [len(self) - round(share * len(self))])
        return Rows(self.x[kept], self.y[kept]), Rows(self.x[taken], self.y[taken])


@dataclass(frozen=True)
class Data:
    """Examples to train on, to choose learning rates on (empty if there is no choice), and to report accuracy on.

    `columns` says how the rows of a table became examples; None for arrays, which `limits` may have scaled.
    """

    train: Rows
    validation: Rows
    test: Rows
    classes: tuple[str, ...]
    columns: Columns | None = None
    limits: tuple[float, float] | None = None

    @property
    def parts(self) -> dict[str, int]:
        """How many examples there are for what."""
        return {"train": len(self.train), "choose the learning rate": len(self.validation), "test": len(self.test)}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return self.train.x.shape[1:]


def load(path: Path, known: Known, validate: bool) -> Data:
    """Read a table, an .npz file or a folder of arrays; hold a quarter out for tests if there is no test set.

    With `validate` 15% of the training examples are held out as well, to choose a learning rate on.
    """
    is_table = path.suffix.lower() in table.SUFFIXES
    train, test, classes, columns, limits = _table(path, known) if is_table else _arrays(path, known)
    if test is None:
        train, test = train.cut(_TEST_SHARE)
    train, validation = train.cut(_VALIDATION_SHARE if validate else 0.0)
    for part, what in ((train, "train on"), (test, "test on"), *([(validation, "choose on")] if validate else [])):
        if len(part) < 2:
            raise QuellError(f"{path} leaves {len(part)} examples to {what}: add more")
    return Data(train, validation, test, classes, columns, limits)


_Read = tuple[Rows, Rows | None, tuple[str, ...], Columns | None, tuple[float, float] | None]


def _table(path: Path, known: Known) -> _Read:
    if known.target is None:
        listed = ", ".join(table.header_of(path))
        raise QuellError(f"say which column of {path} to predict, with --target: it has {listed}")
    ranges = {}
    for text in known.ranges:
        name, _, limits = text.rpartition("=")
        ranges[name] = _limits(text, limits)
    columns = table.columns_of(path, known.target, ranges, known.categories, known.dropped)
    labels = table.cells(path, known.target)
    if known.cuts is None:
        names = _classes(known, sorted(set(labels)))
    else:
        names, labels = _cut(known, labels)
    numbers = {name: number for number, name in enumerate(names)}
    wrong = next((row for row, label in enumerate(labels) if label not in numbers), None)
    if wrong is not None:
        raise QuellError(
            f"example {wrong + 1:,} of {path} has {known.target} = {short(labels[wrong])}, which is in none of "
            f"the classes {', '.join(map(short, names[:_MOST_SHOWN]))}: change them, or remove such examples"
        )
    y = np.fromiter((numbers[label] for label in labels), np.int64, len(labels))
    return Rows(table.encoded(path, columns), y), None, names, columns, None


def _arrays(path: Path, known: Known) -> _Read:
    named = {"--target": known.target, "--cuts": known.cuts, "--category": known.categories, "--drop": known.dropped}
    for option, given in named.items():
        if given:
            raise QuellError(f"{option} is about a column of a .csv or .tsv file, and {path} has none: leave it out")
    if len(known.ranges) > 1:
        raise QuellError("arrays have one --range for all of their numbers, low:high: leave the others out")
    limits = _limits(known.ranges[0], known.ranges[0]) if known.ranges else None
    found = arrays.read(path)
    pairs = [("x", "y"), *([("x_test", "y_test")] if {"x_test", "y_test"} & found.keys() else [])]
    parts = [Rows(*arrays.pair(found, *names, limits)) for names in pairs]
    train, *test = parts
    if test and test[0].x.shape[1:] != train.x.shape[1:]:
        raise QuellError(
            f"examples of x_test have shape {test[0].x.shape[1:]} and those of x {train.x.shape[1:]}: they must agree"
        )
    largest = max(int(part.y.max(initial=0)) for part in parts)
    names = _classes(known, largest + 1)
    if largest >= len(names):
        raise QuellError(f"there is a label {largest}, but --classes has {len(names)}, numbered from 0: add the others")
    return train, test[0] if test else None, names, None, limits


def _classes(known: Known, found: list[str] | int) -> tuple[str, ...]:
    """The classes as they were stated. `found` are those in the data: only to say what to write."""
    if known.classes is None:
        many = found if isinstance(found, int) else len(found)
        if many > _MOST_SHOWN and not isinstance(found, int):
            raise QuellError(
                f"the column {short(known.target)} has {many:,} different values, and quell train predicts classes: "
                "if they are numbers, say where to cut them, such as --cuts 10,20 for below 10, 10 to 20, 20 or more"
            )
        written = str(found) if isinstance(found, int) else f"'{','.join(found)}'"
        raise QuellError(
            f"state the classes, because the model makes them public: --classes {written} are those in the data; use "
            "this list if anybody may know it"
        )
    if isinstance(found, int) and known.classes.isdecimal():
        names = tuple(map(str, range(min(int(known.classes), _MOST_CLASSES + 1))))
    else:
        names = tuple(name.strip() for name in known.classes.split(","))
    if not 2 <= len(names) <= _MOST_CLASSES or len(set(names)) < len(names):
        raise QuellError(
            f"--classes {short(known.classes)} must be 2 to {_MOST_CLASSES:,} different ones: --classes no,yes"
        )
    return names


def _cut(known: Known, labels: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """The classes that cut points make of numbers, and the class of each label; a text that is no number stays."""
    if known.classes is not None:
        raise QuellError("--cuts makes the classes, so it does not go with --classes: drop one")
    try:
        cuts = [require_finite("cut", float(text)) for text in (known.cuts or "").split(",")]
    except ValueError:
        cuts = []
    if not cuts or cuts != sorted(set(cuts)):
        raise QuellError(f"--cuts {short(known.cuts)} must be growing numbers, separated by commas: --cuts 10,20")
    between = [f"{low:g} to {high:g}" for low, high in pairwise(cuts)]
    names = (f"below {cuts[0]:g}", *between, f"{cuts[-1]:g} or more")

    def name_of(text: str) -> str:
        try:
            value = float(text)
        except ValueError:
            return text
        return text if math.isnan(value) else names[bisect_right(cuts, value)]

    return names, [name_of(text) for text in labels]


def _limits(option: str, text: str) -> tuple[float, float]:
    try:
        low, high = (require_finite("range", float(each)) for each in text.split(":"))
    except ValueError:
        raise QuellError(
            f"--range {short(option)} is no range: write age=0:120 for a column of a table, 0:255 for arrays"
        ) from None
    if low >= high:
        raise QuellError(f"--range {option}: {low:g} must lie below {high:g}")
    return low, high
