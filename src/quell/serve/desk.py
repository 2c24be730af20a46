"""What `quell serve` computes: check a request's parameters, make a run of them, and a plan of that.

A person who drags a slider sends many requests and wants the answer to the last one. `Desk` computes one plan at a
time and stops a computation as soon as the same page has sent a newer request.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl

from quell.errors import QuellError
from quell.planning import Mechanism, Plan, Prices, make_plan
from quell.planning.curves import page_content
from quell.planning.planner import recommend
from quell.planning.questions import answers
from quell.planning.search import order, space_of
from quell.progress import announce, listening
from quell.run import Run
from quell.schemes import FIXED, SCHEMES
from quell.strategy import FAMILIES

UNLIMITED = "unlimited"
_RANGES = {  # of what the page may ask for, ends included
    "examples": (1, 10**9),
    "batch_size": (1, 10**9),
    "epochs": (1, 10_000),
    "epsilon": (0.01, 1000),
    "delta": (1e-30, 0.5),
    "momentum": (0, 0.999),
    "memory": (0, 10**6),
}
_WHOLE = ("examples", "batch_size", "epochs")
_MOST_STEPS = 100_000  # a page should answer within seconds
_MOST_PAGES = 64  # whose latest request is remembered

_STOPS: dict[str, tuple[float | str, ...]] = {
    "epsilon": (0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32),
    "epochs": (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100),
    "batch_size": (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384),
    "memory": (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256, UNLIMITED),
}
_LABELS = {
    "epsilon": "Privacy budget ε",
    "epochs": "Epochs",
    "batch_size": "Batch size",
    "memory": "Memory for noise (model copies)",
    "examples": "Examples",
    "delta": "δ",
    "momentum": "Momentum",
    "sampling": "How batches are formed",
}


class SupersededError(Exception):
    """The same page has sent a newer request."""


@dataclasses.dataclass(frozen=True)
class Question:
    """One checked request: the run, whether a preview is enough, and which open page asks."""

    run: Run
    draft: bool
    page: str


def read_question(query: str, fixed: Run) -> Question:
    """The request in a query string; what it does not mention is as in `fixed`."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=len(_LABELS) + 2)
    except ValueError:
        raise QuellError("the request must have the form /plan?epsilon=8&epochs=10") from None
    given = dict(pairs)
    if len(given) < len(pairs):
        raise QuellError("a parameter is given twice: give each once")
    if unknown := sorted(set(given) - {*_LABELS, "kind", "page"}):
        raise QuellError(f"there is no parameter {unknown[0][:40]!r}: use {', '.join(_LABELS)}")
    kind, page = given.pop("kind", "full"), given.pop("page", "")
    if kind not in ("draft", "full"):
        raise QuellError(f"kind={kind[:40]!r} must be draft or full")
    changes: dict[str, Any] = {
        name: text if name == "sampling" else _number(name, text) for name, text in given.items()
    }
    run = fixed.changed(**changes)
    if run.steps > _MOST_STEPS:
        raise QuellError(
            f"a run of {run.steps:,} steps is too long for a live page, which answers up to {_MOST_STEPS:,}: "
            "use larger batches or fewer epochs, or quell plan --html"
        )
    return Question(run, kind == "draft", page[:40])


def controls(run: Run) -> list[dict[str, Any]]:
    """The page's sliders and fields, set to this run."""
    found: list[dict[str, Any]] = []
    for name, label in _LABELS.items():
        value = run.arguments[name]
        if name == "memory" and value is None:
            value = UNLIMITED
        control: dict[str, Any] = {"name": name, "label": label, "value": value}
        if name in _STOPS:
            control["stops"] = sorted({*_STOPS[name], value}, key=lambda stop: (stop == UNLIMITED, stop))
        if name == "sampling":
            control["options"] = [*SCHEMES, "best"]
        found.append(control)
    return found


def draft_plan(run: Run) -> Plan:
    """A preview: a valid plan among mechanisms that need no search, with fixed batches, but seldom the best."""
    run = run.changed(sampling=FIXED.name)
    prices, space = Prices(run), space_of(run)
    best: list[Mechanism] = []
    for family in FAMILIES.values():
        if run.steps > family.instant_steps:
            continue
        announce(family.name)
        priced = []
        for options in family.candidates(space):
            with suppress(QuellError):  # what does not go with this run is left out; independent noise always goes
                priced.append(prices.price(family.name, **options))
        best += sorted(priced, key=lambda mechanism: order(run, mechanism, run.objective))[:1]
    rows = sorted(best, key=lambda mechanism: mechanism.score(run.objective))
    return Plan(run, tuple(rows), recommend(run, rows))


class Desk:
    """Answers one request at a time, and of each page only the latest."""

    def __init__(self) -> None:
        self._working, self._writing = Lock(), Lock()
        self._tickets = count()
        self._latest: dict[str, int] = {}

    def answer(self, question: Question) -> dict[str, Any]:
        """The content of the plan's page; `SupersededError` once the same page has sent a newer request."""
        ticket = self._ticket(question.page)

        def still_wanted(*_: object) -> None:
            if self._latest.get(question.page) != ticket:
                raise SupersededError

        with self._working, listening(still_wanted):
            still_wanted()
            plan = draft_plan(question.run) if question.draft else make_plan(question.run, still_wanted)
            still_wanted()
            return page_content(plan, answers(plan, thorough=False, prices=Prices(question.run)), thorough=False)

    def _ticket(self, page: str) -> int:
        with self._writing:
            ticket = next(self._tickets)
            self._latest.pop(page, None)
            self._latest[page] = ticket
            if len(self._latest) > _MOST_PAGES:
                del self._latest[next(iter(self._latest))]  # the page that has been silent longest
            return ticket


def _number(name: str, text: str) -> float | int | None:
    if name == "memory" and text == UNLIMITED:
        return None
    low, high = _RANGES[name]
    try:
        value = int(text) if name in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise QuellError(f"{name}={text[:40]!r} must be {kind}") from None
    if not low <= value <= high:
        raise QuellError(f"{name}={value:g} must lie between {low:g} and {high:g}")
    return value
