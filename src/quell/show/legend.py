"""What the columns, letters and marks of a table mean: exactly those that are in it, in few words or in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quell.run import OBJECTIVES
from quell.strategy import INDEPENDENT
from quell.strategy.family import DIVERGENCE, HORIZON, NORMALISE
from quell.strategy.spelling import SYMBOLS, spelled

if TYPE_CHECKING:
    from quell.planning import Mechanism

RECOMMENDED, BEYOND, ESTIMATED = "➤", "✗", "~"

COLUMNS = {  # in few words, and in full
    "sampling": ("how batches are formed", "how batches are formed; the promise holds for no other way"),
    "σ": ("noise multiplier", "noise multiplier, the standard deviation of the noise per unit of clip norm"),
    **{each.column: each.meaning for each in OBJECTIVES.values()},
    "gain": ("times less RMSE than DP-SGD", "DP-SGD's RMSE divided by this one (estimated where batches are random)"),
    "mem": ("model copies kept", "model-sized vectors kept between steps"),
    "draws": ("noise vectors per step", "noise vectors made per step"),
}
_LETTERS = {
    "bands": ("bands", "bands, the diagonals of C or of its inverse"),
    "lambda": ("share of old noise cancelled", "share of the last step's noise that is cancelled"),
    "gamma": ("power", "power of the noise design: 0 is DP-SGD, and more cancels more"),
    "buffers": ("buffers", "buffers, the model-sized vectors that its noise is made from"),
    HORIZON: ("steps the design looks back", "how many steps back the noise design looks"),
    DIVERGENCE: ("how much it counts on random batches", "how much random batches the noise design counts on"),
}
_STAR = ("normalised columns", "columns of C scaled to norm 1")
_MARKS = {
    RECOMMENDED: ("best", "the best within the limits"),
    ESTIMATED: ("estimated", "estimated, not certified"),
    BEYOND: ("beyond the limits", "beyond the limits"),
}


def letters(mechanisms: Sequence[Mechanism]) -> dict[str, tuple[str, str]]:
    """What the letters in the labels of these mechanisms mean, in few words and in full."""
    labels = [spelled(mechanism.strategy) for mechanism in mechanisms]
    found = {
        SYMBOLS[name]: texts
        for name, texts in _LETTERS.items()
        if any(f" {SYMBOLS[name]}=" in label for label in labels)
    }
    return found | ({"*": _STAR} if any(each.strategy.parameters.get(NORMALISE) for each in mechanisms) else {})


def legend(
    mechanisms: Sequence[Mechanism],
    columns: Sequence[str] = tuple(COLUMNS),
    objective: str | None = None,
    marks: str = "",
    full: bool = True,
) -> str:
    """What a table's signs mean, and what a plan minimised.

    Args:
        mechanisms: The rows.
        columns: The titles of the columns that are shown.
        objective: What the plan minimised, where the table is a plan's.
        marks: The marks that rows have.
        full: Whole explanations, and what papers call the mechanisms, instead of few words.
    """
    found = {title: texts for title, texts in COLUMNS.items() if title in columns}
    found |= letters(mechanisms)
    found |= {mark: texts for mark, texts in _MARKS.items() if mark in marks}
    sentences = [f"{sign}: {texts[full]}." for sign, texts in found.items()]
    if objective is not None:
        column, title = OBJECTIVES[objective].column, OBJECTIVES[objective].title
        sentences.append(f"The plan minimises {column if column in columns else f'the {title}'}.")
    families = dict.fromkeys(each.family for each in mechanisms if each.family is not INDEPENDENT)
    if full and (named := [f"{family.name} is {family.paper}" for family in families if family.paper]):
        sentences.append(f"In papers {', '.join(named)}.")
    return " ".join(sentences)
