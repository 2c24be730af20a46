"""Numbers to the device and back without waiting for it: a host that waits cannot send the work that comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_recorded: list[Tensor] = []  # what CUDA graphs read from host memory at every replay: some kilobytes each


def uploaded(numbers: Sequence[int] | NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    """Integers on the device, by a copy from pinned memory, which goes on by itself."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    pinned = torch.empty(np.shape(numbers), dtype=torch.int64, pin_memory=True)
    pinned.numpy()[...] = numbers
    if torch.cuda.is_current_stream_capturing():
        _recorded.append(pinned)
    return pinned.to(device, non_blocking=True)


class Awaited:
    """Numbers that the device is still working on. To read them is to wait for them, and for nothing sent later."""

    def __init__(self, value: Tensor) -> None:
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived is None:
            self._value = value
            return
        self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._value.copy_(value.detach(), non_blocking=True)
        self._arrived.record()

    @property
    def arrived(self) -> bool:
        """Whether nobody would wait."""
        return self._arrived is None or bool(self._arrived.query())

    def __float__(self) -> float:
        return float(self.numbers())

    def numbers(self) -> Any:
        """As `Tensor.tolist` nests them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._value.tolist()
