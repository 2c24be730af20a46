"""The model classes that people fine-tune have the per-example gradients of autograd."""

from __future__ import annotations

import pytest
import torch

from quell.errors import QuellError
from quell.torch.engine.layers import LayerEngine
from tests.pytorch.architectures import MODELS, TIED, batch_for, check_gradients, losses, tiny


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autograd(name, attention):
    """Padding, positions that all examples share, tied embeddings, transposed weights, RMSNorm, class tokens."""
    check_gradients(name, tiny(name, attention), clipped=name not in TIED)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["BERT", "Llama", "T5"])
def test_gradient_checkpoints_of_both_kinds(name, reentrant):
    model = tiny(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    check_gradients(name, model, clipped=name not in TIED)


@pytest.mark.parametrize("name", ["BERT", "Llama", "T5"])
def test_bfloat16(name):
    """Autocast, as Trainer turns it on: gradients are autograd's to the precision of bfloat16."""
    model = tiny(name)
    inputs, labels = batch_for(name)
    trained = dict(model.named_parameters())
    with torch.autocast("cpu", torch.bfloat16):
        loss = losses(name, model(**inputs), labels).sum()
    right = torch.autograd.grad(loss, list(trained.values()))
    engine = LayerEngine(model, trained, 1e6, "sum")
    with torch.autocast("cpu", torch.bfloat16):
        losses(name, model(**inputs), labels).sum().backward()
    for found, expected in zip(engine.collect()[1], right, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_a_table_of_positions_that_is_used_otherwise_is_named():
    model = tiny("T5")
    attention = model.encoder.block[0].layer[0].SelfAttention
    original = type(attention).compute_bias
    attention.compute_bias = lambda *args, **kwargs: 2 * original(attention, *args, **kwargs)
    LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
    with pytest.raises(QuellError, match=r"relative_attention_bias \(Embedding\) is looked up once for all examples"):
        model(**batch_for("T5")[0])
