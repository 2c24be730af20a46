"""The registry: every family by name, and the one way to build a strategy."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from quell._types import Array
from quell.errors import QuellError, require_count, require_finite, require_same_steps, short
from quell.participation import Participation
from quell.strategy import band, band_inv, band_toeplitz, blt, diagonal, fractional, identity, square_root, tree
from quell.strategy.family import DIVERGENCE, HORIZON, LEAST_DIVERGENCE, MOST_DIVERGENCE, NORMALISE, Family
from quell.strategy.structure import Parameter, Strategy, ToeplitzStrategy
from quell.workload import Workload, forgetting, sgd

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        identity.IDENTITY,
        fractional.LAMBDA_CGD,
        square_root.BISR,
        band_inv.BAND_INV,
        fractional.FRACTIONAL,
        blt.BLT,
        square_root.BSR,
        band_toeplitz.BAND_TOEPLITZ,
        band.BAND,
        band.DENSE,
        square_root.SQUARE_ROOT,
        diagonal.DIAGONAL,
        tree.TREE,
    )
}

INDEPENDENT = identity.IDENTITY  # the noise of DP-SGD, which everything is compared with


def build(
    name: str,
    workload: Workload,
    participation: Participation,
    solution: Array | None = None,
    **parameters: Parameter,
) -> Strategy:
    """Build the strategy of family `name` for a workload and participation pattern.

    Args:
        name: The family's name (`quell mechanisms` lists them).
        workload: What the optimizer does with gradients.
        participation: How often, and how far apart, one example can take part.
        solution: The coefficients that an optimised family found before; they are used without a new search.
        parameters: The family's parameters. `horizon` optimises for a run in which the effect of a step fades over that
            many steps, so that less noise is cancelled. `divergence` optimises for amplification, at a Rényi divergence
            of order 2; good values are near 1/σ² of the Gaussian mechanism.

    Returns:
        The strategy; raises `QuellError` if it cannot be built or its optimisation did not converge.

    >>> from quell.workload import prefix
    >>> build("bisr", prefix(100), Participation(100, 10), bands=4)
    bisr(bands=4) over 100 steps
    """
    family = find(name)
    require_same_steps(workload=workload.steps, participation=participation.steps)
    normalise = bool(parameters.pop(NORMALISE, family.normalised))
    if normalise and not family.normalisable:
        raise QuellError(f"{family.name} cannot be column-normalised: leave that option out")
    if unknown := sorted(set(parameters) - set(family.required) - set(family.optional)):
        takes = ", ".join(family.takes) or "no parameters"
        raise QuellError(f"{family.name} does not take {', '.join(unknown)}: it takes {takes}")
    if missing := [name for name in family.required if name not in parameters]:
        example = ", ".join(_EXAMPLES.get(name, f"{name}=0.5") for name in missing)
        raise QuellError(f"{family.name} needs {' and '.join(missing)}: for example {example}")
    given: dict[str, Any] = {name: _checked(family, name, value) for name, value in parameters.items()}
    horizon = given.pop(HORIZON, None)
    if horizon is not None:
        workload = forgetting(sgd(workload.steps, weight_decay=workload.decay), horizon)
    if "lambda" in given:
        given["lambda_"] = given.pop("lambda")  # a Python keyword
    if solution is not None:
        if "solution" not in inspect.signature(family.build).parameters:
            raise QuellError(f"{family.name} is not found by a search, so it takes no solution: leave that out")
        given["solution"] = solution
    strategy = family.build(workload, participation, **given)
    if horizon is not None:
        strategy = replace(strategy, parameters={**strategy.parameters, HORIZON: horizon})
    if not family.normalisable or not isinstance(strategy, ToeplitzStrategy):
        return strategy
    strategy = strategy.column_normalised() if normalise else strategy
    return replace(strategy, parameters={**strategy.parameters, NORMALISE: normalise})


def find(name: str) -> Family:
    """The family called `name`, hyphens allowed for underscores."""
    family = FAMILIES.get(name.replace("-", "_").lower())
    if family is None:
        near = get_close_matches(name.lower(), FAMILIES, 1)
        meant = f", perhaps {near[0]}" if near else ""
        meant = f", DP-SGD is {INDEPENDENT.name}" if re.sub(r"[^a-z]", "", name.lower()) == "dpsgd" else meant
        raise QuellError(f"there is no mechanism {short(name)}{meant}: choose one of {', '.join(FAMILIES)}")
    return family


_LEAST = {"buffers": 0, HORIZON: 2}  # a horizon of one step would be independent noise
_SHARES = ("lambda", "gamma")
_EXAMPLES = {"bands": "bands=16", "lambda": "lambda=0.95", "gamma": "gamma=0.5"}


def _checked(family: Family, name: str, value: Parameter) -> Parameter:
    if name == "objective":
        if value not in family.objectives:
            raise QuellError(f"{family.name} has no objective {value!r}: use {', '.join(family.objectives)}")
        return value
    if isinstance(value, str):
        raise QuellError(f"{name}={value!r} must be a number")
    if name in ("bands", "buffers", HORIZON):
        return require_count(name, value, least=_LEAST.get(name, 1))
    number = require_finite(name, value)
    if name == DIVERGENCE:
        if not LEAST_DIVERGENCE <= number <= MOST_DIVERGENCE:
            raise QuellError(
                f"divergence={number:g} must lie between {LEAST_DIVERGENCE:g} and {MOST_DIVERGENCE:g}: good ones near "
                "1/sigma^2 of the Gaussian mechanism with the same promise, 0.3 for epsilon 2 and 3 for epsilon 8"
            )
        return number
    if name in _SHARES and not 0 <= number <= 1:
        raise QuellError(f"{name}={number:g} must lie between 0 (independent noise, DP-SGD) and 1")
    return number
