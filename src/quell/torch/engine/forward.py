"""How a tapped layer runs: with detached parameters, and a tap behind its output.

Linear layers have a tap of their own, attention and recurrent layers are written out (`composite.py`), layers with a
rule run as they are. Layers without one run again by `torch.func`, unless their parameters can be given once per row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from quell.errors import QuellError
from quell.noise.secrecy import never_copied
from quell.noise.stream import uncompiled
from quell.torch.checks import in_a_sentence
from quell.torch.engine.composite import COMPOSITES
from quell.torch.engine.pieces import Piece, Rows
from quell.torch.engine.rules import LOWERED, Rule, by_torch_func, by_unit, embedding, linear
from quell.torch.engine.taps import per_row, swapped, tapped_linear

if TYPE_CHECKING:
    from quell.torch.engine.layers import LayerEngine

_NOT_MAPPED = "use clipping='microbatch', or one of the layers that docs/pytorch.md lists"


@dataclass(eq=False)
class Layer:
    """A tapped layer."""

    name: str
    rule: Rule | None
    trained: Mapping[str, str]  # from its own names of its parameters to the optimizer's
    forward: Callable[..., Any]  # as it was before
    row_by_row: bool | None = None  # whether its parameters may be given to it once for every row
    shared: bool = False  # whether an embedding was seen to get one row of positions for all examples


class TappedForward:
    """What stands in for a tapped layer's forward method. A copy of the layer has none of its taps."""

    def __init__(self, engine: LayerEngine | None, module: nn.Module) -> None:
        self.engine, self.module = engine, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = uncompiled(self._run) if torch.compiler.is_compiling() else self._run
        return run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        if engine is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        if engine.idle or not torch.is_grad_enabled():
            return engine.layers[id(self.module)].forward(*args, **kwargs)
        return run_layer(engine, self.module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> TappedForward:
        return TappedForward(None, copy.deepcopy(self.module, memo))

    __reduce_ex__ = never_copied("a private model is never pickled: save model.state_dict()")

    def __repr__(self) -> str:
        return "<tapped forward>"


def run_layer(engine: LayerEngine, module: Any, args: Any, kwargs: Any) -> Any:
    """A tapped layer's forward pass."""
    layer = engine.layers[id(module)]
    if type(module) in COMPOSITES:
        return COMPOSITES[type(module)](engine, module, *args, **kwargs)
    if layer.rule is None:
        return _run_without_rule(engine, module, layer, args, kwargs)
    (x,) = args or tuple(kwargs.values())
    if layer.rule is linear:
        return tapped_linear(x, module.weight, module.bias, engine.anchor, engine.arrival(module, linear))
    if layer.rule is embedding:
        x = _own_rows(engine, layer, x)
    elif layer.rule in LOWERED and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    with swapped(module):
        y = layer.forward(x)
    (y,) = engine.tapped(module, layer.rule, (y,), (x,))
    return y


def _run_without_rule(engine: LayerEngine, module: nn.Module, layer: Layer, args: Any, kwargs: Any) -> Any:
    """Parameters whose first dimension is 1 row by row where the layer can take them so, others by torch.func."""
    if layer.row_by_row is None:
        layer.row_by_row = _takes_rows(engine, module, layer, args, kwargs)
    if layer.row_by_row:  # None, in a batch of one row, is as good as False
        with swapped(module, **_row_by_row(engine, module, layer)):
            return layer.forward(*args, **kwargs)
    values, structure = pytree.tree_flatten((args, kwargs))
    with swapped(module):
        outputs, shape = pytree.tree_flatten(layer.forward(*args, **kwargs))
    made = [place for place, value in enumerate(outputs) if isinstance(value, Tensor) and value.is_floating_point()]
    given = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
    tensors = [values[place] for place in given]
    for place in given:
        values[place] = None  # kept by the tap, where gradient checkpoints can drop it

    def call(params: dict[str, Tensor], *batch: Any) -> tuple[Tensor, ...]:
        again = list(values)
        for place, value in zip(given, batch, strict=True):
            again[place] = value
        again_args, again_kwargs = pytree.tree_unflatten(again, structure)
        others = {name: p.detach() for name, p in module.named_parameters() if name not in params}
        found = pytree.tree_leaves(functional_call(module, {**others, **params}, again_args, again_kwargs))
        return tuple(found[place] for place in made)

    def rule(module: nn.Module, inputs: Any, gradients: Any, rows: int) -> Any:
        with in_a_sentence(f"making per-example gradients of {engine.called(module)} by torch.func", _NOT_MAPPED):
            return engine.unwatched(lambda: list(by_torch_func(module, call, inputs, gradients, rows)))

    found = engine.tapped(module, rule, [outputs[place] for place in made], tensors)
    for place, value in zip(made, found, strict=True):
        outputs[place] = value
    return pytree.tree_unflatten(outputs, shape)


def _row_by_row(engine: LayerEngine, module: nn.Module, layer: Layer) -> dict[str, Tensor]:
    assert engine.rows is not None
    own, rows = module._parameters, engine.rows
    return {
        name: per_row(own[name], rows, engine.anchor, engine.arrival(module, _row_rule(name))) for name in layer.trained
    }


def _takes_rows(engine: LayerEngine, module: nn.Module, layer: Layer, args: Any, kwargs: Any) -> bool | None:
    """Whether every (1, ...) parameter may be given once per row: None where a single row cannot tell.

    The output must be the same, and a change to one row's copy must change that row of the output alone. Outputs
    without rows, such as a loss, do not show whose copy they used.
    """
    own = {name: module._parameters[name] for name in layer.trained}
    if any(p is None or p.dim() < 2 or len(p) != 1 for p in own.values()):
        return False
    if engine.rows is None or engine.rows < 2:
        return None
    whole = {name: p.detach().expand(engine.rows, *p.shape[1:]) for name, p in own.items() if p is not None}
    changed = {name: p.clone() for name, p in whole.items()}
    for p in changed.values():
        p[0] += 1.0
    with torch.no_grad():
        try:
            plain, same, other = (
                engine.unwatched(partial(_outputs, module, layer, args, kwargs, given))
                for given in ({}, whole, changed)
            )
        except (RuntimeError, ValueError, IndexError):
            return False
    rows = engine.rows
    return bool(plain) and all(
        a.shape == b.shape == c.shape and a.shape[:1] == (rows,) and _close(a, b) and _close(a[1:], c[1:])
        for a, b, c in zip(plain, same, other, strict=True)
    )


def _own_rows(engine: LayerEngine, layer: Layer, tokens: Tensor) -> Tensor:
    """Position numbers that all examples share, such as torch.arange(length), once for every example."""
    rows = engine.rows
    if rows is None:  # a part of the model was called, and nobody knows how many examples it was given
        _refuse_numbers(layer, tokens)
        return tokens
    if tokens.dim() > 1 and len(tokens) == rows:
        return tokens
    if tokens.dim() > 1 and len(tokens) == 1:
        return tokens.expand(rows, *tokens.shape[1:])
    if tokens.dim() == 1 and (layer.shared or len(tokens) != rows):
        layer.shared = True
        return tokens.expand(rows, len(tokens))
    if tokens.untyped_storage().data_ptr() not in engine.given:
        _refuse_numbers(layer, tokens)
    return tokens


def _refuse_numbers(layer: Layer, tokens: Tensor) -> None:
    """Numbers in order that were made inside of the model, as many as there are rows, may be anything."""
    count = len(tokens) if tokens.dim() == 1 else 0
    if count > 1 and bool((tokens == torch.arange(count, device=tokens.device)).all()):
        raise QuellError(
            f"{layer.name} (Embedding) is given the numbers 0 to {count - 1} in a batch of {count} rows: they may "
            "be positions that all examples share, or one token of each; give positions a first dimension of 1 "
            "(positions[None])"
        )


def _outputs(module: nn.Module, layer: Layer, args: Any, kwargs: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """A layer's outputs with other parameters, always with the same random numbers."""
    devices = list({p.device for p in module.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices), swapped(module, **given):
        torch.manual_seed(0)
        return [v for v in pytree.tree_leaves(layer.forward(*args, **kwargs)) if isinstance(v, Tensor)]


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-5))


def _row_rule(name: str) -> Rule:
    def rule(layer: Any, inputs: Any, gradients: tuple[Tensor, ...], rows: int) -> Iterable[tuple[str, Piece]]:
        yield name, Rows(by_unit(gradients[0], rows).sum(1).unsqueeze(1))

    return rule
