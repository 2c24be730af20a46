"""Adam under noise: gradients are scaled before they are clipped, by what Adam has learnt of their sizes.

Adam divides by the root of its second moments v, and with them divides the noise: much of it where gradients are small,
little where they are large. Scale-then-privatise (Ganesh, McMahan and Thakurta 2025, arXiv:2507.01129) clips S∘g, adds
noise to the sum, and divides by S, with S about 1/√v. Then the noise that Adam sees is proportional to what it divides
by, so it is the same for every entry of an update, and correlated noise cancels as planned while v changes slowly.

S is a function of v, v of released gradients, so S costs no privacy: a step's S∘g is clipped to the same norm, whatever
S is, and the mechanism's next query may depend on what was released. It needs no state of its own.

As S is to be r cᵀ (`engine/scales.py`), v is taken as the product of its row and column means, as Adafactor does. S is
normalised so that the mean of 1/S² over all entries is 1: noise keeps its power and moves to where gradients are large.

v is mostly noise, and S decides how large the noise of the next step is. So a mean of few squares, which chance has
made small or large, would make itself smaller or larger. Every mean is drawn towards that of all as if it had been seen
in a hundred squares more: in the first steps S is nearly 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from quell.errors import QuellError
from quell.torch.engine.scales import Scale
from quell.torch.joined import parts_of
from quell.torch.moments import samples
from quell.torch.sharding import any_sharded

_LEAST = 1e-3  # of a mean: the least that a row, a column or a parameter counts as, so that no scale runs away
_ASSUMED = 100  # squares at the mean of all, beside those that were seen


class SecondMoments:
    """The scales of all trained parameters, from the state of the optimizer that trains them."""

    def __init__(self, optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._params = optimizer, dict(params)
        for part in parts_of(optimizer):
            if not isinstance(part, (Adam, AdamW)):
                raise QuellError(f"scale_gradients=True takes Adam or AdamW, not {type(part).__name__}: leave it out")
            if part.state:
                raise QuellError(
                    "scale_gradients=True needs an optimizer that has taken no step: scales follow its second moments, "
                    "and those of earlier steps may not be private. Load a checkpoint after make_private"
                )
        if any_sharded(self._params.values()):
            raise QuellError("scale_gradients=True needs whole parameters, and these are sharded: leave it out")
        self.scales = {name: _ones(parameter) for name, parameter in self._params.items()}
        sizes = torch.tensor([float(p.numel()) for p in self._params.values()])
        self._sizes = (sizes / sizes.sum()).to(next(iter(self._params.values())).device)  # shares of all entries
        self._update()
        for part in parts_of(optimizer):
            part.register_step_post_hook(self._update)
            part.register_load_state_dict_post_hook(self._update)

    def _update(self, *_: Any) -> None:
        """Scales for the next step, from the second moments after this one; ones before the first."""
        with torch.no_grad():
            if all(self._optimizer.state.get(parameter) for parameter in self._params.values()):
                groups = self._optimizer.param_groups
                betas = {id(parameter): group["betas"][1] for group in groups for parameter in group["params"]}
                self._set([self._moments(parameter, betas[id(parameter)]) for parameter in self._params.values()])
            else:
                for scale in self.scales.values():
                    scale.rows.fill_(1.0)
                    scale.columns.fill_(1.0)

    def _set(self, moments: Sequence[tuple[Tensor, Any]]) -> None:
        """Everything stays on the device: nobody waits for a number."""
        tiny = torch.finfo(torch.float32).tiny
        levels = [moment.mean().clamp_min(tiny) for moment, _ in moments]
        mean = torch.stack(levels) @ self._sizes
        wholes = torch.stack(
            [_drawn_in(level / mean, seen * v.numel()) for level, (v, seen) in zip(levels, moments, strict=True)]
        )
        wholes = wholes / (wholes @ self._sizes)
        for scale, (moment, seen), level, whole in zip(self.scales.values(), moments, levels, wholes, strict=True):
            rows, columns = (moment.mean(axis) / level for axis in (1, 0))
            scale.rows.copy_((_drawn_in(rows, seen * moment.shape[1]) * whole).rsqrt())
            scale.columns.copy_(_drawn_in(columns, seen * moment.shape[0]).rsqrt())

    def _moments(self, parameter: nn.Parameter, beta: Any) -> tuple[Tensor, Any]:
        """(first dimension, the rest) v, corrected for its start at zero, and how many squares an entry has seen."""
        state = self._optimizer.state[parameter]
        moments = state["exp_avg_sq"].float().reshape(_shape(parameter))
        return moments / (1 - beta ** state["step"]), samples(beta, state["step"])


def _drawn_in(shares: Tensor, squares: Any) -> Tensor:
    """Shares of a mean, seen in so many squares each, drawn towards 1, with the mean that they had."""
    weight = _LEAST + _ASSUMED / squares
    return (shares + weight) / (1 + weight)


def _ones(parameter: nn.Parameter) -> Scale:
    rows, columns = _shape(parameter)
    return Scale(*(torch.ones(size, device=parameter.device) for size in (rows, columns)))


def _shape(parameter: nn.Parameter) -> tuple[int, int]:
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows, math.prod(parameter.shape[1:])
