"""What correlated noise costs in training time: the λCGD paper's Tables 1 and 2 in this setting.

    PYTHONPATH=src python experiments/runtime.py [--rounds 8] [--models cnn,vit,bert]

A step is: per-example gradients, clipped and added up in micro-batches (`quell.torch.clipped_sum`), noise, SGD update.
Only the noise differs: independent noise from torch's own generator, as in Opacus (DP-SGD); draws remade from counters
(`quell.torch.CorrelatedNoise`, ChaCha20); or old draws kept in the processor's memory, mixed there and sent to the GPU.
All kinds take turns step by step, so that a change of clock speed meets them all; times are medians, and
seconds per epoch are steps per epoch × seconds per step. Data and initial weights are random.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from common import RESULTS, Results
from torch import Tensor, nn
from torch.nn import functional
from training import convnet

from quell.noise import NoiseSpec
from quell.strategy.recurrence import Regenerate
from quell.torch import CorrelatedNoise, clipped_sum

Params = dict[str, Tensor]
STEPS = 10**6  # no run ends here
CLIP, SCALE = 1.0, 1.0


class Transformer(nn.Module):
    """An encoder of the given shape, over image patches (ViT) or tokens (BERT), with a classifier on its mean."""

    def __init__(
        self, layers: int, width: int, heads: int, positions: int, patch: int = 0, vocabulary: int = 0
    ) -> None:
        super().__init__()
        self.patch, self.heads = patch, heads
        self.embed = nn.Linear(3 * patch * patch, width) if patch else nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(positions, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "between": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.patch:
            p = self.patch
            x = x.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
        h = self.embed(x)
        h = h + self.positions[: h.shape[1]]
        for block in self.blocks:
            q, k, v = (
                part.unflatten(2, (self.heads, -1)).transpose(1, 2)
                for part in block["qkv"](block["before"](h)).chunk(3, dim=2)
            )
            mixed = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, dim=-1) @ v
            h = h + block["out"](mixed.transpose(1, 2).flatten(2))
            h = h + block["down"](functional.gelu(block["up"](block["between"](h))))
        return self.head(self.norm(h).mean(1))


@dataclass(frozen=True)
class Model:
    params: Params
    loss: Callable[..., Tensor]
    example: Callable[[int], Tensor]  # a random batch
    batch_size: int
    micro_batch: int
    examples: int  # of an epoch


def cnn(device: torch.device, smoke: bool) -> Model:
    images = lambda n: torch.randn(n, 3, 32, 32, device=device)  # noqa: E731
    return prepared(convnet(0, True), device, 8 if smoke else 512, 50_000, images)


def prepared(
    model: nn.Module, device: torch.device, batch: int, examples: int, example: Callable[[int], Tensor]
) -> Model:
    model.to(device)

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    params = {name: value.detach() for name, value in model.named_parameters()}
    return Model(params, loss, example, batch, 64, examples)


def vit(device: torch.device, smoke: bool) -> Model:
    """ViT-B/16 on images of 224×224, CIFAR-10's number of them."""
    side, shape = (32, (1, 32, 2)) if smoke else (224, (12, 768, 12))
    sizes = dict(zip(("layers", "width", "heads"), shape, strict=True))
    images = lambda n: torch.randn(n, 3, side, side, device=device)  # noqa: E731
    model = Transformer(positions=(side // 16) ** 2, patch=16, **sizes)
    return prepared(model, device, 4 if smoke else 512, 50_000, images)


def bert(device: torch.device, smoke: bool) -> Model:
    """BERT-base on texts of 128 tokens, IMDB's number of them."""
    vocabulary, shape = (100, (1, 32, 2)) if smoke else (30_522, (12, 768, 12))
    sizes = dict(zip(("layers", "width", "heads"), shape, strict=True))
    tokens = lambda n: torch.randint(vocabulary, (n, 128), device=device)  # noqa: E731
    model = Transformer(positions=512, vocabulary=vocabulary, **sizes)
    return prepared(model, device, 4 if smoke else 128, 25_000, tokens)


MODELS = {"cnn": cnn, "vit": vit, "bert": bert}


class Noise(Protocol):
    def add_(self, grads: Params) -> None: ...


class TorchNoise:
    """Independent noise tensor by tensor, as Opacus adds it."""

    def add_(self, grads: Params) -> None:
        for grad in grads.values():
            grad += torch.normal(mean=0.0, std=SCALE, size=grad.shape, device=grad.device)


class CpuBufferNoise:
    """Old draws in the processor's memory: mixed there, the mixture sent to the GPU, the new draw sent back."""

    def __init__(self, noising: np.ndarray, params: Params) -> None:
        self.noising = torch.from_numpy(noising[1:].astype(np.float32))
        device = next(iter(params.values())).device
        self.sizes = [p.numel() for p in params.values()]
        pin = device.type == "cuda"
        self.kept = torch.zeros(len(self.noising), sum(self.sizes), pin_memory=pin)
        self.mixed = torch.zeros(sum(self.sizes), pin_memory=pin)
        self.fresh = torch.zeros(sum(self.sizes), device=device)
        self.step = 0

    def add_(self, grads: Params) -> None:
        count = len(self.noising)
        ages = [(self.step - 1 - place) % count for place in range(count)]  # how old what lies at each place is
        torch.mv(self.kept.t(), self.noising[ages], out=self.mixed)
        self.fresh.normal_(std=SCALE)
        noise = self.fresh + self.mixed.to(self.fresh.device, non_blocking=True)
        self.kept[self.step % count].copy_(self.fresh)
        for grad, part in zip(grads.values(), noise.split(self.sizes), strict=True):
            grad += part.view_as(grad)
        self.step += 1


def kinds(params: Params) -> dict[str, Callable[[], Noise]]:
    def regenerated(bands: int) -> Noise:
        return CorrelatedNoise(NoiseSpec(Regenerate(noising(bands)), STEPS, SCALE), params)

    return {
        "DP-SGD": TorchNoise,
        **{f"regenerated p={bands}": partial(regenerated, bands) for bands in (1, 2, 4, 16)},
        **{f"CPU buffer p={bands}": partial(CpuBufferNoise, noising(bands), params) for bands in (2, 4, 16)},
    }


def noising(bands: int) -> np.ndarray:
    """(bands,) coefficients of C⁻¹: λCGD with λ = 0.9 for two bands, else BISR's (1 − x)^½."""
    if bands == 2:
        return np.array([1.0, -0.9])
    return np.cumprod(np.concatenate([[1.0], (np.arange(1, bands) - 1.5) / np.arange(1, bands)]))


def measure(name: str, device: torch.device, rounds: int, smoke: bool, results: Results) -> None:
    model = MODELS[name](device, smoke)
    made = {kind: make() for kind, make in kinds(model.params).items()}
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in made}
    for noise in made.values():
        for _ in range(16):  # early steps have fewer old draws to make again
            noise.add_({key: torch.zeros_like(param) for key, param in model.params.items()})
    for turn in range(rounds + 1):
        for kind, noise in made.items():
            x, y = model.example(model.batch_size), torch.randint(10, (model.batch_size,), device=device)
            start = clock(device)
            grads = clipped_sum(model.loss, model.params, (x, y), CLIP, micro_batch=model.micro_batch)
            middle = clock(device)
            noise.add_(grads)
            after = clock(device)
            for param, grad in zip(model.params.values(), grads.values(), strict=True):
                param.add_(grad, alpha=-1e-3 / model.batch_size)
            if turn:  # the first round compiles and allocates
                times[kind].append((clock(device) - start, after - middle))
    per_epoch = model.examples // model.batch_size
    parameters = sum(p.numel() for p in model.params.values())
    base = statistics.median(step for step, _ in times["DP-SGD"])
    for kind, measured in times.items():
        step, noise_only = (statistics.median(part) for part in zip(*measured, strict=True))
        results.add(
            f"{name} | {kind}",
            model=name,
            kind=kind,
            parameters=parameters,
            batch_size=model.batch_size,
            micro_batch=model.micro_batch,
            rounds=rounds,
            warm=True,
            step_seconds=step,
            noise_seconds=noise_only,
            epoch_seconds=step * per_epoch,
            ratio=step / base,
        )
        print(
            f"{name:5s} {parameters / 1e6:6.1f}M {kind:18s} {step * 1e3:9.2f} ms a step, {noise_only * 1e3:8.3f} ms "
            f"of noise, {step / base:.4f} × DP-SGD",
            flush=True,
        )


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="tiny models and batches, to try the script")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = Results(options.results / "runtime.json")
    for name in options.models.split(","):
        measure(name, device, options.rounds, options.smoke, results)


if __name__ == "__main__":
    main()
