"""Tables of user ids, as `quell plan --users` reads them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from quell import files
from quell.errors import QuellError, read_count
from quell.schemes.randomness import Indices
from quell.schemes.users import numbered, shared

_USUAL = ("user", "user_id", "users", "owner")
_MOST_BYTES = 1 << 36
Table = tuple[str, Indices, int]  # what `rows_of_users` finds


def population(examples: int | None, users: str | None, column: str | None) -> tuple[dict[str, int], Table | None]:
    """How many examples, users or groups there are, as `Run.from_data` takes it, and what a table of users says.

    Args:
        examples, users, column: What --examples, --users (a number or a table) and --user-column say.
    """
    counted = {} if examples is None else {"examples": examples}
    table = None
    if users is not None:
        try:
            counted["users"] = read_count("users", users)
        except QuellError:
            table = rows_of_users(Path(users), column)
            counted[f"{table[0]}s"] = len(table[1])
    if column is not None and table is None:
        raise QuellError("--user-column is for a table of user ids (--users ids.csv): give both")
    return counted, table


def rows_of_users(path: Path, columns: str | None = None) -> Table:
    """What a table with one row per example says: whether it names users or groups of them, and their rows.

    Args:
        path: A .csv or .tsv file with a header, a .txt file with one id per line, or a .npy array of ids.
        columns: The headers of the columns with ids, separated by commas; several of them where examples have several
            users. Default: the only one, or one called user, user_id, users, owner.

    Returns:
        "user" or "group", (users,) how many rows each of them has, and how many rows belong to no group.
    """
    if columns is not None and path.suffix not in (".csv", ".tsv"):
        raise QuellError(f"{path} has no columns, so --user-column means nothing: leave it out")
    wanted = None if columns is None else [name.strip() for name in columns.split(",")]
    several = wanted is not None and len(wanted) > 1
    try:
        found = (shared if several else numbered)(_ids(path, wanted))
    except OSError as problem:
        raise QuellError(f"cannot read the users of {path}: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise QuellError(f"{path} is not a text file in UTF-8: save it as one") from problem
    except csv.Error as problem:
        raise QuellError(f"{path} is not a table: {problem}") from problem
    if not len(found):
        raise QuellError(f"{path} names no users: it needs one id per example")
    used = found[found >= 0]
    return "group" if several else "user", np.bincount(used), len(found) - len(used)


def _ids(path: Path, wanted: list[str] | None) -> Iterable[object]:
    if path.suffix not in (".csv", ".tsv", ".txt", ".npy"):
        raise QuellError(f"{path} is not a table of ids: give a .csv, .tsv, .txt or .npy file, or a number of users")
    with files.opened(path, _MOST_BYTES) as file:
        if path.suffix != ".npy":
            return _lines(path, wanted)
        try:
            ids: Iterable[object] = np.load(file, allow_pickle=False)
        except files.DAMAGED_ARRAYS as problem:
            raise QuellError(f"{path} does not hold an array of ids: write one with numpy.save") from problem
        return ids


def _lines(path: Path, wanted: list[str] | None) -> Iterator[object]:
    with open(path, newline="", encoding="utf-8-sig") as text:
        if path.suffix == ".txt":
            yield from (line.rstrip("\r\n") for line in text)
            return
        table = csv.reader(text, delimiter="\t" if path.suffix == ".tsv" else ",")
        header = next(table, [])
        usual = [name for name in header if len(header) == 1 or name.strip().lower() in _USUAL]
        names = usual if wanted is None else wanted
        if not names or (wanted is None and len(names) > 1) or any(header.count(name) != 1 for name in names):
            raise QuellError(
                f"{path} has the columns {', '.join(header) or '(none)'}: say with --user-column which holds the "
                "users' ids"
            )
        places = [header.index(name) for name in names]
        for row in filter(None, table):
            cells = [row[place] if place < len(row) else "" for place in places]
            yield cells[0] if len(cells) == 1 else [cell for cell in cells if cell]
