"""Build, estimate and certify mechanisms for one run, and compute what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quell import privacy
from quell._types import Array
from quell.analysis import bounds
from quell.analysis.landscape import Landscape
from quell.analysis.objective import OBJECTIVES, Measured
from quell.errors import QuellError, short
from quell.planning.mechanism import Mechanism
from quell.privacy import Estimate, Guarantee, gaussian_sigma
from quell.run import Run
from quell.schemes import SCHEMES, Scheme, suited
from quell.strategy import INDEPENDENT, Parameter, Strategy, build


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices of mechanisms for a run. Errors are computed once per strategy, DP-SGD and bounds once per run."""

    run: Run

    def build(self, family: str, solution: Array | None = None, /, **parameters: Parameter) -> Strategy:
        """A strategy of a family for what the run is optimised for and its participation."""
        return build(family, self.run.designed_for, self.run.participation, solution, **parameters)

    def price(self, family: str, /, **parameters: Parameter) -> Mechanism:
        """Build a mechanism, certify the least noise that keeps the promise, and compute its error.

        >>> prices = Prices(Run.from_steps(steps=3900, epochs=10, epsilon=8, delta=1e-5))
        >>> round(prices.price("bisr", bands=16).rmse, 2)
        17.94
        """
        return self.certify(self.build(family, **parameters))

    def certify(
        self,
        strategy: Strategy,
        kind: type[Scheme] | None = None,
        comparisons: int = 1,
        near: float | None = None,
        noise: float | None = None,
    ) -> Mechanism:
        """Certify a strategy: with the least noise that keeps the promise, or with a given `noise`.

        Args:
            strategy: How the noise is correlated.
            kind: How batches are formed. Default: the allowed scheme with the least estimated noise.
            comparisons: How many certified mechanisms the best is chosen from; certificates by draws share their
                failure probability (Proof 8 in docs/proofs.md).
            near: About the right noise, if known, to start from.
            noise: The noise to certify instead of searching for the least.

        Returns:
            The mechanism; raises `QuellError` if the noise cannot be certified.
        """
        kind = kind or self._best_kind(strategy)
        promise, scheme = self.run.promise, self.scheme(strategy, kind)
        if noise is None:
            claim = privacy.calibrate(strategy, scheme, promise.epsilon, promise.delta, comparisons, near)
        else:
            claim = privacy.certify(strategy, scheme, noise, promise.epsilon, promise.delta, comparisons)
        return self.with_claim(strategy, claim)

    def estimate(self, strategy: Strategy, kind: type[Scheme], near: float | None = None, effort: int = 1) -> Mechanism:
        """The same in a fraction of the time, for a search; the noise is only estimated."""
        promise, scheme = self.run.promise, self.scheme(strategy, kind)
        return self.with_claim(
            strategy, privacy.estimate(strategy, scheme, promise.epsilon, promise.delta, near, effort)
        )

    def at_least(self, strategy: Strategy, kind: type[Scheme]) -> float:
        """A lower bound on the noise, in milliseconds."""
        accountant = self.scheme(strategy, kind).accountant(strategy)
        accountant.check_range(self.run.epsilon, self.run.delta)
        return accountant.at_least(self.run.epsilon, self.run.delta)

    def score(self, strategy: Strategy, objective: str, noise: float) -> float:
        """The objective with this noise."""
        return OBJECTIVES[objective].score(self._measured(strategy), noise)

    def kinds_for(self, strategy: Strategy) -> tuple[type[Scheme], ...]:
        """The allowed schemes that a strategy should be tried with."""
        return suited(self.run.schemes, strategy.bands, self.run.participation.separation)

    def scheme(self, strategy: Strategy, kind: type[Scheme]) -> Scheme:
        """The scheme of a kind for this run: same steps and expected batch size, groups as the strategy needs."""
        return kind.for_run(self.run.participation, max(1, strategy.bands))

    def scheme_of(self, mechanism: Mechanism) -> Scheme:
        """The scheme that a mechanism's noise is for."""
        kind = SCHEMES.get(mechanism.sampling)
        if kind is None:
            raise QuellError(f"there is no sampling scheme {short(mechanism.sampling)}: use {', '.join(SCHEMES)}")
        return self.scheme(mechanism.strategy, kind)

    @cached_property
    def dpsgd(self) -> Mechanism:
        """DP-SGD: independent noise under the same promise and the best of the allowed schemes, estimated."""
        independent = self.build(INDEPENDENT.name)
        return self.estimate(independent, self._best_kind(independent))

    @cached_property
    def lower_bound(self) -> float:
        """The best possible RMSE without amplification (Proof 2 in docs/proofs.md)."""
        bound = bounds.lower_bound(self.run.workload, self.run.participation)
        return bound * gaussian_sigma(self.run.epsilon, self.run.delta)

    def equivalent_epsilon(self, mechanism: Mechanism) -> float:
        """About the ε at which DP-SGD, under its best scheme, has the mechanism's RMSE."""
        noise = mechanism.rmse / self.dpsgd.unit_error.rmse
        accountant = self.scheme_of(self.dpsgd).accountant(self.dpsgd.strategy)
        return accountant.estimate_epsilon(noise, self.run.delta)

    @property
    def yardsticks(self) -> dict[str, float]:
        """What rows are compared with, as plain data."""
        return {"dpsgd_rmse": self.dpsgd.rmse, "lower_bound": self.lower_bound}

    def as_dict(self, mechanisms: Sequence[Mechanism]) -> dict[str, Any]:
        """The run and mechanisms for it as plain data: what `--json` prints (documented in docs/json.md)."""
        return {
            "run": self.run.as_dict(),
            "yardsticks": self.yardsticks,
            "mechanisms": [mechanism.as_dict(self.run.objective) for mechanism in mechanisms],
        }

    def _best_kind(self, strategy: Strategy) -> type[Scheme]:
        """The allowed scheme under which a strategy needs the least noise."""
        options = self.kinds_for(strategy)
        if not options:
            raise QuellError(
                f"{strategy!r} goes with none of the allowed schemes ({self.run.sampling}): allow more of them"
            )
        return min(options, key=lambda each: self._about(strategy, each)) if len(options) > 1 else options[0]

    def _about(self, strategy: Strategy, kind: type[Scheme]) -> float:
        try:
            return self.estimate(strategy, kind).noise_multiplier
        except QuellError:  # the two do not go together, or ε is out of the scheme's reach
            return float("inf")

    def with_claim(self, strategy: Strategy, claim: Guarantee | Estimate) -> Mechanism:
        """A mechanism from a strategy and a claim that was made elsewhere."""
        return Mechanism(strategy, claim, self._measured(strategy))

    def _measured(self, strategy: Strategy) -> Measured:
        if strategy not in self._known:
            found = Measured(strategy, self._landscape, self.run.optimizer.adaptive)
            for objective in {"rmse", self.run.objective}:  # a strategy whose error cannot be computed is refused here
                OBJECTIVES[objective].score(found, 1.0)
            self._known[strategy] = found
        return self._known[strategy]

    @cached_property
    def _known(self) -> dict[Strategy, Measured]:
        return {}

    @cached_property
    def _landscape(self) -> Landscape:
        return Landscape(self.run.workload, self.run.steps_per_epoch, self.run.batch_size)
