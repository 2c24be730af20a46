"""What a run promises, has spent so far, and rests on: for people (Markdown) and for machines (JSON)."""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch

import quell
from quell import privacy
from quell.errors import at_least
from quell.privacy import Guarantee
from quell.sampling import Cyclic
from quell.strategy.structure import ToeplitzStrategy, describe
from quell.torch.run import Run


@dataclass(frozen=True)
class PrivacyReport:
    """One run at one step. `print(report)` shows Markdown."""

    unit: str
    adjacency: str
    sampling: str
    sampling_assumption: str
    mechanism: str
    noise_multiplier: float
    max_grad_norm: float
    expected_batch_size: float
    bound: str
    steps_done: int
    steps: int
    delta: float
    epsilon_at_the_end: float
    epsilon_so_far: float
    epsilon_so_far_is: str
    failure_probability: float
    key: str
    versions: dict[str, str]

    def json(self) -> str:
        """The report as a JSON object with one key per attribute."""
        return json.dumps(asdict(self), indent=2)

    def markdown(self) -> str:
        """The report as a page for people, ready to be kept with the model."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        failure = (
            f" (failure probability {self.failure_probability:.1g} included in δ)" if self.failure_probability else ""
        )
        end, spent, delta = (at_least(v) for v in (self.epsilon_at_the_end, self.epsilon_so_far, self.delta))
        rows = {
            "promise at the end": f"({end}, {delta})-DP after {self.steps:,} steps",
            "spent so far": f"ε = {spent} at δ = {delta} after {self.steps_done:,} steps ({self.epsilon_so_far_is})",
            "unit of privacy": self.unit,
            "neighbours": self.adjacency,
            "sampling": f"{self.sampling}: {self.sampling_assumption}",
            "mechanism": f"{self.mechanism}, noise multiplier {at_least(self.noise_multiplier)}",
            "clipping": f"every example's gradient to {self.max_grad_norm:g}, sums divided by "
            f"{self.expected_batch_size:g}",
            "bound": self.bound + failure,
            "key": self.key,
            "versions": versions,
        }
        lines = [f"| {name} | {value} |" for name, value in rows.items()]
        return "\n".join(["# Privacy report", "", "| | |", "|---|---|", *lines, ""])

    def __str__(self) -> str:
        return self.markdown()


def privacy_report(run: Run) -> PrivacyReport:
    """The report of a run; `optimizer.privacy_report()` calls it."""
    guarantee = run.mechanism.guarantee
    spent, kind = _spent(run)
    key = run.noise.key
    return PrivacyReport(
        unit="one example",
        adjacency=guarantee.adjacency,
        sampling=guarantee.sampling,
        sampling_assumption=_ASSUMPTIONS[guarantee.sampling],
        mechanism=describe(run.mechanism.strategy),
        noise_multiplier=run.mechanism.noise_multiplier,
        max_grad_norm=float(run.noise.max_grad_norm or 0.0),
        expected_batch_size=run.expected_batch_size,
        bound=f"{guarantee.method}, {guarantee.sensitivity.kind} sensitivity",
        steps_done=run.step,
        steps=run.noise.steps,
        delta=guarantee.delta,
        epsilon_at_the_end=guarantee.epsilon,
        epsilon_so_far=spent,
        epsilon_so_far_is=kind,
        failure_probability=guarantee.failure_probability,
        key=(
            f"{key.id}, made from a seed: NO privacy guarantee"
            if key.seeded
            else f"{key.id}, 256 bits from the operating system"
        ),
        versions=_versions(),
    )


def _spent(run: Run) -> tuple[float, str]:
    """ε of the steps released at the plan's δ, also of those after the one that a checkpoint went back to.

    The first t rows of C·G + Z are a mechanism of their own, with the leading block of C. For fixed batches and
    Toeplitz strategies that block is priced anew; otherwise the whole run's ε is an upper bound.
    """
    whole: Guarantee = run.mechanism.guarantee
    strategy, t = run.mechanism.strategy, run.released
    if t == 0:
        return 0.0, "nothing was released"
    if t < run.noise.steps and isinstance(run.batches.scheme, Cyclic) and isinstance(strategy, ToeplitzStrategy):
        separation = min(run.batches.scheme.separation, t)
        prefix = privacy.epsilon(leading_block(strategy, t), Cyclic(t, separation), whole.noise_multiplier, whole.delta)
        if prefix.epsilon < whole.epsilon:
            return prefix.epsilon, "certified for these steps" if t == run.step else f"of the {t:,} steps released"
    return whole.epsilon, "the whole run's, an upper bound" if t < run.noise.steps else "the whole run's"


def leading_block(strategy: ToeplitzStrategy, steps: int) -> ToeplitzStrategy:
    """The first `steps` rows and columns of C: what the first `steps` releases depend on."""
    given = (strategy.given_coefficients, strategy.given_noising, strategy.column_scale)
    coefficients, noising, scale = (None if values is None else values[:steps] for values in given)
    return replace(strategy, steps=steps, given_coefficients=coefficients, given_noising=noising, column_scale=scale)


_ASSUMPTIONS = {
    "cyclic": "fixed batches in a fixed order; nothing is assumed to be secret about them",
    "balls_in_bins": "each example's batch of the epoch was drawn once, and stays secret",
    "poisson": "each example joins each batch by an independent coin, and who joined stays secret",
    "cyclic_poisson": "fixed groups take turns, members join by independent coins, and who joined stays secret",
    "b_min_sep": "who has rested long enough joins by an independent coin, and who joined stays secret",
}


def _versions() -> dict[str, str]:
    found = {"quell": quell.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    with suppress(PackageNotFoundError):
        found["dp-accounting"] = version("dp-accounting")
    return found
