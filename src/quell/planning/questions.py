"""Questions around a plan: what would change it, which ε a given error needs, how many epochs fixed steps should have.

All answers are estimates except `plan_for_rmse`, which ends in a certified plan.

Runs of different length are compared by the predicted loss. Other objectives are compared by their error *per example
seen*, divided by epochs × examples. The sum of gradients that training follows grows with the number of examples seen,
so that is noise relative to progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from threadpoolctl import threadpool_limits

from quell.errors import QuellError, require_count, require_finite
from quell.planning.mechanism import Mechanism
from quell.planning.planner import Plan, make_plan
from quell.planning.prices import Prices
from quell.planning.search import Progress, pareto, search
from quell.privacy import Meaning
from quell.privacy.accountant import round_up
from quell.run import Run, population
from quell.strategy import FAMILIES
from quell.strategy.family import HORIZON


@dataclass(frozen=True)
class Change:
    """A change of the run, the mechanism it would get, and its error relative to the plan's.

    `what` is "memory" (as much as the mechanism needs), or "epochs" or "batch_size" (twice as many), which are
    compared as different runs.
    """

    what: str
    mechanism: Mechanism
    ratio: float


@dataclass(frozen=True)
class Answers:
    """Everything that has to be computed before a plan can be explained or drawn."""

    dpsgd: Mechanism
    dpsgd_is_estimated: bool  # without amplification estimates are exact
    equivalent_epsilon: float  # the ε that DP-SGD would need for the recommended mechanism's RMSE
    learning_rate: float | None  # the predicted best one, as a multiple of DP-SGD's; None where it is not known
    lower_bound: float
    # The best for each amount of memory, by the plan's objective, within the other limits; empty where that is not
    # known, because a plan file does not hold the estimates that the plan was chosen from.
    frontier: tuple[Mechanism, ...]
    rmse_frontier: tuple[Mechanism, ...]  # of all alternatives, by RMSE
    changes: tuple[Change, ...]
    meaning: Meaning | None  # what the promise lets the best attacker find out; None where it was not asked


def answers(plan: Plan, thorough: bool = True, prices: Prices | None = None) -> Answers:
    """Ask what an explanation of the plan needs.

    Args:
        plan: The plan to explain.
        thorough: Whether to ask what would change the plan and what it means to an attacker, which takes seconds.
        prices: Where DP-SGD is taken from. Default: the plan's own run; a preview compares with the full plan's DP-SGD.
    """
    prices = prices or plan.prices
    any_memory = replace(plan.run.limits, memory=None)
    searched = len(plan.alternatives) > 1  # and not one that was named
    complete = searched and (bool(plan.estimates) or not any(scheme.amplifies for scheme in plan.run.schemes))
    compared = [each for each in plan.alternatives if complete and any_memory.fits(each)]
    return Answers(
        prices.dpsgd,
        prices.dpsgd.scheme.amplifies,
        prices.equivalent_epsilon(plan.mechanism),
        plan.mechanism.learning_rate(prices.dpsgd),
        plan.lower_bound,
        tuple(pareto(compared, plan.run.objective)),
        tuple(pareto(plan.alternatives, "rmse")),
        tuple(changes(plan)) if thorough else (),
        plan.meaning if thorough else None,
    )


def changes(plan: Plan) -> Iterator[Change]:
    """What more memory would do; and what more epochs and larger batches would do with the same kind of mechanism."""
    run, chosen = plan.run, plan.mechanism
    objective = run.objective
    for mechanism in pareto(plan.alternatives, objective):
        if mechanism.buffers > run.limits.buffers and mechanism.score(objective) < 0.97 * chosen.score(objective):
            ratio = mechanism.score(objective) / chosen.score(objective)
            yield Change("memory", mechanism, ratio)
            break
    if run.own_pattern or run.examples is None or run.batch_size is None:
        return
    for what, twice in (("epochs", 2 * run.epochs), ("batch_size", 2 * run.batch_size)):
        if (found := same_kind(plan, **{what: twice})) is not None:
            seen = 2.0 if what == "epochs" else 1.0
            yield Change(what, found, found.across_runs(objective, seen) / chosen.across_runs(objective, 1.0))


def same_kind(plan: Plan, **changes: int) -> Mechanism | None:
    """An estimate of the plan's kind of mechanism for its run with changes; None where the two do not go together."""
    run, chosen = plan.run, plan.mechanism
    if isinstance(run.optimizer.learning_rates, tuple):  # one number per step of this run
        return None
    parameters = dict(chosen.strategy.parameters)
    try:
        prices = Prices(run.changed(sampling=chosen.sampling, **changes))
        if HORIZON in parameters:
            now, before = prices.run.participation.separation, run.participation.separation
            parameters[HORIZON] = max(2, int(parameters[HORIZON]) * now // before)
        with threadpool_limits(1):
            strategy = prices.build(chosen.name, **parameters)
            return prices.estimate(strategy, chosen.scheme, chosen.noise_multiplier)
    except QuellError:
        return None


def plan_for_rmse(run: Run, target: float, progress: Progress | None = None) -> Plan:
    """The plan with the smallest ε whose certified RMSE is at most `target`.

    Args:
        run: The run, with objective "rmse". The search starts at its ε.
        target: The RMSE per unit of clip norm.
        progress: Called with (done, total, what) while the searches run.

    Returns:
        The certified plan; raises `QuellError` if no ε reaches the target.
    """
    if run.objective != "rmse":
        raise QuellError(
            f"a plan for a target RMSE minimises the rmse, not the objective {run.objective}: use objective rmse"
        )
    if require_finite("target_rmse", target) <= 0:
        raise QuellError(f"target_rmse={target:g} must be positive: it is the error per unit of clip norm")
    epsilon = run.epsilon
    for _ in range(3):
        epsilon = _epsilon_of(run.changed(epsilon=epsilon), target, progress)
    for more in (1.0, 1.004, 1.01, 1.02, 1.04):  # certificates ask for a little more noise than estimates
        found = make_plan(run.changed(epsilon=round_up(epsilon * more, 4)), progress)
        if found.mechanism.rmse <= target:
            return found
    raise QuellError(
        f"no epsilon near {epsilon:.3g} could be certified for RMSE {target:g}: ask for a little more error"
    )


def _epsilon_of(run: Run, target: float, progress: Progress | None) -> float:
    """The ε at which the best mechanism at the run's ε has the target error, by secants between logarithms."""
    with threadpool_limits(1):
        best = search(Prices(run), progress)[0]
        epsilon, noise = run.epsilon, best.noise_multiplier
        slope, wanted = -1.0, target / best.unit_error.rmse
        for _ in range(12):
            gap = math.log(wanted / noise)
            if abs(gap) < 2e-3:
                break
            step = min(max(gap / slope, -1.5), 1.5)
            changed = min(max(epsilon * math.exp(step), 1e-3), 1e4)
            if changed == epsilon:
                raise QuellError(f"target_rmse={target:g} is out of reach for any epsilon between 0.001 and 10,000")
            other = Prices(run.changed(epsilon=changed))
            after = other.estimate(best.strategy, best.scheme).noise_multiplier
            slope = min(math.log(after / noise) / math.log(changed / epsilon), -0.1)
            epsilon, noise = changed, after
    return epsilon


@dataclass(frozen=True)
class EpochChoice:
    """One way to spend a fixed number of steps: more epochs mean larger batches."""

    run: Run
    mechanism: Mechanism

    @property
    def error(self) -> float:
        """The objective's error per example (or user) seen, or the loss that it predicts."""
        return self.mechanism.across_runs(self.run.objective, self.run.epochs * (self.run.examples or 1))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `quell plan --steps --json`."""
        return {
            "epochs": self.run.epochs,
            "batch_size": self.run.batch_size,
            "mechanism": self.mechanism.name,
            "sampling": self.mechanism.sampling,
            "error": self.error,
        }


def choices_for_steps(
    steps: int,
    *,
    examples: int | None = None,
    users: int | None = None,
    groups: int | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> list[EpochChoice]:
    """Ways to spend a number of steps: about 1, 2, 4, … epochs, each with its best mechanism.

    Args:
        steps: Optimizer steps to spend.
        examples, users, groups: Size of the data set, in one of these, as in `Run.from_data`.
        progress: Called with (done, total, what) for every number of epochs.
        arguments: All other arguments of `Run.from_data`.

    Returns:
        The choices, fewest epochs first, until one more doubling gains little.
    """
    drawn, size = population(examples, users, groups)
    steps, count = require_count("steps", steps), require_count(f"{drawn}s", size)
    found: list[EpochChoice] = []
    ways = _batches_and_epochs(steps, count)
    sturdy = tuple(family for family in FAMILIES.values() if family.sturdy)
    for done, (batch_size, epochs) in enumerate(ways):
        sizes: dict[str, Any] = {f"{drawn}s": count, "epochs": epochs, "batch_size": batch_size}
        run = Run.from_data(**sizes, **arguments)
        if progress is not None:
            progress(done, len(ways), f"{epochs} epochs")
        with threadpool_limits(1):
            best = search(Prices(run), families=sturdy)
        found += [EpochChoice(run, each) for each in best[:1]]
        if len(found) > 1 and found[-1].error > 0.95 * found[-2].error:
            break
    if not found:
        raise QuellError("no mechanism goes with this sampling here: allow more schemes, or all (best)")
    return found


def _batches_and_epochs(steps: int, examples: int) -> list[tuple[int, int]]:
    """Batch sizes that double, each with the epochs that come within a tenth of the steps; the last is all examples."""
    sizes = [max(1, round(examples * 2**e / steps)) for e in range(steps.bit_length()) if 2**e < steps] + [examples]
    sizes = list({examples // size: size for size in sizes}.values())  # of those with as many batches, the largest
    ways = {size: round(steps / (examples // size)) for size in sizes}
    near = {size: n for size, n in ways.items() if abs(n * (examples // size) - steps) <= 0.1 * steps}
    return list(near.items())
