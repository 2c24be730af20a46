"""What "best" means: the number that a plan minimises.

`rmse` and `maxse` are the errors of the iterates. They are provable, but not what a practitioner is after: mechanisms
with the least RMSE cancel more than training likes. The λCGD paper found the best λ two to four times smaller on the
scale 1/(1−λ) (arXiv:2601.22334, §5.1), and over mechanisms trained on CIFAR-10 with momentum the geometric mean of the
RMSE on the momentum workload and on plain prefix sums ranked accuracies no worse than either (docs/results.md).

`training` says both. It is the RMSE on the optimizer's own workload with *forgetting*: what a step did fades over a
ninth of the run, as it does in training, where later gradients correct for old noise; so it pays to cancel noise within
that time and not beyond. For prefix sums λCGD's best memory 1/(1−λ) is √(horizon/2), so a ninth of the run means a
third of the memory, the middle of the paper's two to four. Adaptive optimizers, for which the advice is fewer bands,
get a sixteenth, a quarter of the memory. Where the optimizer has momentum or decay, the number is the geometric mean of
that and the RMSE on plain prefix sums.
"""

from __future__ import annotations

import math

from quell.analysis.error import error
from quell.strategy import Strategy
from quell.workload import Workload, forgetting, prefix

OBJECTIVES = ("training", "rmse", "maxse")
FORGETTING, ADAPTIVE_FORGETTING = 1 / 9, 1 / 16  # of the run: how long a step's noise matters


def training_error(strategy: Strategy, workload: Workload, adaptive: bool = False) -> float:
    """The objective `training` per unit of noise.

    >>> from quell import strategy, workload
    >>> from quell.participation import Participation
    >>> run = workload.prefix(900)
    >>> dpsgd = strategy.build("identity", run, Participation.single(900))
    >>> round(training_error(dpsgd, run) ** 2, 1)  # about half of 100 steps, less at the start
    47.5
    """
    horizon = (ADAPTIVE_FORGETTING if adaptive else FORGETTING) * workload.steps
    own = error(strategy, forgetting(workload, horizon)).rmse
    if workload.is_prefix:
        return own
    return math.sqrt(own * error(strategy, prefix(workload.steps)).rmse)
