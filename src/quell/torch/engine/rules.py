"""From what a layer saw and the gradient of its output to the pieces of its parameters, one rule per kind of layer.

A rule gets the layer, the saved inputs and the gradient, each with one row per example, and gives (parameter's name,
piece) for the parameters that are trained. Layers without a rule take `by_torch_func`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from quell.errors import QuellError
from quell.torch.engine import kernels
from quell.torch.engine.bounds import wide, wide_type
from quell.torch.engine.patches import Patches, Window
from quell.torch.engine.pieces import Outer, Piece, Rows, Tokens
from quell.torch.random_states import kept_states
from quell.torch.sharding import is_sharded
from quell.torch.standardised import StandardisedConv2d, brought_back

Pieces = Iterable[tuple[str, Piece]]
Tensors = tuple[Tensor, ...]
Rule = Callable[[Any, Tensors, Tensors, int], Pieces]  # layer, inputs, gradients, rows of a unit


def linear(
    layer: Any,
    inputs: Tensors,
    gradients: Tensors,
    rows: int,
    weight: str = "weight",
    bias: str = "bias",
    transposed: bool = False,
) -> Pieces:
    """A product with a weight (outputs, inputs), or with one that is `transposed`, and a bias: each by its name."""
    g = positions(gradients[0], rows)
    if is_trained(layer, weight):
        a = positions(inputs[0], rows).to(g.dtype)
        yield weight, Outer(a, g) if transposed else Outer(g, a)
    if is_trained(layer, bias):
        yield bias, summed(g)


transposed_linear: Rule = partial(linear, transposed=True)  # Hugging Face's Conv1D, whose weight is (inputs, outputs)


def embedding(layer: Any, inputs: Tensors, gradients: Tensors, rows: int) -> Pieces:
    tokens = inputs[0].reshape(len(inputs[0]) // rows, -1)
    padding = -1 if layer.padding_idx is None else int(layer.padding_idx)
    yield "weight", Tokens(gradients[0].reshape(*tokens.shape, -1), tokens, layer.num_embeddings, padding)


def convolution(
    layer: Any, inputs: Tensors, gradients: Tensors, rows: int, through: Callable[[Tensor], Tensor] | None = None
) -> Pieces:
    g = by_unit(gradients[0], rows)
    if is_trained(layer, "weight"):
        x = by_unit(inputs[0].to(g.dtype), rows)
        found = Patches(g, x, Window.of(layer), layer.groups, through, standardised=through is not None)
        yield "weight", found.kept(layer.weight.shape)
    if is_trained(layer, "bias"):
        yield "bias", Rows(g.flatten(3).sum((1, 3), dtype=wide_type(g)))


def standardised_convolution(layer: Any, inputs: Tensors, gradients: Tensors, rows: int) -> Pieces:
    """A convolution by a function of its weight: gradients of what that made go back through it."""
    if is_sharded(layer.weight):
        raise QuellError("standardised convolutions need whole weights, and these are sharded: do not shard them")
    yield from convolution(layer, inputs, gradients, rows, brought_back(layer.weight))


def normalisation(layer: Any, inputs: Tensors, gradients: Tensors, rows: int) -> Pieces:
    """LayerNorm and RMSNorm: what the scale multiplies is computed again from the input."""
    shape = layer.weight.shape
    x = inputs[0].reshape(len(inputs[0]) // rows, -1, shape.numel())
    g = gradients[0].reshape(x.shape)
    epsilon = _epsilon(layer)
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    return _scale_and_shift(layer, *kernels.scale_gradients(x, g, epsilon, isinstance(layer, nn.LayerNorm)))


def channel_normalisation(layer: Any, inputs: Tensors, gradients: Tensors, rows: int) -> Pieces:
    """GroupNorm and InstanceNorm, whose scales belong to channels."""
    x, g = (v.flatten(2) if v.dim() > 2 else v.unsqueeze(2) for v in (inputs[0], gradients[0]))
    groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else layer.num_features
    scales, shifts = kernels.channel_scale_gradients(x, g, groups, layer.eps)
    return _scale_and_shift(layer, added(scales, rows), added(shifts, rows))


def _scale_and_shift(layer: Any, scales: Tensor, shifts: Tensor) -> Pieces:
    for name, values in (("weight", scales), ("bias", shifts)):
        if is_trained(layer, name):
            yield name, Rows(values.view(-1, *layer.weight.shape))


def by_torch_func(
    own: dict[str, Tensor], call: Callable[..., Any], inputs: Any, shared: set[int], gradients: Any, rows: int
) -> Pieces:
    """Any layer: its per-row gradients by running it again under vmap, for its `own` parameters alone.

    `call(parameters, *inputs)` runs the layer; inputs with one row per example are split into rows, except for those
    that all examples share and that are as long by chance.
    """
    examples = len(gradients[0])
    mapped = tuple(0 if has_rows(v, examples) and place not in shared else None for place, v in enumerate(inputs))
    if 0 not in mapped:
        raise QuellError("no input of it has a row per example")

    def one(params: dict[str, Tensor], gradient: tuple[Tensor, ...], *row: Any) -> dict[str, Tensor]:
        batch = [v.unsqueeze(0) if axis == 0 else v for v, axis in zip(row, mapped, strict=True)]
        return pulled_back(lambda p: tuple(_only_row(o) for o in call(p, *batch)), params, gradient)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # for layers that vmap runs row by row
        found = vmap(one, in_dims=(None, 0, *mapped), randomness="error")(own, tuple(gradients), *inputs)
    for name, value in found.items():
        yield name, Rows(added(wide(value), rows))


def _only_row(output: Tensor) -> Tensor:
    if output.shape[:1] != (1,):
        raise QuellError(f"of one row it makes an output of shape {tuple(output.shape)}: {NOT_ROWS}")
    return output[0]


def pulled_back(run: Callable[..., Tensors], params: dict[str, Tensor], gradients: Tensors) -> dict[str, Tensor]:
    """The gradients of the parameters, from those of what `run` makes of them."""
    made, pull = vjp(run, params)
    found: dict[str, Tensor] = pull(tuple(g.to(o.dtype) for g, o in zip(gradients, made, strict=True)))[0]
    return found


def is_trained(layer: Any, name: str) -> bool:
    """Whether the layer has a parameter of this name that is trained."""
    parameter = getattr(layer, name, None)
    return parameter is not None and parameter.requires_grad


def by_unit(values: Tensor, rows: int) -> Tensor:
    """(units, rows of a unit, ...)."""
    return values.reshape(values.shape[0] // rows, rows, *values.shape[1:])


def added(values: Tensor, rows: int) -> Tensor:
    """(units, ...) the sum over each unit's rows."""
    return values if rows == 1 else by_unit(values, rows).sum(1)


def positions(values: Tensor, rows: int) -> Tensor:
    """(units, positions, features): all rows and positions of a unit in a line."""
    if rows == 1 and values.dim() == 3:
        return values
    return values.reshape(values.shape[0] // rows, -1, values.shape[-1])


def summed(g: Tensor) -> Rows:
    """The gradient of a bias: the sum over positions."""
    return Rows(g[:, 0] if g.shape[1] == 1 else g.sum(1, dtype=wide_type(g)))


def _epsilon(layer: Any) -> float | None:
    """What a normalisation adds to the variance, by the names that it goes by."""
    for name in ("eps", "variance_epsilon"):
        with suppress(TypeError, ValueError):  # of None, and of what is no number
            return float(getattr(layer, name, None))  # type: ignore[arg-type]
    return None


NOT_ROWS = (
    "it mixes the examples of a batch, or uses something of the whole batch that it holds (an attribute), or an input "
    "that has a row per example in one batch and one row for all in another; pass it what belongs to examples, with a "
    "row per example in every batch (condition.expand(len(x), -1))"
)


def has_rows(value: Any, examples: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == examples


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: linear,
    nn.Embedding: embedding,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    StandardisedConv2d: standardised_convolution,
    nn.LayerNorm: normalisation,
    nn.RMSNorm: normalisation,
    nn.GroupNorm: channel_normalisation,
    nn.InstanceNorm1d: channel_normalisation,
    nn.InstanceNorm2d: channel_normalisation,
    nn.InstanceNorm3d: channel_normalisation,
}


# whose inputs autocast turns into bfloat16
LOWERED = (linear, transposed_linear, convolution, standardised_convolution)


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of a layer's very type: a subclass may compute something else."""
    kind = type(layer)
    if kind in RULES:
        return RULES[kind]
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return transposed_linear
    return normalisation if _is_rms_norm(layer) else None


def _is_rms_norm(layer: nn.Module) -> bool:
    """Whether a layer with one vector of scales is x/√(mean x² + ε) times that vector, or times one more than it.

    Llama, Mistral, Qwen, T5 and Gemma each have a class of their own for it; what it computes is compared instead.
    """
    own, epsilon = dict(layer.named_parameters(recurse=False)), _epsilon(layer)
    if set(own) != {"weight"} or own["weight"].dim() != 1 or list(layer.children()) or epsilon is None:
        return False
    weight = torch.randn(own["weight"].shape, generator=torch.Generator().manual_seed(1)).to(own["weight"])
    with torch.no_grad(), kept_states():
        x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight) * 3
        try:
            found = functional_call(layer, {"weight": weight}, (x,))  # at random scales: many functions have 1 at 1
        except Exception:  # a layer that wants something else is not one
            return False
        plain = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        close = partial(torch.allclose, rtol=2e-2, atol=1e-3) if weight.dtype != torch.float32 else torch.allclose
        return found.shape == x.shape and any(
            bool(close(found.float(), plain * (weight.float() + shift))) for shift in (0.0, 1.0)
        )
