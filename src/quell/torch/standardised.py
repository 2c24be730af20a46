"""Weight standardisation: convolutions by weights of mean 0 and one size in every output channel.

With GroupNorm it is what private convolutional networks use in the place of BatchNorm (De et al. 2022,
arXiv:2204.13650). It is a function of the weights alone, so gradients stay those of single examples: an example's
gradient of the weight is the gradient of the standardised weight, brought back through the standardisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quell.torch.engine.bounds import wide

_EPSILON = 1e-5  # beside the variance of a channel's weights times their number


class StandardisedConv2d(nn.Conv2d):
    """`nn.Conv2d` by its weights w as (w − mean)/√(variance·number of weights + 10⁻⁵), channel by channel."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, standardised(self.weight)[0].to(input.dtype), self.bias)


def standardise_convolutions(model: nn.Module) -> nn.Module:
    """Make every `nn.Conv2d` of a model one with standardised weights, which keeps its parameters.

    Call it before you make the optimizer, for networks whose convolutions are followed by a normalisation layer.

    Args:
        model: The model, which is changed.

    Returns:
        The model.

    >>> model = standardise_convolutions(nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)))
    >>> type(model[0]).__name__
    'StandardisedConv2d'
    """
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = StandardisedConv2d
    return model


def standardised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The standardised weight, and (channels, 1, ...) what its channels were multiplied with, in float32 or better."""
    weight = wide(weight)
    axes = tuple(range(1, weight.dim()))
    centred = weight - weight.mean(axes, keepdim=True)
    factors = (centred.square().sum(axes, keepdim=True) + _EPSILON).rsqrt()
    return centred * factors, factors


def brought_back(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """From gradients (units, channels, rest) of the standardised weight, flat, to those of the weight.

    With f the factor of a channel and ŵ = f·(w − mean), an entry's is f·(g − mean(g) − ŵ·⟨ŵ, g⟩).
    """
    with torch.no_grad():
        made, factors = (values.flatten(1) for values in standardised(weight))

    def through(gradients: Tensor) -> Tensor:
        inner = (gradients * made).sum(2, keepdim=True)
        return (gradients - gradients.mean(2, keepdim=True) - inner * made) * factors

    return through
