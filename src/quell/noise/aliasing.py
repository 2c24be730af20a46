"""Do two gradients share memory? Then one would get two rows of noise, and threads writing both would lose some.

Addresses and strides say so, on any device, without reading what lies there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quell.errors import QuellError

Span = tuple[int, int, int]  # first byte, byte after the last, number of the tensor


def memory_span(tensor: Any, number: int) -> Span:
    """The bytes between which a tensor with elements lies."""
    if isinstance(tensor, np.ndarray):
        if tensor.flags.c_contiguous:
            start = tensor.__array_interface__["data"][0]
            return start, start + tensor.nbytes, number
    elif tensor.is_contiguous():
        start = tensor.data_ptr()
        return start, start + tensor.numel() * tensor.itemsize, number
    outline = np.asarray(_Outline(tensor))
    start, stop = np.lib.array_utils.byte_bounds(outline)
    if stop - start < outline.nbytes:
        raise QuellError(f"tensor {number} repeats elements in memory: pass a copy that holds each of its own")
    return start, stop, number


def require_apart(tensors: list[Any], spans: list[Span]) -> None:
    """No two of the tensors share a byte; interleaved ones do not."""
    ordered = sorted(spans)
    reached = 0
    for start, stop, _ in ordered:
        if start < reached:
            break
        reached = stop
    else:
        return
    for place, (start, stop, number) in enumerate(ordered):
        for other_start, _, other in ordered[place + 1 :]:
            if other_start >= stop:
                break
            if start and _share(tensors[number], tensors[other]):  # without storage ("meta") all lies at 0
                raise QuellError(f"tensors {number} and {other} share memory: pass each parameter's gradient once")


def _share(a: Any, b: Any) -> bool:
    try:
        return np.shares_memory(np.asarray(_Outline(a)), np.asarray(_Outline(b)), max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # strides too intricate to tell


class _Outline:
    """The memory of a tensor as NumPy understands it, to be compared and never read: it may lie on a GPU."""

    def __init__(self, tensor: Any) -> None:
        if isinstance(tensor, np.ndarray):
            address, strides = tensor.__array_interface__["data"][0], tensor.strides
        else:
            address, strides = tensor.data_ptr(), tuple(stride * tensor.itemsize for stride in tensor.stride())
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(tensor.shape),
            "strides": strides,
            "typestr": f"|V{tensor.itemsize}",
        }
