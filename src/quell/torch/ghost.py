"""`clipping="ghost"`: only the norms of examples' gradients, by Opacus's hooks, then one pass that adds up."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from quell.errors import QuellError
from quell.torch.checks import refuse_unmeasured_layers
from quell.torch.clipping import Clipped, clip_factors, norm_of
from quell.torch.distributed import sum_over_ranks, world
from quell.torch.engine import DeferredEngine, Pass, is_differentiable
from quell.torch.ghost_hooks import TIED, Norms, ShardedNorms
from quell.torch.norms import full_precision
from quell.torch.opacus import drop_gradients
from quell.torch.sharding import copies, is_sharded, local

_OUTSIDE = (
    "a parameter is used outside its layer's forward pass, which clipping='ghost' cannot see; use clipping='microbatch'"
)


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
        kind = ShardedNorms if self.sharded else Norms
        self._hooks = kind(model, loss_reduction="sum", strict=False)
        self._probed = self._shortened = False
        model.register_forward_pre_hook(self._before, prepend=True)
        model.register_forward_hook(self._after)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.flush()
            self._forget()  # what no backward pass has fetched, or one that failed

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return None
        if any(getattr(parameter, "_forward_counter", 0) > 1 for parameter in self.params.values()):
            raise QuellError(TIED)
        return self._cut(outputs, [value for value in pytree.tree_leaves(outputs) if is_differentiable(value)])

    def _clip(self, done: Pass, gradients: Sequence[Tensor], examples: int) -> Clipped:
        outputs: list[Tensor] = done.made_by
        try:
            with torch.autocast(outputs[0].device.type, enabled=False), full_precision():
                return self._clip_in_two_passes(outputs, gradients, examples)
        except BaseException:
            drop_gradients(self._all)  # the next forward pass forgets the rest
            raise

    def _clip_in_two_passes(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], examples: int) -> Clipped:
        self._hooks.forget_norms()
        ends = _smallest_parameters(self.model, self._hooks.NORM_SAMPLERS) if self._shortened else None
        torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=ends)
        drop_gradients(self._all)
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

    def _sums_of(self, measured: set[int], examples: int) -> Clipped:
        """What the second pass left in `p.grad`, refused where the first pass took no norm."""
        sums = {}
        for name, parameter in self.params.items():
            if parameter.grad is not None:
                if self._hooks.label(name, parameter) not in measured:
                    raise QuellError(f"{name} has a gradient but no norm: {_OUTSIDE}")
                sums[name] = self._whole_sum(parameter.grad)
        drop_gradients(self._all)
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
        drop_gradients(self._all)
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
            raise QuellError(f"{' and '.join(shared)} are one parameter: {TIED}")


def _silence_first_layers() -> None:
    """torch warns that a layer whose input needs no gradient has its hook fire early: true, and of no consequence."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
