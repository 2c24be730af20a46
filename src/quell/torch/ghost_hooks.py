"""The norm of every example's gradient in every layer, by Opacus's hooks: what `clipping="ghost"` clips by."""

from __future__ import annotations

import math
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import GradSampleHooksFastGradientClippingFSDP
from torch import Tensor, nn

from quell.errors import QuellError
from quell.torch.checks import in_a_sentence
from quell.torch.norms import convolution_norms, embedding_norms, linear_norms
from quell.torch.opacus import NOT_TRAINING, OTHER_LAYER

_MOST_NUMBERS = 1 << 26  # of gradients and patches that are held at a time: 256 MiB
TIED = (
    "clipping='ghost' cannot take the norm of a parameter that is used more than once per example, or again by "
    "checkpoint(use_reentrant=False); use clipping='microbatch' or 'flat'"
)


class _Strict:
    """Refuses what Opacus's hooks for norms let pass.

    They record nothing in eval mode, and then stumble over the backward pass. Norms in bfloat16 are off by up to a
    percent, and the clip norm is a privacy bound.
    """

    _module: nn.Module

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        try:
            super().capture_activations_hook(module, inputs, output)  # type: ignore[misc]
        except NotImplementedError:
            raise QuellError(f"a {type(module).__name__} layer was run twice: {TIED}") from None

    def rearrange_grad_samples(self, *, module: nn.Module, backprops: Tensor, **options: Any) -> Any:
        if not getattr(module, "activations", None):
            raise QuellError(NOT_TRAINING.format(type(module).__name__))
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

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        with in_a_sentence(f"the gradient norm of a {type(module).__name__} layer", OTHER_LAYER):
            super().capture_backprops_hook(module, *arguments, **options)  # type: ignore[misc]

    def forget_activations(self) -> None:
        for module in self._module.modules():
            module.__dict__.pop("max_batch_len", None)
            if hasattr(module, "activations"):
                module.activations.clear()


def _whole_convolution_norms(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Opacus makes the gradients of a convolution whole: of few examples at a time, so that all of it is small."""
    sampler, inputs = GradSampleHooks.GRAD_SAMPLERS[nn.Conv2d], activations[0]
    patches = math.prod(layer.kernel_size) * layer.in_channels * math.prod(backprops.shape[2:])
    count = max(1, _MOST_NUMBERS // max(layer.weight.numel(), patches))
    parts = [
        convolution_norms(layer, sampler(layer, [few], g), few, g)
        for few, g in zip(inputs.split(count), backprops.split(count), strict=True)
    ]
    return {parameter: torch.cat([part[parameter] for part in parts]) for parameter in parts[0]}


_SAMPLERS = {
    nn.Linear: linear_norms,
    nn.Embedding: embedding_norms,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _whole_convolution_norms),
}


class Norms(_Strict, GradSampleHooksFastGradientClipping):
    """Norms, kept on the parameters."""

    NORM_SAMPLERS = _SAMPLERS

    def label(self, name: str, parameter: Any) -> int:
        return id(parameter)

    def forget_norms(self) -> None:
        for parameter in self._module.parameters():
            parameter._norm_sample = None

    def forget_activations(self) -> None:
        super().forget_activations()
        for parameter in self._module.parameters():
            parameter._forward_counter = 0
            parameter.grad_sample = None
            parameter.__dict__.pop("_current_grad_sample", None)

    def norms(self, examples: int, device: torch.device) -> tuple[Tensor, set[int]]:
        """(examples, 2) bound and value of the norm over all parameters that were measured, and which those are."""
        found = {id(p): p._norm_sample for p in self._module.parameters() if p._norm_sample is not None}
        return _combined(found.values(), examples, device), set(found)


class ShardedNorms(_Strict, GradSampleHooksFastGradientClippingFSDP):
    """Norms under FSDP, kept on the modules, because parameters come and go."""

    NORM_SAMPLERS = _SAMPLERS

    def label(self, name: str, parameter: Any) -> int:
        owner = self._module.get_submodule(name.rpartition(".")[0])
        return id(owner)

    def forget_norms(self) -> None:
        for module in self._module.modules():
            module.__dict__.pop("norm_sample", None)

    def forget_activations(self) -> None:
        super().forget_activations()
        for module in self._module.modules():
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
