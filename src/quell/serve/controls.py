"""The live page's sliders, fields and presets, as plain data."""

from __future__ import annotations

from typing import Any

from quell.run import Run
from quell.schemes import SCHEMES
from quell.serve.desk import OPTIMIZERS, UNLIMITED

_STOPS: dict[str, tuple[float | str, ...]] = {
    "epsilon": (0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32),
    "epochs": (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100),
    "batch_size": (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384),
    "memory": (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256, UNLIMITED),
}
_OPTIONS = {"sampling": [*SCHEMES, "best"], "optimizer": list(OPTIMIZERS)}
_LABELS = {
    "epsilon": "Privacy budget ε",
    "epochs": "Epochs",
    "batch_size": "Batch size",
    "memory": "Memory (copies)",
    "examples": "Examples",
    "delta": "δ",
    "momentum": "Momentum",
    "optimizer": "Optimizer",
    "sampling": "How batches are formed",
}
_HINTS = {
    "examples": "50000, 50,000 or 50k",
    "delta": "Empty: the largest power of ten up to 1/(10 · examples).",
    "momentum": "0 to 0.999; Adam brings its own 0.9.",
}
# Runs as people make them; sizes of the training sets of MNIST, CIFAR-10, SST-2 and E2E.
_PRESETS: dict[str, dict[str, Any]] = {
    "MNIST, small CNN": {"examples": 60_000, "batch_size": 512, "epochs": 20, "epsilon": 2, "momentum": 0.9},
    "CIFAR-10, CNN from scratch": {"examples": 50_000, "batch_size": 1024, "epochs": 50, "epsilon": 8, "momentum": 0.9},
    "CIFAR-10, ViT fine-tuned": {"examples": 50_000, "batch_size": 1024, "epochs": 5, "epsilon": 1, "momentum": 0.9},
    "BERT on SST-2": {"examples": 67_349, "batch_size": 1024, "epochs": 3, "epsilon": 3, "optimizer": "adam"},
    "LoRA on a 1B decoder": {
        "examples": 42_061,
        "batch_size": 512,
        "epochs": 10,
        "epsilon": 8,
        "optimizer": "adam",
        "memory": 16,
    },
}
_AS_STARTED = {"delta": "", "momentum": 0, "optimizer": "sgd", "memory": 4, "sampling": "best"}


def controls(run: Run, usual_delta: bool = False) -> list[dict[str, Any]]:
    """The page's sliders and fields, set to this run; with `usual_delta`, δ follows the number of examples."""
    given = run.arguments
    optimizer = next(name for name, adaptive in OPTIMIZERS.items() if adaptive == given["adaptive"])
    values = given | {"optimizer": optimizer, "memory": UNLIMITED if given["memory"] is None else given["memory"]}
    values |= {"examples": f"{run.examples:,}"} | ({"delta": ""} if usual_delta else {})
    found: list[dict[str, Any]] = []
    for name, label in _LABELS.items():
        value = values[name]
        control: dict[str, Any] = {"name": name, "label": label, "value": value}
        if name in _STOPS:
            control["stops"] = sorted({*_STOPS[name], value}, key=lambda stop: (stop == UNLIMITED, stop))
        elif name in _OPTIONS:
            control["options"] = _OPTIONS[name]
        else:
            control["hint"] = _HINTS[name]
        found.append(control)
    return found


def presets() -> dict[str, dict[str, Any]]:
    """What every control is set to by a preset."""
    return {name: _AS_STARTED | values for name, values in _PRESETS.items()}
