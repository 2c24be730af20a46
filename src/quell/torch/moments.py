"""Adam's second moments without the noise in them, while it steps (DP-AdamBC: Tang et al. 2024, arXiv:2312.14334).

Adam's v is the moving average of squared gradients, and noise of variance q_t adds the average of q_t to it, the same
for every entry: where noise is most of a gradient, v is the noise's everywhere, and Adam is SGD. So v − E is what it
divides by instead, with E that average, which is known: q_t is (scale/batch)² times the square of row t of C⁻¹.
An average over N squares of noise is off by about √(2/N) of itself, and less than that is not to be told from zero, so
v − E is at least that share of E.

The wrapped optimizer is torch's own. Before its step, v is set to what its own update will turn into v − E; afterwards
it gets the v that it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from quell._types import Array
from quell.analysis.error import noise_variances
from quell.errors import QuellError
from quell.strategy import Strategy
from quell.torch.joined import parts_of
from quell.torch.sharding import local


class CorrectedMoments:
    """Lets Adam or AdamW step by second moments without the noise of a strategy's rows, `scale` per unit of noise."""

    def __init__(self, optimizer: Optimizer, strategy: Strategy, scale: float, step: Callable[[], int]) -> None:
        self._step, self._kept = step, dict[nn.Parameter, Tensor]()
        variances = scale * scale * noise_variances(strategy)
        self._noise = cache(lambda beta: _averages(variances, beta))
        for part in parts_of(optimizer):
            part.register_step_pre_hook(self._before)
            part.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        step = self._step()
        for group in optimizer.param_groups:
            beta = float(group["betas"][1])
            noise = float(self._noise(beta)[step - 1]) if beta else 0.0
            least = math.sqrt(2 / samples(beta, step)) * noise
            for parameter in group["params"]:
                if beta and parameter.grad is not None and optimizer.state.get(parameter):  # which begins with a step
                    self._correct(parameter, optimizer.state[parameter]["exp_avg_sq"], beta, noise, least)

    def _correct(self, parameter: nn.Parameter, moments: Tensor, beta: float, noise: float, least: float) -> None:
        with torch.no_grad():
            held, squares = local(moments), local(parameter.grad).square().mul_(1 - beta)
            plain = held * beta + squares
            self._kept[parameter] = plain
            held.copy_((plain - noise).clamp_min_(least).sub_(squares).div_(beta))

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        kept, self._kept = self._kept, {}
        for parameter, plain in kept.items():
            local(optimizer.state[parameter]["exp_avg_sq"]).copy_(plain)


def require_correctable(optimizer: Optimizer) -> None:
    """Refuse optimizers whose second moments are none, or are of other numbers than gradients in float32."""
    for part in parts_of(optimizer):
        if not isinstance(part, AdamW) and (not isinstance(part, Adam) or _decays_moments(part)):
            raise QuellError(
                f"correct_moments=True takes AdamW, or Adam without weight_decay, not this {type(part).__name__}: "
                "use torch.optim.AdamW, or leave it out"
            )
        if any(p.element_size() < 4 for group in part.param_groups for p in group["params"]):
            raise QuellError(
                "correct_moments=True needs float32 parameters, because Adam's moments have their precision: use "
                "autocast for bfloat16, or leave it out"
            )


def _averages(variances: Array, beta: float) -> Array:
    """(n,) what noise of these variances adds to second moments, before Adam's correction for their start."""
    from quell.algebra.recursion import recursion  # compiled code, loaded when first needed

    return recursion(np.array([1.0, -beta]), (1 - beta) * variances)


def samples(beta: float, step: Any) -> Any:
    """How many equal shares would make an average as steady as one whose shares fade by beta, after so many steps."""
    faded = beta**step
    return (1 - faded) * (1 + beta) / ((1 - beta) * (1 + faded))


def _decays_moments(part: Optimizer) -> bool:
    """Whether weight decay is added to gradients, and so to their squares."""
    return any(group["weight_decay"] and not group.get("decoupled_weight_decay") for group in part.param_groups)
