"""A mechanism in one line, as tables show it and as people type it: "blt d=2", "bisr* p=4", "identity"."""

from __future__ import annotations

import re

from quell.errors import QuellError, short
from quell.strategy.family import DIVERGENCE, HORIZON, NORMALISE
from quell.strategy.registry import INDEPENDENT, find
from quell.strategy.structure import Parameter, Strategy

SYMBOLS = {"bands": "p", "lambda": "λ", "gamma": "γ", "buffers": "d", HORIZON: "h", DIVERGENCE: "R"}
_NAMES = {symbol: name for name, symbol in SYMBOLS.items()}


def spelled(strategy: Strategy) -> str:
    """Family and parameters, short enough for a table; a star means that columns are normalised.

    >>> from quell import workload
    >>> from quell.participation import Participation
    >>> from quell.strategy import build
    >>> spelled(build("bisr", workload.prefix(8), Participation(8, 4), bands=4, column_normalise=True))
    'bisr* p=4'
    """
    parameters = dict(strategy.parameters)
    star = "*" if parameters.pop(NORMALISE, False) else ""
    objective = parameters.pop("objective", "rmse")
    settings = [
        f"{SYMBOLS.get(name, name)}={value:.4g}" if isinstance(value, float) else f"{SYMBOLS.get(name, name)}={value}"
        for name, value in parameters.items()
        if (name, value) != ("lambda", 1.0)  # the usual one of families that cancel fully
    ]
    if strategy.solution is not None and objective != "rmse":  # in other families it only chose the numbers above
        settings.append(f"objective={objective}")
    name = INDEPENDENT.title if strategy.family == INDEPENDENT.name else strategy.family
    return " ".join([f"{name}{star}", *settings])


def read(text: str, **more: Parameter) -> tuple[str, dict[str, Parameter]]:
    """The family's name and its parameters, from letters as in tables or from full names, and `more` of them.

    A name alone leaves everything to the family's defaults. With settings, columns are normalised where there is a
    star, and only there, as in tables.

    >>> read("blt d=2"), read("bisr* bands=4")
    (('blt', {'buffers': 2}), ('bisr', {'bands': 4, 'column_normalise': True}))
    """
    name, *settings = re.sub(r"\(.*?\)|,", " ", text).split() or [""]
    family, parameters = find(name.removesuffix("*")), dict[str, Parameter]()
    for setting in settings:
        key, _, value = setting.partition("=")
        key = _NAMES.get(key, key)
        if not value or key in parameters:
            raise QuellError(
                f"mechanism {short(text)} is not a name with settings: write it as tables do, for example "
                "'blt d=2 h=75' or 'bisr* p=4'"
            )
        parameters[key] = _value(value)
    if name.endswith("*") or (settings and family.normalisable):
        parameters.setdefault(NORMALISE, name.endswith("*"))
    if twice := sorted(set(parameters) & set(more)):
        raise QuellError(f"{', '.join(twice)} is decided twice, in {short(text)} and beside it: leave one out")
    return family.name, parameters | more


def _value(text: str) -> Parameter:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
