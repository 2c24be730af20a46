"""`clipping="flat"` and `clipping="ghost"`: per-example gradients, or only their norms, by Opacus's hooks.

The one module that imports Opacus, when a mode that needs it is asked for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from quell.errors import QuellError

try:
    from opacus.grad_sample import GradSampleHooks
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
        GradSampleHooksFastGradientClippingFSDP,
    )
    from opacus.optimizers import DPOptimizer
except ImportError as missing:
    raise QuellError(
        "clipping='flat' and 'ghost' use Opacus: pip install -c constraints.txt '.[torch]', or take 'microbatch'"
    ) from missing

from quell.torch.clipping import Clipped, clip_factors, norm_of, sum_clipped
from quell.torch.distributed import sum_over_ranks, world
from quell.torch.engine import DeferredEngine, Engine, Pass, is_differentiable
from quell.torch.optimizer import PrivateOptimizer
from quell.torch.sharding import copies, is_sharded, local


class OpacusOptimizer(PrivateOptimizer, DPOptimizer):
    """An Opacus `DPOptimizer` in type and interface; clipping and noise are Quell's."""


class FlatEngine(Engine):
    """Whole per-example gradients (`p.grad_sample`), clipped at the step."""

    def __init__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], max_grad_norm: float, loss_reduction: str
    ) -> None:
        super().__init__(params, max_grad_norm, loss_reduction)
        self._all = list(model.parameters())  # also those that the optimizer does not train
        _silence_first_layers()
        # For a mean loss Opacus multiplies every layer's gradients by the batch size; `_scales` does it per example.
        self._hooks = _Gradients(model, loss_reduction="sum", strict=False)

    def flush(self) -> None:
        found: dict[str, Tensor] = {}
        passes: list[int] = []  # how many examples each backward pass had
        for name, parameter in self.params.items():
            sample = parameter.grad_sample
            if sample is not None:
                parts = sample if isinstance(sample, list) else [sample]
                passes = [len(part) for part in parts]
                found[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        sizes = {len(gradient) for gradient in found.values()}
        if len(sizes) > 1:
            raise QuellError(
                f"the layers saw different numbers of examples ({sorted(sizes)}): every input of a layer must have one "
                "row per example"
            )
        if found:
            with torch.no_grad():
                held = {name: self.params[name] for name in found}
                scales = self._scales(passes, next(iter(found.values())).device)
                clipped = sum_clipped(lambda: iter([found]), held, self.max_grad_norm, scales)
                self._take(clipped.examples, clipped)
        self._drop()

    def _scales(self, passes: Sequence[int], device: torch.device) -> Tensor | float:
        """From an example's share of a mean loss to its own loss: times the size of its batch."""
        if not self.mean_loss:
            return 1.0
        if len(passes) == 1:
            return float(passes[0])
        return torch.cat([torch.full((size,), float(size), device=device) for size in passes])

    def discard(self) -> None:
        super().discard()
        self._drop()

    def _drop(self) -> None:
        for parameter in self._all:
            parameter.grad_sample = None
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

    def __init__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], max_grad_norm: float, loss_reduction: str
    ) -> None:
        super().__init__(params, max_grad_norm, loss_reduction)
        self.model, self._all = model, list(model.parameters())
        self.sharded = any(is_sharded(parameter) for parameter in params.values())
        _refuse_ties(model)
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

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return None
        if any(getattr(parameter, "_forward_counter", 0) > 1 for parameter in self.params.values()):
            raise QuellError(_TIED)
        return self._cut(outputs, [value for value in pytree.tree_leaves(outputs) if is_differentiable(value)])

    def _clip(self, done: Pass, gradients: Sequence[Tensor], examples: int) -> Clipped:
        outputs: list[Tensor] = done.made_by
        with torch.autocast(outputs[0].device.type, enabled=False):
            self._hooks.forget_norms()
            ends = _smallest_parameters(self.model, self._hooks.NORM_SAMPLERS) if self._shortened else None
            torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=ends)
            self._drop_gradients()
            with torch.no_grad():
                norms, measured = self._hooks.norms(examples, outputs[0].device)
            self._hooks.disable_hooks()
            try:
                self._probe(outputs, gradients, norms)
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
        alone = bool(torch.isfinite(norms[:1]).any()) and (not self.sharded or world()[0] == 0)
        mask = torch.zeros_like(norms)
        mask[:1] = float(alone)
        torch.autograd.backward(outputs, [_scaled(gradient, mask) for gradient in gradients], retain_graph=True)
        factor = world()[1] if self.sharded else 1
        found_gradients = [local(p.grad) for p in self._all if p.grad is not None]
        squares = [(gradient.float() * factor).square().sum() for gradient in found_gradients]
        real_square = torch.stack(squares).sum() if squares else mask.new_zeros(())
        both = torch.stack([real_square, norms[:1].square().sum() if alone else mask.new_zeros(())])
        if self.sharded:
            sum_over_ranks([both])
        self._drop_gradients()
        real, found = both.sqrt().tolist()
        if not math.isfinite(real):
            return  # some example's values are not finite: a later batch will do
        if not abs(real - found) <= 5e-3 * max(real, found):  # room for TF32, not for a layer that is used twice
            raise QuellError(f"one example's gradient has norm {real:.4g}, its layers say {found:.4g}: {_OUTSIDE}")
        self._probed = real > 0
        self._shortened = self._probed and not self.sharded and _ends_in_parameters(outputs, self.model)

    def _forget(self) -> None:
        self._hooks.forget_activations()


class _InTrainMode:
    """Opacus's hooks look away in eval mode, and stumble over the backward pass."""

    def rearrange_grad_samples(self, *, module: nn.Module, backprops: Tensor, **options: Any) -> Any:
        if not getattr(module, "activations", None):
            raise QuellError(
                f"a {type(module).__name__} layer has a backward pass but was not in train mode in the forward pass: "
                "call model.train() before training"
            )
        return super().rearrange_grad_samples(module=module, backprops=backprops, **options)  # type: ignore[misc]


class _Gradients(_InTrainMode, GradSampleHooks):
    """Opacus's per-example gradients, kept on the parameters."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        samplers = GradSampleHooks.GRAD_SAMPLERS
        self.GRAD_SAMPLERS = {kind: _kept_at_once(sampler) for kind, sampler in samplers.items()}


def _kept_at_once(sampler: Callable[..., dict[nn.Parameter, Tensor]]) -> Callable[..., dict[nn.Parameter, Tensor]]:
    """A sampler that keeps what it made for a layer's only call, and leaves the rest to Opacus.

    Opacus copies every layer's gradients into zeros, to add those of further calls: twice the memory of the largest
    layer, and two more passes over it.
    """

    def sample(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        rest = {}
        for parameter, made in sampler(layer, activations, backprops).items():
            alone = getattr(parameter, "_forward_counter", 0) == 1 and not hasattr(parameter, "_current_grad_sample")
            if alone and parameter.requires_grad and len(made) == layer.max_batch_len and made.is_contiguous():
                parameter._current_grad_sample = made
            else:
                rest[parameter] = made
        return rest

    return sample


class _Full32(_InTrainMode):
    """Norms in bfloat16 are off by up to a percent, so there they are refused: the clip norm is a privacy bound."""

    def rearrange_grad_samples(self, *, module: nn.Module, backprops: Tensor, **options: Any) -> Any:
        activations, backprops = super().rearrange_grad_samples(module=module, backprops=backprops, **options)
        for tensor in (*activations, backprops):
            if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
                raise QuellError(
                    f"{type(module).__name__} works in {tensor.dtype}, too coarse for the norms of clipping='ghost': "
                    "use clipping='flat' or 'microbatch' with mixed precision, or float32"
                )
        return activations, backprops


class _Norms(_Full32, GradSampleHooksFastGradientClipping):
    """Opacus's norms, kept on the parameters."""

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

    def norms(self, examples: int, device: torch.device) -> tuple[Tensor, set[int]]:
        """(examples,) norms over all parameters that were measured, and which those are."""
        found = {id(p): p._norm_sample for p in self._module.parameters() if p._norm_sample is not None}
        return _combined(found.values(), examples, device), set(found)


class _ShardedNorms(_Full32, GradSampleHooksFastGradientClippingFSDP):
    """Opacus's norms under FSDP, kept on the modules, because parameters come and go."""

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
    kept = [norm.reshape(-1).float().to(device) for norm in norms]
    if not examples or not kept:
        return torch.zeros(examples, device=device)
    if any(len(norm) != examples for norm in kept):
        raise QuellError(
            f"the layers saw {sorted({len(norm) for norm in kept})} examples and the output has {examples} rows: "
            "clipping='ghost' needs one row of output per example"
        )
    return torch.linalg.vector_norm(torch.stack(kept), dim=0)


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
    "clipping='ghost' cannot take the norm of a parameter that is used more than once per example; use "
    "clipping='microbatch' or 'flat'"
)
_OUTSIDE = (
    "a parameter is used outside its layer's forward pass, which clipping='ghost' cannot see; use clipping='microbatch'"
)
