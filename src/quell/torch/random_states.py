"""The random numbers that a loop draws on: torch's on CPU and GPUs, NumPy's and Python's, all of every rank.

They are in every checkpoint and come back with it, so that steps that come again see the same dropout masks and the
same augmentation. Generators that a user makes (`np.random.default_rng()`, `torch.Generator()`) are the user's to save.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from quell.torch.distributed import gather, world


def own_states() -> dict[str, Any]:
    """The states of this process, as plain data and tensors."""
    numpy_state: Any = np.random.get_state()
    kind, words, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": (kind, words.tolist(), *rest),
        "python": random.getstate(),
    }


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


def random_states() -> list[dict[str, Any]]:
    """The states of all ranks, in their order. Call it on all ranks."""
    return gather(own_states())


def set_random_states(saved: Sequence[dict[str, Any]]) -> None:
    """Go on with this rank's numbers; with another number of ranks than were saved, sums differ anyway."""
    rank, size = world()
    if len(saved) == size:
        set_own_states(saved[rank])
