"""Taps: how the engine sees what a layer saw, and the gradient of what it made.

A tapped layer runs as always, but with its parameters detached, so that autograd makes no gradients for them. An
identity is put behind its output. It keeps the layer's input as autograd would have kept it, so gradient checkpoints
work, and when the output's gradient arrives it hands both over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quell.torch.autocast import lowered

_unsafe_view = torch.ops.aten._unsafe_view.default
Arrived = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]  # takes what was kept and the gradients


def tap(outputs: Sequence[Tensor], inputs: Sequence[Tensor], anchor: Tensor, arrived: Arrived) -> tuple[Tensor, ...]:
    """The same outputs, which call `arrived(inputs, gradients)` when a backward pass comes through them.

    `anchor` is something that requires a gradient, so that the outputs do; it gets none.
    """
    seen = {id(value) for value in inputs}
    own = [value.clone() if value._is_view() or id(value) in seen else value for value in outputs]
    made: tuple[Tensor, ...] = _Tap.apply(arrived, len(own), *own, *inputs, anchor)
    return made


def tapped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, arrived: Arrived) -> Tensor:
    """x weightᵀ + bias with a tap behind it, in one: most layers are linear, and every node costs the host time."""
    made: Tensor = _Linear.apply(arrived, x, weight.detach(), None if bias is None else bias.detach(), anchor)
    return made


def per_row(parameter: Tensor, rows: int, anchor: Tensor, arrived: Arrived) -> Tensor:
    """A parameter of shape (1, ...) as (rows, ...), whose gradient arrives row by row."""
    made: Tensor = _PerRow.apply(arrived, rows, parameter.detach(), anchor)
    return made


@contextmanager
def swapped(modules: Iterable[nn.Module], others: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """The modules with detached parameters, or the others given, instead of their own."""
    owned = [(module, module._parameters) for module in modules]
    for module, own in owned:
        detached = {name: p.detach() if p is not None and p.requires_grad else p for name, p in own.items()}
        module.__dict__["_parameters"] = {**detached, **(others or {})}
    try:
        yield
    finally:
        for module, own in owned:
            module.__dict__["_parameters"] = own


class _Tap(torch.autograd.Function):
    """In place, because a view of the output could not be changed in place by what comes after it."""

    @staticmethod
    def forward(ctx: Any, arrived: Arrived, count: int, *tensors: Tensor) -> Any:
        ctx.arrived, ctx.others = arrived, len(tensors) - count
        ctx.save_for_backward(*tensors[count:-1])
        ctx.mark_dirty(*tensors[:count])
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.arrived(ctx.saved_tensors, gradients)
        return (None, None, *gradients, *[None] * ctx.others)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arrived: Arrived, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor) -> Any:
        x, weight, bias = lowered(x), lowered(weight), None if bias is None else lowered(bias)
        ctx.arrived = arrived
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])
        y = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias, flat, weight.t())
        return _unsafe_view(y, (*x.shape[:-1], weight.shape[0]))  # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        (g,) = gradients
        ctx.arrived((x,), gradients)
        back = torch.mm(g.reshape(-1, g.shape[-1]), weight).view(x.shape) if ctx.needs_input_grad[1] else None
        return None, back, None, None, None


class _PerRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arrived: Arrived, rows: int, parameter: Tensor, anchor: Tensor) -> Any:
        ctx.arrived = arrived
        return parameter.expand(rows, *parameter.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.arrived((), gradients)
        return None, None, None, None
