"""A priced mechanism: a strategy, the noise it needs for a guarantee, and the error that noise causes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quell import bounds, privacy
from quell.error import Error, error
from quell.errors import QuellError, at_least
from quell.privacy import Guarantee, gaussian_sigma
from quell.sampling import Cyclic
from quell.strategy import Parameter, Strategy, build, describe
from quell.workload import Workload

MOST_NUMBERS = 1_000_000  # of an optimised strategy that a row can hold


@dataclass(frozen=True)
class Mechanism:
    """One row of a comparison. RMSE and MaxSE are those of the iterates per unit of clip norm, noise included."""

    strategy: Strategy
    guarantee: Guarantee
    unit_error: Error

    @property
    def name(self) -> str:
        return self.strategy.family

    @property
    def noise_multiplier(self) -> float:
        return self.guarantee.noise_multiplier

    @property
    def rmse(self) -> float:
        return self.unit_error.rmse * self.noise_multiplier

    @property
    def maxse(self) -> float:
        return self.unit_error.maxse * self.noise_multiplier

    @property
    def buffers(self) -> int:
        return self.strategy.recurrence.buffers

    @property
    def draws(self) -> int:
        return self.strategy.recurrence.draws

    def __repr__(self) -> str:
        return (
            f"<{describe(self.strategy)}: σ={at_least(self.noise_multiplier)}, RMSE {self.rmse:.4g}, {self.guarantee}>"
        )


@dataclass(frozen=True)
class Problem:
    """What every mechanism of a comparison has in common, with the yardsticks it is measured against."""

    workload: Workload
    sampling: Cyclic
    epochs: int
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        count, b = self.sampling.participation.count, self.sampling.separation
        if count < self.epochs:
            raise QuellError(
                f"separation={b} lets an example take part {count} times, but {self.epochs} epochs use it more often: "
                f"give a separation of at most {self.workload.steps // self.epochs}"
            )

    def price(self, name: str, **parameters: Parameter) -> Mechanism:
        """Build, calibrate and evaluate one mechanism.

        >>> from quell import workload
        >>> problem = Problem(workload.prefix(3900), Cyclic.from_epochs(3900, 10), 10, epsilon=8, delta=1e-5)
        >>> round(problem.price("bisr", bands=16).rmse, 2)
        17.94
        """
        strategy = build(name, self.workload, self.sampling.participation, None, **parameters)
        guarantee = privacy.calibrate(strategy, self.sampling, self.epsilon, self.delta)
        return Mechanism(strategy, guarantee, error(strategy, self.workload))

    @cached_property
    def dpsgd(self) -> Mechanism:
        """Independent noise under the same sampling and guarantee."""
        return self.price("identity")

    @cached_property
    def lower_bound(self) -> float:
        """No mechanism without amplification has a smaller RMSE."""
        bound = bounds.lower_bound(self.workload, self.sampling.participation)
        return bound.value * gaussian_sigma(self.epsilon, self.delta)

    def row(self, mechanism: Mechanism) -> dict[str, Any]:
        """The mechanism as plain data: the keys of `--json` and of plan files (documented in docs/json.md)."""
        guarantee, solution = mechanism.guarantee, mechanism.strategy.solution
        return {
            "mechanism": mechanism.name,
            **mechanism.strategy.parameters,
            **({} if solution is None or solution.size > MOST_NUMBERS else {"solution": solution.tolist()}),
            "steps": self.workload.steps,
            "epochs": self.epochs,
            "separation": self.sampling.separation,
            "participations": self.sampling.participation.count,
            "momentum": self.workload.momentum,
            "weight_decay": self.workload.decay,
            "learning_rates": "constant" if self.workload.rates is None else "scheduled",
            "epsilon": guarantee.epsilon,
            "delta": guarantee.delta,
            "sampling": guarantee.sampling,
            "sensitivity": guarantee.sensitivity.value,
            "sensitivity_kind": guarantee.sensitivity.kind,
            "noise_multiplier": mechanism.noise_multiplier,
            "rmse": mechanism.rmse,
            "maxse": mechanism.maxse,
            "buffers": mechanism.buffers,
            "draws": mechanism.draws,
            "dpsgd_rmse": self.dpsgd.rmse,
            "lower_bound": self.lower_bound,
            "guarantee": {
                "epsilon": guarantee.epsilon,
                "delta": guarantee.delta,
                "unit": "example",
                "adjacency": guarantee.adjacency,
                "sampling": guarantee.sampling,
                "method": guarantee.method,
                "sensitivity": guarantee.sensitivity.kind,
                "sensitivity_method": guarantee.sensitivity.method,
            },
        }
