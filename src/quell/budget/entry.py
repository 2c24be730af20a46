"""One run in a budget: what it promises, what is known of its privacy loss, and the plan by which to check both."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from quell import privacy
from quell.errors import QuellError, require_privacy, short
from quell.planning.file import Check, certified
from quell.planning.mechanism import Mechanism
from quell.planning.prices import Prices
from quell.privacy.composition import Charge
from quell.privacy.profile import of_plain, plain

MOST_BYTES = 1 << 20  # of a plan that an entry carries; of larger ones only the digest
_TOLERANCE = 1e-6  # of points that were certified on another machine


@dataclass(frozen=True)
class Entry:
    """One charged run.

    Args:
        run: What names it: the id of its noise key, or what was given. The same run with the same plan is charged once.
        when: When it was charged (UTC).
        unit: Whom its promise is for: "example" or "user".
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

    @property
    def charge(self) -> Charge:
        return Charge(of_plain(self.profile), self.epsilon, self.delta)

    @property
    def kind(self) -> str:
        """What was run, in a word or two."""
        return "plan by digest" if self.plan is None else str(self.plan["mechanism"]["family"])

    def same_run(self, other: Entry) -> bool:
        return (self.run, self.digest) == (other.run, other.digest)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def entry_of(prices: Prices, mechanism: Mechanism, run: str) -> Entry:
    """The entry of a run of a plan's mechanism; takes certificates where the scheme needs them."""
    guarantee, planned = mechanism.guarantee, prices.run
    if (guarantee.epsilon, guarantee.delta) != (planned.epsilon, planned.delta):  # a mechanism of another plan
        planned = planned.changed(epsilon=guarantee.epsilon, delta=guarantee.delta)
    content = plan_of(planned.as_dict(), mechanism.as_dict())
    profile = privacy.profile(mechanism.strategy, prices.scheme_of(mechanism), guarantee)
    return Entry(
        run,
        datetime.now(UTC).isoformat(timespec="seconds"),
        prices.run.promise.unit,
        guarantee.epsilon,
        guarantee.delta,
        plain(profile),
        digest_of(content),
        content if len(_text(content)) <= MOST_BYTES else None,
    )


def read_entry(content: dict[str, Any]) -> Entry:
    """The entry in a line; raises `QuellError` if the line is none."""
    try:
        entry = Entry(**content)
        require_privacy(entry.epsilon, entry.delta)
        of_plain(entry.profile)
        texts = (entry.run, entry.when, entry.unit, entry.digest)
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
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
    yield _same(f"{label}: digest", entry.digest, digest_of(content))
    try:
        prices, mechanism = certified(content.get("run"), content.get("mechanism"))
        fresh = entry_of(prices, mechanism, entry.run)
    except QuellError as refusal:
        yield Check(f"{label}: plan", "can be built, and its noise suffices", str(refusal), False)
        return
    for name in ("unit", "epsilon", "delta"):
        yield _same(f"{label}: {name}", getattr(entry, name), getattr(fresh, name))
    yield Check(f"{label}: privacy loss", entry.profile["kind"], fresh.profile["kind"], _no_less(entry, fresh))


def digest_of(content: dict[str, Any]) -> str:
    """Of a plan as plain data."""
    return sha256(_text(content).encode()).hexdigest()


def plan_of(run: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """What an entry carries of a plan: the run, and what makes one mechanism of it what it is, without its prices."""
    kept: dict[str, Any] = {name: row[name] for name in ("family", "parameters", "solution") if name in row}
    kept |= {"noise": {"multiplier": row["noise"]["multiplier"]}, "error": {}}
    return {"run": run, "mechanism": {**kept, "guarantee": {"sampling": row["guarantee"]["sampling"]}}}


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _same(claim: str, stated: Any, fresh: Any) -> Check:
    return Check(claim, stated, fresh, stated == fresh)


def _no_less(stated: Entry, fresh: Entry) -> bool:
    """Whether the stated loss is the recomputed one, up to rounding between machines."""
    ours, theirs = (list(_numbers(entry.profile)) for entry in (stated, fresh))
    return len(ours) == len(theirs) and all(
        one == other
        or (isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=_TOLERANCE))
        for one, other in zip(ours, theirs, strict=True)
    )


def _numbers(value: Any) -> Iterator[Any]:
    """Everything in nested plain data, in order."""
    if isinstance(value, dict):
        for name in sorted(value):
            yield name
            yield from _numbers(value[name])
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    else:
        yield value
