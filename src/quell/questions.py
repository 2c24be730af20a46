"""Questions around a plan: what would change it, which ε a given error needs, how many epochs fixed steps should have.

All answers are estimates (`quell.quick`) except `plan_for_rmse`, which ends in a certified plan.

Runs of different length are compared by their error *per example seen*, RMSE / (epochs × examples): the sum of
gradients that training follows grows with the number of examples seen, so that is noise relative to progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from threadpoolctl import threadpool_limits

from quell.errors import QuellError, require_count, require_finite
from quell.mechanism import Mechanism, Problem
from quell.planning import Plan, make_plan, problem_of
from quell.privacy.accountant import round_up
from quell.sampling import Cyclic
from quell.search import Progress, pareto, search
from quell.setup import Setup
from quell.show import words
from quell.strategy import build
from quell.strategy.family import HORIZON

_STURDY = ("identity", "lambda_cgd", "fractional", "band_toeplitz", "blt")  # found in a second, one of each kind


@dataclass(frozen=True)
class Change:
    """A change of the run, the mechanism it would get, and its error relative to the plan's.

    `longer` says that the changed run sees examples more often, so that errors are compared per example seen.
    """

    what: str
    mechanism: Mechanism
    ratio: float
    longer: bool


@dataclass(frozen=True)
class Answers:
    """Everything that has to be computed before a plan can be explained or drawn."""

    dpsgd: Mechanism
    dpsgd_is_estimated: bool  # without amplification estimates are exact
    equivalent_epsilon: float  # the ε that DP-SGD would need for the recommended mechanism's RMSE
    lower_bound: float
    frontier: tuple[Mechanism, ...]  # the best by the plan's objective for so much memory, within the other limits
    rmse_frontier: tuple[Mechanism, ...]  # of all alternatives, by RMSE
    changes: tuple[Change, ...]


def answers(plan: Plan, thorough: bool = True) -> Answers:
    """Ask what an explanation of the plan needs; `thorough` adds what would change it, which takes about a second."""
    any_memory = replace(plan.setup, memory=None)
    return Answers(
        plan.problem.dpsgd,
        plan.problem.dpsgd.sampling != Cyclic.name,
        plan.dpsgd_equivalent_epsilon,
        plan.lower_bound,
        tuple(pareto([each for each in plan.alternatives if any_memory.fits(each)], plan.setup.objective)),
        tuple(pareto(plan.alternatives, "rmse")),
        tuple(changes(plan)) if thorough else (),
    )


def changes(plan: Plan) -> Iterator[Change]:
    """What more memory would do; and what more epochs and larger batches would do with the same kind of mechanism."""
    setup, chosen = plan.setup, plan.mechanism
    objective = setup.objective
    for mechanism in pareto(plan.alternatives, objective):
        if mechanism.buffers > setup.buffer_limit and mechanism.score(objective) < 0.97 * chosen.score(objective):
            ratio = mechanism.score(objective) / chosen.score(objective)
            yield Change(f"Memory for {words.copies(mechanism.buffers)}", mechanism, ratio, longer=False)
            break
    longer, larger = {"epochs": 2 * setup.epochs}, {"batch_size": 2 * setup.batch_size}
    for what, options in (("Twice the epochs", longer), ("Batches twice as large", larger)):
        if setup.user_level or isinstance(setup.learning_rates, tuple) or options.get("batch_size", 0) > setup.examples:
            continue
        other = replace(setup, sampling=chosen.sampling, **options)  # type: ignore[arg-type]
        try:
            with threadpool_limits(1):
                found = _same_kind(chosen, problem_of(other), setup.cycle.separation)
        except QuellError:  # the mechanism does not go with that
            continue
        seen = other.epochs / setup.epochs
        yield Change(what, found, found.score(objective) / seen / chosen.score(objective), longer=True)


def _same_kind(chosen: Mechanism, problem: Problem, separation: int) -> Mechanism:
    """About what the plan's mechanism can do for another problem; `separation` is that of the plan."""
    parameters = dict(chosen.strategy.parameters)
    if HORIZON in parameters:
        parameters[HORIZON] = max(2, int(parameters[HORIZON]) * problem.cycle.separation // separation)
    strategy = build(chosen.name, problem.workload, problem.cycle.participation, None, **parameters)
    return problem.estimated(strategy, chosen.sampling, chosen.noise_multiplier)


def plan_for_rmse(setup: Setup, target: float, progress: Progress | None = None) -> Plan:
    """The plan with the least ε whose RMSE is at most `target`; the search starts at the set-up's own ε."""
    if setup.objective != "rmse":
        raise QuellError(
            f"a plan for a target RMSE minimises the rmse, not the objective {setup.objective}: use objective rmse"
        )
    if require_finite("target_rmse", target) <= 0:
        raise QuellError(f"target_rmse={target:g} must be positive: it is the error per unit of clip norm")
    epsilon = setup.epsilon
    for _ in range(3):
        epsilon = _epsilon_of(replace(setup, epsilon=epsilon), target, progress)
    for more in (1.0, 1.004, 1.01, 1.02, 1.04):  # certificates ask for a little more noise than estimates
        found = make_plan(replace(setup, epsilon=round_up(epsilon * more, 4)), progress)
        if found.mechanism.rmse <= target:
            return found
    raise QuellError(
        f"no epsilon near {epsilon:.3g} could be certified for RMSE {target:g}: ask for a little more error"
    )


def _epsilon_of(setup: Setup, target: float, progress: Progress | None) -> float:
    """The ε at which the best mechanism at the set-up's ε has the target error, by secants between logarithms."""
    with threadpool_limits(1):
        best = search(setup, problem_of(setup), progress)[0]
        epsilon, noise = setup.epsilon, best.noise_multiplier
        slope, wanted = -1.0, target / best.unit_error.rmse
        for _ in range(12):
            gap = math.log(wanted / noise)
            if abs(gap) < 2e-3:
                break
            step = min(max(gap / slope, -1.5), 1.5)
            changed = min(max(epsilon * math.exp(step), 1e-3), 1e4)
            if changed == epsilon:
                raise QuellError(f"target_rmse={target:g} is out of reach for any epsilon between 0.001 and 10,000")
            task = problem_of(replace(setup, epsilon=changed))
            after = task.estimated(best.strategy, best.sampling).noise_multiplier
            slope = min(math.log(after / noise) / math.log(changed / epsilon), -0.1)
            epsilon, noise = changed, after
    return epsilon


@dataclass(frozen=True)
class Choice:
    """One way to spend a fixed number of steps: more epochs mean larger batches."""

    setup: Setup
    mechanism: Mechanism

    @property
    def noise_per_example(self) -> float:
        """Error per example seen."""
        return self.mechanism.score(self.setup.objective) / (self.setup.epochs * self.setup.examples)

    def as_dict(self) -> dict[str, Any]:
        """Plain data (documented in docs/json.md)."""
        return {
            "epochs": self.setup.epochs,
            "batch_size": self.setup.batch_size,
            "mechanism": self.mechanism.name,
            "sampling": self.mechanism.sampling,
            "noise_per_example": self.noise_per_example,
        }


def choices_for_steps(steps: int, setup: Setup, progress: Progress | None = None) -> list[Choice]:
    """Epochs 1, 2, 4, … at about `steps` steps, each with its best mechanism; `setup` gives everything else."""
    steps = require_count("steps", steps)
    found: list[Choice] = []
    rounds = [2**e for e in range(20) if steps <= setup.examples * 2**e <= steps * setup.examples]
    for done, epochs in enumerate(rounds):
        option = replace(setup, epochs=epochs, batch_size=round(setup.examples * epochs / steps))
        if abs(option.steps - steps) > 0.1 * steps:  # an epoch has a whole number of steps
            break
        if progress is not None:
            progress(done, len(rounds), f"{epochs} epochs")
        with threadpool_limits(1):
            best = search(option, problem_of(option), families=_STURDY)
        found += [Choice(option, each) for each in best[:1]]
        if len(found) > 1 and found[-1].noise_per_example > 0.95 * found[-2].noise_per_example:
            break
    if not found:
        raise QuellError(
            f"{steps:,} steps cannot be spent on {setup.examples:,} examples: take at most that many steps"
        )
    return found
