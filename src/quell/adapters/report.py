"""The privacy report of a run: its promise, what it has spent so far, and what both depend on."""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import quell
from quell import privacy
from quell.noise import Key
from quell.privacy import Guarantee, Meaning
from quell.schemes import Batches, Scheme
from quell.show import statement, words
from quell.strategy.structure import ToeplitzStrategy, describe

if TYPE_CHECKING:
    from quell.planning import Mechanism

GENERATORS = {  # what their security means for a promise (docs/noise.md)
    "chacha20": ": the promise holds against everyone who cannot break ChaCha20",
    "chacha8": ": the promise holds against everyone who cannot break ChaCha with 8 rounds, a smaller security margin "
    "than the usual 20",
    "philox": ", which is NOT secure: the promise holds only against people who do not try to find the key. Publish "
    "no model that was trained with it",
}

CERTIFIED, WHOLE = "certified for these steps", "the whole run's, an upper bound"


@dataclass(frozen=True)
class PrivacyReport:
    """The promise of a run and what it has spent so far. `print(report)` shows Markdown, `json()` gives JSON.

    `epsilon_at_the_end` and `delta` hold after all `steps`. `epsilon_so_far` holds for the steps released so far, at
    the same δ; `epsilon_so_far_is` says whether it was certified for them or is that of the whole run. Both are for one
    `unit` more or less, an example or a user with all rows (`adjacency`), and need batches of what is `drawn`, formed
    as `sampling_assumption` says; there are `examples` of these, or users. Where the key is `seeded`, nothing is
    promised. `failure_probability` is that of Monte-Carlo accounting and is already included in
    `delta`. `clipped` says whether Quell clipped the gradients; otherwise the loop has to, and nothing checks it.
    `meaning` is what the whole run lets the best attacker find out. `generator` says what made the noise, and
    against whom the promise holds with it.
    """

    unit: str
    drawn: str
    examples: int
    adjacency: str
    sampling: str
    sampling_assumption: str
    mechanism: str
    noise_multiplier: float
    max_grad_norm: float
    clipped: bool
    expected_batch_size: float
    bound: str
    steps_done: int
    steps: int
    delta: float
    epsilon_at_the_end: float
    epsilon_so_far: float
    epsilon_so_far_is: str
    failure_probability: float
    meaning: Meaning
    key: str
    seeded: bool
    generator: str
    versions: dict[str, str]
    search: str | None = None  # what the promise covers beside this run; set by `quell.tuning.TuningPlan.covering`

    def json(self) -> str:
        """The report as a JSON object with one key per attribute."""
        return json.dumps({**asdict(self), "meaning": self.meaning.as_dict()}, indent=2)

    def markdown(self) -> str:
        """The report as a page for people, ready to be kept with the model."""
        return statement.report_markdown(self)

    def __str__(self) -> str:
        return self.markdown()

    def _repr_markdown_(self) -> str:
        return self.markdown()


def privacy_report(
    mechanism: Mechanism,
    batches: Batches,
    key: Key,
    generator: str,
    max_grad_norm: float,
    clipped: bool,
    step: int,
    released: int,
    framework: tuple[str, str],
) -> PrivacyReport:
    """The report of a run that stands before `step` and has released `released` steps.

    Args:
        mechanism: The mechanism whose noise is added.
        batches: The batches of the run.
        key: The key of the run.
        generator: What makes normals of the key, by name.
        max_grad_norm: What gradients are clipped to.
        clipped: Whether Quell clips them.
        step: The step that is due.
        released: How many steps count as released, also those after the one that a checkpoint went back to.
        framework: Name and version of what the run is trained with.

    Returns:
        The report.
    """
    guarantee = mechanism.guarantee
    so_far, kind = spent(mechanism, batches.scheme, step, released)
    return PrivacyReport(
        unit=f"one {words.whom(batches.unit)}",
        drawn=batches.unit,
        examples=batches.examples,
        adjacency=guarantee.adjacency,
        sampling=guarantee.sampling,
        sampling_assumption=statement.assumption(guarantee.sampling, batches.unit),
        mechanism=describe(mechanism.strategy),
        noise_multiplier=mechanism.noise_multiplier,
        max_grad_norm=max_grad_norm,
        clipped=clipped,
        expected_batch_size=batches.expected_size,
        bound=f"{words.method(guarantee)}, {guarantee.sensitivity.kind} sensitivity",
        steps_done=step,
        steps=mechanism.strategy.steps,
        delta=guarantee.delta,
        epsilon_at_the_end=guarantee.epsilon,
        epsilon_so_far=so_far,
        epsilon_so_far_is=kind,
        failure_probability=guarantee.failure_probability,
        meaning=privacy.meaning(mechanism.strategy, batches.scheme, guarantee),
        key=(
            f"{key.id}, made from a seed: NO privacy guarantee"
            if key.seeded
            else f"{key.id}, 256 bits from the operating system"
        ),
        seeded=key.seeded,
        generator=f"{generator}{GENERATORS[generator]}",
        versions=_versions(*framework),
    )


def spent(mechanism: Mechanism, scheme: Scheme, step: int, released: int) -> tuple[float, str]:
    """ε of all steps released so far, at the plan's δ, and how it is known (Proof 14 in docs/proofs.md).

    Steps that were released before going back to an older checkpoint count too.
    """
    whole: Guarantee = mechanism.guarantee
    strategy, t = mechanism.strategy, released
    if t == 0:
        return 0.0, "nothing was released"
    shorter = scheme.of_first(t) if t < strategy.steps else None
    if shorter is not None and isinstance(strategy, ToeplitzStrategy):
        prefix = privacy.epsilon(leading_block(strategy, t), shorter, whole.noise_multiplier, whole.delta)
        if prefix.epsilon < whole.epsilon:
            return prefix.epsilon, CERTIFIED if t == step else f"of the {t:,} steps released"
    return whole.epsilon, WHOLE if t < strategy.steps else "the whole run's"


def leading_block(strategy: ToeplitzStrategy, steps: int) -> ToeplitzStrategy:
    """The first `steps` rows and columns of C: what the first `steps` releases depend on."""
    given = (strategy.given_coefficients, strategy.given_noising, strategy.column_scale)
    coefficients, noising, scale = (None if values is None else values[:steps] for values in given)
    return replace(strategy, steps=steps, given_coefficients=coefficients, given_noising=noising, column_scale=scale)


def _versions(framework: str, its_version: str) -> dict[str, str]:
    found = {"quell": quell.__version__, framework: its_version, "python": platform.python_version()}
    with suppress(PackageNotFoundError):
        found["dp-accounting"] = version("dp-accounting")
    return found
