"""What one unit's gradient is brought to: one norm over all parameters, or one for each group of them.

A number C clips: factors are min(1, C/norm). "automatic" normalises: factors are 1/(norm + γ), so every gradient gets
a norm just below 1 and there is no clip norm to choose (Bu et al. 2023, arXiv:2206.07136; γ keeps gradients that are
nearly zero from being blown up). Groups are bounded apart, so a unit adds at most √(C₁² + C₂² + …) over all of them,
which is what the noise is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quell.adapters.choice import require_clip_norm
from quell.errors import QuellError

AUTOMATIC = "automatic"
ClipNorm = float | str | Mapping[str, "float | str"]  # as the user gives it

_STABILISER = 0.01  # γ, as in the paper
_LEAST = 1e-30  # factor: floats below 1e-38 have fewer digits


@dataclass(frozen=True)
class Bound:
    """The most that one unit adds to the sums of some parameters, by their names."""

    norm: float
    automatic: bool
    names: frozenset[str]


@dataclass(frozen=True)
class Bounds:
    """The bounds of all trained parameters, each of which belongs to one of them."""

    groups: tuple[Bound, ...]
    settings: str  # as the user gave them, to compare runs by

    @classmethod
    def of(cls, given: ClipNorm | Bounds, names: Mapping[str, Any]) -> Bounds:
        """The bounds that `max_grad_norm` means for parameters of these names."""
        if isinstance(given, Bounds):
            return given
        if not isinstance(given, Mapping):
            return cls((_bound(given, frozenset(names)),), str(given))
        held: dict[str, set[str]] = {prefix: set() for prefix in given}
        for name in names:
            fitting = [prefix for prefix in given if not prefix or name == prefix or name.startswith(prefix + ".")]
            if not fitting:
                raise QuellError(f"max_grad_norm has no group for {name}: add it, or a group '' for all others")
            held[max(fitting, key=len)].add(name)
        if unused := [prefix for prefix, own in held.items() if not own]:
            raise QuellError(
                f"max_grad_norm has a group {unused[0]!r} without trained parameters: groups are the beginnings of "
                f"their names, such as {next(iter(names), '')!r}"
            )
        return cls(tuple(_bound(given[prefix], frozenset(own)) for prefix, own in held.items()), str(dict(given)))

    @property
    def norm(self) -> float:
        """The most that one unit adds over all parameters: what the noise is for."""
        return math.hypot(*(bound.norm for bound in self.groups))


def clip_factors(norms: Tensor, bound: float | Bound) -> Tensor:
    """What to multiply each unit's gradient with, given its norm.

    It is 0 where the norm is not finite, and for gradients so long that products with the factor would be rounded to
    fewer digits than the bound allows for.
    """
    norms = norms * (1 + 1e-5)  # what is added is rounded too
    if isinstance(bound, Bound) and bound.automatic:
        factors = bound.norm / (norms + _STABILISER)
    else:
        factors = ((bound.norm if isinstance(bound, Bound) else bound) / (norms + 1e-6)).clamp(max=1.0)
    return torch.where(factors >= _LEAST, factors, 0.0)  # a comparison with NaN is false


Measured = list[tuple[Tensor, Bound]]  # the norms of the same units over the parameters of each bound


def lengths(measured: Measured) -> Tensor:
    """(units, 2) every unit's norm over all parameters, and the most times that it is as long as a bound allows."""
    norms = torch.stack([norms.float() for norms, _ in measured])
    relative = torch.stack([norms.float() / bound.norm for norms, bound in measured])
    return torch.stack([torch.linalg.vector_norm(norms, dim=0), relative.amax(0)], dim=1)


def _bound(given: Any, names: frozenset[str]) -> Bound:
    if given is None:
        raise QuellError(
            "max_grad_norm=None would leave gradients as long as they are, and the noise is for gradients that are "
            f"clipped: pass a number, such as 1.0, or {AUTOMATIC!r}, which needs none"
        )
    if isinstance(given, str):
        if given != AUTOMATIC:
            raise QuellError(f"max_grad_norm={given!r} must be a positive number or {AUTOMATIC!r}")
        return Bound(1.0, True, names)
    return Bound(require_clip_norm(given), False, names)
