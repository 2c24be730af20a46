"""The batches that a mechanism's guarantee is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quell.noise import Key
from quell.privacy import certify
from quell.schemes import Batches, Scheme

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan


def scheme_of(plan: Plan, mechanism: Mechanism) -> Scheme:
    """The plan's way of forming batches for a mechanism; refused if the mechanism's promise does not hold under it."""
    promised = mechanism.guarantee
    scheme = plan.prices.scheme_of(mechanism)
    if promised.scheme != scheme:  # certified for another run, perhaps with fewer participations
        certify(mechanism.strategy, scheme, mechanism.noise_multiplier, promised.epsilon, promised.delta)
    return scheme.for_training()


def batches_of(plan: Plan, scheme: Scheme, key: Key) -> Batches:
    """The batches of a run, drawn of what the plan says, in every framework by the same derived key."""
    return Batches(scheme, plan.run.examples or 0, key.derive("quell batches"), plan.run.drawn)
