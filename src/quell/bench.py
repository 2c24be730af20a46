"""Measure how long noise takes on this machine: the three numbers of `quell.costs`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from quell.costs import NoiseCost
from quell.errors import QuellError, require_count
from quell.noise import Key, NoiseSpec, NoiseStream
from quell.strategy.recurrence import Exponentials, Recurrence, Regenerate

_DRAWS, _BUFFERS = 8, 4


def measure(parameters: int = 10_000_000, device: str = "cpu", repeats: int = 5) -> NoiseCost:
    """Nanoseconds per parameter for independent noise, for each further draw, and for each buffer."""
    parameters = require_count("parameters", parameters)
    gradient, wait = _gradient(parameters, device)
    half_power = np.cumprod(np.concatenate([[1.0], (np.arange(1, _DRAWS) - 1.5) / np.arange(1, _DRAWS)]))
    decays = np.linspace(0.5, 0.99, _BUFFERS)
    exponentials = Exponentials(-0.1 * (1 - decays), decays)

    def nanoseconds(recurrence: Recurrence) -> float:
        stream = NoiseStream(NoiseSpec(recurrence, 10**6, 1.0), [gradient], key=Key.generate())
        times = []
        for _ in range(_DRAWS + repeats):  # early steps have fewer draws, and compile
            start = time.perf_counter()
            stream.add_([gradient])
            wait()
            times.append(time.perf_counter() - start)
        return 1e9 * statistics.median(times[_DRAWS:]) / parameters

    base, drawn, buffered = (nanoseconds(r) for r in (Regenerate(np.ones(1)), Regenerate(half_power), exponentials))
    least = 0.01 * base  # differences of measurements may come out negative on a busy machine
    return NoiseCost(base, max(least, (drawn - base) / (_DRAWS - 1)), max(least, (buffered - base) / _BUFFERS))


def _gradient(parameters: int, device: str) -> tuple[Any, Any]:
    """A gradient on the device, and a function that waits for the device."""
    if device == "cpu":
        return np.zeros(parameters, np.float32), lambda: None
    if device != "cuda":
        raise QuellError(f"there is nothing to measure on {device!r}: use cpu or cuda")
    try:
        import torch
    except ImportError as missing:
        raise QuellError("measuring a GPU needs PyTorch: pip install 'quell[torch]'") from missing
    if not torch.cuda.is_available():
        raise QuellError("this machine has no CUDA device that PyTorch can use: measure the cpu instead")
    return torch.zeros(parameters, device="cuda"), torch.cuda.synchronize
