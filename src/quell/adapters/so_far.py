"""What the log of a run says of it beside what was measured: its facts, ε so far, and how large its noise should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quell._types import Array
from quell.adapters.report import CERTIFIED, WHOLE, spent
from quell.analysis.error import noise_variances
from quell.errors import QuellError, at_least
from quell.noise import Key
from quell.schemes import Batches
from quell.show import words
from quell.strategy.structure import describe

if TYPE_CHECKING:
    from quell.planning import Mechanism

_SURE = 3.0  # how many standard deviations above the noise's own a released norm must lie to show a gradient


class SoFar:
    """The columns of a log that follow from the plan and from norms of what was released."""

    def __init__(self, mechanism: Mechanism, batches: Batches, max_grad_norm: float, elements: int) -> None:
        self._mechanism, self._batches, self._elements = mechanism, batches, elements
        self._steps, self._batch = mechanism.strategy.steps, batches.expected_size
        self._expected = expected_norms(mechanism, max_grad_norm, elements)
        self._known: tuple[int, tuple[float, str]] = (0, (0.0, "nothing was released"))

    def row(self, step: int, released: int, squares: Sequence[float]) -> dict[str, Any]:
        """The row after `step` steps.

        Args:
            step: How many steps were taken.
            released: How many count as released, also those after the one that a checkpoint went back to.
            squares: Squared norms of the noisy gradient sums of the last steps, as they were released.

        Returns:
            Values by column. The norm of the gradient below the noise is estimated by E‖g + z‖² = ‖g‖² + E‖z‖²; the
            noise z that was drawn is secret, and not looked at.
        """
        epsilon, kind = self._spent_so_far(released)
        found = sum(squares) / len(squares)
        row: dict[str, Any] = {
            "step": step,
            "steps_left": self._steps - step,
            "epsilon_at_most": float(at_least(epsilon, 7)),
            "epsilon_is": kind,
            "gradient_norm": math.sqrt(found) / self._batch,
        }
        if self._expected is None:
            return row
        expected = float(np.mean(np.square(self._expected[step - len(squares) : step])))
        unsure = _SURE * expected * math.sqrt(2.0 / (self._elements * len(squares)))
        seen = found - expected > unsure
        row["noise_norm"] = math.sqrt(expected) / self._batch
        row["noise_to_signal"] = math.sqrt(expected / (found - expected)) if seen else None
        return row

    def _spent_so_far(self, released: int) -> tuple[float, str]:
        """ε of all steps released so far, or a little more, and what it was certified for. Cheap enough to ask often.

        Steps are counted up to the next of eight numbers per doubling. A promise for more steps holds for fewer, and a
        run of a million steps then asks the accountant some 150 times.
        """
        counted = counted_up(released, self._steps)
        if counted != self._known[0]:
            self._known = counted, spent(self._mechanism, self._batches.scheme, counted, counted)
        epsilon, kind = self._known[1]
        if counted > released:
            kind = f"certified for the first {counted:,} steps, an upper bound" if kind == CERTIFIED else WHOLE
        return epsilon, kind


def counted_up(released: int, steps: int) -> int:
    """The next number of steps for which ε is asked: at most an eighth more.

    >>> [counted_up(released, 1000) for released in (0, 1, 15, 17, 100, 999)]
    [0, 1, 15, 18, 104, 1000]
    """
    coarse = 1 << max(0, released.bit_length() - 4)
    return min(-(-released // coarse) * coarse, steps)


def expected_norms(mechanism: Mechanism, max_grad_norm: float, elements: int) -> Array | None:
    """(n,) root of the expected squared norm of each step's noise over so many elements; None where no formula is fast.

    Every element of row t of C⁻¹Z has the variance ‖row t of C⁻¹‖².
    """
    try:
        rows = np.sqrt(noise_variances(mechanism.strategy))
    except QuellError:
        return None
    return np.asarray(max_grad_norm * mechanism.noise_multiplier * elements**0.5 * rows)


def run_facts(mechanism: Mechanism, batches: Batches, key: Key, max_grad_norm: float) -> dict[str, Any]:
    """What a log says of its run, as plain data."""
    guarantee = mechanism.guarantee
    return {
        "key": key.id,
        "seeded": key.seeded,
        "mechanism": describe(mechanism.strategy),
        "unit": f"one {words.whom(batches.unit)}",
        "sampling": guarantee.sampling,
        "steps": mechanism.strategy.steps,
        "epsilon_at_the_end": guarantee.epsilon,
        "delta": guarantee.delta,
        "noise_multiplier": mechanism.noise_multiplier,
        "max_grad_norm": max_grad_norm,
        "expected_batch_size": batches.expected_size,
    }
