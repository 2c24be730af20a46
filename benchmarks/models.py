"""The models whose private steps are timed, and data of their shapes: decoders, also with LoRA, a ViT, a small text
classifier, three CNNs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
from networks import resnet9
from training import convnet

try:
    from peft import LoraConfig, inject_adapter_in_model
except ImportError:  # then a layer like peft's, below
    LoraConfig = None


LORA = "a layer like peft's" if LoraConfig is None else "peft"
NAMES = ("decoder135", "vit", "decoder1b", "lora1b", "convnet", "cnn", "resnet9", "transformer")


@dataclass(frozen=True)
class Size:
    """Of a transformer; `vocabulary` is 0 where it sees patches of 768 numbers."""

    layers: int
    width: int
    heads: int
    positions: int
    vocabulary: int = 0


@dataclass(frozen=True)
class Task:
    """A model, its batch, and what it sees: numbers below `tokens`, or floats where that is 0."""

    name: str
    device: str
    batch: int
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int
    classes: int
    labels: tuple[int, ...] = ()  # the shape of an example's labels

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(self.device):
            return self.build().to(self.device)

    def data(self, rows: int) -> TensorDataset:
        options: dict[str, Any] = {"generator": torch.Generator(self.device).manual_seed(1), "device": self.device}
        if self.tokens:
            x = torch.randint(self.tokens, (rows, *self.shape), **options)
        else:
            x = torch.randn(rows, *self.shape, **options)
        return TensorDataset(x, torch.randint(self.classes, (rows, *self.labels), **options))


def task_of(name: str, device: str, batch: int | None, tiny: bool) -> Task:
    """The task of that name: its usual batch and size, or hardly any."""
    cuda = device == "cuda"
    usual = {"decoder135": 32, "vit": 128, "decoder1b": 16, "lora1b": 16, "transformer": 32 if cuda else 8}
    usual["resnet9"] = 2500 if cuda else 64
    rows = batch or (2 if tiny else usual.get(name, 512 if cuda else 64))
    if name in IMAGES:
        return Task(name, device, rows, IMAGES[name], (3, 32, 32), 0, 10)
    if name == "transformer":
        size = Size(1, 16, 2, 8, 50) if tiny else Size(6, 512, 8, 128 if cuda else 32, 2000)
        return Task(name, device, rows, lambda: TextClassifier(size), (size.positions,), size.vocabulary, 10)
    if name == "vit":
        size = Size(1, 16, 2, 4) if tiny else Size(12, 768, 12, 196)
        return Task(name, device, rows, lambda: Transformer(size), (size.positions, 768), 0, 100)
    if name not in NAMES:
        raise SystemExit(f"there is no model {name!r}: use {', '.join(NAMES)}")
    size = Size(12, 768, 12, 512, 32_000) if name == "decoder135" else Size(18, 2048, 16, 512, 32_000)
    size = Size(1, 16, 2, 8, 50) if tiny else size
    build = (lambda: with_lora(Transformer(size))) if name == "lora1b" else (lambda: Transformer(size))
    shape = (size.positions,)
    return Task(name, device, rows, build, shape, size.vocabulary, size.vocabulary, shape)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    """With query, key and value from one layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0))
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(width), attention, nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A decoder that predicts a token at every position, or, without a vocabulary, a ViT over patches, 100 classes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.decodes = size.width, size.vocabulary > 0
        self.embed = nn.Embedding(size.vocabulary, width) if self.decodes else nn.Linear(768, width)
        self.position = nn.Embedding(size.positions, width)
        blocks = (Block(width, Attention(width, size.heads, causal=self.decodes)) for _ in range(size.layers))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, size.vocabulary or 100, bias=not self.decodes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        hidden = self.norm(self.blocks(self.embed(x) + self.position(places)))
        return self.head(hidden if self.decodes else hidden.mean(1))


class TextClassifier(nn.Module):
    """Classifies sequences by the mean of their tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        blocks = (Block(size.width, FusedAttention(size.width, size.heads)) for _ in range(size.layers))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))).mean(1))


def cnn() -> nn.Module:
    """Classifies 32×32 images, with group norm."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 96), nn.ReLU(), nn.Linear(96, 10))


def paper_convnet() -> nn.Module:
    """The ConvNet of experiments/cifar10.py."""
    with torch.device("cpu"):
        return convnet(seed=0, he=True)


IMAGES = {"convnet": paper_convnet, "cnn": cnn, "resnet9": lambda: resnet9(seed=0)}  # of 32×32 pixels


class LoRALinear(nn.Module):
    """A frozen linear layer and what is trained beside it, as peft has it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def with_lora(model: nn.Module, rank: int = 16) -> nn.Module:
    """Adapters on every linear layer, the rest frozen."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if LoraConfig is not None:
        return inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=names), model)
    model.requires_grad_(False)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoRALinear(model.get_submodule(name), rank))
    return model
