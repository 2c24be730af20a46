"""What differs between two plans: run, promise, noise, error, memory and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from quell.planning.planner import Plan
from quell.show import words

Fact = int | float | str | bool | None


@dataclass(frozen=True)
class Difference:
    """One fact that differs.

    Args:
        part: "run", "promise", "noise", "error", "memory" or "cost".
        name: Which fact of that part.
        first, second: What it is in either plan.
    """

    part: str
    name: str
    first: Fact
    second: Fact

    @property
    def ratio(self) -> float | None:
        """The second over the first, where both are numbers other than zero."""
        numbers = [each for each in (self.first, self.second) if isinstance(each, int | float) and each]
        return float(numbers[1] / numbers[0]) if len(numbers) == 2 else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data: one row of `quell diff --json`."""
        return {**asdict(self), "ratio": self.ratio}


def differences(first: Plan, second: Plan) -> list[Difference]:
    """The facts that differ, in the order of `facts`."""
    one, other = facts(first), facts(second)
    return [
        Difference(part, name, one[part][name], other[part][name])
        for part in one
        for name in one[part]
        if one[part][name] != other[part][name]
    ]


def facts(plan: Plan) -> dict[str, dict[str, Fact]]:
    """What two plans are compared by, in parts; errors are those of the recommended mechanism."""
    run, chosen = plan.run, plan.mechanism
    return {
        "run": {
            "batches are drawn of": f"{run.drawn}s",
            "examples": run.examples,
            "batch_size": run.batch_size,
            "epochs": run.epochs,
            "steps": run.steps,
            "participations": run.participation.count,
            "separation": run.participation.separation,
            "momentum": run.optimizer.momentum,
            "weight_decay": run.optimizer.weight_decay,
            "learning_rates": _rates(run.optimizer.learning_rates),
            "adaptive": run.optimizer.adaptive,
            "ema": run.optimizer.ema,
        },
        "promise": {
            "epsilon": chosen.guarantee.epsilon,
            "delta": chosen.guarantee.delta,
            "unit": words.whom(run.drawn, run.promise.unit),
            "neighbours": chosen.guarantee.adjacency,
            "sampling": chosen.sampling,
        },
        "noise": {"mechanism": words.label(chosen), "noise_multiplier": chosen.noise_multiplier},
        "error": {
            "rmse": chosen.rmse,
            "maxse": chosen.maxse,
            "training": chosen.score("training"),
            "training_per_example": chosen.across_runs("training", run.epochs * (run.examples or 1)),
        },
        "memory": {"buffers": chosen.buffers},
        "cost": {"draws": chosen.draws},
    }


def _rates(given: str | Sequence[float] | None) -> str | None:
    """A schedule, or a list of rates by a digest: there can be a million of them."""
    if given is None or isinstance(given, str):
        return given
    return f"a list of {len(given):,} (digest {blake2b(repr(tuple(given)).encode(), digest_size=4).hexdigest()})"
