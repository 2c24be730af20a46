"""Small models for a first try, without batch normalisation, which would mix examples."""

from __future__ import annotations

import math

from torch import nn

from quell.errors import QuellError

MODELS = ("auto", "linear", "mlp", "cnn")
_HIDDEN = 64
_LEAST_SIDE = 4


def build(kind: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model for examples of that shape; "auto" takes a CNN for images and an MLP for features."""
    if kind not in MODELS:
        raise QuellError(f"there is no model {kind!r}: use {', '.join(MODELS)}")
    image = len(shape) == 3 and min(shape[1:]) >= _LEAST_SIDE
    if kind == "cnn" and not image:
        raise QuellError(
            f"a cnn needs images of at least {_LEAST_SIDE} by {_LEAST_SIDE}, and examples have shape {shape}: use mlp"
        )
    features = math.prod(shape)
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))
    if kind == "cnn" or (kind == "auto" and image):
        return nn.Sequential(
            nn.Conv2d(shape[0], 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 16, classes),
        )
    return nn.Sequential(nn.Flatten(), nn.Linear(features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, classes))
