"""The optimal diagonal strategy for full batches: independent noise whose size changes from step to step.

With C = diag(d), ‖A·C⁻¹‖_F² = Σ ‖A_j‖²/d_j² and full-batch sensitivity² = (Σ d_j²) up to scale, so by
Cauchy–Schwarz d_j = ‖A_j‖^{1/2}, A_j the j-th column of the workload: (n−j)^{1/4} for prefix sums (Theorem 4 of
arXiv:2601.22334, 6% below DP-SGD).
"""

from __future__ import annotations

import numpy as np

from quell.errors import QuellError
from quell.participation import Participation
from quell.strategy.family import Family, no_lines
from quell.strategy.structure import ToeplitzStrategy
from quell.workload import Workload


def diagonal(workload: Workload, _: Participation) -> ToeplitzStrategy:
    """C = diag(‖A_j‖^{1/2})."""
    if not workload.is_toeplitz:
        raise QuellError("diagonal needs a constant learning rate: leave the schedule out, or take another mechanism")
    column_energy = np.cumsum(np.square(workload.coefficients))[::-1]
    return ToeplitzStrategy("diagonal", workload.steps, np.ones(1), np.ones(1), column_scale=column_energy**0.25)


DIAGONAL = Family(
    "diagonal",
    "independent noise that grows towards the end: the optimal diagonal for full batches",
    diagonal,
    lines=no_lines,
    constant_rate_only=True,
)
