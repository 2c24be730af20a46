"""Which computable number ranks mechanisms as training does? Rank correlations over the runs of `lambda_sweep.py`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
from common import PLANS, Entry, read_json, strategy_of
from plans import plan_name
from scipy.stats import spearmanr

from quell import workload
from quell.analysis.error import error
from quell.analysis.objective import training_error


@dataclass(frozen=True)
class Study:
    labels: list[str]
    epsilons: list[float]
    accuracy: dict[tuple[str, float], list[float]]  # of the seeds
    correlations: dict[str, list[float]]  # per candidate, one for each ε


def analysed(accuracy: dict[tuple[str, float], list[float]], size: str) -> Study:
    """From the accuracies of (mechanism, ε); `size` says which runs they come from."""
    epsilons = sorted({epsilon for _, epsilon in accuracy}, reverse=True)
    labels = [label for label, epsilon in accuracy if epsilon == epsilons[0]]
    labels.sort(key=lambda label: -statistics.mean(accuracy[label, epsilons[0]]))
    plans = read_json(PLANS / "predictors.json")
    correlations: dict[str, list[float]] = {}
    for epsilon in epsilons:
        known = [label for label in labels if (label, epsilon) in accuracy]
        means = [statistics.mean(accuracy[label, epsilon]) for label in known]
        numbers = [candidates(plans[plan_name(label, epsilon, "balls_in_bins", size)]) for label in known]
        for name in numbers[0]:
            rank = spearmanr([-number[name] for number in numbers], means).statistic
            correlations.setdefault(name, []).append(float(rank))
    return Study(labels, epsilons, accuracy, correlations)


def candidates(plan: Entry) -> dict[str, float]:
    """Amplified RMSE on three workloads, geometric means of them, and the planner's own objective."""
    n, chosen, sigma = plan["steps"], strategy_of(plan), plan["noise_multiplier"]
    workloads = {
        "optimizer": workload.sgd(n, plan["momentum"], plan["weight_decay"]),
        "prefix": workload.prefix(n),
        "identity": workload.toeplitz(np.eye(1, n)[0]),
    }
    single = {name: sigma * error(chosen, task).rmse for name, task in workloads.items()}
    pairs = (("optimizer", "prefix"), ("optimizer", "identity"), ("prefix", "identity"), tuple(workloads))
    means = {" × ".join(names): float(np.prod([single[name] for name in names]) ** (1 / len(names))) for names in pairs}
    planners = sigma * training_error(chosen, workloads["optimizer"])
    return {**single, **means, "the planner's `training`": planners}
