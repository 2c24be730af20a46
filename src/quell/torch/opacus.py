"""What `clipping="flat"` and `clipping="ghost"` share, which both stand on Opacus's hooks."""

from __future__ import annotations

from collections.abc import Iterable

from opacus.optimizers import DPOptimizer
from torch import nn

from quell.torch.optimizer import PrivateOptimizer

NOT_TRAINING = (
    "a {} layer has a backward pass but was not in train mode in the forward pass: call model.train() before training"
)
OTHER_LAYER = "use clipping='microbatch' or another layer"


class OpacusOptimizer(PrivateOptimizer, DPOptimizer):
    """An Opacus `DPOptimizer` in type and interface; clipping and noise are Quell's."""


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Autograd leaves the sum without clipping there as well."""
    for parameter in parameters:
        parameter.grad = None
