"""Checks of the shape of a plan file's content, before its claims are checked.

Whether values are right is checked later, by `Run`, the strategies and the accountants. They can rely on strings,
numbers and lists of numbers where a plan has them, and on no more rows than a plan may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

from quell.errors import short

MOST_ROWS = 256  # of a plan file; plans have about twenty

PLAIN = str | int | float
SETTING = PLAIN | None
Shape = (
    type | UnionType | Callable[[object], bool] | Mapping[str, Any]
)  # types, a test, or the shapes of a dict's parts
REST = "*"  # stands for all parts that are not named; a name that ends in "?" may be missing


def odd(value: object, shape: Shape, name: str) -> str | None:
    """The first part of a value that does not have its shape, in words; None if there is none."""
    if not isinstance(shape, Mapping):
        fits = isinstance(value, shape) if isinstance(shape, type | UnionType) else shape(value)
        return None if fits else f"{name}={short(value)} is not what a plan has there"
    if not isinstance(value, dict):
        return f"{name}={short(value)} has no parts"
    for part in shape:
        if part not in value and part != REST and not part.endswith("?"):
            return f"{name} has no {part}"
    known = {part.removesuffix("?"): inner for part, inner in shape.items()}
    for part, inner in value.items():
        if part not in known and REST not in known:
            return f"{name} has a part {short(part)} that plans do not have"
        shown = part if part in known else short(part)
        if wrong := odd(inner, known[part if part in known else REST], f"{name}.{shown}"):
            return wrong
    return None


def odd_plan(content: dict[str, Any], shape: Shape, row_shape: Shape) -> str | None:
    """The same for a whole plan, its rows and its recommended index."""
    if wrong := odd(content, shape, "the plan"):
        return wrong
    rows, index = content["mechanisms"], content["recommended"]
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        return f"its mechanisms are not a list of at most {MOST_ROWS} rows"
    if type(index) is not int or not 0 <= index < len(rows):
        return f"recommended={short(index)} is not the number of one of its rows"
    return next((wrong for n, row in enumerate(rows) if (wrong := odd(row, row_shape, f"row {n}"))), None)


def is_schedule(value: object) -> bool:
    """Whether it can stand for learning rates."""
    return isinstance(value, SETTING) or are_numbers(value)


def are_numbers(value: object) -> bool:
    """Whether it is a list of numbers; integers only up to 2⁵³, which float64 holds exactly."""
    return isinstance(value, list) and all(
        type(each) is float or (type(each) is int and abs(each) <= 2**53) for each in value
    )


def is_solution(value: object) -> bool:
    """Whether it is a list of numbers, or of lists of numbers of one length."""
    if not isinstance(value, list):
        return False
    return are_numbers(value) or all(are_numbers(row) and len(row) == len(value[0]) for row in value)
