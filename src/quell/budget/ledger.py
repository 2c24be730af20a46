"""`Budget`: what runs on one data set have spent together, what they may spend, and who may still start.

Every run is charged when it starts, finished or not. The file (`quell.budget.lines`) begins with the budget and holds
one line per run, with the run's plan, so that every number in it can be recomputed (`verify`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quell.budget import lines
from quell.budget.claims import plan_of, run_claim
from quell.budget.entry import UNITS, Entry, checks_of, digest_of, entry_of, read_entry
from quell.errors import QuellError, at_least, require_privacy, short
from quell.planning.file import Check
from quell.planning.mechanism import Mechanism
from quell.planning.planner import Plan
from quell.privacy.composition import Together
from quell.show.words import counted

FORMAT, VERSION = "quell-budget", 1


@dataclass(frozen=True)
class Allowance:
    """The first line of a budget: a name, what all runs together may spend, and for whom.

    `fixed_plans` says that no plan will be chosen by looking at what earlier runs released; else plans may be.
    """

    name: str
    epsilon: float
    delta: float
    unit: str = "example"
    fixed_plans: bool = False

    def __post_init__(self) -> None:
        epsilon, delta = require_privacy(self.epsilon, self.delta)
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", delta)
        if not isinstance(self.fixed_plans, bool):
            raise QuellError(f"fixed_plans={short(self.fixed_plans)} must be True or False")
        if self.unit not in UNITS:
            raise QuellError(f"unit={short(self.unit)} is not known: use {', '.join(UNITS)}")
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise QuellError(f"name={short(self.name)} must be a line of text: name the data set")


@dataclass(frozen=True)
class Spent:
    """What runs have spent together at `delta`: see `quell.privacy.composition` for the three ε."""

    runs: int
    delta: float
    epsilon: float
    adaptive_epsilon: float
    naive_epsilon: float
    naive_delta: float


class Budget:
    """The budget in a file. Make one with `Budget.create`, or `quell budget init`.

    >>> import tempfile
    >>> budget = Budget.create(Path(tempfile.mkdtemp()) / "patients.budget", name="patients", epsilon=8, delta=1e-5)
    >>> budget.spent().epsilon
    0.0
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._parse(lines.read(self.path))

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        name: str,
        epsilon: float,
        delta: float,
        unit: str = "example",
        fixed_plans: bool = False,
    ) -> Budget:
        """A new file for one data set.

        Args:
            path: Where; an existing file is refused.
            name: Of the data set.
            epsilon, delta: What all runs together may spend.
            unit: Whom the budget protects: each "example", each "user", or, for plans with `groups=`, each "user with
                public ownership of examples".
            fixed_plans: That no plan will be chosen by looking at what earlier runs released, which charges less.
        """
        allowed = Allowance(name, epsilon, delta, unit, fixed_plans)
        lines.create(Path(path), {"format": FORMAT, "version": VERSION, **asdict(allowed)})
        return cls(path)

    @property
    def allowed(self) -> Allowance:
        """The first line."""
        return self._parse(lines.read(self.path))[0]

    @property
    def entries(self) -> list[Entry]:
        """All charged runs, in order."""
        return self._parse(lines.read(self.path))[1]

    def spent(self, delta: float | None = None) -> Spent:
        """What all runs so far have spent together, at `delta` (default: the budget's)."""
        allowed, entries = self._parse(lines.read(self.path))
        return spent(entries, allowed.delta if delta is None else require_privacy(1.0, delta)[1], allowed.unit)

    def charge(self, plan: Plan, mechanism: Mechanism | None = None, *, run: str) -> bool:
        """Charge a run of a plan before it starts; raises `QuellError` where the budget does not suffice.

        Args:
            plan: The plan of the run.
            mechanism: The mechanism used. Default: the recommended one.
            run: What names the run. The same run with the same plan is charged once, also when it is resumed.

        Returns:
            Whether it was charged now, and not before.
        """
        return self.add(entry_of(run_claim(plan.prices, mechanism or plan.mechanism), run))

    def add(self, entry: Entry) -> bool:
        """Charge an entry, as `charge` does."""

        def line(found: list[dict[str, Any]]) -> dict[str, Any] | None:
            allowed, entries = self._parse(found)
            if any(entry.same_run(other) for other in entries):
                return None
            self._require_room(allowed, [*entries, entry])
            return entry.as_dict()

        return lines.append(self.path, line)

    def require_room(self, entry: Entry) -> None:
        """Refuse, in a sentence, an entry that would exceed the budget; charge nothing."""
        allowed, entries = self._parse(lines.read(self.path))
        if not any(entry.same_run(other) for other in entries):
            self._require_room(allowed, [*entries, entry])

    def verify(self, plans: Iterable[Plan] = ()) -> list[Check]:
        """Recompute every claim of every entry from its plan.

        Args:
            plans: Plans of entries that were too large to carry them.

        Returns:
            One check per claim, and one for the whole budget.
        """
        parts = [plan_of(plan.run.as_dict(), each.as_dict()) for plan in plans for each in plan.mechanisms]
        known = {digest_of(part): part for part in parts}
        allowed, entries = self._parse(lines.read(self.path))
        found = [check for entry in entries for check in checks_of(entry, known)]
        used = decisive(allowed, entries)
        return [*found, Check("ε of all runs, at most the budget's", used, allowed.epsilon, used <= allowed.epsilon)]

    def _require_room(self, allowed: Allowance, entries: list[Entry]) -> None:
        new = entries[-1]
        if UNITS.index(new.unit) < UNITS.index(allowed.unit):
            raise QuellError(
                f"the budget {self.path} is per {allowed.unit}, but the run is private per {new.unit}: plan it per "
                f"{allowed.unit}"
            )
        total = decisive(allowed, entries)
        if total > allowed.epsilon:
            before = decisive(allowed, entries[:-1])
            raise QuellError(
                f"the budget {self.path} of ε = {allowed.epsilon:g} at δ = {allowed.delta:g} does not suffice: "
                f"{counted(len(entries) - 1, 'run')} spent ε = {at_least(before, 4)}, and with this one it would be "
                f"{at_least(total, 4)}; plan it with a smaller epsilon or delta, or stop here"
            )

    def _parse(self, found: list[dict[str, Any]]) -> tuple[Allowance, list[Entry]]:
        first, *rest = found
        kind, version = first.pop("format", None), first.pop("version", None)
        if kind != FORMAT or version != VERSION:
            raise QuellError(f"{self.path} is not a budget of version {VERSION}: quell budget init makes one")
        try:
            return Allowance(**first), [read_entry(content) for content in rest]
        except TypeError:
            raise QuellError(f"the first line of {self.path} is not that of a budget: restore the file") from None


def spent(entries: Iterable[Entry], delta: float, unit: str = "example") -> Spent:
    """What runs have spent together at `delta`, for each `unit`."""
    together = _together(entries, unit)
    return Spent(
        len(together.charges), delta, together.epsilon(delta), together.adaptive_epsilon(delta), *together.naive
    )


def decisive(allowed: Allowance, entries: Iterable[Entry]) -> float:
    """The ε of all runs that the budget compares with its own."""
    together = _together(entries, allowed.unit)
    return (together.epsilon if allowed.fixed_plans else together.adaptive_epsilon)(allowed.delta)


def _together(entries: Iterable[Entry], unit: str) -> Together:
    return Together(tuple(entry.charge_per(unit) for entry in entries))
