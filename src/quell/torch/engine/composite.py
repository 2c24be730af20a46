"""Layers that are several in one, written out so that each of their products can be tapped: attention, recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from quell.errors import QuellError
from quell.torch.autocast import lowered
from quell.torch.engine.pieces import Outer, Rows, Stacked
from quell.torch.engine.rules import Pieces, Rule, Tensors, is_trained, linear, positions, summed

if TYPE_CHECKING:
    from quell.torch.engine.layers import LayerEngine

Gates = Callable[[Tensor, Tensor, Tensors, Any], Tensors]  # of products with input and state, the state, the layer


def attention(
    engine: LayerEngine,
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention, as torch.nn.functional.multi_head_attention_forward computes it."""
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn or query.dim() != 3:
        raise QuellError(
            f"{engine.called(layer)} has kdim, vdim, add_bias_kv, add_zero_attn or no batch dimension: use "
            "clipping='microbatch', or an attention layer without them"
        )
    inputs = [lowered(x if layer.batch_first else x.transpose(0, 1)) for x in (query, key, value)]
    weights = layer.in_proj_weight.detach().chunk(3)
    biases = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.detach().chunk(3)
    made = [functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    if any(p.requires_grad for p in layer.parameters(recurse=False)):
        made = list(engine.tapped(layer, _projections, made, inputs))
    q, k, v = (x.unflatten(2, (layer.num_heads, -1)).transpose(1, 2) for x in made)
    mask = _attention_mask(q, key_padding_mask, attn_mask)
    if attn_mask is None and is_causal:
        raise QuellError("nn.MultiheadAttention with is_causal=True needs its attn_mask too, as torch documents it")
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) if need_weights else None
    if scores is None:
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, layer.dropout if layer.training else 0.0)
    else:
        scores = functional.softmax(scores if mask is None else scores + mask, dim=-1)
        scores = functional.dropout(scores, layer.dropout, layer.training)
        mixed = scores @ v
        scores = scores.mean(1) if average_attn_weights else scores
    output = layer.out_proj(mixed.transpose(1, 2).flatten(2))
    return output if layer.batch_first else output.transpose(0, 1), scores


def _projections(layer: Any, inputs: Tensors, gradients: Tensors, rows: int) -> Pieces:
    gs = [positions(g, rows) for g in gradients]
    if is_trained(layer, "in_proj_weight"):
        pairs = zip(gs, (positions(x, rows) for x in inputs), strict=True)
        yield "in_proj_weight", Stacked([Outer(g, a.to(g.dtype)) for g, a in pairs])
    if is_trained(layer, "in_proj_bias"):
        yield "in_proj_bias", Rows(torch.cat([summed(g).values for g in gs], dim=1))


def _attention_mask(q: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Both masks as one, to be added to the scores (examples, heads, queries, keys)."""
    found: Tensor | None = None
    if mask is not None:
        found = _additive(mask, q)
        found = found.unflatten(0, (len(q), -1)) if found.dim() == 3 else found
    if padding is not None:
        hidden = _additive(padding, q)[:, None, None, :]
        found = hidden if found is None else found + hidden
    return found


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
    return mask.to(like.dtype)


def recurrent(
    engine: LayerEngine, layer: Any, inputs: Tensor | PackedSequence, state: Any = None
) -> tuple[Any, Tensor | tuple[Tensor, Tensor]]:
    """nn.RNN, nn.LSTM and nn.GRU, step by step.

    Each cell's products with its input are one product for all steps; those with its state get the gradient of every
    step by a tensor of zeros that is added to them.
    """
    if getattr(layer, "proj_size", 0):
        raise QuellError(f"{engine.called(layer)} has proj_size: use an LSTM without it, and a Linear after it")
    packed = inputs if isinstance(inputs, PackedSequence) else None
    x, lengths = pad_packed_sequence(packed, batch_first=True) if packed is not None else (inputs, None)
    if packed is None and not layer.batch_first:
        x = x.transpose(0, 1)
    directions, gates = 2 if layer.bidirectional else 1, _LAYERS[type(layer)]
    starts = _state_parts(gates, state, x, layer.num_layers * directions, len(x), layer.hidden_size)
    ends: list[Tensors] = []
    for level in range(layer.num_layers):
        sides = []
        for direction in range(directions):
            suffix = f"_l{level}" + ("_reverse" if direction else "")
            flow = _reversed(x, lengths) if direction else x
            start = tuple(part[level * directions + direction] for part in starts)
            out, end = _one_direction(engine, layer, suffix, flow, start, lengths)
            sides.append(_reversed(out, lengths) if direction else out)
            ends.append(end)
        x = torch.cat(sides, dim=2)
        if layer.dropout and level + 1 < layer.num_layers:
            x = functional.dropout(x, layer.dropout, layer.training)
    final: Any = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    if packed is not None:
        output: Any = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    else:
        output = x if layer.batch_first else x.transpose(0, 1)
    return output, final if gates is _lstm else final[0]


def _one_direction(
    engine: LayerEngine, layer: Any, suffix: str, x: Tensor, start: Tensors, lengths: Tensor | None
) -> tuple[Tensor, Tensors]:
    gates, x = _LAYERS[type(layer)], lowered(x)
    projected = _product(engine, layer, f"ih{suffix}", x)
    weights = _detached(layer, f"hh{suffix}")
    before: list[Tensor] = []
    states: list[Tensor] = []
    rule = _state_rule(_cell_rule(f"hh{suffix}"), before)
    (marks,) = engine.tapped(layer, rule, (torch.zeros_like(projected),), (x,))
    now = start
    for step in range(x.shape[1]):
        before.append(now[0].detach())
        from_state = functional.linear(now[0], *weights) + marks[:, step]
        new = gates(projected[:, step], from_state, now, layer)
        if lengths is not None:  # shorter sequences keep their last state
            alive = (lengths > step).to(x.device)[:, None]
            new = tuple(torch.where(alive, fresh, old) for fresh, old in zip(new, now, strict=True))
        now = new
        states.append(now[0])
    return torch.stack(states, dim=1), now


def cell(engine: LayerEngine, layer: Any, x: Tensor, state: Any = None) -> Any:
    """nn.RNNCell, nn.LSTMCell and nn.GRUCell: one step."""
    gates = _CELLS[type(layer)]
    parts = _state_parts(gates, state, x, len(x), layer.hidden_size)
    new = gates(_product(engine, layer, "ih", x), _product(engine, layer, "hh", parts[0]), parts, layer)
    return new if gates is _lstm else new[0]


def _product(engine: LayerEngine, layer: Any, which: str, value: Tensor) -> Tensor:
    """What a layer makes of its input ("ih") or its state ("hh"), with a tap behind it."""
    (made,) = engine.tapped(layer, _cell_rule(which), (functional.linear(value, *_detached(layer, which)),), (value,))
    return made


def _detached(layer: Any, which: str) -> tuple[Tensor, Tensor | None]:
    """The weight of such a product, and its bias."""
    bias = getattr(layer, f"bias_{which}", None)
    return getattr(layer, f"weight_{which}").detach(), None if bias is None else bias.detach()


def _cell_rule(which: str) -> Rule:
    """The rule of such a product: a linear layer of other names."""
    return partial(linear, weight=f"weight_{which}", bias=f"bias_{which}")


def _state_rule(plain: Rule, before: list[Tensor]) -> Rule:
    """The same for the state that each step began with, which is known when the sequence is done."""

    def rule(layer: Any, inputs: Tensors, gradients: Tensors, rows: int) -> Pieces:
        return plain(layer, (torch.stack(before[: gradients[0].shape[1]], dim=1),), gradients, rows)

    return rule


def _state_parts(gates: Gates, state: Any, x: Tensor, *size: int) -> Tensors:
    """The parts of a state, of which an LSTM has two, or zeros of this size."""
    if state is None:
        return (x.new_zeros(size),) * (2 if gates is _lstm else 1)
    return tuple(state) if gates is _lstm else (state,)


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Each sequence backwards, its padding left where it is."""
    if lengths is None:
        return x.flip(1)
    steps = torch.arange(x.shape[1], device=x.device)
    ends = lengths.to(x.device)[:, None]
    order = torch.where(steps < ends, ends - 1 - steps, steps)
    return x.gather(1, order[:, :, None].expand_as(x))


def _rnn(from_input: Tensor, from_state: Tensor, state: Tensors, layer: Any) -> Tensors:
    total = from_input + from_state
    return (torch.tanh(total) if layer.nonlinearity == "tanh" else torch.relu(total),)


def _lstm(from_input: Tensor, from_state: Tensor, state: Tensors, layer: Any) -> Tensors:
    i, f, g, o = (from_input + from_state).chunk(4, dim=1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(from_input: Tensor, from_state: Tensor, state: Tensors, layer: Any) -> Tensors:
    reset_in, update_in, new_in = from_input.chunk(3, dim=1)
    reset_state, update_state, new_state = from_state.chunk(3, dim=1)
    update = torch.sigmoid(update_in + update_state)
    new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_state) * new_state)
    return ((1 - update) * new + update * state[0],)


_LAYERS: dict[type[nn.Module], Gates] = {nn.RNN: _rnn, nn.LSTM: _lstm, nn.GRU: _gru}
_CELLS: dict[type[nn.Module], Gates] = {nn.RNNCell: _rnn, nn.LSTMCell: _lstm, nn.GRUCell: _gru}

COMPOSITES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: attention,
    **dict.fromkeys(_LAYERS, recurrent),
    **dict.fromkeys(_CELLS, cell),
}
