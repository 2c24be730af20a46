"""What models compute once for all examples: attention biases by position (T5), prompts that are learned (peft).

Autograd adds up the gradients of all examples there. So what is shared is given to the model once per example, and the
gradient of each example's copy becomes a piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quell.errors import QuellError
from quell.torch.engine.forward import TappedForward
from quell.torch.engine.pieces import Tokens
from quell.torch.engine.rules import Pieces, Tensors, by_unit
from quell.torch.engine.taps import per_row

if TYPE_CHECKING:
    from quell.torch.engine.layers import LayerEngine


def tap_shared(engine: LayerEngine, model: nn.Module) -> None:
    for module in model.modules():
        if callable(getattr(module, "compute_bias", None)):
            table = getattr(module, "relative_attention_bias", None)
            if id(table) in engine.layers:
                module.compute_bias = SharedBias(engine, module, module.compute_bias)
        if callable(getattr(module, "get_prompt", None)) and hasattr(module, "active_peft_config"):
            module.get_prompt = SharedPrompt(engine, module, module.get_prompt)


class SharedPrompt(TappedForward):
    """What stands in for peft's `get_prompt`, which runs its encoder for one row and repeats what it made.

    Asked for one prompt, it repeats nothing, and the engine gives its encoder a row of token numbers for each example.
    """

    def _tapped(self, engine: LayerEngine, args: Any, kwargs: Any) -> Any:
        module: Any = self.module
        if module.active_peft_config.peft_type not in ("PROMPT_TUNING", "P_TUNING"):
            return self.before(*args, **kwargs)
        names = dict(zip(("batch_size", "task_ids", "max_cache_len"), args, strict=False)) | kwargs
        prompts = self.before(**{**names, "batch_size": 1})
        if len(prompts) != names["batch_size"]:
            raise QuellError(
                f"peft made {len(prompts)} prompts for {names['batch_size']} examples, so gradients of single examples "
                "cannot be told apart: use LoRA or prefix tuning instead"
            )
        return prompts


class SharedBias(TappedForward):
    """What stands in for a module's `compute_bias`, which makes (1, heads, queries, keys) of an embedding."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._run(*args, **kwargs)
        engine = self.engine
        if torch.is_grad_enabled() or not engine.running or engine.rows is None:
            return made
        return made.expand(engine.rows, *made.shape[1:])  # a reentrant checkpoint, whose second run has this shape

    def _tapped(self, engine: LayerEngine, args: Any, kwargs: Any) -> Any:
        module: Any = self.module
        table: nn.Embedding = module.relative_attention_bias
        tapped, looked_up = table.forward, []

        def look_up(places: Tensor) -> Tensor:
            looked_up.append(places)
            return table.weight.detach()[places]

        table.forward = look_up
        try:
            bias = self.before(*args, **kwargs)
        finally:
            table.forward = tapped
        if engine.rows is None or len(looked_up) != 1 or not _is_bias(bias, table, looked_up[0]):
            raise QuellError(
                f"{engine.called(table)} is looked up once for all examples, in a way that per-example gradients "
                "cannot follow: freeze it (requires_grad_(False)), or use clipping='microbatch'"
            )

        def rule(table: Any, inputs: Tensors, gradients: Tensors, rows: int) -> Pieces:
            g = by_unit(gradients[0].permute(0, 2, 3, 1), rows).flatten(1, 3)
            yield "weight", Tokens(g, looked_up[0].flatten().expand(g.shape[:2]), table.num_embeddings, -1)

        return per_row(bias, engine.rows, engine.anchor, engine.arrival(table, rule))


def _is_bias(bias: Tensor, table: nn.Embedding, places: Tensor) -> bool:
    expected = table.weight.detach()[places].movedim(-1, 0)[None]
    return table.padding_idx is None and places.dim() == 2 and torch.equal(bias, expected)
