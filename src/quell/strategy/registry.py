"""The registry: every family by name, and the one way to build a strategy."""

from __future__ import annotations

from collections.abc import Mapping

from quell.errors import QuellError, require_count, require_finite
from quell.sampling import Participation
from quell.strategy import diagonal, fractional, identity, square_root, tree
from quell.strategy.family import Family
from quell.strategy.structure import Parameter, Strategy, ToeplitzStrategy
from quell.workload import Workload

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        identity.IDENTITY,
        fractional.LAMBDA_CGD,
        square_root.BISR,
        fractional.FRACTIONAL,
        square_root.BSR,
        square_root.SQUARE_ROOT,
        diagonal.DIAGONAL,
        tree.TREE,
    )
}


def build(name: str, workload: Workload, participation: Participation, **parameters: Parameter) -> Strategy:
    """The strategy of family `name` for a workload and participation pattern.

    >>> from quell.workload import prefix
    >>> build("bisr", prefix(100), Participation(100, 10), bands=4)
    bisr(bands=4) over 100 steps
    """
    family = find(name)
    if participation.steps != workload.steps:
        raise QuellError(f"the workload has {workload.steps:,} steps but the participation {participation.steps:,}")
    normalise = bool(parameters.pop("column_normalise", False))
    if normalise and not family.normalisable:
        raise QuellError(f"{family.name} cannot be column-normalised: leave that option out")
    if unknown := sorted(set(parameters) - set(family.required) - set(family.optional)):
        takes = ", ".join((*family.required, *family.optional)) or "no parameters"
        raise QuellError(f"{family.name} does not take {', '.join(unknown)}: it takes {takes}")
    if missing := [name for name in family.required if name not in parameters]:
        example = ", ".join(_EXAMPLES[name] for name in missing)
        raise QuellError(f"{family.name} needs {' and '.join(missing)}: for example {example}")
    given = {name: _checked(name, value) for name, value in {**family.optional, **parameters}.items()}
    if "lambda" in given:
        given["lambda_"] = given.pop("lambda")  # a Python keyword
    strategy = family.build(workload, participation, **given)
    return strategy.column_normalised() if normalise and isinstance(strategy, ToeplitzStrategy) else strategy


def find(name: str) -> Family:
    """The family called `name`, hyphens allowed for underscores."""
    family = FAMILIES.get(name.replace("-", "_").lower())
    if family is None:
        raise QuellError(f"there is no mechanism {name!r}: choose one of {', '.join(FAMILIES)}")
    return family


_EXAMPLES = {"bands": "bands=16", "lambda": "lambda=0.95", "gamma": "gamma=0.5"}


def _checked(name: str, value: Parameter) -> Parameter:
    if name == "bands":
        return require_count(name, value)
    number = require_finite(name, value)
    if not 0 <= number <= 1:
        raise QuellError(f"{name}={number:g} must lie between 0 (independent noise, DP-SGD) and 1")
    return number
