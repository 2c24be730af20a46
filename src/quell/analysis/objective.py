"""What "best" means: the number that a plan minimises. Every objective is one entry of `OBJECTIVES`.

`rmse` and `maxse` are the errors of the iterates. They are provable, but not what a practitioner is after: mechanisms
with the least RMSE cancel more than training likes. The λCGD paper found the best λ two to four times smaller on the
scale 1/(1−λ) (arXiv:2601.22334, §5.1).

`training`, the default, is the RMSE on the optimizer's own workload with *forgetting*: what a step did fades over a
ninth of the run, as it does in training, where later gradients correct for old noise; so it pays to cancel noise within
that time and not beyond. For prefix sums λCGD's best memory 1/(1−λ) is √(horizon/2), so a ninth of the run means a
third of the memory, the middle of the paper's two to four. Adaptive optimizers, for which the advice is fewer bands,
get a sixteenth, a quarter of the memory.

With momentum, that RMSE e is multiplied by (e / the noise of a single step)^(1/9): of two mechanisms that leave the
same error, the one whose steps are noisier trains better. Such noise is taken back by the next steps, momentum hides
most of it, and what is left shakes the weights, which leads to flatter minima (Orvieto et al., arXiv:2202.02831). The
exponent is the one number here that was found by training; any from 1/18 to 1/6 ranks about as well (docs/results.md).
Adam divides by the size of single gradients, so noisy steps make it slow: adaptive optimizers get the geometric mean
with the RMSE on plain prefix sums instead.

Where an average of the weights is used, `training` is still that of the weights themselves, at which gradients are
taken, and strategies are optimised for them. By the error of the average, the best noise is one that shakes the weights
many times as much and is taken back within the average: BandMF with 16 bands that was fitted to the average trained 2.6
points worse than the one fitted to the weights, at the same predicted error of the average (docs/results.md).

`loss` predicts what training leaves of a loss (`quell.analysis.landscape`), told as a noise multiplier: that of
independent noise, DP-SGD's, which would leave as much. So it is on the scale of the noise, as the other objectives are.
It ranks runs worse than `training`, most of all at ε ≤ 2: a quadratic loss has no flatter minima (docs/results.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from quell.analysis.error import Error, error
from quell.analysis.landscape import Landscape, Noise
from quell.strategy import Strategy
from quell.workload import Workload, forgetting, sgd, single_steps

FORGETTING, ADAPTIVE_FORGETTING = 1 / 9, 1 / 16  # of the run: how long a step's noise matters
JITTER = 1 / 9  # how much it is worth that single steps are noisy


@dataclass(frozen=True, eq=False)
class Measured:
    """What objectives are computed from, for one strategy in one run and per unit of noise; each when first asked."""

    strategy: Strategy
    landscape: Landscape
    adaptive: bool = False

    @cached_property
    def error(self) -> Error:
        """RMSE and MaxSE of the model's weights."""
        return error(self.strategy, self.landscape.workload)

    @cached_property
    def training(self) -> float:
        """The objective `training`."""
        return training_error(self.strategy, self.landscape.workload, self.adaptive)

    @cached_property
    def noise(self) -> Noise:
        """What the noise costs at every learning rate."""
        return self.landscape.noise(self.strategy)

    @cached_property
    def single_step(self) -> float:
        """The noise of a single step."""
        return single_step_error(self.strategy)

    def best_rate(self, sigma: float) -> float:
        """The predicted best learning rate, in a unit that all mechanisms of a run have in common.

        Adam divides gradients by their size, which is mostly that of the noise, so what acts as SGD's rate does is
        Adam's divided by the noise of a single step.
        """
        rate = self.noise.best(sigma)[1]
        return rate * sigma * self.single_step if self.adaptive else rate


@dataclass(frozen=True)
class Objective:
    """A number to minimise, and what it is called.

    Args:
        title: Its name in sentences.
        column: Its name in tables.
        meaning: What the column means, in few words and in full.
        score: The number, from what was measured and the noise multiplier. It grows with the noise.
        predicts_loss: Whether runs of other lengths and batches are compared by the loss that is left, and not by the
            error per example seen.
        of_average: Whether it is about the average of the weights where one is used, and not about the weights.
    """

    title: str
    column: str
    meaning: tuple[str, str]
    score: Callable[[Measured, float], float]
    predicts_loss: bool = False
    of_average: bool = True

    def compares(self, drawn: str) -> str:
        """What `across_runs` is, in words."""
        return "predicted loss" if self.predicts_loss else f"error per {drawn} seen"

    def across_runs(self, measured: Measured, sigma: float, seen: float) -> float:
        """The number by which runs are compared that saw `seen` examples, or units of any other size."""
        return measured.noise.best(sigma)[0] if self.predicts_loss else self.score(measured, sigma) / seen


OBJECTIVES = {
    "training": Objective(
        "predicted training error",
        "train",
        ("predicted training error", "predicted training error, an RMSE in which the effect of a step fades"),
        lambda measured, sigma: measured.training * sigma,
        of_average=False,
    ),
    "rmse": Objective(
        "RMSE",
        "RMSE",
        ("average error", "average error that noise causes in the model, per unit of clip norm"),
        lambda measured, sigma: measured.error.rmse * sigma,
    ),
    "maxse": Objective(
        "MaxSE",
        "MaxSE",
        ("worst-step error", "the same as RMSE at the worst step"),
        lambda measured, sigma: measured.error.maxse * sigma,
    ),
    "loss": Objective(
        "σ of an equally good DP-SGD",
        "as σ",
        ("σ of an equally good DP-SGD", "the σ with which DP-SGD is predicted to train equally well"),
        lambda measured, sigma: measured.noise.equivalent(sigma),
        predicts_loss=True,
    ),
}
DEFAULT_OBJECTIVE = "training"


def training_error(strategy: Strategy, workload: Workload, adaptive: bool = False) -> float:
    """The objective `training` per unit of noise.

    >>> from quell import strategy, workload
    >>> from quell.participation import Participation
    >>> run = workload.prefix(900)
    >>> dpsgd = strategy.build("identity", run, Participation.single(900))
    >>> round(training_error(dpsgd, run) ** 2, 1)  # about half of 100 steps, less at the start
    47.5
    """
    workload = workload.without_average
    horizon = (ADAPTIVE_FORGETTING if adaptive else FORGETTING) * workload.steps
    own = error(strategy, forgetting(workload, horizon)).rmse
    if not workload.momentum:
        return own
    if adaptive:
        return math.sqrt(own * error(strategy, sgd(workload.steps)).rmse)
    return own * math.pow(own / single_step_error(strategy), JITTER)


def single_step_error(strategy: Strategy) -> float:
    """The noise of a single step per unit of noise, as a root mean square over the run."""
    return error(strategy, single_steps(strategy.steps)).rmse
