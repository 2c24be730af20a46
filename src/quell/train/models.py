"""Small models for a first try, without batch normalisation, which would mix examples."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quell.errors import QuellError
from quell.train.table import Columns

MODELS = ("auto", "linear", "mlp", "cnn")
_HIDDEN = 64
_LEAST_SIDE = 4


def build(kind: str, shape: tuple[int, ...], classes: int, columns: Columns | None = None) -> nn.Module:
    """A model for examples of that shape, or rows of a table; "auto" takes a CNN for images and an MLP for the rest."""
    if kind not in MODELS:
        raise QuellError(f"there is no model {kind!r}: use {', '.join(MODELS)}")
    image = len(shape) == 3 and min(shape[1:]) >= _LEAST_SIDE
    if kind == "cnn" and not image:
        raise QuellError(
            f"a cnn needs images of at least {_LEAST_SIDE} by {_LEAST_SIDE}, and examples have shape {shape}: use mlp"
        )
    features = math.prod(shape) if columns is None else len(columns.columns) + columns.buckets
    first = nn.Flatten() if columns is None else Features(len(columns.columns), columns.buckets)
    if kind == "linear":
        return nn.Sequential(first, nn.Linear(features, classes))
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
    return nn.Sequential(first, nn.Linear(features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, classes))


class Features(nn.Module):
    """Rows from `Columns.encoded` into features: the numbers, and 1 for each feature that a text switches on."""

    def __init__(self, columns: int, buckets: int) -> None:
        super().__init__()
        self.columns, self.buckets = columns, buckets

    def forward(self, rows: Tensor) -> Tensor:
        numbers, places = rows[:, : self.columns], rows[:, self.columns :].long()
        flags = rows.new_zeros(len(rows), self.buckets + 1).scatter_add(1, places, torch.ones_like(numbers))
        return torch.cat([numbers, flags[:, 1:]], dim=1)
