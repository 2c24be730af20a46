"""How many examples a model gets right, with noise that protects these examples.

The held-out examples of a file are people's data too. One of them changes the count by at most one, so a count with
discrete Laplace noise is ε-differentially private for them (Ghosh, Roughgarden and Sundararajan 2009). Noise is drawn
exactly, from integers of the operating system (Canonne, Kamath and Steinke 2020, Algorithm 1): no rounding can undo it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random
from secrets import SystemRandom


def noisy(count: int, most: int, epsilon: float, random: Random | None = None) -> int:
    """`count` of `most` examples, ε-private for each of them. What falls outside 0 to `most` is moved to its ends."""
    dice, rate = random or SystemRandom(), Fraction(epsilon)
    return min(most, max(0, count + _geometric(rate, dice) - _geometric(rate, dice)))


def deviation(epsilon: float) -> float:
    """The standard deviation of that noise.

    >>> round(deviation(1.0), 2)
    1.36
    """
    return math.sqrt(2.0 * math.exp(-epsilon)) / -math.expm1(-epsilon)


def _geometric(rate: Fraction, dice: Random) -> int:
    """k ≥ 0 with probability proportional to e^(−rate·k): heads of a coin that shows e^−rate, before the first tail.

    Many small coins stand for one long run of heads: e^(−rate·s) for a power s of two, as often as it shows heads, then
    the rest within s.
    """
    step = 1
    while rate * step < Fraction(1, 2):
        step *= 2
    while True:  # the rest below `step`, by rejection
        rest = dice.randrange(step)
        if _coin(rate * rest, dice):
            break
    found = 0
    while _coin(rate * step, dice):
        found += step
    return found + rest


def _coin(loss: Fraction, dice: Random) -> bool:
    """True with probability e^−loss, exactly."""
    while loss > 1:
        if not _coin(Fraction(1), dice):
            return False
        loss -= 1
    place = 1
    while dice.randrange(loss.denominator * place) < loss.numerator:
        place += 1
    return place % 2 == 1
