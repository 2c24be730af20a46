"""The batches that a mechanism's guarantee is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quell.privacy import certify
from quell.schemes import Scheme

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan


def scheme_of(plan: Plan, mechanism: Mechanism) -> Scheme:
    """The sampling scheme that the mechanism's guarantee is about; refused where it does not hold under the plan's."""
    promised = mechanism.guarantee
    scheme = plan.prices.scheme_of(mechanism)
    if all(mechanism is not row for row in plan.mechanisms):  # priced elsewhere, perhaps for fewer participations
        certify(mechanism.strategy, scheme, mechanism.noise_multiplier, promised.epsilon, promised.delta)
    return scheme.for_training()
