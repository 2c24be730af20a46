"""A stand-in for CUDA graphs where there is no GPU: it runs the passes again and overwrites one set of buffers."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.utils.data import TensorDataset

from quell.torch import make_private
from quell.torch.engine import graphs

from .training import examples, network, seeded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class ByHand(graphs.Recording):
    """Replays by running again."""

    def __init__(self, engine, forward, leaves, structure):
        self.engine, self._usual, self.replays, self.forward = engine, forward, 0, forward
        self._inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        self.args, self.kwargs = torch.utils._pytree.tree_unflatten(self._inputs, structure)
        self.units = len(self._tensors[0]) // engine.rows_per_unit
        self.sums = {name: torch.zeros_like(p) for name, p in engine.params.items()}
        made, self._structure = torch.utils._pytree.tree_flatten(self._run())
        self._outputs = [v.detach() for v in made]
        self._places, self._has_gradient = list(range(len(made))), [v.requires_grad for v in made]
        self._gradients = [torch.zeros_like(v) for v in self._outputs]

    def _in_own_memory(self):
        return nullcontext()

    def _run(self):
        with torch.enable_grad(), torch.random.fork_rng([]):
            return self.forward(*self.args, **self.kwargs)

    def replay_forward(self):
        with torch.enable_grad():
            self.made = torch.utils._pytree.tree_leaves(self.forward(*self.args, **self.kwargs))
        for static, value in zip(self._outputs, self.made, strict=True):
            static.copy_(value.detach())
        return tuple(v.clone() for v in self._outputs), []

    def replay_backward(self, gradients):
        torch.autograd.backward(self.made, list(gradients))
        (self.found,) = self.engine.take_finished()

    def clip(self, present):
        pieces, units = self.engine.pieces_of(self.found)
        with torch.no_grad():
            sums = self.engine.clipped(pieces, units, torch.tensor(present))
        self.measured = self.engine.measured
        for name, total in sums.items():
            self.sums[name].copy_(total)
        self.norm = torch.stack([v.norm() for v in self.sums.values()]).norm()


def start(plan, model=None, data=None, bound=0.3, **options):
    data = TensorDataset(*(tensor.to(DEVICE) for tensor in (data or examples()).tensors))
    model = (network() if model is None else model).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return make_private(model, optimizer, data, plan, bound, **{"key": seeded(3), **options})
