"""CUDA graphs that nobody asked for: recorded where a GPU waits for Python, and nobody can tell but by the clock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils import _pytree as pytree

from quell.torch.engine.attributes import PLAIN

if TYPE_CHECKING:
    from quell.torch.engine.layers import LayerEngine

_IN_A_ROW = 3  # passes for which the GPU must have waited
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EVERYWHERE = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_ADDED = 0.1  # memory that a recording may add to what a pass holds


class Pace:
    """For how many passes in a row the GPU had nothing left to do.

    The host sends forward and backward pass, and then the clipping. If the passes are done by the time that all of the
    clipping is sent, the GPU is as fast as the host at least, and has waited for it.
    """

    def __init__(self) -> None:
        self.waited = 0
        self.counts = True  # whether this pass takes Python no longer than others

    @property
    def is_slow(self) -> bool:
        return self.waited >= _IN_A_ROW

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around the clipping of a pass."""
        event = torch.cuda.Event()
        event.record()
        yield
        self.waited = self.waited + 1 if self.counts and event.query() else 0


class Trial:
    """Made before a pass that runs as usual, to say after it whether a recording of it would do the same.

    Python does not run in a replay. So the pass must set no attribute of a module, draw no random numbers on the host
    (to skip a layer, say) and return nothing but tensors and plain values. And there must be memory for it.
    """

    def __init__(self, engine: LayerEngine) -> None:
        self._engine, self._random = engine, _random_on_host()
        self._allocated, _ = memory(engine.device)

    def passed(self, outputs: Any) -> bool:
        values = pytree.tree_leaves(outputs)
        tensors = [value for value in values if isinstance(value, Tensor)]
        others = [value for value in values if not isinstance(value, Tensor)]
        as_before = _random_on_host() == self._random and not self._engine.attributes.look(by_model=True)
        return as_before and all(isinstance(value, PLAIN) for value in others) and self._has_room(tensors)

    def _has_room(self, outputs: list[Tensor]) -> bool:
        """Outputs, their gradients, clipped sums and copies of those lie beside what a pass holds anyway."""
        allocated, free = memory(self._engine.device)
        held = allocated - self._allocated
        sums = sum(4 * parameter.numel() for parameter in self._engine.params.values())
        added = 2 * (sums + sum(value.nbytes for value in outputs))
        return added <= _ADDED * held and held <= free


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the device that tensors have, and that they could still get."""
    allocated = torch.cuda.memory_allocated(device)
    return allocated, torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody has put hooks on them, which a replay would not call; Quell's own only look at modes."""
    everywhere = any(getattr(every_module, name) for name in _EVERYWHERE)
    return everywhere or any(_foreign(vars(module)[name]) for module in modules for name in _HOOKS)


def _foreign(hooks: Any) -> bool:
    return bool(hooks) and not all(str(getattr(hook, "__module__", "")).startswith("quell.") for hook in hooks.values())


def _random_on_host() -> tuple[Any, ...]:
    words: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), words[1].tobytes(), words[2:], random.getstate()
