"""GroupNorm in the place of BatchNorm, which mixes the examples of a batch."""

from __future__ import annotations

import torch
from torch import nn

from quell.errors import QuellError, require_count

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def replace_batch_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Put a GroupNorm in the place of every BatchNorm of a model, with the same scales and shifts.

    Call it before you make the optimizer, also for pretrained models: they need some training to get used to it. What
    timm's BatchNormAct2d does after the norm stays. In the place of a BatchNorm1d, which often has one number per
    channel, all channels are one group: alone, or two by two, normalised numbers would say nothing of the example.

    Args:
        model: The model, which is changed.
        groups: The most groups of channels; layers whose channels they do not divide get as many as do. A BatchNorm1d
            gets one.

    Returns:
        The model; a GroupNorm, if it is a BatchNorm itself.

    >>> model = replace_batch_norm(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), groups=4)
    >>> model[1].num_groups
    3
    """
    most = require_count("groups", groups)
    if type(model) in _BATCH_NORMS:
        return _group_norm(model, most)
    for name, child in model.named_children():
        if type(child).__name__ == "BatchNormAct2d":
            setattr(model, name, nn.Sequential(_group_norm(child, most), child.drop, child.act))
            continue
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and type(child) not in _BATCH_NORMS:
            raise QuellError(
                f"{name} is a {type(child).__name__}, which does more than a BatchNorm: build the model with another "
                "normalisation (many have norm_layer=)"
            )
        setattr(model, name, replace_batch_norm(child, most))
    return model


def _group_norm(layer: nn.Module, most: int) -> nn.GroupNorm:
    channels = layer.num_features
    most = 1 if isinstance(layer, nn.BatchNorm1d) else min(most, channels)
    groups = next(count for count in range(most, 0, -1) if channels % count == 0)
    made = nn.GroupNorm(groups, channels, layer.eps, layer.affine)
    if layer.affine:
        with torch.no_grad():
            made.weight.copy_(layer.weight)
            made.bias.copy_(layer.bias)
        made.to(layer.weight.device, layer.weight.dtype)
        for ours, theirs in ((made.weight, layer.weight), (made.bias, layer.bias)):
            ours.requires_grad_(theirs.requires_grad)
    return made.train(layer.training)
