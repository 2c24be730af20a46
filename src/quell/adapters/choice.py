"""Which mechanism of a plan a run uses, and what is refused before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from quell.errors import QuellError, require_finite

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan


def require_one_source(key: object, seed: int | None) -> None:
    if key is not None and seed is not None:
        raise QuellError("pass a key or a seed, not both")


def select(plan: Any, mechanism: str | Mechanism | None = None) -> Any:
    """The plan's recommended mechanism, its best of another family, or the mechanism that was given.

    Refused: noise that is only estimated, and a promise that is looser than the plan's.
    """
    offered: Sequence[Any] = getattr(plan, "mechanisms", ())
    if mechanism is None:
        return _certified(getattr(plan, "mechanism", plan))
    if not isinstance(mechanism, str):
        if offered and mechanism.strategy.steps != plan.steps:
            raise QuellError(
                f"the mechanism was made for {mechanism.strategy.steps:,} steps and the plan has {plan.steps:,}: "
                "price it with plan.price(...)"
            )
        promised = _certified(mechanism).guarantee
        if offered and (promised.epsilon > plan.run.epsilon * (1 + 1e-9) or promised.delta > plan.run.delta):
            raise QuellError(
                f"the mechanism promises ({promised.epsilon:g}, {promised.delta:g})-DP, less than the plan's "
                f"({plan.run.epsilon:g}, {plan.run.delta:g}): price it with plan.price(...)"
            )
        return mechanism
    for row in offered:
        if row.name == mechanism:
            return row
    names = ", ".join(dict.fromkeys(row.name for row in offered)) or "none"
    raise QuellError(
        f"the plan has certified no mechanism {mechanism!r}, only {names}: pass one that you price for it, as with "
        "mechanism=plan.price(name, bands=4)"
    )


def _certified(chosen: Any) -> Any:
    if hasattr(chosen, "claim"):
        chosen.guarantee  # noqa: B018 - refuses an estimate
    return chosen


def require_clip_norm(max_grad_norm: float) -> float:
    bound = require_finite("max_grad_norm", max_grad_norm)
    if bound <= 0:
        raise QuellError(f"max_grad_norm={bound:g} must be positive: it is what per-example gradients are clipped to")
    return bound


def refuse_other_data(plan: Plan, examples: int) -> None:
    if examples != plan.run.examples:
        raise QuellError(
            f"the data set has {examples:,} examples, but the plan is for {plan.run.examples:,}: make a plan with "
            f"examples={examples}"
        )


def refuse_user_level(plan: object) -> None:
    """A plan per user promises nothing when batches are drawn, and gradients clipped, example by example."""
    run = getattr(plan, "run", None)
    if run is not None and run.user_level:
        raise QuellError(
            "the plan's promise is per user, but batches are drawn and gradients clipped per example here: make a plan "
            "with users= for make_private(..., users=ids), or without separation and participations; or, where your "
            "own code clips per user and keeps users' steps as far apart as planned, pass plan.mechanism to "
            "CorrelatedNoise, or in JAX to privatize"
        )


def described(names: tuple[str, ...] | None, tensors: Sequence[Any]) -> str:
    """Names and whole shapes, in short: equal only where all of them are."""
    shapes = [(names[i] if names else i, tuple(tensor.shape)) for i, tensor in enumerate(tensors)]
    digest = blake2b(repr(shapes).encode(), digest_size=8).hexdigest()
    return f"{len(shapes):,} with {sum(math.prod(shape) for _, shape in shapes):,} elements ({digest})"
