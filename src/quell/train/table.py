"""A table of examples, from a .csv or .tsv file, as numbers that a model can take.

Nothing is computed from several rows: a scale, a vocabulary or the kind of a column that was found in the data would be
a release that no noise protects. Each cell is encoded by itself. A number is scaled by the range that the user states
for its column, or else by a fixed function. Any other text, an empty cell included, switches on one of a fixed number
of features, which a public hash of the column's name and the text chooses. So the names of the columns and the number
of rows are public, and nothing else about the table is.
"""

from __future__ import annotations

import csv
import math
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quell import files
from quell.errors import QuellError, short
from quell.train.arrays import MOST_BYTES

SUFFIXES = (".csv", ".tsv")
_BUCKETS, _MOST_BUCKETS = 16, 1024  # features for texts: for each column, and in all
_MOST_CACHED = 1 << 16
_MOST_NAMED = 20


@dataclass(frozen=True)
class Column:
    """A column that the model sees. `limits` are the stated range of its numbers; a category's numbers are names."""

    name: str
    limits: tuple[float, float] | None = None
    category: bool = False

    def number(self, text: str) -> float | None:
        """The scaled number in a cell, None for other texts."""
        if self.category:
            return None
        try:
            value = float(text)
        except ValueError:
            return None
        if not math.isfinite(value):
            return None
        if self.limits is None:
            return math.asinh(value) / 4  # near 1 for numbers of any size, without looking at the others
        low, high = self.limits
        return min(1.0, max(-1.0, (2 * value - (low + high)) / (high - low)))


@dataclass(frozen=True)
class Columns:
    """The columns that a model sees, in order."""

    columns: tuple[Column, ...]

    @property
    def buckets(self) -> int:
        """Features for texts."""
        return min(_MOST_BUCKETS, _BUCKETS * len(self.columns))

    def encoded(self, rows: Iterator[Sequence[str]]) -> NDArray[np.float32]:
        """(rows, 2 · columns): the numbers, 0 where there is a text, then the texts' features from 1, 0 for numbers."""
        seen: list[dict[str, tuple[float, float]]] = [{} for _ in self.columns]
        content = array("f")
        for row in rows:
            cells = []
            for column, known, text in zip(self.columns, seen, row, strict=True):
                found = known.get(text)
                if found is None:
                    found = self._cell(column, text.strip())
                    if len(known) < _MOST_CACHED:
                        known[text] = found
                cells.append(found)
            content.extend(chain(*zip(*cells, strict=True)))
        return np.frombuffer(content, dtype=np.float32).reshape(-1, 2 * len(self.columns))

    def _cell(self, column: Column, text: str) -> tuple[float, float]:
        number = column.number(text)
        if number is not None:
            return number, 0
        return 0, 1 + zlib.crc32(f"{column.name}\0{text}".encode()) % self.buckets

    def as_plain(self) -> list[list[Any]]:
        """Plain data, for a model's file."""
        return [[each.name, each.limits, each.category] for each in self.columns]

    @classmethod
    def from_plain(cls, content: Sequence[Sequence[Any]]) -> Columns:
        return cls(tuple(Column(name, tuple(limits) if limits else None, bool(flag)) for name, limits, flag in content))


def columns_of(
    path: Path,
    target: str,
    ranges: dict[str, tuple[float, float]],
    categories: Sequence[str] = (),
    dropped: Sequence[str] = (),
) -> Columns:
    """All columns of a table but the target and those that are dropped, as the user described them."""
    header = header_of(path)
    for option, names in (("--target", [target]), ("--range", ranges), ("--category", categories), ("--drop", dropped)):
        for name in names:
            if name not in header:
                raise QuellError(f"{option} {short(name)} is no column of {path}: it has {', '.join(header)}")
    for first, second, said in (
        (categories, ranges, "be a --category and have a --range"),
        ([target], dropped, "be the --target and be left out by --drop"),
        (ranges, dropped, "have a --range and be left out by --drop"),
        (categories, dropped, "be a --category and be left out by --drop"),
    ):
        both = [name for name in first if name in second]
        if both:
            raise QuellError(f"the column {short(both[0])} cannot {said}: leave one of the two options out")
    kept = [name for name in header if name != target and name not in dropped]
    if not kept:
        raise QuellError(f"{path} has no column left to learn from: drop fewer")
    return Columns(tuple(Column(name, ranges.get(name), name in categories) for name in kept))


def header_of(path: Path) -> list[str]:
    """The names of a table's columns."""
    with _opened(path) as rows:
        return _header(path, rows)


def encoded(path: Path, columns: Columns) -> NDArray[np.float32]:
    """The rows of a table, encoded; columns that the model does not see are passed over."""
    with _opened(path) as rows:
        header = _header(path, rows)
        missing = [each.name for each in columns.columns if each.name not in header]
        if len(missing) == len(columns.columns):
            names = ", ".join(each.name for each in columns.columns[:_MOST_NAMED])
            more = ", …" if len(columns.columns) > _MOST_NAMED else ""
            raise QuellError(
                f"{path} has none of the columns that the model was trained with ({names}{more}): give a .csv or .tsv "
                "table that has them"
            )
        if missing:
            raise QuellError(f"{path} has no column {short(missing[0])}, which the model was trained with: add it")
        places = [header.index(each.name) for each in columns.columns]
        return columns.encoded([row[place] for place in places] for row in _whole(path, header, rows))


def cells(path: Path, name: str) -> list[str]:
    """One column of a table."""
    with _opened(path) as rows:
        header = _header(path, rows)
        place = header.index(name)
        return [row[place].strip() for row in _whole(path, header, rows)]


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[list[str]]]:
    try:
        with files.opened(path, MOST_BYTES):  # refuses what is no ordinary file
            pass
        with open(path, newline="", encoding="utf-8-sig") as text:
            first = text.readline()
            text.seek(0)
            yield csv.reader(text, delimiter=max(",;\t", key=first.count))
    except FileNotFoundError:
        raise QuellError(f"there is no file {path}") from None
    except OSError as problem:
        raise QuellError(f"cannot read {path}: {problem.strerror or problem}") from problem
    except UnicodeDecodeError:
        raise QuellError(f"{path} is not a text file in UTF-8: save it as one") from None
    except csv.Error as problem:
        raise QuellError(f"{path} is not a table: {problem}") from None


def _header(path: Path, rows: Iterator[list[str]]) -> list[str]:
    header = [name.strip() for name in next(rows, [])]
    twice = [name for name in header if header.count(name) > 1]
    if not header or twice:
        problem = f"has two columns called {short(twice[0])}" if twice else "is empty"
        raise QuellError(f"{path} {problem}: its first line must name the columns, each once")
    return header


def _whole(path: Path, header: list[str], rows: Iterator[list[str]]) -> Iterator[list[str]]:
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        if len(row) != len(header):
            raise QuellError(
                f"row {number:,} of {path} has {len(row)} cells, the header {len(header)}: make them agree"
            )
        yield row
