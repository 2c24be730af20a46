"""From users to rows: whose examples are whose, and which of them a user brings to a step.

A scheme draws users as it would draw examples, and a user's rows of a step are one unit of the batch; where examples
have several users, a unit is a group of users who share examples. Which rows these are is decided by the step and by
the user's own order of rows, drawn once, and never by who took part before: given that order, a user is to the
accountants what an example is, with a gradient that depends on the step (Proof 15 in docs/proofs.md). Nobody's rows
change those of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from hashlib import blake2b
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from quell.errors import QuellError, short
from quell.schemes.randomness import Indices, permuted


def numbered(ids: Iterable[object]) -> Indices:
    """(examples,) the number of each example's user, from 0; `ids` names the user of each example.

    >>> numbered(["bob", "eve", "bob"]).tolist(), numbered(np.array([7, 7, 3])).tolist()
    ([0, 1, 0], [1, 1, 0])
    """
    if isinstance(ids, np.ndarray) and ids.ndim != 1:
        raise QuellError(f"the ids of users have shape {ids.shape}: pass one id per example")
    if type(ids) is np.ndarray and (
        ids.dtype.kind in "iu" or (ids.dtype.kind in "SU" and np.all(ids != ids.dtype.type()))
    ):
        return np.unique(ids, return_inverse=True)[1].astype(np.int64)
    known: dict[object, int] = {}
    return np.fromiter((_number(known, place, each) for place, each in _each(ids)), dtype=np.int64)


def shared(owners: Iterable[object]) -> Indices:
    """(examples,) the number of each example's group, from 0, for examples with several users; -1 if it is left out.

    `owners` has the ids of each example's users, or one id. Examples with the same users are a group. Groups are chosen
    one after the other, those with most examples first, unless they have a user in common with one that was chosen
    before: a maximal set in which everyone is in at most one group. It depends on who owns which example alone, which
    is public in the promise that goes with it (Proof 16 in docs/proofs.md).

    >>> shared([("ann", "bob"), "cid", ("bob", "cid"), ("bob", "ann")]).tolist()
    [0, 1, -1, 0]
    """
    known: dict[object, int] = {}
    groups: dict[frozenset[int], int] = {}

    def group(place: int, users: object) -> int:
        several = users if isinstance(users, _SEVERAL) else (users,)
        if not len(several):
            raise QuellError(f"example {place:,} has no user: leave it out, or give it a user of its own")
        members = frozenset(_number(known, place, each) for each in several)
        return groups.setdefault(members, len(groups))

    numbers = np.fromiter((group(place, users) for place, users in _each(owners)), dtype=np.int64)
    taken: set[int] = set()
    chosen = np.full(len(groups), -1, dtype=np.int64)
    everyone, found = list(groups), 0
    for each in np.argsort(-np.bincount(numbers, minlength=len(groups)), kind="stable").tolist():
        if taken.isdisjoint(everyone[each]):
            taken |= everyone[each]
            chosen[each], found = found, found + 1
    return chosen[numbers]


_SEVERAL = (list, tuple, set, frozenset, np.ndarray)
_IDS = (str, bytes, (int, float), UUID, date)  # kinds; equal ones are one user, which other objects may not promise


def _each(ids: Iterable[object]) -> Iterator[tuple[int, object]]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise QuellError(f"the ids of users are {short(ids)}: pass a list or an array with one entry per example")
    return ((place, None if each is np.ma.masked else each) for place, each in enumerate(ids))


def _number(known: dict[object, int], place: int, name: Any) -> int:
    if callable(getattr(name, "item", None)) and not getattr(name, "shape", (0,)):
        name = name.item()  # tensors hash by identity: the same id twice would be two users
    if isinstance(name, _SEVERAL):
        raise QuellError(
            f"example {place:,} has several users ({short(name)}), but the plan draws users who share no examples: "
            "make a plan with groups= (docs/users.md), or give every example one id"
        )
    if name is None or name != name or name in ("", b""):  # what tables have there
        raise QuellError(f"example {place:,} has no user ({short(name)}): leave it out, or give it a user of its own")
    kind = next((kind for kind in _IDS if isinstance(name, kind)), None)
    if kind is None:
        raise QuellError(f"the user {short(name)} of example {place:,} cannot be an id: use numbers or texts")
    if not isinstance(other := next(iter(known), name), kind):
        raise QuellError(
            f"the users {short(other)} and {short(name)} (of example {place:,}) are ids of different kinds, so that "
            "one person could be two users, as 7 and '7': give ids of one kind"
        )
    return known.setdefault(name, len(known))


@dataclass(frozen=True, eq=False)
class UserRows:
    """The rows of every user, in an order of the user's own.

    >>> rows = UserRows.of(numbered(["bob", "eve", "bob", "bob"]), key=bytes(32))
    >>> [sorted(rows.taken(np.array([0]), turn, 2).tolist()) for turn in (0, 3)]  # six turns of three rows
    [[0, 2], [0, 2]]
    >>> rows.taken(np.array([1]), 0, 2).tolist()  # eve has one row, which stands for two
    [1, 1]
    """

    order: NDArray[np.unsignedinteger]  # all rows, those of a user together
    starts: Indices  # (users + 1,) where each user's begin

    @classmethod
    def of(cls, numbers: Indices, key: bytes) -> UserRows:
        """From the number of each row's user; rows of -1 are left out. Keeps 4 bytes per row below 2³² rows."""
        # A uniform order of all rows is, on each user's own rows, a uniform order that is independent of all others'.
        order = permuted(key, "rows of users", len(numbers))
        order = order[numbers[order] >= 0]
        order = order[np.argsort(numbers[order], kind="stable")]
        return cls(order, np.concatenate([[0], np.cumsum(np.bincount(numbers[numbers >= 0]))]))

    @property
    def users(self) -> int:
        """How many there are."""
        return len(self.starts) - 1

    def taken(self, users: Indices, turn: int, most: int) -> Indices:
        """(len(users) · most,) the rows of each of the users that are due in their turn, in blocks of `most`.

        Every turn goes on where the turn before ended. Users with fewer rows than `most` bring some of them more than
        once: blocks have one size, which says nothing about anybody.
        """
        have = (self.starts[users + 1] - self.starts[users])[:, None]
        places = (turn * most + np.arange(most)) % have
        return self.order[self.starts[users][:, None] + places].astype(np.int64).ravel()

    def digest(self, key: bytes) -> str:
        """A keyed digest of whose rows are whose, to notice other users in a resumed run."""
        found = blake2b(self.starts.tobytes(), digest_size=16, key=key)
        found.update(np.ascontiguousarray(self.order).data)
        return found.hexdigest()
