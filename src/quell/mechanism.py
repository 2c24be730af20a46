"""A priced mechanism: a strategy, the noise it needs for a guarantee, and the error that noise causes."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quell import bounds, privacy
from quell.error import Error, error
from quell.errors import QuellError, at_least
from quell.objective import training_error
from quell.privacy import Estimate, Guarantee, gaussian_sigma
from quell.privacy.accountant import round_up
from quell.quick import quick
from quell.sampling import SCHEMES, BallsInBins, BMinSep, Cyclic, CyclicPoisson, Poisson, Scheme, scheme_names
from quell.strategy import Parameter, Strategy, build, describe
from quell.workload import Workload

MOST_BINS = 16_384  # steps per epoch up to which balls in bins is tried unasked: every draw takes so many numbers
MOST_NUMBERS = 1_000_000  # of an optimised strategy that a row can hold


@dataclass(frozen=True)
class Mechanism:
    """One row of a comparison. RMSE and MaxSE are those of the iterates per unit of clip norm, noise included.

    Its noise rests on a `claim`: a guarantee, or an estimate where a search has not certified it.
    """

    strategy: Strategy
    claim: Guarantee | Estimate
    unit_error: Error
    unit_training: float  # `quell.objective.training_error`

    @property
    def name(self) -> str:
        return self.strategy.family

    @property
    def certified(self) -> bool:
        """Whether the noise is proven to keep the promise; only such mechanisms are recommended and saved."""
        return self.claim.certified

    @property
    def guarantee(self) -> Guarantee:
        """The proven promise; an estimate has none."""
        if isinstance(self.claim, Estimate):
            raise QuellError(
                f"{describe(self.strategy)} has only an estimate of its noise: price it to get a guarantee"
            )
        return self.claim

    @property
    def sampling(self) -> str:
        """The name of the scheme that its noise is for."""
        return self.claim.sampling

    @property
    def noise_multiplier(self) -> float:
        return self.claim.noise_multiplier

    @property
    def training(self) -> float:
        """The objective `training` (`quell.objective`)."""
        return self.unit_training * self.noise_multiplier

    def score(self, objective: str) -> float:
        """What a plan with this objective makes small."""
        return {"rmse": self.rmse, "maxse": self.maxse, "training": self.training}[objective]

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
        return f"<{describe(self.strategy)}: σ={at_least(self.noise_multiplier)}, RMSE {self.rmse:.4g}, {self.claim}>"


@dataclass(frozen=True)
class Problem:
    """What every mechanism of a comparison has in common, with the yardsticks it is measured against."""

    workload: Workload
    cycle: Cyclic  # the epochs: steps, and steps between two uses of an example
    epochs: int
    epsilon: float
    delta: float
    sampling: str = Cyclic.name  # the allowed schemes, of which each mechanism takes its best
    adaptive: bool = False  # whether the optimizer is; the objective `training` asks
    unit: str = "example"  # whose presence is hidden

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

    def priced(
        self, strategy: Strategy, sampling: str | None = None, comparisons: int = 1, near: float | None = None
    ) -> Mechanism:
        """A strategy with the least noise that keeps the promise under a scheme (the best allowed by default).

        Where the best of several is taken, say between how many: certificates by sampling share their failure
        probability. `near` is about the noise, where that is known.
        """
        if sampling is None:
            options = self.schemes_for(strategy)
            sampling = min(options, key=lambda name: self._about(strategy, name)) if len(options) > 1 else options[0]
        scheme = self.scheme_of(strategy, sampling)
        return self.with_claim(
            strategy, privacy.calibrate(strategy, scheme, self.epsilon, self.delta, comparisons, near)
        )

    def estimated(self, strategy: Strategy, sampling: str, near: float | None = None, effort: int = 1) -> Mechanism:
        """The same in a fraction of the time, for a search: the noise is an estimate (`quell.quick`)."""
        scheme = self.scheme_of(strategy, sampling)
        return self.with_claim(strategy, quick(strategy, scheme, self.epsilon, self.delta, near, effort))

    def certified(self, mechanism: Mechanism, comparisons: int = 1) -> Mechanism:
        """The same strategy and scheme with noise that is proven to suffice."""
        strategy, noise = mechanism.strategy, mechanism.noise_multiplier
        scheme = self.scheme_of(strategy, mechanism.sampling)
        if isinstance(scheme, Poisson | CyclicPoisson):  # nothing is drawn: a little more than the estimate will do
            for more in (1.0005, 1.002, 1.008):
                with suppress(QuellError):
                    enough = round_up(noise * more)
                    return self.with_claim(
                        strategy, privacy.certify(strategy, scheme, enough, self.epsilon, self.delta)
                    )
        return self.priced(strategy, mechanism.sampling, comparisons, noise)

    def unit_score(self, strategy: Strategy, objective: str) -> float:
        """The objective per unit of noise."""
        if objective == "training":
            return training_error(strategy, self.workload, self.adaptive)
        return float(getattr(error(strategy, self.workload), objective))

    def with_claim(self, strategy: Strategy, claim: Guarantee | Estimate) -> Mechanism:
        """The mechanism of a strategy whose noise is known, with its errors."""
        unit_training = training_error(strategy, self.workload, self.adaptive)
        return Mechanism(strategy, claim, error(strategy, self.workload), unit_training)

    def _about(self, strategy: Strategy, sampling: str) -> float:
        try:
            return self.estimated(strategy, sampling).noise_multiplier
        except QuellError:  # the two do not go together
            return math.inf

    def schemes_for(self, strategy: Strategy) -> tuple[str, ...]:
        """The allowed schemes that can amplify this strategy, and cyclic; a single allowed one is not questioned."""
        allowed = scheme_names(self.sampling)
        if len(allowed) == 1:
            return allowed
        bands = getattr(strategy, "bands", self.workload.steps)
        most = {"poisson": 1, "cyclic_poisson": self.cycle.separation, "b_min_sep": self.cycle.separation}
        if self.cycle.separation > MOST_BINS:
            most["balls_in_bins"] = 0
        if bands == 1 and "poisson" in allowed:  # nothing amplifies independent noise more
            most["cyclic_poisson"] = most["balls_in_bins"] = 0
        return tuple(name for name in allowed if bands <= most.get(name, bands))

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
        """The yardstick: independent noise under the same promise and the best of the allowed schemes, estimated."""
        identity = build("identity", self.workload, self.cycle.participation)
        allowed = scheme_names(self.sampling)
        coins = "poisson" if (len(allowed) > 1 and "poisson" in allowed) or allowed == ("cyclic_poisson",) else None
        return self.estimated(identity, coins or allowed[0])

    @cached_property
    def lower_bound(self) -> float:
        """No mechanism without amplification has a smaller RMSE."""
        bound = bounds.lower_bound(self.workload, self.cycle.participation)
        return bound.value * gaussian_sigma(self.epsilon, self.delta)

    def promise(self, mechanism: Mechanism) -> str:
        """The guarantee in words, with the unit of privacy that this problem is about."""
        return str(mechanism.guarantee).replace("per example", f"per {self.unit}")

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
            "training": mechanism.training,
            "buffers": mechanism.buffers,
            "draws": mechanism.draws,
            "dpsgd_rmse": self.dpsgd.rmse,
            "lower_bound": self.lower_bound,
            "guarantee": {
                "epsilon": guarantee.epsilon,
                "delta": guarantee.delta,
                "unit": self.unit,
                "adjacency": guarantee.adjacency,
                "sampling": guarantee.sampling,
                "method": guarantee.method.split(" (")[0],
                "failure_probability": guarantee.failure_probability,
                "sensitivity": guarantee.sensitivity.kind,
                "sensitivity_method": guarantee.sensitivity.method,
            },
        }
