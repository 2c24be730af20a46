"""Checks of the shape of a plan file's content, before its claims are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quell.errors import short

MOST_ROWS = 256  # of a plan file; plans have about twenty


def odd_rows(content: dict[str, Any], odd: Callable[[object], str | None]) -> str | None:
    """What is wrong with the shape of a plan's rows or its recommended index; None if nothing is."""
    rows, index = content["mechanisms"], content["recommended"]
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        return f"its mechanisms are not a list of at most {MOST_ROWS} rows"
    if type(index) is not int or not 0 <= index < len(rows):
        return f"recommended={short(index)} is not the number of one of its rows"
    return next((f"row {number} of its mechanisms: {w}" for number, row in enumerate(rows) if (w := odd(row))), None)


def are_plain(value: object) -> bool:
    """Whether it is a dict of strings and numbers."""
    return isinstance(value, dict) and all(is_plain(each) for each in value.values())


def is_plain(value: object) -> bool:
    """Whether it is a string or a number."""
    return isinstance(value, str | int | float)


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
