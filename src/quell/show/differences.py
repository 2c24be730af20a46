"""What differs between two plans, in plain words and as a table. A is the first of them, B the second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from quell.errors import at_least
from quell.show import words

if TYPE_CHECKING:
    from quell.planning.difference import Difference, Fact

_NAMES = {
    "batch_size": "batch size",
    "participations": "times that one can be used",
    "separation": "steps between two uses",
    "weight_decay": "factor on the weights",
    "learning_rates": "learning rates",
    "adaptive": "adaptive optimizer",
    "ema": "average of the weights",
    "epsilon": "ε",
    "delta": "δ",
    "unit": "protects each",
    "noise_multiplier": "noise multiplier σ",
    "rmse": "RMSE",
    "maxse": "MaxSE",
    "training": "predicted training error",
    "training_per_example": "predicted training error per example seen",
    "buffers": "model copies kept",
    "draws": "noise vectors per step",
}
_SAME = 0.005  # relative differences below are not worth a sentence


def sentences(found: Sequence[Difference]) -> list[str]:
    """What B has that A has not, most important first."""
    if not found:
        return ["The two plans are the same in all that matters to a run."]
    by_name = {each.name: each for each in found}
    lines = []
    levels = [each.ratio for name in ("epsilon", "delta") if (each := by_name.get(name)) and each.ratio]
    changed = " and ".join(_instead(by_name[name]) for name in ("epsilon", "delta") if name in by_name)
    if levels and (all(ratio < 1 for ratio in levels) or all(ratio > 1 for ratio in levels)):
        lines.append(f"B promises {'more' if levels[0] < 1 else 'less'} privacy: {changed}.")
    elif levels:
        lines.append(f"B promises less in one way and more in the other: {changed}.")
    for name, text in (
        ("unit", "B protects each {second}, A each {first}."),
        ("neighbours", "B's promise is about {second} neighbours, A's about {first} neighbours."),
        ("sampling", "B needs batches formed by {second} sampling, A by {first} sampling."),
        ("mechanism", "B's noise is {second}, A's is {first}."),
    ):
        if name in by_name:
            each = by_name[name]
            lines.append(text.format(first=each.first, second=each.second))
    another_run = any(each.part == "run" for each in found)
    errors = ("training_per_example",) if another_run else ("rmse", "training")
    told = [_error(by_name[name]) for name in errors if name in by_name]
    lines.append(f"B leaves {' and '.join(told)}." if told else "They leave equally much error.")
    if another_run:
        lines.append("The runs differ, so errors are compared per example seen: noise relative to progress.")
    for name, thing in (("buffers", "model copy"), ("draws", "noise vector")):
        if name in by_name:
            verb, when = ("keeps", "") if name == "buffers" else ("makes", " per step")
            first, second = int(by_name[name].first or 0), int(by_name[name].second or 0)
            both = [
                words.counted(count, thing) if count else words.counted(0, thing).replace("0", "no")
                for count in (second, first)
            ]
            lines.append(f"B {verb} {both[0]}{when}, and A {both[1]}.")
    return lines


def difference_table(found: Sequence[Difference]) -> Table:
    """Every fact that differs, one per row."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for title in ("A", "B"):
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("B over A", justify="right", no_wrap=True)
    for each in found:
        change = "" if each.ratio is None else f"{words.times(each.ratio)}×"
        table.add_row(
            _NAMES.get(each.name, each.name), shown(each.name, each.first), shown(each.name, each.second), change
        )
    return table


def shown(name: str, value: Fact) -> str:
    """A fact as it is written everywhere else."""
    match value:
        case None:
            return "constant" if name == "learning_rates" else "none"
        case bool():
            return "yes" if value else "no"
        case float() if name == "noise_multiplier":
            return words.noise(value)
        case float() if name == "delta":
            return words.number(value)
        case float() if name == "epsilon":
            return at_least(value)
        case float():
            return words.amount(value)
        case int():
            return f"{value:,}"
    return value


def _instead(each: Difference) -> str:
    name = _NAMES[each.name]
    return f"{name} = {shown(each.name, each.second)} instead of {shown(each.name, each.first)}"


def _error(each: Difference) -> str:
    ratio = each.ratio or 1.0
    name = _NAMES[each.name]
    if abs(ratio - 1) < _SAME:
        return f"about as much {name}"
    values = f"{shown(each.name, each.second)} instead of {shown(each.name, each.first)}"
    return f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'} {name} ({values})"
