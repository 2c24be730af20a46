"""`clipping="flat"`: every example's whole gradient, by Opacus's hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.layers.dp_rnn import RNNLinear
from opacus.utils.module_utils import requires_grad
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quell.errors import QuellError
from quell.torch.checks import in_a_sentence, refuse_unmeasured_layers
from quell.torch.clipping import sum_clipped
from quell.torch.engine import Engine, is_differentiable
from quell.torch.opacus import NOT_TRAINING, OTHER_LAYER, drop_gradients

_MADE_OF_LAYERS = (DPRNN, DPLSTM, DPGRU)  # whose parameters are used by layers inside them


class FlatEngine(Engine):
    """Whole per-example gradients, clipped at the step."""

    clipping = "flat"

    def __init__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], max_grad_norm: float, loss_reduction: str
    ) -> None:
        super().__init__(params, max_grad_norm, loss_reduction)
        refuse_unmeasured_layers(model)
        self._all = list(model.parameters())  # also those that the optimizer does not train
        self._hooks = _Gradients(model, self.params.values())

    def flush(self) -> None:
        for found in self._hooks.collect():
            gradients = {name: found[parameter] for name, parameter in self.params.items() if parameter in found}
            sizes = {len(gradient) for gradient in gradients.values()}
            if len(sizes) > 1:
                self.discard()
                raise QuellError(
                    f"the layers saw different numbers of examples ({sorted(sizes)}): every input of a layer must have "
                    "one row per example"
                )
            if gradients:
                self._take_clipped(gradients, float(sizes.pop()) if self.mean_loss else 1.0)
        drop_gradients(self._all)

    def _take_clipped(self, gradients: Mapping[str, Tensor], scale: float) -> None:
        """`scale` leads from an example's share of a mean loss to its own loss."""
        held = {name: self.params[name] for name in gradients}
        with torch.no_grad():
            clipped = sum_clipped(lambda: iter([gradients]), held, self.max_grad_norm, scale)
        self._take(clipped.examples, clipped)

    def discard(self) -> None:
        super().discard()
        self._hooks.collect()
        drop_gradients(self._all)


class _Gradients(GradSampleHooks):
    """Per-example gradients by Opacus's rules for layers, by backward pass.

    Opacus pairs inputs with gradients by the order in which they come, and counts calls. A call that no backward pass
    reaches, or one that fails, spoils both for all later batches. Here each call's inputs wait at its own output, and
    what one backward pass brings belongs together.
    """

    def __init__(self, model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        self._trained = set(trained)
        self._finished: list[_PerExample] = []
        self._under_way: dict[int, _PerExample] = {}  # by autograd's number of the backward pass
        super().__init__(model, loss_reduction="sum", strict=False)

    def collect(self) -> list[_PerExample]:
        """What finished backward passes have left; what one that failed has left is dropped."""
        finished, self._finished, self._under_way = self._finished, [], {}
        return finished

    def add_hooks(self, *, batch_first: bool = True, **options: Any) -> None:
        if hasattr(self._module, "autograd_grad_sample_hooks"):
            raise QuellError("the model has Opacus's hooks already: pass the plain model")
        self._module.autograd_grad_sample_hooks = self.autograd_grad_sample_hooks = []
        for module in self.iterate_submodules(self._module):
            if type(module) in _MADE_OF_LAYERS:
                continue
            if type(module) not in self.GRAD_SAMPLERS:
                prepare_layer(module, batch_first=batch_first)
            self.autograd_grad_sample_hooks.append(module.register_forward_hook(self.capture_activations_hook))

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or not requires_grad(module):
            return
        outputs = [value for value in pytree.tree_leaves(output) if is_differentiable(value)]
        if len(outputs) > 1 or not inputs:
            raise QuellError(
                f"a {type(module).__name__} layer with parameters has several outputs, or no input but by keyword, "
                "which clipping='flat' cannot follow: use clipping='microbatch'"
            )
        within = torch._C._current_graph_task_id()
        if within >= 0:  # a reentrant checkpoint runs its layers again, and has a backward pass of its own
            self._gradients_of(within)
        activations = [value.detach() for value in inputs] if module.training else None
        for value in outputs:
            value.register_hook(partial(self._arrived, module, activations, within))

    def _gradients_of(self, backward: int) -> _PerExample:
        """Where the gradients of the running backward pass go, which is done when autograd says so."""
        if backward not in self._under_way:
            self._under_way[backward] = _PerExample()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, backward))
        return self._under_way[backward]

    def _finish(self, backward: int) -> None:
        if found := self._under_way.pop(backward, None):
            self._finished.append(found)

    def _arrived(self, module: Any, activations: list[Tensor] | None, within: int, gradient: Tensor) -> None:
        if activations is None:
            raise QuellError(NOT_TRAINING.format(type(module).__name__))
        if not activations:
            raise QuellError(
                f"a second backward pass came to a {type(module).__name__} layer's one forward pass: add the losses up "
                "and call backward() once"
            )
        found = self._gradients_of(within if within >= 0 else torch._C._current_graph_task_id())
        sampler = self.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)
        rows = len(activations[0])
        failing = in_a_sentence(f"the per-example gradient of a {type(module).__name__} layer", OTHER_LAYER)
        with torch.no_grad(), failing:
            for parameter, made in sampler(module, activations, gradient.detach()).items():
                if parameter in self._trained:
                    made = made[:rows]  # Opacus makes a row for a batch of none
                    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                        made[:, module.padding_idx] = 0.0  # that row is not trained
                    found.add(parameter, made, type(module))
        activations.clear()  # the hook lives as long as the loss does, and they need not


class _PerExample(dict[nn.Parameter, Tensor]):
    """The per-example gradients that one backward pass brought, added up over the calls of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: set[nn.Parameter] = set()  # what a single call made may be a view of something else

    def add(self, parameter: nn.Parameter, made: Tensor, kind: type[nn.Module]) -> None:
        held = self.get(parameter)
        if held is None:
            self[parameter] = made
            return
        if len(held) != len(made) and kind is not RNNLinear:  # late steps of packed sequences have the first rows only
            raise QuellError(
                f"a {kind.__name__} layer saw {len(made)} and {len(held)} examples in one pass: every call needs one "
                "row per example"
            )
        if len(made) > len(held):
            held, made = made, held
            self._sums.discard(parameter)
        if parameter not in self._sums:
            held = held.clone()
            self._sums.add(parameter)
        held[: len(made)] += made
        self[parameter] = held
