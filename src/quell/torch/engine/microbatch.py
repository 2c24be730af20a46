"""`clipping="microbatch"`: per-example gradients by torch.func, one micro-batch at a time.

The forward pass keeps no activations, and the model's outputs are cut from its graph: the user's `backward` stops
there, and the engine carries on before the next forward pass, or at the step. Each micro-batch runs again, with the
same random numbers, and its per-example gradients are clipped and added before the next one: one more forward pass for
a fraction of the memory, and any layer that `vmap` understands. The loop stays the user's, and a gradient that reaches
a parameter around the model, which could not be clipped, is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from quell.errors import QuellError, require_count
from quell.torch.autocast import Autocast
from quell.torch.checks import in_a_sentence
from quell.torch.clip_norms import Bounds, ClipNorm
from quell.torch.clipping import Clipped, sum_clipped
from quell.torch.engine.base import Engine, StandIn, is_differentiable
from quell.torch.engine.bounds import norm_of
from quell.torch.engine.forward import Way, is_buffer, kind_of, own_inputs
from quell.torch.engine.rules import pulled_back
from quell.torch.random_states import kept_states, own_states

_NOT_MAPPED = (
    "clipping='microbatch' takes layers that vmap understands, and no convolutions or norms under autocast: try "
    "clipping='layers', the default, or leave autocast out; if both ways refuse a layer, freeze it, or use one that "
    "docs/pytorch.md lists (of peft, LoRA on linear layers)"
)


@dataclass(eq=False)
class Inputs:
    """The arguments of one forward pass, and what it takes to run it again in the same way."""

    values: list[Any]
    structure: Any
    mapped: list[int]  # which of them have one row per example
    examples: int
    random_state: dict[str, Any]
    autocast: Autocast

    def of(self, examples: slice) -> list[Tensor]:
        """The arguments with one row per example, of some examples."""
        return [self.values[place][examples] for place in self.mapped]


@dataclass(eq=False)
class Pass:
    """One forward pass whose output was cut off: the loss's gradient arrives at `leaves` and waits there."""

    leaves: list[Tensor]
    inputs: Inputs
    given_up: list[bool]  # holds True once another forward pass came before a gradient did


class CutForward(StandIn):
    """What stands in for the model's forward method."""

    def __init__(self, engine: MicrobatchEngine, before: Callable[..., Any]) -> None:
        self.engine, self.before = engine, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine.forward(args, kwargs)


class MicrobatchEngine(Engine):
    clipping = "microbatch"
    unseen = "around the model's output, or in eval mode (call model.train())"

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, nn.Parameter],
        max_grad_norm: ClipNorm | Bounds,
        loss_reduction: str,
        size: int,
    ) -> None:
        super().__init__(params, max_grad_norm, loss_reduction)
        self.model, self.size = model, require_count("micro_batch", size)
        self._plain_forward: Callable[..., Any] = model.forward
        self._open: Pass | None = None
        self._shared: set[tuple[str, int]] = set()  # places of arguments that all examples were seen to share
        self._split: dict[Way, list[int] | None] = {}  # for each way of calling the model, which follow the batch
        model.forward = CutForward(self, model.forward)

    def forward(self, args: Any, kwargs: Any) -> Any:
        if self.inside or not self.model.training or not torch.is_grad_enabled():
            return self._plain_forward(*args, **kwargs)
        self.flush()
        inputs = self._inputs(args, kwargs)
        with torch.no_grad():
            self._require_rows(inputs, kind_of(args, kwargs))
            return self._cut(self._outputs(inputs, args, kwargs), inputs)

    def _inputs(self, args: Any, kwargs: Any) -> Inputs:
        """What was given, and which of it has a row per example: never what was of another length once.

        In a batch of another size that may be as long by chance, and then everybody's gradient would change.
        """
        values, structure = pytree.tree_flatten((args, kwargs))
        tensors = {place: value for place, value in enumerate(values) if isinstance(value, Tensor) and value.dim()}
        if not tensors:
            raise QuellError("the model was called without a tensor: clipping='microbatch' needs to know the examples")
        examples, way = len(next(iter(tensors.values()))), str(structure)
        self._shared |= {(way, place) for place, v in tensors.items() if len(v) != examples or is_buffer(self.model, v)}
        mapped = [place for place in tensors if (way, place) not in self._shared]
        return Inputs(values, structure, mapped, examples, own_states(), Autocast.now(self.device.type))

    def _require_rows(self, inputs: Inputs, way: Way) -> None:
        """Refuse a first batch, of each way of calling the model, in which what all examples share is as long as it."""

        def call(*values: Any) -> list[Tensor]:
            args, kwargs = pytree.tree_unflatten(values, inputs.structure)
            made = pytree.tree_leaves(self._plain_forward(*args, **kwargs))
            return [v for v in made if isinstance(v, Tensor) and v.is_floating_point()]

        shared = set(range(len(inputs.values))).difference(inputs.mapped)
        own, before = self.params.values(), self._split.get(way)
        self._split[way] = own_inputs(
            self, self.model, "the model", own, call, inputs.values, shared, inputs.examples, before
        )

    def _outputs(self, inputs: Inputs, args: Any, kwargs: Any) -> Any:
        if not inputs.examples:
            return self._plain_forward(*args, **kwargs)
        example = _Example(self, inputs)
        dims = (None,) + (0,) * len(inputs.mapped)
        run = vmap(example, in_dims=dims, randomness="different", chunk_size=self.size)
        with in_a_sentence("running the model one example at a time, by torch.func.vmap,", _NOT_MAPPED):
            return example.rebuilt(run(self._detached(), *inputs.of(slice(None))))

    def _cut(self, outputs: Any, inputs: Inputs) -> Any:
        """The outputs as leaves of their own, remembered."""
        flat, spec = pytree.tree_flatten(outputs)
        flat = [value.detach().requires_grad_() if is_differentiable(value) else value for value in flat]
        leaves = [value for value in flat if isinstance(value, Tensor) and value.requires_grad]
        given_up: list[bool] = []  # the hooks hold this alone: a cycle would keep the activations alive
        for leaf in leaves:
            leaf.register_hook(lambda gradient: _refuse_late(given_up))
        self._open = Pass(leaves, inputs, given_up)
        return pytree.tree_unflatten(flat, spec)

    def flush(self) -> None:
        done, self._open = self._open, None
        if done is None:
            return
        if all(leaf.grad is None for leaf in done.leaves):
            done.given_up.append(True)
            return
        examples = _rows(done.leaves)
        if examples != done.inputs.examples:
            raise QuellError(
                f"the model made {examples} rows of output from {done.inputs.examples} examples: it must make one each"
            )
        factor = examples if self.mean_loss else 1
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * factor for leaf in done.leaves]
        clipped = self._clip(done.inputs, gradients)
        unused = self._unused(done, clipped.sums)
        sums = {name: total for name, total in clipped.sums.items() if name not in unused}
        self._take(examples, sums, norm_of(sums.values()))
        for measured in clipped.measured:
            self._keep_norms(measured)

    def _unused(self, done: Pass, sums: Mapping[str, Tensor]) -> set[str]:
        """Of the parameters that have had no gradient yet, those that this loss does not use.

        torch.func gives them gradients of zero, which a parameter that is used can have too. Autograd's record of one
        example tells them apart.
        """
        zero = [name for name in self._missing if not bool(sums[name].any())]
        if not zero or not done.inputs.examples:
            return set(zero)
        params = {name: parameter.requires_grad_() for name, parameter in self._detached().items()}
        with kept_states(done.inputs.random_state), torch.enable_grad():
            outputs = _Example(self, done.inputs)(params, *(row[0] for row in done.inputs.of(slice(1))))
            pairs = zip(outputs, done.leaves, strict=True)
            used = [output for output, leaf in pairs if leaf.grad is not None and output.requires_grad]
            if not used:
                return set(zero)
            weights = [torch.zeros_like(output) for output in used]
            found = torch.autograd.grad(used, [params[name] for name in zero], weights, allow_unused=True)
        return {name for name, gradient in zip(zero, found, strict=True) if gradient is None}

    def discard(self) -> None:
        super().discard()
        with torch._C.DisableTorchFunctionSubclass():  # looking at gradients is no part of the loop's work on a batch
            if self._open is not None and any(leaf.grad is not None for leaf in self._open.leaves):
                self._open = None

    def _clip(self, inputs: Inputs, gradients: Sequence[Tensor]) -> Clipped:
        """Sums of clipped gradients, given the gradient of every example's own loss at the outputs."""
        run = _Example(self, inputs)
        params = self._detached()
        count = len(gradients)

        def pulled(p: dict[str, Tensor], *values: Tensor) -> dict[str, Tensor]:
            return pulled_back(lambda q: run(q, *values[count:]), p, values[:count])

        per_example = vmap(pulled, in_dims=(None,) + (0,) * (count + len(inputs.mapped)), randomness="different")

        def micro_batches() -> Iterator[dict[str, Tensor]]:
            with kept_states(inputs.random_state):
                for first in range(0, inputs.examples, self.size):
                    some = slice(first, first + self.size)
                    made = per_example(params, *(g[some] for g in gradients), *inputs.of(some))
                    for name, scale in self.scales.items():
                        made[name] = made[name].float() * scale.entries.view(params[name].shape)
                    yield made

        with torch.no_grad(), in_a_sentence("the gradient of one example, by torch.func.vmap,", _NOT_MAPPED):
            return sum_clipped(micro_batches(), params, self.bounds)

    def _detached(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.params.items()}


class _Example:
    """The model on one example: floating-point outputs without their batch dimension, the rest set aside."""

    def __init__(self, engine: MicrobatchEngine, inputs: Inputs) -> None:
        self.engine, self.inputs = engine, inputs
        self.others: list[Any] = []
        self.spec: Any = None

    def __call__(self, params: dict[str, Tensor], *rows: Tensor) -> tuple[Tensor, ...]:
        values = list(self.inputs.values)
        for place, row in zip(self.inputs.mapped, rows, strict=True):
            values[place] = row.unsqueeze(0)
        args, kwargs = pytree.tree_unflatten(values, self.inputs.structure)
        engine = self.engine
        with self.inputs.autocast.again():
            outputs = engine.unwatched(lambda: functional_call(engine.model, params, args, kwargs))
        flat, self.spec = pytree.tree_flatten(outputs)
        self.others = [None if isinstance(value, Tensor) else value for value in flat]
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if any(not t.is_floating_point() or not t.dim() or t.shape[0] != 1 for t in tensors):
            raise QuellError(
                f"one example gives outputs of shapes {[tuple(t.shape) for t in tensors]}: clipping='microbatch' needs "
                "floating-point outputs with one row per example, and the loss outside the model"
            )
        return tuple(tensor[0] for tensor in tensors)

    def rebuilt(self, tensors: list[Tensor]) -> Any:
        waiting = iter(tensors)
        return pytree.tree_unflatten([next(waiting) if o is None else o for o in self.others], self.spec)


def _refuse_late(given_up: list[bool]) -> None:
    if given_up:
        raise QuellError(
            "the model was called twice before a backward pass: use one forward pass per loss (for accuracies, call it "
            "under torch.no_grad())"
        )


def _rows(leaves: Sequence[Tensor]) -> int:
    sizes = {leaf.shape[0] if leaf.dim() else None for leaf in leaves if leaf.grad is not None}
    if len(sizes) != 1 or None in sizes:
        raise QuellError(
            f"the loss uses outputs of shapes {[tuple(leaf.shape) for leaf in leaves]}, which do not have one row per "
            "example: let the model return such outputs and compute the loss from them, one per example"
        )
    return int(sizes.pop() or 0)
