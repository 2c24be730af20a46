"""Where a run cannot be: its steps would hang, or go uncounted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from quell.errors import QuellError


def refuse_devices(params: Any, ledger: bool) -> None:
    """Refuse several processes, and a ledger with several CPU devices.

    A ledger reads the sums of every step in a callback. The copy that the callback is given needs a thread, and on
    several CPU devices all threads may be waiting for the callback's answer.
    """
    if jax.process_count() > 1:
        raise QuellError("quell.jax counts the steps of one process: train with one, on any number of local devices")
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree_util.tree_leaves(params)]
    devices = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    if ledger and len(devices) > 1 and all(device.platform == "cpu" for device in devices):
        raise QuellError(
            "a ledger cannot be kept while parameters lie on several CPU devices: pass key=Key.generate() and no "
            "ledger, or use one CPU device"
        )


def platform_of(leaves: Sequence[Any]) -> str:
    """What makes the noise: "cpu", "cuda", or another name."""
    sharding = getattr(leaves[0], "sharding", None)
    device = jax.devices()[0] if sharding is None else next(iter(sharding.device_set))
    return "cuda" if "cuda" in str(device.client.platform_version) else str(device.platform)
