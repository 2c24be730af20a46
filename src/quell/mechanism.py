"""A priced mechanism: a strategy, the noise it needs for a guarantee, and the error that noise causes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quell import bounds, privacy
from quell.error import Error, error
from quell.errors import QuellError, at_least
from quell.privacy import Guarantee, gaussian_sigma
from quell.sampling import SCHEMES, BallsInBins, BMinSep, Cyclic, CyclicPoisson, Poisson, Scheme
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
    cycle: Cyclic  # the epochs: steps, and steps between two uses of an example
    epochs: int
    epsilon: float
    delta: float
    sampling: str = Cyclic.name  # the scheme, or "best" where each mechanism takes its own

    def __post_init__(self) -> None:
        count, b = self.cycle.participation.count, self.cycle.separation
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
        return self.priced(build(name, self.workload, self.cycle.participation, None, **parameters))

    def priced(self, strategy: Strategy, sampling: str | None = None, comparisons: int = 1) -> Mechanism:
        """A strategy with the least noise that keeps the promise under a scheme (the problem's own by default).

        Where the best of several is taken, say between how many: certificates by sampling share their failure
        probability.
        """
        if sampling is None:
            options = self.schemes_for(strategy)
            sampling = min(options, key=lambda name: self.estimated(strategy, name)) if len(options) > 1 else options[0]
        scheme = self.scheme_of(strategy, sampling)
        guarantee = privacy.calibrate(strategy, scheme, self.epsilon, self.delta, comparisons)
        return Mechanism(strategy, guarantee, error(strategy, self.workload))

    def estimated(self, strategy: Strategy, sampling: str) -> float:
        """About the RMSE under a scheme, for a search; infinite where the two do not go together."""
        try:
            scheme = self.scheme_of(strategy, sampling)
            noise = privacy.estimate(strategy, scheme, self.epsilon, self.delta).noise_multiplier
            return noise * error(strategy, self.workload).rmse
        except QuellError:
            return math.inf

    def schemes_for(self, strategy: Strategy) -> tuple[str, ...]:
        """The schemes to try: the problem's own, or for "best" all that can amplify this strategy, and cyclic."""
        if self.sampling != "best":
            return (self.sampling,)
        few = getattr(strategy, "bands", self.workload.steps) <= self.cycle.separation
        return ("balls_in_bins", "cyclic_poisson", "cyclic") if few else ("balls_in_bins", "cyclic")

    def scheme_of(self, strategy: Strategy, sampling: str) -> Scheme:
        """The scheme of that name for this run: same steps and expected batch size, groups as the strategy needs."""
        n, b = self.workload.steps, self.cycle.separation
        bands = max(1, getattr(strategy, "bands", n))
        match sampling:
            case "cyclic":
                return self.cycle
            case "balls_in_bins":
                return BallsInBins(n, b)
            case "poisson":
                return Poisson(n, 1.0 / b)
            case "cyclic_poisson":
                return CyclicPoisson.of_fraction(n, bands, 1.0 / b)
            case "b_min_sep":
                return BMinSep.of_fraction(n, bands, 1.0 / b)
        raise QuellError(f"there is no sampling scheme {sampling!r}: use {', '.join(SCHEMES)}")

    @cached_property
    def dpsgd(self) -> Mechanism:
        """Independent noise under the same guarantee and scheme; Poisson sampling where schemes are free."""
        identity = build("identity", self.workload, self.cycle.participation)
        return self.priced(identity, "poisson" if self.sampling in ("best", "cyclic_poisson") else self.sampling)

    @cached_property
    def lower_bound(self) -> float:
        """No mechanism without amplification has a smaller RMSE."""
        bound = bounds.lower_bound(self.workload, self.cycle.participation)
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
            "separation": self.cycle.separation,
            "participations": self.cycle.participation.count,
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
                "method": guarantee.method.split(" (")[0],
                "failure_probability": guarantee.failure_probability,
                "sensitivity": guarantee.sensitivity.kind,
                "sensitivity_method": guarantee.sensitivity.method,
            },
        }
