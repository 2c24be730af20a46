"""A stand-in for CUDA graphs where there is no GPU: it writes down torch's operations and runs them again."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from quell.torch import make_private
from quell.torch.engine import graphs
from quell.torch.engine.attributes import Contents
from quell.torch.engine.base import is_differentiable
from quell.torch.writes import restored_buffers

from .training import examples, network, seeded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Tape(TorchDispatchMode):
    """Operations on tensors. A replay runs them in their order, without Python, and writes what they make to the same
    places, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {v.untyped_storage().data_ptr() for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
        new = [
            value if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in given else None
            for value in pytree.tree_leaves(made)
        ]
        self.operations.append((func, args, kwargs or {}, new))
        return made

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, places in self.operations:
                for place, value in zip(places, pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                    if place is not None:
                        place.data.copy_(value)


class OnTape(graphs.Recording):
    """Forward pass, backward pass and clipping, each on a tape."""

    def __init__(self, engine, forward, leaves, structure):
        self.engine, self._usual, self.replays, self.used = engine, forward, 0, engine.collected
        self._inputs = [v.clone() if isinstance(v, Tensor) else v for v in leaves]
        self._present = torch.zeros((), dtype=torch.int64)
        args, kwargs = pytree.tree_unflatten(self._inputs, structure)
        given, anchor = engine.given, engine.anchor
        engine.given = {value.untyped_storage().data_ptr() for value in self._tensors}
        engine.anchor = torch.zeros_like(anchor, requires_grad=True)
        self._passes = [Tape() for _ in range(3)]
        try:
            with torch.enable_grad(), torch.random.fork_rng([]), restored_buffers(engine.model):
                with self._passes[0]:
                    outputs, self._structure = pytree.tree_flatten(forward(*args, **kwargs))
                self._places = [place for place, value in enumerate(outputs) if isinstance(value, Tensor)]
                self._has_gradient = [is_differentiable(outputs[place]) for place in self._places]
                self._outputs = [v.detach() if isinstance(v, Tensor) else v for v in outputs]
                gradients = [torch.zeros_like(value) for value in outputs if is_differentiable(value)]
                self._gradients = list(gradients)
                end = graphs._End.apply(gradients, *(value for value in outputs if is_differentiable(value)))
                with self._passes[1]:
                    end.backward()
                found = self._found()
                with self._passes[2]:
                    self.sums, self.norm, self.units = self._clipped(found)
        finally:
            engine.take_finished()
            engine.given, engine.anchor = given, anchor
        self.contents = Contents(engine.model)

    def _in_own_memory(self):
        return nullcontext()

    def _held(self):
        return 0

    def replay_forward(self):
        self._passes[0].replay()
        made = tuple(self._outputs[place].clone() for place in self._places)
        return made, [value for value, can in zip(made, self._has_gradient, strict=True) if not can]

    def replay_backward(self, gradients):
        chosen = [value for value, can in zip(gradients, self._has_gradient, strict=True) if can]
        torch._foreach_copy_(self._gradients, chosen)
        self._passes[1].replay()

    def clip(self, present):
        self._present.fill_(present)
        self._passes[2].replay()


def start(plan, model=None, data=None, bound=0.3, **options):
    data = TensorDataset(*(tensor.to(DEVICE) for tensor in (data or examples()).tensors))
    model = (network() if model is None else model).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return make_private(model, optimizer, data, plan, bound, **{"key": seeded(3), **options})
