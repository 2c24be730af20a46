"""Tables for the terminal, and a whole plan as text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quell.run import OBJECTIVES
from quell.show import cards, words
from quell.show.legend import BEYOND, ESTIMATED, RECOMMENDED, legend
from quell.strategy import FAMILIES

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan
    from quell.planning.file import Check
    from quell.planning.questions import Answers, EpochChoice

_SCORES = tuple(objective.column for name, objective in OBJECTIVES.items() if name != "rmse")
_EXPENDABLE = ("draws", "gain", *_SCORES, "sampling", "mem")  # in narrow terminals, first to last
_TEXT_WIDTH = 120


def mechanism_table(
    mechanisms: Sequence[Mechanism],
    dpsgd_rmse: float,
    plan: Plan | None = None,
    width: int = _TEXT_WIDTH,
    best: Mechanism | None = None,
    explain: bool = True,
) -> Table:
    """One row per mechanism; marks the best one (that of a plan: recommended) and those beyond a plan's limits.

    Where `width` is too small for all columns the least important are left out: a number is never cut short.
    """
    searched = plan is not None and len(mechanisms) > 1  # a mechanism that was named is not the best of anything
    best = plan.mechanism if plan is not None and searched else best
    marks = [_mark(each, plan, best) for each in mechanisms]
    measure = "maxse" if plan is None or plan.run.objective == "rmse" else plan.run.objective
    cells = {
        "mechanism": [f"{mark} {words.label(each)}" for mark, each in zip(marks, mechanisms, strict=True)],
        "sampling": [each.sampling for each in mechanisms],
        "σ": [words.noise(each.noise_multiplier, not each.certified) for each in mechanisms],
        "RMSE": [words.amount(each.rmse) for each in mechanisms],
        OBJECTIVES[measure].column: [words.amount(each.score(measure)) for each in mechanisms],
        "gain": [f"{words.times(dpsgd_rmse / each.rmse)}×" for each in mechanisms],
        "mem": [f"{each.buffers:,}" for each in mechanisms],
        "draws": [f"{each.draws:,}" for each in mechanisms],
    }
    widths = {title: max(map(cell_len, (title, *column))) for title, column in cells.items()}
    for title in _EXPENDABLE:
        if sum(widths.values()) + 2 * len(widths) + 1 > width and title in widths:
            del widths[title]
    estimated = "" if all(each.certified for each in mechanisms) else ESTIMATED
    objective = plan.run.objective if plan is not None and searched else None
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=legend(mechanisms, list(widths), objective, "".join(marks) + estimated, explain),
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    for title, least in widths.items():
        text = title in ("mechanism", "sampling")
        table.add_column(title, justify="left" if text else "right", no_wrap=True, min_width=None if text else least)
    for mark, row in zip(marks, zip(*(cells[title] for title in widths), strict=True), strict=True):
        table.add_row(*row, style={RECOMMENDED: "bold green", BEYOND: "dim"}.get(mark))
    return table


def _mark(mechanism: Mechanism, plan: Plan | None, best: Mechanism | None) -> str:
    if plan is not None and not plan.run.limits.fits(mechanism):
        return BEYOND
    return RECOMMENDED if mechanism is best else " "


def print_plan(plan: Plan, answers: Answers, console: Console, explain: bool = True) -> None:
    """What to use and what that gives, the table, and if wanted the reasons and the long legend."""
    console.print(cards.headline(plan), style="bold green", highlight=False)
    console.print(card_table(cards.cards(plan, answers)))
    console.print(words.describe_run(plan.run), highlight=False)
    console.print(
        mechanism_table(plan.alternatives, answers.dpsgd.rmse, plan, console.width, explain=explain), highlight=False
    )
    for note in words.notes(plan.run):
        console.print(f"Note: {note}", style="yellow", highlight=False)
    for line in words.reasons(plan, answers) if explain else [*words.learning_rate(plan, answers), words.MORE]:
        console.print(line, highlight=False)


def card_table(shown: Sequence[cards.Card]) -> Table:
    """Cards below each other."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for card in shown:
        table.add_row(f"  {card.title}", card.value, card.note)
    return table


def plan_text(plan: Plan, answers: Answers) -> str:
    """The whole plan as text."""
    text = io.StringIO()
    print_plan(plan, answers, Console(width=_TEXT_WIDTH, file=text))
    return text.getvalue()


def choices_table(choices: Sequence[EpochChoice]) -> Table:
    """Ways to spend a fixed number of steps."""
    first, least = choices[0], words.counted(choices[0].run.epochs, "epoch")
    compared = OBJECTIVES[first.run.objective].compares(first.run.drawn)
    table = Table("epochs", "batch", "mechanism", "sampling", "σ", compared, box=box.SIMPLE_HEAD)
    for choice in choices:
        table.add_row(
            f"{choice.run.epochs:,}",
            f"{choice.run.batch_size:,}",
            words.label(choice.mechanism),
            choice.mechanism.sampling,
            words.noise(choice.mechanism.noise_multiplier, estimated=True),
            f"{choice.error / first.error:.3f} × that of {least}",
        )
    return table


def check_table(checks: Sequence[Check]) -> Table:
    """The claims that failed, or all of them when none did."""
    false = [check for check in checks if not check.holds]
    table = Table("claim", "stated", "recomputed", "", title="False claims" if false else None)
    for check in false or checks:
        shown = (escape(text) for text in (check.claim, _number(check.stated), _number(check.recomputed)))
        table.add_row(*shown, "ok" if check.holds else "FALSE")
    return table


def _number(value: float | str) -> str:
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def families_table() -> Table:
    """Every mechanism that Quell knows, with its parameters."""
    table = Table("mechanism", "parameters", "what it does")
    for family in FAMILIES.values():
        table.add_row(family.title, ", ".join(family.takes), family.summary)
    return table


def training_table(arms: Sequence[Mapping[str, str]]) -> Table:
    """One row per way of training; `arms` as in `quell.train.content`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("training", "mechanism", "batches"):
        table.add_column(title, no_wrap=True)
    for title in ("σ", "lr", "accuracy"):
        table.add_column(title, justify="right", no_wrap=True)
    for arm in arms:
        cells = (arm[key] for key in ("name", "mechanism", "batches", "sigma", "learning_rate", "accuracy"))
        table.add_row(*cells, style="bold green" if arm["name"] == "planned" else None)
    return table


def text_of(table: Table) -> str:
    """A table as plain text."""
    text = io.StringIO()
    Console(width=_TEXT_WIDTH, file=text).print(table)
    return text.getvalue()
