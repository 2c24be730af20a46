"""Decides when CUDA graphs are recorded by default: where the GPU waits for Python, and only the speed changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quell.torch.engine.attributes import Contents
from quell.torch.engine.base import is_differentiable
from quell.torch.random_states import host_states
from quell.torch.tape import nodes_behind

if TYPE_CHECKING:
    from quell.torch.engine.layers import LayerEngine

_IN_A_ROW = 3  # passes for which the GPU must have waited
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ADDED, _LITTLE = 0.1, 1 << 26  # memory that a recording may add, as a share of what a pass holds, or in bytes


class Pace:
    """Counts the passes in a row for which Python was hardly ahead of the GPU.

    Python sends the forward pass, the backward pass and then the clipping. If the GPU has work for longer than that
    takes, Python gets ahead by up to a step. So if the GPU is done with the forward pass by the time that the clipping
    is sent, it waits for Python, or would as soon as that is held up.
    """

    def __init__(self) -> None:
        self.waited = 0
        self._sent: torch.cuda.Event | None = None

    @property
    def gpu_waits(self) -> bool:
        return self.waited >= _IN_A_ROW

    def sent(self) -> None:
        """A forward pass was sent that takes Python no longer than others."""
        self._sent = torch.cuda.Event()
        self._sent.record()

    def clipped(self) -> None:
        """All of a pass was sent, also its clipping."""
        sent, self._sent = self._sent, None
        self.waited = self.waited + 1 if sent is not None and sent.query() else 0


class Trial:
    """A pass that runs as usual and is watched: would a recording of it do the same, to whoever looks at it?

    Python does not run in a replay. So the pass must not set attributes or change lists of modules, must not draw
    random numbers on the host (to skip a layer, say), must not change its inputs, and must return nothing but tensors.
    Its backward pass must not run Python either, must begin at all outputs and outside of autocast. And there must be
    memory for it.
    """

    def __init__(self, engine: LayerEngine, inputs: Iterable[Any]) -> None:
        self._engine = engine
        self._inputs = [(value, value._version) for value in inputs if isinstance(value, Tensor)]
        self._random, self._contents = host_states(), Contents(engine.model)
        self._allocated, _ = memory(engine.device)
        self._noting = _Noting()
        self._passed, self._unused = False, 0

    def watched(self) -> TorchFunctionMode:
        """Around the forward pass."""
        return self._noting

    def end(self, outputs: Any) -> None:
        """After the forward pass."""
        values = pytree.tree_leaves(outputs)
        tensors = [value for value in values if isinstance(value, Tensor)]
        self._passed = (
            host_states() == self._random
            and not self._engine.attributes.look(by_model=True)
            and not self._contents.changed()
            and not self._noting.hooks
            and all(value._version == version for value, version in self._inputs)
            and all(value is None or isinstance(value, Tensor) for value in values)
            and not any(map(_runs_python, nodes_behind(value.grad_fn for value in tensors)))
            and self._has_room(tensors)
        )
        del self._inputs, self._random, self._contents  # which may hold activations
        used = [value for value in tensors if is_differentiable(value)]
        self._unused = len(used)
        for value in used:
            value.register_hook(self._arrived)

    def passed(self) -> bool:
        """After the backward pass."""
        return self._passed and not self._unused

    def _arrived(self, gradient: Tensor) -> None:
        self._unused -= 1
        self._passed &= not torch.is_autocast_enabled(gradient.device.type)  # it would round otherwise in a recording

    def _has_room(self, outputs: list[Tensor]) -> bool:
        """Outputs, their gradients, clipped sums and copies of those lie beside what a pass holds anyway."""
        allocated, free = memory(self._engine.device)
        held = allocated - self._allocated
        sums = sum(4 * parameter.numel() for parameter in self._engine.params.values())
        added = 2 * (sums + sum(value.nbytes for value in outputs))
        return added <= max(_ADDED * held, _LITTLE) and held <= free


class _Noting(TorchFunctionMode):
    """Notes whether hooks are put on tensors."""

    hooks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.hooks |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the device that tensors have, and that they could still get."""
    allocated = torch.cuda.memory_allocated(device)
    return allocated, torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated


def suit(parts: Iterable[nn.Module]) -> bool:
    """Whether nobody has put hooks on these parts of a model, which a replay would not call, or compiled them.

    Quell's own hooks only look at modes.
    """
    if any(getattr(every_module, f"_global{name}") for name in _HOOKS):
        return False
    return not any(is_compiled(part) or any(_foreign(vars(part)[name]) for name in _HOOKS) for part in parts)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile runs it, which has graphs of its own."""
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def _foreign(hooks: Any) -> bool:
    return bool(hooks) and not all(str(getattr(hook, "__module__", "")).startswith("quell.") for hook in hooks.values())


def _runs_python(node: Any) -> bool:
    """Whether its backward pass is a function that somebody else than Quell has written."""
    made_by = getattr(type(node), "_forward_cls", None)
    return made_by is not None and not made_by.__module__.startswith("quell.")
