"""What a forward pass writes into the model: into buffers, or into parameters.

Steps add noise to what the weights learn of the data; what a forward pass writes has none, and `state_dict` holds it.
Contents are compared, because torch does not count writes through `.data`. Of buffers there are copies for as long as a
pass takes. Parameters may be all that fits into memory, so of these there are checksums only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quell.torch.engine.attributes import PLAIN
from quell.torch.sharding import local

Buffers = dict[str, Tensor | None]  # of one module, by their own names

_AT_ONCE = 1 << 20  # numbers whose checksum is made at once: of more, the copies as int64 would take memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of a number; others are taken as int64


@dataclass(frozen=True, eq=False)
class State:
    """What a module held: its buffers, and attributes that are numbers, switches or texts: how long a cache is."""

    buffers: Buffers
    plain: dict[str, Any]


class BufferCopies:
    """The buffers of a model as they are now, with copies of what is in them; `known` are copies of some, by id."""

    def __init__(self, model: nn.Module, known: Mapping[int, Tensor] | None = None) -> None:
        self.model, known = model, known or {}
        self._held = {module: dict(module._buffers) for module in model.modules()}
        self._found = {id(b): b for own in self._held.values() for b in own.values() if b is not None}
        self._versions = [buffer._version for buffer in self._found.values()]
        self.copies = {
            place: known[place] if place in known else buffer.detach().clone() for place, buffer in self._found.items()
        }

    def written(self) -> dict[str, Tensor]:
        """What is in buffers that are new, or not as they were, by their full names."""
        changed = self._changed()
        return {
            f"{path}.{name}".lstrip("."): buffer.detach().clone()
            for path, module in self.model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and (buffer is not self._held.get(module, {}).get(name) or id(buffer) in changed)
        }

    def before(self) -> dict[nn.Module, Buffers]:
        """All buffers of the modules in which one is new, or not as it was: as they were."""
        changed = self._changed()
        return {
            module: {name: self.copies[id(b)] if id(b) in changed else b for name, b in own.items()}
            for module, own in self._held.items()
            if not _holds(module, own) or not changed.isdisjoint(map(id, own.values()))
        }

    def restore(self) -> None:
        """Let the model have these buffers again, and in them what they had."""
        for module, own in self._held.items():
            if not _holds(module, own):
                _put(module, own)
        for place in self._changed():
            buffer, copy = self._found[place], self.copies[place]
            if (buffer.shape, buffer.dtype) != (copy.shape, copy.dtype):
                buffer.data = copy
            with torch.no_grad():
                buffer.copy_(copy)

    def _changed(self) -> set[int]:
        """Which of the tensors are not as they were, by id."""
        changed, looked_at = set(), {}
        for (place, buffer), version in zip(self._found.items(), self._versions, strict=True):
            copy = self.copies[place]
            if buffer._version != version or (buffer.shape, buffer.dtype) != (copy.shape, copy.dtype):
                changed.add(place)
            else:
                looked_at[place] = (_bits(buffer) != _bits(copy)).any()
        return changed | {place for place, differs in zip(looked_at, _read(looked_at.values()), strict=True) if differs}


@contextmanager
def restored_buffers(model: nn.Module, begin: Mapping[nn.Module, State] | None = None) -> Iterator[dict[str, Tensor]]:
    """Passes inside leave the buffers as they were; gives what they had written there, when it is over.

    Inside, modules in `begin` hold what they held then, so that what is written once only is written again.
    """
    outside, fresh, begin = BufferCopies(model), _Fresh(), begin or {}
    attributes = {module: dict(vars(module)) for module in begin}
    for module, state in begin.items():
        now = module._buffers
        _put(module, {n: b if b is None or b is now.get(n) else fresh.copy(b) for n, b in state.buffers.items()})
        for name in _plain(module).keys() - state.plain.keys():
            del vars(module)[name]
        vars(module).update(state.plain)
    inside = BufferCopies(model, outside.copies) if begin else outside
    written: dict[str, Tensor] = {}
    try:
        yield written
    finally:
        written.update(inside.written())
        for module, own in attributes.items():
            vars(module).clear()
            vars(module).update(own)
        outside.restore()


class _Fresh:
    """One copy of each tensor, also of one that several modules hold."""

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        return self._made.setdefault(id(tensor), tensor.clone())


def _holds(module: nn.Module, own: Buffers) -> bool:
    """Whether a module's buffers are these very tensors."""
    now = module._buffers
    return now.keys() == own.keys() and all(now[name] is buffer for name, buffer in own.items())


def _put(module: nn.Module, own: Buffers) -> None:
    module._buffers.clear()
    module._buffers.update(own)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}


class ModelBefore:
    """A model before a forward pass: copies of its buffers, and checksums of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = BufferCopies(model)
        self._attributes = {module: _plain(module) for module in model.modules()}
        self._parameters = dict(model.named_parameters())
        self._kinds = [parameter.dtype for parameter in self._parameters.values()]
        self._checksums = checksums(self._parameters.values())

    def states(self) -> dict[nn.Module, State]:
        """What the modules held that have written into their buffers since."""
        return {module: State(own, self._attributes[module]) for module, own in self._buffers.before().items()}

    def written_parameter(self) -> str | None:
        """The first parameter with other numbers than before; a change of the dtype is not looked into."""
        now = checksums(self._parameters.values())
        looked_at = zip(self._parameters.items(), self._kinds, self._checksums, now, strict=True)
        return next((name for (name, p), kind, old, new in looked_at if p.dtype == kind and old != new), None)


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """A number for each tensor, or this rank's part of it, that is another one when any of its bits is.

    Each value's bits count as an integer, multiplied with a weight for its place. The device adds these up, modulo
    2⁶⁴, and is asked once for all. Writes that leave such a sum as it was, by chance, are one in 2⁶⁴.
    """
    weights: dict[torch.device, Tensor] = {}
    tensors, sums = [local(tensor) for tensor in tensors], []
    most = min(_AT_ONCE, 2 * max((tensor.numel() for tensor in tensors), default=0))  # complex numbers are two
    for tensor in tensors:
        bits = _bits(tensor)
        if bits.device not in weights:
            weights[bits.device] = _weights(bits.device, most)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for part in bits.split(max(1, most)):
            total = total * 6364136223846793005 + (part * weights[bits.device][: len(part)]).sum()
        sums.append(total)
    return _read(sums)


def _weights(device: torch.device, count: int) -> Tensor:
    """Odd numbers without a pattern."""
    numbers = torch.arange(1, count + 1, device=device) * -7046029254386353131
    return (numbers ^ (numbers >> 31)) * -4658895280553007687 | 1


def _bits(tensor: Tensor) -> Tensor:
    """(n,) a tensor's values as integers of their bits, in their order in memory; none where they lie elsewhere."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = tensor.detach()
        hidden = tensor.layout != torch.strided or tensor.is_quantized or is_traceable_wrapper_subclass(tensor)
        if hidden or tensor.is_meta:
            return torch.zeros(0, dtype=torch.int64)
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        flat = tensor.resolve_conj().resolve_neg().permute(order).reshape(-1)
        return flat.view(_INTEGERS.get(flat.element_size(), torch.int64))


def _read(numbers: Iterable[Tensor]) -> list[int]:
    """Single numbers that lie on devices, which are waited for once."""
    numbers = list(numbers)
    found: list[int] = torch.stack([number.to(numbers[0].device) for number in numbers]).tolist() if numbers else []
    return found
