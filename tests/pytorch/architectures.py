"""Hugging Face's model classes in tiny configurations, batches for them, and their examples' own losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quell.torch.engine.layers import LayerEngine
from quell.torch.losses import next_token_losses, token_losses

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, CLASSES, IMAGE = 30, 9, 3, 8
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = {**ENCODER, **SPECIAL, "num_key_value_heads": 1}
GPT2 = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, **SPECIAL}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
DISTIL = {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 16}
DISTIL |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
VIT = {**ENCODER, **UNDROPPED, "image_size": IMAGE, "patch_size": 4}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # class, configuration, options
    "BERT": ("BertForSequenceClassification", "BertConfig", {**ENCODER, **UNDROPPED}),
    "BERT, masked words": ("BertForMaskedLM", "BertConfig", {**ENCODER, **UNDROPPED}),
    "BERT, token labels": ("BertForTokenClassification", "BertConfig", {**ENCODER, **UNDROPPED}),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", {**ENCODER, **UNDROPPED}),
    "DistilBERT": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "GPT-2, untied": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "GPT-2, classes": ("GPT2ForSequenceClassification", "GPT2Config", GPT2),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 4}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**DECODER, "tie_word_embeddings": True}),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "ViT": ("ViTForImageClassification", "ViTConfig", VIT),
}
TIED = ("BERT, masked words", "GPT-2", "Qwen2", "T5")  # the norms of both uses are added, which clips a little more


def tiny(name: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    kind, config, options = MODELS[name]
    labels = {} if causal(name) or name in ("T5", "BERT, masked words") else {"num_labels": CLASSES}
    made = getattr(transformers, config)(**{**options, **labels, **changes}, attn_implementation=attention)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(made)
    for parameter in model.parameters():  # scales and biases that are not all ones and zeros
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def causal(name: str) -> bool:
    return MODELS[name][0].endswith(("CausalLM", "LMHeadModel"))


def batch_for(name: str, examples: int = 6) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and labels; sentences have different lengths, and are padded."""
    maker = torch.Generator().manual_seed(3)
    classes = torch.randint(0, CLASSES, (examples,), generator=maker)
    if name == "ViT":
        return {"pixel_values": torch.randn(examples, 3, IMAGE, IMAGE, generator=maker)}, classes
    lengths = torch.randint(3, LENGTH + 1, (examples,), generator=maker)
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    tokens = torch.randint(3, WORDS, (examples, LENGTH), generator=maker) * mask
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if name == "T5":
        inputs["decoder_input_ids"] = tokens.roll(1, 1)
    if MODELS[name][0].endswith(("Classification",)) and "Token" not in MODELS[name][0]:
        return inputs, classes
    labels = tokens % CLASSES if name == "BERT, token labels" else tokens
    return inputs, labels.masked_fill(mask == 0, -100)


def losses(name: str, outputs: Any, labels: Tensor) -> Tensor:
    """One per example. Prompts that were learned stand before the tokens, and have no labels."""
    if causal(name):
        return next_token_losses({"logits": outputs["logits"][:, -labels.shape[1] :]}, labels)
    return token_losses(outputs, labels)


def check_gradients(name: str, model: nn.Module, clipped: bool = True) -> None:
    """The engine's clipped sum is that of one backward pass per example: norms and gradients are autograd's."""
    inputs, labels = batch_for(name)
    trained = {own: p for own, p in model.named_parameters() if p.requires_grad}
    alone = []
    for row in range(len(labels)):
        one = model(**{key: value[row : row + 1] for key, value in inputs.items()})
        losses(name, one, labels[row : row + 1]).sum().backward()  # checkpoints know no torch.autograd.grad
        alone.append([torch.zeros_like(p) if p.grad is None else p.grad for p in trained.values()])
        model.zero_grad()
    norms = [float(torch.sqrt(sum(g.double().square().sum() for g in gradient))) for gradient in alone]
    bound = sorted(norms)[1] if clipped else 1e6
    weights = [min(1.0, bound / norm) for norm in norms]
    engine = LayerEngine(model, trained, bound, "sum")
    losses(name, model(**inputs), labels).sum().backward()
    seen, sums = engine.collect()
    assert seen == len(labels)
    whole = sum(weight * norm for weight, norm in zip(weights, norms, strict=True))
    for found, column in zip(sums, zip(*alone, strict=True), strict=True):
        right = sum(weight * gradient for weight, gradient in zip(weights, column, strict=True))
        assert float(torch.cat([g.flatten() for g in column]).abs().max()) > 0  # a gradient of zeros would show nothing
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4 * whole)
