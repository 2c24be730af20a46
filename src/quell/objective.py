"""What "best" means: the number a plan makes small.

`rmse` and `maxse` are the errors of the iterates. They are provable, but not what a practitioner is after: mechanisms
with the least RMSE cancel more than training likes. The λCGD paper found the best λ two to four times smaller on the
scale 1/(1−λ) (arXiv:2601.22334, §5.1), and over mechanisms trained on CIFAR-10 with momentum the RMSE on the momentum
workload alone ranked accuracies poorly, its geometric mean with the RMSE on plain prefix sums far better.

`training` is one number that says both. It is a weighted geometric mean of three RMSEs, all of them under the same
noise:

* on the optimizer's own workload: noise in the iterates;
* on prefix sums: the same for an optimizer that forgets its momentum, as sharp valleys make it;
* on the identity: noise in a single step, which moves the point where the next gradient is taken.

With prefix sums as workload the first two agree, and λCGD's best memory 1/(1−λ) falls from √(n/2) to √(n·(½ − w)) with
w the weight of the single step: a third of it at w = 4/9. Adaptive optimizers divide by a running mean of squared
gradients, noise included, so there the single step weighs more, which means fewer bands.
"""

from __future__ import annotations

import math

from quell.error import error
from quell.strategy import Strategy
from quell.workload import Workload, identity, prefix

OBJECTIVES = ("training", "rmse", "maxse")
STEP_WEIGHT, ADAPTIVE_STEP_WEIGHT = 0.4, 0.45  # of noise in a single step; at ½ independent noise would always win


def training_error(strategy: Strategy, workload: Workload, adaptive: bool = False) -> float:
    """The `training` objective per unit of noise.

    >>> from quell import strategy, workload
    >>> from quell.sampling import Participation
    >>> run = workload.prefix(4)
    >>> dpsgd = strategy.build("identity", run, Participation.single(4))
    >>> round(training_error(dpsgd, run), 4)  # (√2.5)^0.6 · 1^0.4
    1.3163
    """
    step_weight = ADAPTIVE_STEP_WEIGHT if adaptive else STEP_WEIGHT
    own = math.log(error(strategy, workload).rmse)
    plain = own if workload.is_prefix else math.log(error(strategy, prefix(workload.steps)).rmse)
    step = math.log(error(strategy, identity(workload.steps)).rmse)
    return math.exp((1 - step_weight) * (own + plain) / 2 + step_weight * step)
