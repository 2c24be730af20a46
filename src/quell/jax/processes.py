"""What the processes of one run must agree on. Process 0 keeps the count: it has the ledger, the log and the callbacks.

All processes run one program. A callback is run once, by the first device of the mesh, so process 0 answers for all,
and its answer reaches the other devices inside the program. Here is what happens before: the key of process 0 is handed
to the others, over the network of the devices, which must be trusted; and where one process fails, all do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from quell.errors import QuellError
from quell.noise import Key

Made = TypeVar("Made")
_LONGEST = 1000  # bytes of a message


def counts_steps() -> bool:
    """Whether this is the process that counts the steps."""
    return bool(jax.process_index() == 0)


def everywhere(work: Callable[[], Made]) -> Made:
    """What `work` makes here; where it fails in one process, all fail, and none waits for another."""
    if jax.process_count() == 1:
        return work()
    try:
        made = work()
    except QuellError as problem:
        _gathered(str(problem).encode()[:_LONGEST] or b"?")
        raise
    for number, told in enumerate(_gathered(b"")):
        if told:
            raise QuellError(f"process {number}: {told.decode(errors='replace')}")
    return made


def shared_secret(key: Key | None, recorded: bool) -> tuple[Key, bool]:
    """Process 0's key, and whether it keeps a ledger, in every process."""
    if jax.process_count() > 1:
        own = bytes(34) if key is None else bytes([key.seeded, recorded]) + key.reveal()
        told = bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8))))
        if not counts_steps():
            return Key(told[2:], _seeded=bool(told[0])), bool(told[1])
    assert key is not None
    return key, recorded


def require_agreement(name: bytes) -> None:
    """Refuse, in every process, a run that is not the same in all of them."""
    if jax.process_count() > 1 and any(other != name for other in _gathered(name)):
        raise QuellError(
            "the processes were given different plans, max_grad_norm, generators, users or parameters: pass the same "
            "to privatize in every process"
        )


def _gathered(own: bytes) -> list[bytes]:
    """The bytes of all processes, in their order."""
    padded = np.frombuffer(own.ljust(_LONGEST, b"\0"), np.uint8)
    everyone: Any = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row).rstrip(b"\0") for row in everyone]
