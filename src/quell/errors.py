"""What Quell says to people: errors they can put right, and numbers rounded to the honest side.

Every message is one sentence that names the value that was wrong and what to do about it; the command line
prints it as it stands and exits with status 2.
"""

from __future__ import annotations

import math
import re
from decimal import ROUND_CEILING, Context, Decimal, DecimalException
from numbers import Real

_MOST = 2**256  # nothing has to be counted beyond
_LONGEST = 100  # characters of a count


def at_least(value: float, digits: int = 6) -> str:
    """`value` to so many significant digits, rounded up: a printed σ, ε or δ must not promise more than the number.

    >>> at_least(1.898091, 4), at_least(8.0), at_least(1e-05)
    ('1.899', '8', '1e-05')
    """
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"


class QuellError(ValueError):
    """A request that cannot be honoured as stated; `about` names the parameter that was wrong, where it is one."""

    def __init__(self, message: str, about: str | None = None) -> None:
        super().__init__(message)
        self.about = about


def require_finite(name: str, value: float) -> float:
    """`value` as a float, refused when it is not a number, NaN or infinite."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise QuellError(f"{name}={short(value)} is not a finite number: pass an ordinary number", name)
    return number


def require_count(name: str, value: float | None, least: int = 1) -> int:
    """`value` as an int, refused when it is not whole or below `least`."""
    if not isinstance(value, Real) or isinstance(value, bool) or not least <= value < _MOST or value != int(value):
        raise QuellError(f"{name}={short(value)} must be a whole number of at least {least}", name)
    return int(value)


_FACTORS = {"k": 10**3, "m": 10**6, "b": 10**9}


def read_count(name: str, text: str | int, least: int = 1) -> int:
    """A count as people write it: 50000, 50,000, 50_000, 50k, 1.2M or 1e6.

    >>> read_count("examples", "50k"), read_count("examples", "1.2M"), read_count("examples", "50,000")
    (50000, 1200000, 50000)
    """
    plain = str(text).strip().lower()
    grouped = re.fullmatch(r"\d{1,3}(,\d{3})+|\d+(_\d+)*", plain[:_LONGEST])
    factor = 1 if grouped else _FACTORS.get(plain[-1:], 1)
    number = re.sub("[,_]", "", plain) if grouped else plain if factor == 1 else plain[:-1]
    try:
        value = Decimal(number) * factor if len(plain) <= _LONGEST else Decimal("nan")
        if value.is_finite() and abs(value) < _MOST and value == int(value):
            return require_count(name, int(value), least)
    except DecimalException:  # not a number, or far too long
        pass
    raise QuellError(
        f"{name}={short(text)} must be a whole number of at least {least}, such as 50000, 50,000 or 50k", name
    )


def short(value: object) -> str:
    r"""A value as it may stand in a sentence: at most 40 characters, all of them printable.

    >>> short("\x1b[31m"), short([1.0] * 1000)
    ("'\\x1b[31m'", '[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0,…')
    """
    if isinstance(value, int) and abs(value) >= _MOST:
        return f"an integer of {value.bit_length():,} bits"  # Python refuses to write out long ones
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 40 else text[:40] + "…"


def require_privacy(epsilon: float, delta: float) -> tuple[float, float]:
    """(epsilon, delta) as floats with epsilon > 0 and 0 < delta < 1."""
    epsilon, delta = require_finite("epsilon", epsilon), require_finite("delta", delta)
    if epsilon <= 0:
        raise QuellError(
            f"epsilon={epsilon:g} must be positive: smaller means more private, 1 to 10 is common", "epsilon"
        )
    if not 0 < delta < 1:
        raise QuellError(
            f"delta={delta:g} must lie strictly between 0 and 1: take at most 1/examples, e.g. 1e-5", "delta"
        )
    return epsilon, delta


def require_same_steps(**steps: int) -> None:
    """Refuse two things that were made for runs of different length.

    >>> require_same_steps(strategy=10, workload=12)
    Traceback (most recent call last):
    quell.errors.QuellError: the strategy has 10 steps but the workload 12: make both for one run
    """
    (one, first), (other, second) = steps.items()
    if first != second:
        raise QuellError(f"the {one} has {first:,} steps but the {other} {second:,}: make both for one run")
