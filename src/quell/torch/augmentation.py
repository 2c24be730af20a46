"""Random changes to examples, made batch by batch in the loop's own process, on the device where the batch lies.

What an example adds to a step is bounded only if its rows are made from this example alone. So the first batches are
changed twice, with equal random numbers, the second time with all but one, or half, of the examples replaced, chosen at
random: the rows of those that stayed must stay the same. A function that keeps examples of earlier batches is not
noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quell.errors import QuellError, require_count
from quell.torch.nested import leaves, mapped, opened, tensors_in
from quell.torch.random_states import kept_states, own_states

_LOOKS = 4  # first batches that are changed twice


def crop_and_flip(images: Tensor, padding: int = 4) -> Tensor:
    """Move each image by up to `padding` pixels in both directions, and mirror every second one, at random.

    The pixels that come in are those of the border, reflected. For `make_private(..., augment=crop_and_flip)`; another
    padding by `functools.partial(crop_and_flip, padding=2)`.

    Args:
        images: (rows, channels, height, width), on any device.
        padding: Most pixels to move by, fewer than the images have.

    Returns:
        Images of the same shape, drawn with torch's random numbers.

    >>> crop_and_flip(torch.arange(12.0).view(1, 1, 3, 4), padding=1).shape
    torch.Size([1, 1, 3, 4])
    """
    most = require_count("padding", padding)
    if images.dim() != 4 or most >= min(images.shape[2:]):
        raise QuellError(
            f"crop_and_flip takes images (rows, channels, height, width) larger than padding={most}, not a tensor of "
            f"shape {tuple(images.shape)}"
        )
    count, channels, *sizes = images.shape
    places = []
    for size in sizes:
        moved = torch.randint(-most, most + 1, (count, 1), device=images.device)
        moved = (torch.arange(size, device=images.device) + moved).abs()
        places.append(size - 1 - (size - 1 - moved).abs())
    mirrored = torch.randint(0, 2, (count, 1), device=images.device, dtype=torch.bool)
    places[1] = torch.where(mirrored, places[1].flip(1), places[1])
    rows = torch.arange(count, device=images.device)[:, None, None, None]
    planes = torch.arange(channels, device=images.device)[:, None, None]
    return images[rows, planes, places[0][:, None, :, None], places[1][:, None, None, :]]


class Augmentation:
    """The user's function for the inputs of every batch, of which so many `rows` in a row are one unit's."""

    def __init__(self, change: Callable[[Any], Any], rows: int) -> None:
        if not callable(change):
            raise QuellError(f"augment is a {type(change).__name__}: pass a function of a batch's inputs")
        self.change, self.rows = change, rows
        self._looks, self._random = _LOOKS, np.random.default_rng()

    def __call__(self, batch: Any) -> Any:
        """The batch with other inputs: its first element, if it is a list or a tuple, or all of it."""
        found = opened(batch) if isinstance(batch, (list, tuple)) else None
        if found is None:
            return self._changed(batch)
        (inputs, *others), with_parts = found
        return with_parts([self._changed(inputs), *others])

    def _changed(self, inputs: Any) -> Any:
        count = _rows(inputs)
        if not self._looks or count <= self.rows:  # nobody else in it
            return self._made(inputs)
        given = mapped(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)
        before = own_states()
        made = self._made(inputs)  # which may write into them
        for units in self._chosen(count // self.rows):
            stays = units.repeat_interleave(self.rows)
            others = mapped(partial(self._others_replaced, stays=stays), given)
            with kept_states(before):
                again = self._made(others)
            self._require_apart(made, again, stays)
        self._looks -= 1  # a loop that goes on after the error gets it again
        return made

    def _made(self, inputs: Any) -> Any:
        made = self.change(inputs)
        if made is None:
            raise QuellError("augment returned None: let it return the inputs that it changed")
        return made

    def _chosen(self, units: int) -> list[Tensor]:
        """Two units alone, which see any mixing that they are in; and half of them, some of which see any pair's.

        They are drawn apart from the loop's random numbers.
        """
        places = torch.from_numpy(self._random.permutation(units))
        return [places == 0, places == 1, places < units // 2]

    def _others_replaced(self, value: Any, stays: Tensor) -> Any:
        """Units that do not stay become copies of a neighbour."""
        if not isinstance(value, Tensor):
            return value
        if not value.dim() or len(value) != len(stays):
            return value.clone()
        own = stays.to(value.device).view(-1, *[1] * (value.dim() - 1))
        return torch.where(own, value, value.roll(-self.rows, 0))

    def _require_apart(self, made: Any, again: Any, stays: Tensor) -> None:
        for first, second in zip(leaves(made), leaves(again), strict=True):
            if not isinstance(first, Tensor) or not first.dim():
                continue
            if len(first) != len(stays):
                raise QuellError(
                    f"augment made {len(first)} rows from {len(stays)}: let it change every row, and pass "
                    "rows_per_example= for several views of an example"
                )
            kept = stays.to(first.device)
            if first.shape != second.shape or not torch.equal(first[kept].nan_to_num(), second[kept].nan_to_num()):
                raise QuellError(
                    "augment makes an example's rows from other examples too, changes their order, or draws random "
                    "numbers that are not torch's, NumPy's or Python's own: change each row by itself, with "
                    "torch.rand and the like"
                )


def _rows(inputs: Any) -> int:
    tensors = [value for value in tensors_in(inputs) if value.dim()]
    if not tensors:
        raise QuellError("augment needs batches of tensors, or of lists, tuples, mappings and dataclasses of them")
    return len(tensors[0])
