"""The random numbers that a loop draws on: torch's on CPU and GPUs, NumPy's and Python's.

A run seeds them from its key for each part of a step (`TrainingRun.seed`). Generators that a user makes
(`np.random.default_rng()`, `torch.Generator()`) are the user's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import shake_256
from typing import Any

import numpy as np
import torch

from quell.noise.stream import uncompiled

_WORDS = 624  # of 32 bits, that a Mersenne twister holds


def own_states() -> dict[str, Any]:
    """The states of this process, as plain data and tensors. torch.compile does not trace how they are read."""
    return (uncompiled(_own_states) if torch.compiler.is_compiling() else _own_states)()


def _own_states() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    kind, words, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": (kind, words.tolist(), *rest),
        "python": random.getstate(),
    }


def host_states() -> tuple[Any, ...]:
    """The states of this process's generators on the host, to be compared."""
    numpy_state: Any = np.random.get_state()
    _, words, *rest = numpy_state
    return torch.get_rng_state().numpy().tobytes(), words.tobytes(), rest, random.getstate()


def set_own_states(own: dict[str, Any]) -> None:
    torch.set_rng_state(own["torch"].cpu())
    for device, state in enumerate(own["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state.cpu(), device)
    np.random.set_state(tuple(own["numpy"]))
    version, words, gauss = own["python"]
    random.setstate((version, tuple(words), gauss))


@contextmanager
def kept_states(begin: dict[str, Any] | None = None) -> Iterator[None]:
    """Inside, random numbers go on from `begin` (default: from where they are); afterwards as if nothing was drawn."""
    before = own_states()
    try:
        if begin is not None:
            set_own_states(begin)
        yield
    finally:
        set_own_states(before)


def seed_all(secret: bytes) -> None:
    """Let all random numbers follow from the secret, whatever was drawn before."""
    words = np.frombuffer(shake_256(secret).digest(4 * _WORDS + 72), dtype="<u4")
    own, rest = words[:_WORDS], words[_WORDS:]
    np.random.seed(rest[:8])
    random.seed(rest[8:16].tobytes())
    number = int(rest[16:].view("<u8")[0])
    torch.default_generator.manual_seed(number)
    # Of that number torch's generator of the CPU uses 32 bits, which can all be tried out: it gets its words whole.
    state = torch.get_rng_state()
    state.numpy().view(np.int64)[3 : 3 + _WORDS] = own
    torch.set_rng_state(state)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
