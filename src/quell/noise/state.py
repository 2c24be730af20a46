"""What a stopped stream needs to go on: the step, and the buffers of those recurrences that have any. Never the key.

Draws that a stream merely keeps to save work are not saved: they are made anew from their counters. Buffers belong to
elements, so the states of any set of ranks can be cut anew for another set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quell.errors import QuellError, require_count
from quell.noise.layout import Shard, require_disjoint

FORMAT, VERSION = "quell-noise", 2
_FIELDS = {"noise", "generator", "key_id", "step", "released", "shards", "buffers"}


def make(
    fingerprint: str, generator: str, key_id: str, step: int, released: int, shards: tuple[Shard, ...], buffers: Any
) -> dict[str, Any]:
    """Plain data and arrays, as `torch.save` or `pickle` take it."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "noise": fingerprint,
        "generator": generator,
        "key_id": key_id,
        "step": step,
        "released": released,
        "shards": [[shard.tensor, shard.offset, shard.length] for shard in shards],
        "buffers": buffers,
    }


def check(state: Mapping[str, Any], fingerprint: str, generator: str, key_id: str, steps: int) -> None:
    """Refuse the state of another plan, generator or key."""
    if state.get("format") != FORMAT or state.get("version") != VERSION or not set(state) >= _FIELDS:
        raise QuellError(
            "this is not the state of a noise stream, or that of another version of Quell: pass what "
            "NoiseStream.state_dict() returned"
        )
    if state["noise"] != fingerprint:
        raise QuellError(
            f"the state belongs to other noise ({state['noise']}) than this stream makes ({fingerprint}): "
            "resume with exactly the plan, max_grad_norm and parameters it was saved under"
        )
    if state["generator"] != generator:
        raise QuellError(f"the state was made with generator={state['generator']!r}, this stream has {generator!r}")
    if state["key_id"] != key_id:
        raise QuellError(
            f"the state belongs to key {state['key_id']}, this stream has {key_id}: load the key of that run"
        )
    step = require_count("the state's step", state["step"], least=0)
    if step > steps:
        raise QuellError(f"the state stands at step {step:,}, outside the plan's {steps:,} steps")
    require_count("the state's released", state["released"], least=step)


def check_buffers(buffers: list[Any], count: int, shards: tuple[Shard, ...]) -> None:
    """Refuse buffers of another shape than `count` rows for each of `shards`: broadcasting would hide the mistake."""
    shapes = [tuple(np.shape(kept)) for kept in buffers]
    expected = [(count, shard.length) for shard in shards]
    if shapes != expected:
        raise QuellError(
            f"the state's buffers have shapes {shapes[:3]}, where {expected[:3]} are needed: it is damaged"
        )


def shards_of(state: Mapping[str, Any]) -> tuple[Shard, ...]:
    return tuple(Shard(*map(int, shard)) for shard in state["shards"])


def gather(states: Sequence[Mapping[str, Any]], shards: tuple[Shard, ...]) -> list[Any] | None:
    """The buffers of `shards`, cut from the states of whichever ranks hold them; None if there are none to cut.

    Ranks that are replicas of each other hold the same shards, and what one of them has is enough.
    """
    if len(states) == 1 and shards_of(states[0]) == shards:
        buffers: list[Any] | None = states[0]["buffers"]
        return buffers
    if len(steps := {state["step"] for state in states}) > 1:
        raise QuellError(f"the states stand at different steps ({sorted(steps)}): gather those of one checkpoint")
    states = list({shards_of(state): state for state in states}.values())
    require_disjoint([shard for state in states for shard in shards_of(state)], "pass the states of one checkpoint")
    if any(state["buffers"] is None for state in states):
        return None
    held = [
        (shard, np.asarray(kept))
        for state in states
        for shard, kept in zip(shards_of(state), state["buffers"], strict=True)
    ]
    return [_cut(shard, held) for shard in shards]


def _cut(shard: Shard, held: list[tuple[Shard, Any]]) -> Any:
    count = held[0][1].shape[0]
    cut = np.zeros((count, shard.length), np.float32)
    missing = shard.length
    for other, kept in held:
        if shard.overlaps(other):
            start, stop = max(shard.offset, other.offset), min(shard.stop, other.stop)
            source = kept[:, start - other.offset : stop - other.offset]
            cut[:, start - shard.offset : stop - shard.offset] = source
            missing -= stop - start
    if missing:
        raise QuellError(
            f"the states do not hold {missing:,} of the elements {shard.offset:,} to {shard.stop:,} of tensor "
            f"{shard.tensor}: pass the states of all ranks of the checkpoint"
        )
    return cut
