"""`clipping="flat"` and `clipping="ghost"`: per-example gradients, or only their norms, by Opacus's hooks.

The one module that imports Opacus, when a mode that needs it is asked for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from quell.errors import QuellError

try:
    from opacus.grad_sample import GradSampleHooks
    from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
        GradSampleHooksFastGradientClippingFSDP,
    )
    from opacus.layers import DPGRU, DPLSTM, DPRNN
    from opacus.layers.dp_rnn import RNNLinear
    from opacus.optimizers import DPOptimizer
    from opacus.utils.module_utils import requires_grad
except ImportError as missing:
    raise QuellError(
        "clipping='flat' and 'ghost' use Opacus: pip install -c constraints.txt '.[torch]', or take 'microbatch'"
    ) from missing

from quell.torch.checks import refuse_unmeasured_layers
from quell.torch.clipping import Clipped, clip_factors, norm_of, sum_clipped
from quell.torch.distributed import sum_over_ranks, world
from quell.torch.engine import DeferredEngine, Engine, Pass, is_differentiable
from quell.torch.norms import convolution_norms, embedding_norms, full_precision, linear_norms
from quell.torch.optimizer import PrivateOptimizer
from quell.torch.sharding import copies, is_sharded, local

_MADE_OF_LAYERS = (DPRNN, DPLSTM, DPGRU)  # whose parameters are used by layers inside them


class OpacusOptimizer(PrivateOptimizer, DPOptimizer):
    """An Opacus `DPOptimizer` in type and interface; clipping and noise are Quell's."""


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
        self._drop_gradients()

    def _take_clipped(self, gradients: Mapping[str, Tensor], scale: float) -> None:
        """`scale` leads from an example's share of a mean loss to its own loss."""
        held = {name: self.params[name] for name in gradients}
        with torch.no_grad():
            clipped = sum_clipped(lambda: iter([gradients]), held, self.max_grad_norm, scale)
        self._take(clipped.examples, clipped)

    def discard(self) -> None:
        super().discard()
        self._hooks.collect()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._all:
            parameter.grad = None  # the sum without clipping, which autograd makes as well


class GhostEngine(DeferredEngine):
    """Norms first, without any per-example gradient; then one backward pass of the reweighted outputs.

    The first pass is for Opacus's hooks, which look at what arrives at the layers. Its gradients of parameters are not
    used, so where autograd allows it, it goes to the smallest parameter of each layer only.

    Every parameter that gets a gradient in the second pass must have had its norm taken in the first, and on the first
    batch the norm of one example's real gradient is compared with the norm that the hooks found: a parameter used
    outside its layer would otherwise escape the clipping. Norms are taken over all trainable parameters of the model,
    also those that the optimizer does not hold: gradients are then clipped a little more than need be, never less.
    """

    clipping = "ghost"

    def __init__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], max_grad_norm: float, loss_reduction: str
    ) -> None:
        super().__init__(params, max_grad_norm, loss_reduction)
        self.model, self._all = model, list(model.parameters())
        self.sharded = any(is_sharded(parameter) for parameter in params.values())
        _refuse_ties(model)
        refuse_unmeasured_layers(model)
        if any(parameter.requires_grad for parameter in model.parameters(recurse=False)):
            raise QuellError(
                f"{type(model).__name__} holds parameters itself, outside its layers, where clipping='ghost' cannot "
                "see them: wrap a single layer in nn.Sequential, or use clipping='microbatch'"
            )
        _silence_first_layers()
        kind = _ShardedNorms if self.sharded else _Norms
        self._hooks = kind(model, loss_reduction="sum", strict=False)
        self._probed = self._shortened = False
        model.register_forward_pre_hook(self._before, prepend=True)
        model.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.flush()
            self._forget()  # what no backward pass has fetched, or one that failed

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return None
        if any(getattr(parameter, "_forward_counter", 0) > 1 for parameter in self.params.values()):
            raise QuellError(_TIED)
        return self._cut(outputs, [value for value in pytree.tree_leaves(outputs) if is_differentiable(value)])

    def _clip(self, done: Pass, gradients: Sequence[Tensor], examples: int) -> Clipped:
        outputs: list[Tensor] = done.made_by
        try:
            with torch.autocast(outputs[0].device.type, enabled=False), full_precision():
                return self._clip_in_two_passes(outputs, gradients, examples)
        except BaseException:
            self._drop_gradients()  # the next forward pass forgets the rest
            raise

    def _clip_in_two_passes(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], examples: int) -> Clipped:
        self._hooks.forget_norms()
        ends = _smallest_parameters(self.model, self._hooks.NORM_SAMPLERS) if self._shortened else None
        torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=ends)
        self._drop_gradients()
        with torch.no_grad():
            both, measured = self._hooks.norms(examples, outputs[0].device)
        norms = both[:, 0]
        self._hooks.disable_hooks()
        try:
            self._probe(outputs, gradients, both)
            factors = clip_factors(norms, self.max_grad_norm)
            torch.autograd.backward(outputs, [_scaled(gradient, factors) for gradient in gradients])
        finally:
            self._hooks.enable_hooks()
        return self._sums_of(measured, examples)

    def _drop_gradients(self) -> None:
        for parameter in self._all:
            parameter.grad = None

    def _sums_of(self, measured: set[int], examples: int) -> Clipped:
        """What the second pass left in `p.grad`, refused where the first pass took no norm."""
        sums = {}
        for name, parameter in self.params.items():
            if parameter.grad is not None:
                if self._hooks.label(name, parameter) not in measured:
                    raise QuellError(f"{name} has a gradient but no norm: {_OUTSIDE}")
                sums[name] = self._whole_sum(parameter.grad)
        self._drop_gradients()
        norm, count = self._over_ranks(sums, examples) if self.sharded else (float(norm_of(sums.values())), examples)
        if not math.isfinite(norm):
            raise QuellError("an example's gradient is not finite: use clipping='flat' or 'microbatch', which drop it")
        return Clipped(sums, count, norm)

    def _whole_sum(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient, as a sum: FSDP has made it a mean over the ranks."""
        return local(gradient).float() * world()[1] if self.sharded else gradient.float()

    def _over_ranks(self, sums: Mapping[str, Tensor], examples: int) -> tuple[float, int]:
        """The norm of the sharded sums, and of how many examples on all ranks they are."""
        size, device = world()[1], next(iter(self.params.values())).device
        both = torch.tensor([0.0, examples], dtype=torch.float64, device=device)
        for name, total in sums.items():
            both[0] += norm_of([total]).to(both).square() / copies(self.params[name], size)
        sum_over_ranks([both])
        square, count = both.tolist()
        return math.sqrt(square), int(count)

    def _probe(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], norms: Tensor) -> None:
        """Once: the gradient of the first example, computed alone, must have the norm that the hooks found."""
        if self._probed:
            return
        alone = bool(torch.isfinite(norms[:1]).all()) and len(norms) > 0 and (not self.sharded or world()[0] == 0)
        mask = torch.zeros_like(norms[:, 0])
        mask[:1] = float(alone)
        torch.autograd.backward(outputs, [_scaled(gradient, mask) for gradient in gradients], retain_graph=True)
        factor = world()[1] if self.sharded else 1
        found_gradients = [local(p.grad) for p in self._all if p.grad is not None]
        squares = [(gradient.float() * factor).square().sum() for gradient in found_gradients]
        real_square = torch.stack(squares).sum() if squares else mask.new_zeros(())
        found_squares = norms[0].square() if alone else norms.new_zeros(2)
        three = torch.cat([real_square.reshape(1), found_squares])
        if self.sharded:
            sum_over_ranks([three])
        self._drop_gradients()
        real, bound, found = three.tolist()
        if not math.isfinite(real):
            return  # some example's values are not finite: a later batch will do
        if not abs(real - found) <= bound - found + 1e-2 * max(real, found):  # no room for a layer that is used twice
            norms_of_one = f"norm {math.sqrt(real):.4g}, its layers say {math.sqrt(found):.4g}"
            raise QuellError(f"one example's gradient has {norms_of_one}: {_OUTSIDE}")
        self._probed = real > 0 and bound <= 1.5 * found  # else rounding hides too much
        self._shortened = self._probed and not self.sharded and _ends_in_parameters(outputs, self.model)

    def _forget(self) -> None:
        self._hooks.forget_activations()


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
            raise QuellError(_NOT_TRAINING.format(type(module).__name__))
        if not activations:
            raise QuellError(
                f"a second backward pass came to a {type(module).__name__} layer's one forward pass: add the losses up "
                "and call backward() once"
            )
        found = self._gradients_of(within if within >= 0 else torch._C._current_graph_task_id())
        sampler = self.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)
        rows = len(activations[0])
        with torch.no_grad():
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


class _Full32:
    """What Opacus's hooks for norms do not look at.

    They look away in eval mode, and stumble over the backward pass. Norms in bfloat16 are off by up to a percent, so
    there they are refused: the clip norm is a privacy bound.
    """

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        try:
            super().capture_activations_hook(module, inputs, output)  # type: ignore[misc]
        except NotImplementedError:
            raise QuellError(f"a {type(module).__name__} layer was run twice: {_TIED}") from None

    def rearrange_grad_samples(self, *, module: nn.Module, backprops: Tensor, **options: Any) -> Any:
        if not getattr(module, "activations", None):
            raise QuellError(_NOT_TRAINING.format(type(module).__name__))
        activations, backprops = super().rearrange_grad_samples(  # type: ignore[misc]
            module=module, backprops=backprops, **options
        )
        for tensor in (*activations, backprops):
            if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
                raise QuellError(
                    f"{type(module).__name__} works in {tensor.dtype}, too coarse for the norms of clipping='ghost': "
                    "use clipping='flat' or 'microbatch' with mixed precision, or float32"
                )
        return activations, backprops


def _whole_convolution_norms(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    sampler = GradSampleHooks.GRAD_SAMPLERS[nn.Conv2d]
    return convolution_norms(layer, sampler(layer, activations, backprops), activations[0], backprops)


_SAMPLERS = {
    nn.Linear: linear_norms,
    nn.Embedding: embedding_norms,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _whole_convolution_norms),
}


class _Norms(_Full32, GradSampleHooksFastGradientClipping):
    """Norms, kept on the parameters."""

    NORM_SAMPLERS = _SAMPLERS

    def label(self, name: str, parameter: Any) -> int:
        return id(parameter)

    def forget_norms(self) -> None:
        for parameter in self._module.parameters():
            parameter._norm_sample = None

    def forget_activations(self) -> None:
        for module in self._module.modules():
            module.__dict__.pop("max_batch_len", None)
            if hasattr(module, "activations"):
                module.activations.clear()
        for parameter in self._module.parameters():
            parameter._forward_counter = 0
            parameter.grad_sample = None
            parameter.__dict__.pop("_current_grad_sample", None)

    def norms(self, examples: int, device: torch.device) -> tuple[Tensor, set[int]]:
        """(examples, 2) bound and value of the norm over all parameters that were measured, and which those are."""
        found = {id(p): p._norm_sample for p in self._module.parameters() if p._norm_sample is not None}
        return _combined(found.values(), examples, device), set(found)


class _ShardedNorms(_Full32, GradSampleHooksFastGradientClippingFSDP):
    """Norms under FSDP, kept on the modules, because parameters come and go."""

    NORM_SAMPLERS = _SAMPLERS

    def label(self, name: str, parameter: Any) -> int:
        owner = self._module.get_submodule(name.rpartition(".")[0])
        return id(owner)

    def forget_norms(self) -> None:
        for module in self._module.modules():
            module.__dict__.pop("norm_sample", None)

    def forget_activations(self) -> None:
        for module in self._module.modules():
            module.__dict__.pop("max_batch_len", None)
            if hasattr(module, "activations"):
                module.activations.clear()
            if hasattr(module, "_forward_counter"):
                module._forward_counter = 0

    def norms(self, examples: int, device: torch.device) -> tuple[Tensor, set[int]]:
        owners = [module for module in self._module.modules() if "norm_sample" in module.__dict__]
        found = [norm for module in owners for norm in module.norm_sample]
        return _combined(found, examples, device), {id(module) for module in owners}


def _combined(norms: Any, examples: int, device: torch.device) -> Tensor:
    """(examples, 2) bound and value of the norm over all layers."""
    kept = [norm.float().to(device) for norm in norms]
    if not examples or not kept:
        return torch.zeros(examples, 2, device=device)
    if any(len(norm) != examples for norm in kept):
        raise QuellError(
            f"the layers saw {sorted({len(norm) for norm in kept})} examples and the output has {examples} rows: "
            "clipping='ghost' needs one row of output per example"
        )
    return torch.linalg.vector_norm(torch.stack([norm.reshape(examples, -1).expand(-1, 2) for norm in kept]), dim=0)


def _scaled(gradient: Tensor, factors: Tensor) -> Tensor:
    """Each example's rows times its factor; exactly zero where the factor is, whatever the gradient."""
    shaped = factors.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1))
    return torch.where(shaped > 0, gradient * shaped, 0.0)


def _smallest_parameters(model: nn.Module, known_layers: Any) -> list[nn.Parameter]:
    """One parameter of every layer that uses all it has at every call, and those of other layers: all hooks fire."""
    ends: list[nn.Parameter] = []
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        ends += [min(own, key=Tensor.numel)] if own and type(module) in known_layers else own
    return ends


def _ends_in_parameters(outputs: Sequence[Tensor], model: nn.Module) -> bool:
    """Whether the graph behind the outputs is of torch's own operations, and its leaves are the model's parameters.

    Else a pass to parameters alone might go around a layer whose input has another origin, or be refused, as
    reentrant checkpoints do.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    seen: set[Any] = {None}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        foreign = isinstance(node, BackwardCFunction) and "BackwardHookFunction" not in type(node).__name__
        if foreign or (hasattr(node, "variable") and id(node.variable) not in parameters):
            return False
        waiting += [before for before, _ in node.next_functions]
    return True


def _refuse_ties(model: nn.Module) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        if len(shared) > 1:
            raise QuellError(f"{' and '.join(shared)} are one parameter: {_TIED}")


def _silence_first_layers() -> None:
    """torch warns that a layer whose input needs no gradient has its hook fire early: true, and of no consequence."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")


_TIED = (
    "clipping='ghost' cannot take the norm of a parameter that is used more than once per example, or again by "
    "checkpoint(use_reentrant=False); use clipping='microbatch' or 'flat'"
)
_NOT_TRAINING = (
    "a {} layer has a backward pass but was not in train mode in the forward pass: call model.train() before training"
)
_OUTSIDE = (
    "a parameter is used outside its layer's forward pass, which clipping='ghost' cannot see; use clipping='microbatch'"
)
