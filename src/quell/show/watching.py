"""A run's log for people: the newest row as cards, the rows so far as curves. For the terminal, the page and --json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from quell.errors import at_least
from quell.show.page.document import assemble
from quell.show.words import SEEDED, amount, number

_POINTS = 400  # of a curve
_SPARKS = "▁▂▃▄▅▆▇█"
_NOT_PRIVATE = "not private"
_CURVES = ("epsilon_at_most", "gradient_norm", "noise_norm", "noise_to_signal", "step_seconds", "noise_seconds")
_NORM_CURVES = ("clipped_share_not_private", "median_norm_not_private")

Row = Mapping[str, Any]


def watch_content(name: str, about: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """What there is to see of a log, as plain data.

    Args:
        name: The folder of the log.
        about: What the run is (`run.json`).
        rows: All rows so far.
    """
    last: Row = rows[-1] if rows else {"step": 0, "steps_left": about["steps"]}
    names = [column for column in (*_CURVES, *_NORM_CURVES) if column in about["columns"]]
    return {
        "name": name,
        "setup": f"{name}: {about['mechanism']}, {about['sampling']} batches, clip norm {about['max_grad_norm']:g}.",
        "cards": _cards(about, last, rows),
        "notes": _notes(about),
        "curves": {column: _curve(rows, column) for column in names},
        "not_private": [column for column in names if column in _NORM_CURVES],
        "ended": not last["steps_left"],
    }


def watch_table(content: Mapping[str, Any], width: int) -> Group:
    """The cards with a small curve each, and the notes, in so many columns."""
    table = Table.grid(padding=(0, 2))
    room = 24 if width >= 100 else 14
    for card in content["cards"]:
        curve = content["curves"].get(card["curve"], {"y": []})
        style = "yellow" if card["private"] else ""
        table.add_row(
            Text(card["name"], style=f"bold {style}"), Text(card["value"], style=style), sparkline(curve["y"], room)
        )
        table.add_row("", Text(card["note"], style="dim"), "")
    return Group(Text(content["setup"]), Text(), table, *(Text(note, style="dim") for note in content["notes"]))


def watch_page(content: Mapping[str, Any], refresh: int | None) -> str:
    """The same as one HTML page without network, which loads itself again after `refresh` seconds."""
    text = "\n".join(f"{card['name']}: {card['value']}. {card['note']}" for card in content["cards"])
    data = {**content, "refresh": None if content["ended"] else refresh}
    return assemble("Quell run", "watch.html", ("charts.js", "watch.js"), data, text).html


def sparkline(values: Sequence[float], room: int) -> str:
    """Values as a line of blocks, each the mean of those it stands for.

    >>> sparkline([1, 2, 3, 4, 5, 6, 7, 8], 4)
    '▁▃▆█'
    """
    if not values:
        return ""
    room = min(room, len(values))
    bounds = [len(values) * i // room for i in range(room + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(top * (mean - low) / (high - low)) if high > low else 0] for mean in means)


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> [duration(seconds) for seconds in (0.0042, 0.5, 90, 5400, 400_000)]
    ['4.2 ms', '0.5 s', '1.5 min', '1.5 h', '4.6 days']
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60), ("s", 0.1)):
        if seconds >= size * (1 if unit == "s" else 1.2):
            return f"{seconds / (1 if unit == 's' else size):.2g} {unit}"
    return f"{1000 * seconds:.2g} ms"


def _cards(about: Mapping[str, Any], last: Row, rows: Sequence[Row]) -> list[dict[str, Any]]:
    known = last.get("epsilon_is", "nothing was released")
    whole = f"At the end: {number(about['epsilon_at_the_end'])}, with δ = {number(about['delta'])}"
    found = [
        _card("Steps", f"{last['step']:,} of {about['steps']:,}", _time_left(last, rows), None),
        _card(
            "ε so far",
            f"at most {at_least(last.get('epsilon_at_most') or 0.0, 4)}",
            f"{known[0].upper()}{known[1:]}. {whole}, for {about['unit']} more or less.",
            "epsilon_at_most",
        ),
    ]
    if rows:
        found.append(_noise_card(last))
    if last.get("step_seconds"):
        noise = last.get("noise_seconds") or 0.0
        found.append(
            _card(
                "Time of a step",
                duration(last["step_seconds"]),
                f"Its noise: {duration(noise)} ({noise / last['step_seconds']:.0%}).",
                "step_seconds",
            )
        )
    clipped, median = (last.get(column) for column in _NORM_CURVES)
    if clipped is not None and median is not None:
        warning = "NOT covered by the promise: it depends on single examples, so do not publish it."
        found.append(_card(f"Clipped ({_NOT_PRIVATE})", f"{clipped:.0%} of gradients", warning, _NORM_CURVES[0], True))
        norm = f"{amount(median)} (clip norm {about['max_grad_norm']:g})"
        found.append(_card(f"Median norm ({_NOT_PRIVATE})", norm, warning, _NORM_CURVES[1], True))
    return found


def _noise_card(last: Row) -> dict[str, Any]:
    noise, gradient, ratio = (last.get(name) for name in ("noise_norm", "gradient_norm", "noise_to_signal"))
    if noise is None:
        return _card("Gradient", amount(gradient or 0.0), "norm of the noisy gradient, as released", "gradient_norm")
    norms = f"Norm of the noisy gradient: {amount(gradient or 0.0)}. Expected of its noise: {amount(noise)}."
    if ratio is None:
        return _card("Noise to signal", "not visible", f"The noise hides the gradient. {norms}", "noise_to_signal")
    return _card("Noise to signal", f"about {amount(ratio)}", norms, "noise_to_signal")


def _card(name: str, value: str, note: str, curve: str | None, private: bool = False) -> dict[str, Any]:
    return {"name": name, "value": value, "note": note, "curve": curve, "private": private}


def _time_left(last: Row, rows: Sequence[Row]) -> str:
    seconds = [row["step_seconds"] for row in rows[-20:] if row.get("step_seconds")]
    if not last["steps_left"]:
        return "done"
    left = f"{last['steps_left']:,} left"
    return f"{left}, about {duration(sum(seconds) / len(seconds) * last['steps_left'])}" if seconds else left


def _notes(about: Mapping[str, Any]) -> list[str]:
    found = []
    if about.get("seeded"):
        found.append(SEEDED)
    if any(column in about["columns"] for column in _NORM_CURVES):
        found.append("This log holds numbers that are not private. Show it only to people who may see the data.")
    return found


def _curve(rows: Sequence[Row], column: str) -> dict[str, list[float]]:
    """Steps and values where there is one, at most `_POINTS` of them, the last included."""
    there = [(row["step"], row[column]) for row in rows if row.get(column) is not None]
    thin = -(-len(there) // _POINTS) or 1
    kept = there[::-1][::thin][::-1]
    return {"x": [step for step, _ in kept], "y": [value for _, value in kept]}
