"""What a gradient is: a NumPy array or a torch tensor, looked at without importing torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quell.errors import QuellError
from quell.noise.aliasing import memory_span, require_apart
from quell.noise.layout import Shard


def is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def device_of(tensor: Any) -> Any:
    """The torch device of a tensor; None for a NumPy array."""
    return tensor.device if is_torch(tensor) else None


def to_torch(values: list[Any]) -> list[Any]:
    """As torch CPU tensors, which `torch.load` accepts without being told to trust the file."""
    return [sys.modules["torch"].as_tensor(value) for value in values]


def as_list(tensors: Any) -> list[Any]:
    """One tensor or several as a list."""
    return [tensors] if is_torch(tensors) or isinstance(tensors, np.ndarray) else list(tensors)


def check(tensors: list[Any], shards: tuple[Shard, ...]) -> None:
    """Refuse what noise cannot be added to, before anything is written. It runs every step, so it is kept cheap."""
    if len(tensors) != len(shards):
        raise QuellError(f"{len(tensors)} tensors were given, but the stream was made for {len(shards)}")
    torch = sys.modules.get("torch")
    devices, spans = set(), []
    for number, (tensor, shard) in enumerate(zip(tensors, shards, strict=True)):
        if torch is not None and isinstance(tensor, torch.Tensor):
            fault, size = _torch_fault(torch, tensor), tensor.numel()
            devices.add(tensor.device)
        elif isinstance(tensor, np.ndarray):
            fault, size = _numpy_fault(tensor), tensor.size
            devices.add(None)
        else:
            what = "None" if tensor is None else type(tensor).__name__
            fault, size = f"is {what}: noise is added to NumPy arrays and torch tensors, zeros if need be", 0
        if fault is None and size != shard.length:
            fault = f"has {size:,} elements, but the stream was made for {shard.length:,}"
        if fault is not None:
            raise QuellError(f"tensor {number} {fault}")
        if size:
            spans.append(memory_span(tensor, number))
    if len(devices) > 1:
        raise QuellError("the tensors lie on different devices: make one stream per device, with shards that say which")
    require_apart(tensors, spans)


def _torch_fault(torch: Any, tensor: Any) -> str | None:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"has dtype {tensor.dtype}: noise is added to {_FLOATS}"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}: noise is dense, so call .to_dense() first"
    return None


def _numpy_fault(array: NDArray[Any]) -> str | None:
    if array.dtype not in (np.float32, np.float16, np.float64):
        return f"has dtype {array.dtype}: noise is added to {_FLOATS}"
    if not array.flags.writeable:
        return "is read-only: noise is added in place, so pass a writable array"
    return None


_FLOATS = "float32, bfloat16, float16 and float64"
