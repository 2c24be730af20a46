"""A moving average of the weights: often better than the last ones, and free, because it uses released weights only.

After step t the average is Σ_s rate^(t−s)·w_s / Σ_s rate^(t−s) over the weights w_1, …, w_t after each step. Divided
by the sum of its shares it needs no warm-up: the first weights, which were never trained, have no share in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quell.errors import QuellError, require_finite
from quell.torch.engine.bounds import wide_type
from quell.torch.sharding import dealt_like, local


class AveragedWeights:
    """The average of each parameter, in float32 or better, dealt out over ranks as the parameter is."""

    def __init__(self, params: Sequence[nn.Parameter], rate: float) -> None:
        self.rate = rate
        self.shown = False  # whether the model has the averaged weights now
        self._params = list(params)
        self._values = [torch.zeros_like(p, dtype=wide_type(p), requires_grad=False) for p in self._params]

    def update(self, stepped: Iterable[nn.Parameter], step: int) -> None:
        """Let the weights after step number `step`, counted from 1, join the average of the parameters that stepped."""
        chosen = {id(parameter) for parameter in stepped}
        pairs = [pair for pair in zip(self._values, self._params, strict=True) if id(pair[1]) in chosen]
        share = math.expm1(math.log(self.rate)) / math.expm1(step * math.log(self.rate))
        averages = [local(average) for average, _ in pairs]
        with torch.no_grad():
            torch._foreach_lerp_(averages, [local(p).to(average.dtype) for average, p in pairs], share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters have the averaged values; afterwards their own again."""
        if self.shown:
            raise QuellError(
                "the model has the averaged weights already: use one `with optimizer.averaged()` at a time"
            )
        own = [local(parameter).clone() for parameter in self._params]
        self.shown = True
        try:
            self._put(local(average) for average in self._values)
            yield
        finally:
            self._put(own)
            self.shown = False

    def _put(self, values: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._params, values, strict=True):
                local(parameter).copy_(value)

    def require_training_weights(self) -> None:
        """Refuse what is meant for the weights that are trained while the averaged ones stand in for them."""
        if self.shown:
            raise QuellError("the model has the averaged weights: leave `with optimizer.averaged()` first")

    def state_dict(self) -> dict[str, Any]:
        """The averages, dealt out over ranks as they are."""
        return {"rate": self.rate, "values": list(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for average, value in zip(self._values, state["values"], strict=True):
                local(average).copy_(local(dealt_like(value, average)))


def require_rate(ema: float | None) -> float | None:
    """A usable rate, or None for no average."""
    rate = None if ema is None else require_finite("ema", ema)
    if rate is not None and not 0 < rate < 1:
        raise QuellError(f"ema={rate:g} must be between 0 and 1: the share of the past that a step leaves, as 0.98")
    return rate
