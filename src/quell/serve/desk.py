"""What `quell serve` computes: check a request's parameters, make a run of them, and a plan of that.

Answers come in parts, each told to the page as soon as it is known: progress, then the plan, then the plan with all
reasons and curves. Whoever listens may raise an exception, which ends the computation: the page has gone, or asks
something else by now. Previews and the searches of several pages run beside each other, as many as there are cores.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qsl

from quell.errors import QuellError, read_count
from quell.planning import Mechanism, Plan, Prices, make_plan
from quell.planning.curves import page_content
from quell.planning.named import named_plan
from quell.planning.planner import recommend
from quell.planning.questions import answers
from quell.planning.search import order, space_of
from quell.progress import announce, listening
from quell.run import Run
from quell.schemes import FIXED
from quell.strategy import FAMILIES

UNLIMITED = "unlimited"
Tell = Callable[[dict[str, Any]], None]
RANGES = {  # of what the page may ask for, ends included
    "examples": (1, 10**9),
    "batch_size": (1, 10**9),
    "epochs": (1, 10_000),
    "epsilon": (0.01, 1000),
    "delta": (1e-30, 0.5),
    "momentum": (0, 0.999),
    "memory": (0, 10**6),
}
_WHOLE = ("examples", "batch_size", "epochs")
_CHOICES = ("sampling", "optimizer")
OPTIMIZERS = {"sgd": False, "adam": True}  # by whether they rescale gradients
NAMES = (*RANGES, *_CHOICES)
_KINDS = ("draft", "full", "certify")
_LONGEST = 200  # characters of a mechanism
_MOST_STEPS = 100_000  # a page should answer within minutes
_OFTEN = 0.2  # seconds between two messages about progress


@dataclasses.dataclass(frozen=True)
class Question:
    """One checked request: the run, and whether a preview, the full plan or one mechanism's certificate is wanted."""

    run: Run
    kind: str = "full"
    mechanism: str = ""


def read_question(query: str, fixed: Run) -> Question:
    """The request in a query string; what it does not mention is as in `fixed`."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=len(NAMES) + 2)
    except ValueError:
        raise QuellError("the request must have the form /plan?epsilon=8&epochs=10") from None
    given = dict(pairs)
    if len(given) < len(pairs):
        raise QuellError("a parameter is given twice: give each once")
    if unknown := sorted(set(given) - {*NAMES, "kind", "mechanism"}):
        raise QuellError(f"there is no parameter {unknown[0][:40]!r}: use {', '.join(NAMES)}")
    kind, mechanism = given.pop("kind", "full"), given.pop("mechanism", "")
    if kind not in _KINDS:
        raise QuellError(f"kind={kind[:40]!r} must be {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
    if (kind == "certify") != bool(mechanism) or len(mechanism) > _LONGEST:
        raise QuellError("kind=certify goes with a mechanism, such as mechanism=blt d=2 h=88, and nothing else does")
    changes: dict[str, Any] = {}
    for name, text in given.items():
        if name == "optimizer":
            if text not in OPTIMIZERS:
                raise QuellError(f"optimizer={text[:40]!r} must be {' or '.join(OPTIMIZERS)}", name)
            changes |= {"optimizer": text} if OPTIMIZERS[text] else {"adaptive": False}
        else:
            changes[name] = text if name in _CHOICES else _number(name, text)
    run = fixed.changed(**changes)
    if run.steps > _MOST_STEPS:
        raise QuellError(
            f"batch_size={run.batch_size:,} makes a run of {run.steps:,} steps, too long for a live page, which "
            f"answers up to {_MOST_STEPS:,}: use larger batches or fewer epochs, or quell plan --html",
            "batch_size",
        )
    return Question(run, kind, mechanism)


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
    """Answers requests, each in its own thread: previews at once, searches as many at a time as there are cores."""

    def __init__(self) -> None:
        self._searches = BoundedSemaphore(max(2, os.cpu_count() or 1))
        self._pace = 1.0  # seconds of the last search relative to `_usual_seconds`

    def answer(self, question: Question, tell: Tell) -> None:
        """Tell the parts of an answer as they come; what `tell` raises ends the computation and is passed on."""
        run, since, latest, stage = question.run, time.monotonic(), 0.0, "starting"

        def still(_: str) -> None:
            nonlocal latest
            passed = time.monotonic() - since
            if passed - latest >= _OFTEN:
                latest = passed
                tell({"progress": {"what": stage, "seconds": round(passed, 1), "expected": self._expected(question)}})

        def report(what: str) -> None:
            nonlocal stage
            stage = what
            still(what)

        def progress(done: int, total: int, what: str) -> None:
            report(what)

        def brief(plan: Plan, preview: bool = False) -> dict[str, Any]:
            known = answers(plan, thorough=False, prices=Prices(run))  # one DP-SGD for preview and plan
            return page_content(plan, known, thorough=False, preview=preview)

        with listening(still):
            if question.kind == "draft":
                tell({"plan": brief(draft_plan(run), preview=True)})
                return
            with self._turn(report):
                begun = time.monotonic()
                if question.kind == "certify":
                    named = named_plan(run, question.mechanism, progress)
                    tell({"row": brief(named)["mechanisms"][0]})
                    return
                plan = make_plan(run, progress)
                if (seconds := time.monotonic() - begun) > 1.0:  # shorter ones say little about long ones
                    self._pace = seconds / _usual_seconds(run)
                tell({"plan": brief(plan)})
                report("computing reasons and other ε")
                tell({"plan": plan.page_content})

    def _expected(self, question: Question) -> float | None:
        """About how long a search takes here, judged by the last one; None for everything else."""
        return round(self._pace * _usual_seconds(question.run), 1) if question.kind == "full" else None

    @contextmanager
    def _turn(self, report: Callable[[str], None]) -> Iterator[None]:
        """Wait for one of the searches to end, as long as the page waits too."""
        while not self._searches.acquire(timeout=_OFTEN):
            report("waiting for the searches of other tabs")
        try:
            yield
        finally:
            self._searches.release()


def _usual_seconds(run: Run) -> float:
    """About what a search took where it was measured, on one core: 20 s for 3,900 steps, 95 s for 31,250 steps."""
    amplified = any(kind.amplifies for kind in run.schemes)
    return (20.0 if amplified else 2.0) * float(max(1.0, run.steps / 3900) ** 0.75)


def _number(name: str, text: str) -> float | int | None:
    """A parameter's value; counts as people write them, and an empty δ for the usual one."""
    if (name == "memory" and text == UNLIMITED) or (name == "delta" and not text.strip()):
        return None
    low, high = RANGES[name]
    try:
        value = read_count(name, text, least=0) if name in _WHOLE else float(text)
    except QuellError:  # which is a ValueError
        raise
    except ValueError:
        raise QuellError(f"{name}={text[:40]!r} must be a number", name) from None
    if not low <= value <= high:
        raise QuellError(f"{name}={value:g} must lie between {low:g} and {high:g}", name)
    return value
