"""A mechanism: a strategy, the noise it needs for a promise, and the error that this noise causes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quell.analysis.error import Error
from quell.analysis.objective import DEFAULT_OBJECTIVE, OBJECTIVES, Measured
from quell.errors import QuellError, at_least
from quell.privacy import Estimate, Guarantee
from quell.schemes import SCHEMES, Scheme
from quell.strategy import FAMILIES, Family, Strategy, describe

MOST_NUMBERS = 1_000_000  # of an optimised strategy that a row can hold


@dataclass(frozen=True)
class Mechanism:
    """A strategy with its noise and error: one row of a plan's table.

    Args:
        strategy: How the noise is correlated.
        claim: The guarantee behind the noise, or an estimate if the mechanism is not certified.
        measured: What objectives are computed from, per unit of noise and clip norm.
    """

    strategy: Strategy
    claim: Guarantee | Estimate
    measured: Measured

    @property
    def name(self) -> str:
        """The family's name."""
        return self.strategy.family

    @property
    def family(self) -> Family:
        """The family's record: title, parameters, how it is built."""
        return FAMILIES[self.strategy.family]

    @property
    def certified(self) -> bool:
        """Whether the noise is proven to keep the promise; only such mechanisms are recommended and saved."""
        return self.claim.certified

    @property
    def guarantee(self) -> Guarantee:
        """The certified promise; raises `QuellError` if the noise is only estimated."""
        if isinstance(self.claim, Estimate):
            raise QuellError(
                f"the noise of {describe(self.strategy)} is only estimated: certify it with plan.price or quell price"
            )
        return self.claim

    @property
    def sampling(self) -> str:
        """The name of the scheme that its noise is for."""
        return self.claim.sampling

    @property
    def scheme(self) -> type[Scheme]:
        """The kind of batches that its noise is for."""
        return SCHEMES[self.claim.sampling]

    @property
    def noise_multiplier(self) -> float:
        """σ: standard deviation of the noise per unit of clip norm, sensitivity included."""
        return self.claim.noise_multiplier

    @property
    def unit_error(self) -> Error:
        """RMSE and MaxSE of the model's weights per unit of noise and clip norm."""
        return self.measured.error

    def score(self, objective: str) -> float:
        """The number that a plan with this objective minimises (docs/planner.md)."""
        if objective not in self._scores:
            self._scores[objective] = OBJECTIVES[objective].score(self.measured, self.noise_multiplier)
        return self._scores[objective]

    @cached_property
    def _scores(self) -> dict[str, float]:
        return {}

    @property
    def rmse(self) -> float:
        """Average error that noise causes in the model over the run, per unit of clip norm."""
        return self.score("rmse")

    @property
    def maxse(self) -> float:
        """The same at the worst step."""
        return self.score("maxse")

    def learning_rate(self, other: Mechanism) -> float | None:
        """The predicted best learning rate as a multiple of another mechanism's of the same run.

        None where the other takes the largest rate that the model has: what it would be beyond that is not known.
        """
        if other.measured.noise.best(other.noise_multiplier)[1] >= other.measured.landscape.rates[0]:
            return None
        mine, theirs = (each.measured.best_rate(each.noise_multiplier) for each in (self, other))
        return mine / theirs

    def across_runs(self, objective: str, seen: float) -> float:
        """The number by which mechanisms of different runs are compared, `seen` telling how many examples they see."""
        return OBJECTIVES[objective].across_runs(self.measured, self.noise_multiplier, seen)

    @property
    def buffers(self) -> int:
        """Model-sized vectors kept between steps."""
        return self.strategy.recurrence.buffers

    @property
    def draws(self) -> int:
        """Noise vectors generated per step."""
        return self.strategy.recurrence.draws

    def as_dict(self, objective: str = DEFAULT_OBJECTIVE) -> dict[str, Any]:
        """Plain data: a row of `--json` and of plan files (docs/json.md), with the score that the plan minimises."""
        guarantee, solution = self.guarantee, self.strategy.solution
        moved = guarantee.sensitivity
        return {
            "family": self.name,
            "parameters": dict(self.strategy.parameters),
            **({} if solution is None or solution.size > MOST_NUMBERS else {"solution": solution.tolist()}),
            "noise": {"multiplier": self.noise_multiplier, "buffers": self.buffers, "draws": self.draws},
            "error": {name: self.score(name) for name in dict.fromkeys(("rmse", "maxse", "training", objective))},
            "guarantee": {
                "sampling": guarantee.sampling,
                "adjacency": guarantee.adjacency,
                "method": guarantee.method,
                "failure_probability": guarantee.failure_probability,
                "sensitivity": moved.value,
                "sensitivity_kind": moved.kind,
                "sensitivity_method": moved.method,
            },
        }

    def __repr__(self) -> str:
        known = "certified" if self.certified else "estimated"
        return (
            f"<{describe(self.strategy)}: σ={at_least(self.noise_multiplier)} ({known}, {self.sampling} sampling), "
            f"RMSE {self.rmse:.4g}>"
        )
