"""Autocast as the loop uses it: to run something again under the same settings, and to round as it would round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Autocast:
    """The settings for a kind of device, such as "cuda", at one moment."""

    device: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def now(cls, device: str) -> Autocast:
        return cls(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def again(self) -> torch.autocast:
        """A context with these settings, without the cache: what is run again has other weights than the loop's."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


def lowered(value: Tensor) -> Tensor:
    """The value as autocast, if it is on, gives it to a matrix product."""
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value
