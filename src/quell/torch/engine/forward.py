"""How a tapped layer runs: with detached parameters, and a tap behind its output.

Linear layers have a tap of their own, attention and recurrent layers are written out (`composite.py`), layers with a
rule run as they are. Layers without one run again by `torch.func`, unless their parameters can be given once per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from quell.errors import QuellError
from quell.noise.stream import uncompiled
from quell.torch.autocast import Autocast, lowered
from quell.torch.checks import in_a_sentence
from quell.torch.coupling import follow_the_batch
from quell.torch.engine.base import Engine, StandIn
from quell.torch.engine.composite import COMPOSITES
from quell.torch.engine.pieces import Rows
from quell.torch.engine.rules import (
    LOWERED,
    NOT_ROWS,
    Pieces,
    Rule,
    added,
    by_torch_func,
    embedding,
    has_rows,
    linear,
    rule_for,
)
from quell.torch.engine.taps import per_row, swapped, tapped_linear
from quell.torch.random_states import kept_states

if TYPE_CHECKING:
    from quell.torch.engine.layers import LayerEngine

_NOT_MAPPED = (
    "try clipping='microbatch'; if both ways refuse a layer, freeze it, or use one that docs/pytorch.md lists (of "
    "peft, LoRA on linear layers)"
)


Way = tuple[Any, ...]  # in which a layer is called, by what its arguments are


@dataclass(eq=False)
class Layer:
    """A tapped layer."""

    name: str
    rule: Rule | None
    trained: Mapping[str, str]  # from its own names of its parameters to the optimizer's
    forward: Callable[..., Any]  # as it was before
    whole: bool = False  # whether its parameters are those of the modules in it too
    shared: Tensor | None = None  # of an embedding: the most positions that all examples were seen to share
    # Without a rule, for each way of calling it: which inputs all examples were seen to share. For each in each way of
    # calling the model: does it take its parameters once for every row (None: not known yet), which inputs are split.
    shared_inputs: dict[Way, set[int]] = field(default_factory=dict)
    row_by_row: dict[Way, bool | None] = field(default_factory=dict)
    own_inputs: dict[Way, list[int] | None] = field(default_factory=dict)


class TappedForward(StandIn):
    """What stands in for a tapped layer's forward method."""

    def __init__(self, engine: LayerEngine, module: nn.Module, before: Callable[..., Any]) -> None:
        self.engine, self.module, self.before = engine, module, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = uncompiled(self._run) if torch.compiler.is_compiling() else self._run
        return run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        if engine.inside:
            return self.before(*args, **kwargs)
        if engine.running:  # also in a reentrant checkpoint, which has no gradients yet and runs again without a pass
            layer = engine.layers.get(id(self.module))
            if layer is not None:
                engine.note(layer.name, way_of(layer, args, kwargs))
        if not torch.is_grad_enabled():
            return self.before(*args, **kwargs)
        engine.calls_parts |= not engine.running and torch._C._current_graph_task_id() < 0  # nor is it a checkpoint
        return self._tapped(engine, args, kwargs)

    def _tapped(self, engine: LayerEngine, args: Any, kwargs: Any) -> Any:
        return run_layer(engine, self.module, args, kwargs)


def layers_to_tap(model: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[nn.Module, Layer]]:
    """Every module that uses trained parameters, whose names are given by their ids.

    What a layer with a rule holds is used there. A module without one that holds the same parameter does so to tie it,
    as the heads of BERT do; should it use it by itself, autograd makes a gradient, which is refused.
    """
    modules = dict(model.named_modules())
    rules = {name: rule_for(module) for name, module in modules.items()}
    ruled = {name for name, module in modules.items() if rules[name] is not None or type(module) in COMPOSITES}
    used = {id(p) for name in ruled for p in _trained(modules[name], names).values()}
    whole = [name for name, module in modules.items() if _is_whole(module, names, used)]
    for name, module in modules.items():
        if any(name.startswith(f"{above}." if above else "") and name != above for above in whole):
            continue
        trained = _trained(module, names, name in whole)
        found = {own: names[id(p)] for own, p in trained.items() if name in ruled or id(p) not in used}
        if found:
            yield module, Layer(name or "the model", rules[name], found, module.forward, name in whole)


def _is_whole(module: nn.Module, names: Mapping[int, str], used: set[int]) -> bool:
    """Whether it computes with what a `ParameterDict` or `ParameterList` in it holds, which compute nothing themselves.

    peft's IA³ and its LoRA of embeddings do. Such a module is taken with all that is in it, if that has no rules.
    """
    holders = [child for child in module.children() if isinstance(child, (nn.ParameterDict, nn.ParameterList))]
    if not any(_trained(child, names) for child in holders):
        return False
    return not any(id(p) in used for p in _trained(module, names, True).values())


def _trained(module: nn.Module, names: Mapping[int, str], below: bool = False) -> dict[str, nn.Parameter]:
    return {own: p for own, p in module.named_parameters(recurse=below) if p.requires_grad and id(p) in names}


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
    elif layer.rule in LOWERED:
        x = lowered(x)
    with swapped([module]):
        y = layer.forward(x)
    (y,) = engine.tapped(module, layer.rule, (y,), (x,))
    return y


def kind_of(args: Any, kwargs: Any) -> Way:
    """Of arguments: their structure, how many dimensions tensors have, switches, and the types of all else."""
    values, structure = pytree.tree_flatten((args, kwargs))
    return str(structure), *map(_kind, values)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dim()
    is_switch = isinstance(value, (bool, type(None))) or (isinstance(value, str) and len(value) < 30)  # no text
    return (value,) if is_switch else type(value)


def way_of(layer: Layer, args: Any, kwargs: Any) -> Way:
    """In which a layer is called. One with a rule has a single input; a row of it may be for all examples."""
    if layer.rule is None:
        return kind_of(args, kwargs)
    x = args[0] if args else next(iter(kwargs.values()))
    return x.dim(), x.dim() > 0 and len(x) == 1


def _run_without_rule(engine: LayerEngine, module: nn.Module, layer: Layer, args: Any, kwargs: Any) -> Any:
    """Parameters whose first dimension is 1 row by row where the layer can take them so, others by torch.func."""
    way = kind_of(args, kwargs)
    here = (engine.way, *way)
    if layer.row_by_row.get(here) is None:
        layer.row_by_row[here] = not layer.whole and _takes_rows(engine, module, layer, args, kwargs)
    if layer.row_by_row[here]:  # None, in a batch of one row, is as good as False
        with swapped([module], _row_by_row(engine, module, layer)):
            return layer.forward(*args, **kwargs)
    values, structure = pytree.tree_flatten((args, kwargs))
    given = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
    with swapped(module.modules() if layer.whole else [module]):
        outputs, shape = pytree.tree_flatten(layer.forward(*args, **kwargs))
    made = [place for place, value in enumerate(outputs) if isinstance(value, Tensor) and value.is_floating_point()]
    tensors = [values[place] for place in given]
    shared = layer.shared_inputs.setdefault(way, set())
    shared |= _shared_inputs(engine, tensors, engine.rows)
    autocast = Autocast.now(tensors[0].device.type if tensors else "cpu")
    for place in given:
        values[place] = None  # kept by the tap, where gradient checkpoints can drop it

    def call(params: dict[str, Tensor], *batch: Any) -> tuple[Tensor, ...]:
        again = list(values)
        for place, value in zip(given, batch, strict=True):
            again[place] = value
        again_args, again_kwargs = pytree.tree_unflatten(again, structure)
        others = {name: p.detach() for name, p in module.named_parameters() if name not in params}
        with autocast.again():
            found = pytree.tree_leaves(functional_call(module, {**others, **params}, again_args, again_kwargs))
        return tuple(found[place] for place in made if place < len(found))  # in eval mode there may be fewer

    def rule(module: nn.Module, inputs: Any, gradients: Any, rows: int) -> Any:
        examples, before = len(gradients[0]), layer.own_inputs.get(here)
        shared.update(_shared_inputs(engine, inputs, examples))  # only now, in loops that call parts
        trained = [engine.params[name] for name in layer.trained.values()]
        layer.own_inputs[here] = own_inputs(
            engine, module, engine.called(module), trained, partial(call, {}), inputs, shared, examples, before
        )
        with in_a_sentence(f"making per-example gradients of {engine.called(module)} by torch.func", _NOT_MAPPED):
            own = {name: p.detach() for name, p in module.named_parameters() if name in layer.trained}
            return engine.unwatched(lambda: list(by_torch_func(own, call, inputs, shared, gradients, rows)))

    # The tap works in place, and autograd may have kept an output for its own backward pass (that of a sigmoid).
    copies = [outputs[place].clone() if outputs[place].grad_fn is not None else outputs[place] for place in made]
    found = engine.tapped(module, rule, copies, tensors)
    for place, value in zip(made, found, strict=True):
        outputs[place] = value
    return pytree.tree_unflatten(outputs, shape)


def _shared_inputs(engine: LayerEngine, tensors: Sequence[Tensor], examples: int | None) -> set[int]:
    """Which are certainly no rows of examples: of another length, or a part of what the model holds.

    An input that was so once is never split again: in a batch of another size it may be as long as that by chance, and
    then everybody's gradient would change with one example more.
    """
    if examples is None or len(tensors) < 2:  # of a single input there is no doubt
        return set()
    found = {place for place, value in enumerate(tensors) if not has_rows(value, examples)}
    if len(found) < len(tensors) - 1:
        found |= {place for place, value in enumerate(tensors) if is_buffer(engine.model, value)}
    return found


def is_buffer(model: nn.Module, value: Tensor) -> bool:
    """Whether it is a buffer of the model, or a part of one."""
    return value.untyped_storage().data_ptr() in {held.untyped_storage().data_ptr() for held in model.buffers()}


def own_inputs(
    engine: Engine,
    module: nn.Module,
    called: str,
    parameters: Iterable[nn.Parameter],
    call: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Any],
    shared: set[int],
    examples: int,
    before: list[int] | None,
) -> list[int] | None:
    """Which inputs are split into rows, if that was looked at: now, or `before` for calls of the same kind.

    Refuses inputs of which one may be shared by all examples, and be as long as they are many by chance: with some rows
    alone of all that are split, what `call` makes of these examples must stay the same. Each way of calling is looked
    at, and each batch that is as long as what all examples shared before.
    """
    as_long = [place for place, value in enumerate(inputs) if has_rows(value, examples)]
    split = [place for place in as_long if place not in shared]
    in_doubt = any(place not in split and not is_buffer(engine.model, inputs[place]) for place in as_long)
    if examples < 2 or (before == split and not in_doubt):
        return before

    def outputs(rows: slice) -> Sequence[Tensor]:
        cut = [value[rows] if place in split else value for place, value in enumerate(inputs)]
        made: Sequence[Tensor] = engine.unwatched(partial(call, *cut))
        return made

    if not follow_the_batch(module, parameters, outputs, examples, sure=in_doubt or len(split) > 1):
        if in_doubt or len(split) < 2:
            raise QuellError(f"{called} makes something else of some rows alone: {NOT_ROWS}")
        raise QuellError(
            f"{called} gets {len(split)} inputs of {examples} rows, and without their last ones other outputs change: "
            "one may be shared by all examples and be as long as the first batch by chance; give what is shared a "
            "first dimension of 1 (mask[None]), or keep it in the model as a buffer"
        )
    return split


def _row_by_row(engine: LayerEngine, module: nn.Module, layer: Layer) -> dict[str, Tensor]:
    assert engine.rows is not None
    own, rows = module._parameters, engine.rows
    return {
        name: per_row(own[name], rows, engine.anchor, engine.arrival(module, _row_rule(name))) for name in layer.trained
    }


def _takes_rows(engine: LayerEngine, module: nn.Module, layer: Layer, args: Any, kwargs: Any) -> bool | None:
    """Whether every (1, ...) parameter may be given once per row: None where a single row cannot tell.

    The output must be the same, and a row of it the same whatever the copies of the other rows are: the first and the
    last one are tried, at random values, because zeros hide what comes behind them. Outputs without rows, such as a
    loss, do not show whose copy they used.
    """
    found = {name: module._parameters[name] for name in layer.trained}
    if any(p is None or p.dim() < 2 or len(p) != 1 for p in found.values()):
        return False
    rows = engine.rows
    if rows is None or rows < 2:
        return None
    random = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return 0.5 * torch.randn(like.shape, generator=random).to(like)

    one = {name: p.detach() + noise(p) for name, p in found.items() if p is not None}
    whole = {name: p.expand(rows, *p.shape[1:]) for name, p in one.items()}
    # Others move apart, and all together: a mean over many hardly shows the one, a difference to it not the other.
    others = {name: p + noise(p) + noise(p[:1]) for name, p in whole.items()}
    settings = [one, whole]
    for row in (0, rows - 1):
        kept = torch.arange(rows, device=engine.device) == row
        settings.append({n: torch.where(kept.view(-1, *[1] * (p.dim() - 1)), whole[n], p) for n, p in others.items()})
    with torch.no_grad():
        try:
            plain, same, first, last = (
                engine.unwatched(partial(_outputs, module, layer, args, kwargs, given)) for given in settings
            )
        except Exception:  # the layer cannot run with several rows, or with such numbers
            return False
    return bool(plain) and all(
        a.shape == b.shape == c.shape == d.shape
        and a.shape[:1] == (rows,)
        and _close(a, b)
        and _close(b[0], c[0])
        and _close(b[-1], d[-1])
        for a, b, c, d in zip(plain, same, first, last, strict=True)
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
    if tokens.dim() == 1 and (layer.shared is not None or len(tokens) != rows):
        _share(engine, layer, tokens, rows)
        return tokens.expand(rows, len(tokens))
    if tokens.untyped_storage().data_ptr() not in engine.given:
        _refuse_numbers(layer, tokens)
    elif tokens.dim() > 1:  # such as the choices of all examples: positions would be given once per example
        raise other_rows(f"{layer.name} (Embedding) gets {len(tokens)}", rows)
    return tokens


def _share(engine: LayerEngine, layer: Layer, tokens: Tensor, rows: int) -> None:
    """Note that all examples share these positions, or refuse what may be numbers of examples.

    A single number would have another place in what comes next. As many as there are rows are positions if they go on
    or stop like those that were seen before.
    """
    before = layer.shared
    if len(tokens) == 1 < rows:
        raise QuellError(
            f"{layer.name} (Embedding) is given a single number for {rows} examples: give it one for each "
            "(number.expand(len(x)))"
        )
    if before is None:
        engine.note(layer.name, "positions that all examples share")
    elif len(tokens) == rows and not torch.equal(*(numbers[: min(rows, len(before))] for numbers in (tokens, before))):
        raise QuellError(
            f"{layer.name} (Embedding) is given {rows} numbers in a batch of {rows} rows, and was given numbers that "
            "all examples share before: give those a first dimension of 1 (positions[None])"
        )
    if before is None or len(tokens) > len(before):
        layer.shared = tokens.detach()


def other_rows(found: str, examples: int | None) -> QuellError:
    """That a layer has more or fewer rows than there are examples, ready to be raised."""
    return QuellError(
        f"{found} rows from {examples} examples: every layer with trained parameters needs one row per example, along "
        "the first dimension (batch_first=True); freeze it, or try clipping='microbatch'"
    )


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
    with kept_states(), swapped([module], given):
        return [v for v in pytree.tree_leaves(layer.forward(*args, **kwargs)) if isinstance(v, Tensor)]


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-5))


def _row_rule(name: str) -> Rule:
    def rule(layer: Any, inputs: Any, gradients: Any, rows: int) -> Pieces:
        yield name, Rows(added(gradients[0], rows).unsqueeze(1))

    return rule
