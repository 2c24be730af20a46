"""One charged run in a budget: what it promises, what is known of its loss, and the plan by which to check both."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from quell.budget.claims import Claim, claim_again
from quell.errors import QuellError, require_privacy, short
from quell.planning.file import Check
from quell.privacy.composition import Charge, changed
from quell.privacy.profile import of_plain, plain
from quell.show.words import whom

MOST_BYTES = 1 << 20  # of a plan that an entry carries; of larger ones only the digest
UNITS = ("example", whom("group"), "user")  # whom promises can be for, each stronger than those before
_TOLERANCE = 1e-6  # of points that were certified on another machine


@dataclass(frozen=True)
class Entry:
    """One charged run, or one search.

    Args:
        run: What names it: the id of its noise key, or what was given. The same run with the same plan is charged once.
        when: When it was charged (UTC).
        unit: Whom its promise is for, one of `UNITS`.
        epsilon, delta: Its promise.
        profile: What is known of its δ at every ε, as plain data (`quell.privacy.profile`).
        digest: Of the plan: run and mechanism as plain data.
        plan: The same plan, where it is not too large.
    """

    run: str
    when: str
    unit: str
    epsilon: float
    delta: float
    profile: dict[str, Any]
    digest: str
    plan: dict[str, Any] | None = None

    def charge_per(self, unit: str) -> Charge:
        """What the run costs each `unit`. A run per user hides whole users; a row of one that changes counts twice."""
        own = Charge(of_plain(self.profile), self.epsilon, self.delta)
        return changed(own) if unit == "example" != self.unit else own

    @property
    def kind(self) -> str:
        """What was run, in a word or two."""
        if self.plan is None:
            return "plan by digest"
        return "search" if "plans" in self.plan else str(self.plan["mechanism"]["family"])

    def same_run(self, other: Entry) -> bool:
        """Whether this is the same run with the same plan, perhaps resumed."""
        return (self.run, self.digest) == (other.run, other.digest)

    def as_dict(self) -> dict[str, Any]:
        """Plain data: a line of the file, without its checksum."""
        return asdict(self)


def entry_of(claim: Claim, run: str) -> Entry:
    """The entry of what claims this, under the name `run`."""
    return Entry(
        run,
        datetime.now(UTC).isoformat(timespec="seconds"),
        claim.unit,
        claim.epsilon,
        claim.delta,
        plain(claim.profile),
        digest_of(claim.content),
        claim.content if len(_text(claim.content)) <= MOST_BYTES else None,
    )


def read_entry(content: dict[str, Any]) -> Entry:
    """The entry in a line; raises `QuellError` if the line is none."""
    try:
        entry = Entry(**content)
        require_privacy(entry.epsilon, entry.delta)
        of_plain(entry.profile)
        texts = (entry.run, entry.when, entry.unit, entry.digest)
        if not all(isinstance(text, str) and text.isprintable() for text in texts) or entry.unit not in UNITS:
            raise TypeError
    except TypeError:
        raise QuellError(f"{short(content)} is not an entry of a budget: restore the file from a copy") from None
    return entry


def checks_of(entry: Entry, plans: dict[str, dict[str, Any]]) -> Iterator[Check]:
    """Every claim of an entry beside what its plan says; `plans` holds plans by digest, for entries that carry none."""
    label, content = f"run {entry.run}", entry.plan if entry.plan is not None else plans.get(entry.digest)
    if content is None:
        yield Check(f"{label}: plan", entry.digest, "not given: pass the plan file", False)
        return
    yield _check(f"{label}: digest", entry.digest, digest_of(content))
    try:
        fresh = claim_again(content)
    except QuellError as refusal:
        yield Check(f"{label}: plan", "can be built, and its noise suffices", str(refusal), False)
        return
    for name in ("unit", "epsilon", "delta"):
        yield _check(f"{label}: {name}", getattr(entry, name), getattr(fresh, name))
    known = plain(fresh.profile)
    holds = _same(entry.profile, known) or _covers(entry.profile, known)
    yield Check(f"{label}: privacy loss", entry.profile["kind"], known["kind"], holds)


def digest_of(content: dict[str, Any]) -> str:
    """Of a plan as plain data."""
    return sha256(_text(content).encode()).hexdigest()


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _check(claim: str, stated: Any, fresh: Any) -> Check:
    return Check(claim, stated, fresh, _same(stated, fresh))


def _covers(stated: dict[str, Any], fresh: dict[str, Any]) -> bool:
    """Whether certified points lie nowhere below those of today, as where better bounds were found since."""
    if not (stated["kind"] == fresh["kind"] and "points" in fresh and len(stated["points"]) == len(fresh["points"])):
        return False
    pairs = list(zip(stated["points"], fresh["points"], strict=True))
    deltas = [(before[1], now[1]) for before, now in pairs] + [(stated["failure"], fresh["failure"])]
    return all(_same(before[0], now[0]) for before, now in pairs) and all(
        before >= now or _same(before, now) for before, now in deltas
    )


def _same(stated: Any, fresh: Any) -> bool:
    """Whether plain data are equal, numbers up to rounding between machines."""
    if isinstance(fresh, dict):
        return (
            isinstance(stated, dict)
            and stated.keys() == fresh.keys()
            and all(_same(stated[k], fresh[k]) for k in fresh)
        )
    if isinstance(fresh, list):
        return isinstance(stated, list) and len(stated) == len(fresh) and all(map(_same, stated, fresh))
    if isinstance(fresh, float) and isinstance(stated, float):
        return math.isclose(stated, fresh, rel_tol=_TOLERANCE)
    return type(stated) is type(fresh) and stated == fresh
