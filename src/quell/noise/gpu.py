"""The GPU engine: one Triton launch per dtype for all tensors, the step counter on the device.

Pointers, sizes and offsets go to the kernels in a table, so the number of launches does not grow with the number of
tensors. A captured CUDA graph reads the step from device memory and advances it, so each replay adds the next row.
Under Triton's interpreter the same code runs on CPU tensors, which is how it is tested without a GPU.

All work goes to the current CUDA stream of the tensors' device, as torch's own operations do: the gradients must be
ready on that stream. When the current stream changes between calls, the new one waits for the engine's earlier work.
Replays of a captured graph are the caller's: run them on one stream, or order them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from quell.errors import QuellError
from quell.noise import triton_kernels as kernels
from quell.noise.generators import key_words
from quell.noise.key import Key
from quell.noise.layout import LANES, WORDS, Shard, chacha_rounds
from quell.noise.secrecy import never_copied
from quell.noise.spec import NO_GRID, Recipe

POINTER = int(kernels.POINTER)
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


@dataclass(eq=False)
class _Launch:
    """The tensors of one dtype: which they are, and the tables that lead the kernel to them."""

    dtype: torch.dtype
    members: list[int]
    table: NDArray[np.int64]  # (members, COLUMNS)
    programs: torch.Tensor  # (programs,) int32, the member each program works for
    rows: torch.Tensor | None = None  # the table on the device; a new one when tensors move, as a graph keeps the old


class GpuEngine:
    """Adds the rows of one recipe to CUDA tensors."""

    def __init__(
        self, recipe: Recipe, generator: str, key: Key, shards: tuple[Shard, ...], device: torch.device
    ) -> None:
        self.recipe, self.shards, self.device = recipe, shards, device
        self._generator = generator
        self._knobs = kernels.knobs(generator, recipe)
        self._known_step, self._graphs = 0, False  # once a graph was captured, only the device knows the step
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._key = self._upload(np.array([key_words(generator, key, s.tensor) for s in shards], np.uint32))
        self._taps = self._upload(recipe.taps)
        self._scales = self._upload(np.stack([recipe.scales, recipe.grids], axis=1))
        self._moves = None if recipe.moves is None else self._upload(recipe.moves)
        aligned = [-(-shard.length // LANES) * LANES for shard in shards]
        starts = list(accumulate(aligned, initial=0))
        self._parts = [slice(start, start + s.length) for start, s in zip(starts, shards, strict=False)]
        self._buffers = torch.zeros((recipe.buffers, starts[-1]), dtype=torch.float32, device=device)
        self._launches: list[_Launch] = []
        self._staging: dict[int, torch.Tensor] = {}
        self._seen: list[tuple[torch.dtype, bool]] = []
        self._captured: list[Any] = []  # what graphs read and write must outlive them
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # where work went last

    __reduce_ex__ = never_copied("an engine holds key material and is never pickled or copied")

    @property
    def step(self) -> int:
        """The next row. After a graph was captured this waits for the device."""
        if self._graphs and not self.capturing():
            torch.cuda.synchronize(self.device)  # replays may run on any stream
            self._known_step = int(self._counter.item())
        return self._known_step

    def capturing(self) -> bool:
        with self._on_device():
            return self.device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())

    def prepare(self, tensors: list[torch.Tensor]) -> None:
        """Tell the device where the tensors lie; cheap when nothing moved since the last time."""
        self._follow_stream()
        seen = [(tensor.dtype, tensor.is_contiguous()) for tensor in tensors]
        if seen != self._seen:
            if self.capturing():
                raise QuellError(_MOVED)
            self._staging = {
                number: torch.zeros(tensor.numel(), dtype=torch.float32, device=self.device)
                for number, tensor in enumerate(tensors)
                if not tensor.is_contiguous()
            }
            self._launches = self._build(
                [torch.float32 if i in self._staging else t.dtype for i, t in enumerate(tensors)]
            )
            self._seen = seen
        for launch in self._launches:
            self._point(launch, [self._staging.get(i, tensors[i]).data_ptr() for i in launch.members])

    def add(self, tensors: list[torch.Tensor]) -> None:
        self.prepare(tensors)
        for number, staged in self._staging.items():
            staged.view(tensors[number].shape).copy_(tensors[number].detach())
        for launch in self._launches:
            self._row(launch)
        for number, staged in self._staging.items():
            tensors[number].detach().copy_(staged.view(tensors[number].shape))
        self._counter.add_(1)
        if self.capturing():
            self._graphs = True
            self._captured.append(([launch.rows for launch in self._launches], self._launches, self._staging))
        else:
            self._known_step += 1

    def export(self) -> list[torch.Tensor]:
        """A copy of each shard's buffers in host memory, (buffers, length)."""
        self._follow_stream()
        return [self._buffers[:, part].to("cpu", copy=True) for part in self._parts]

    def restore(self, step: int, buffers: list[Any] | None) -> None:
        """Stand before row `step` with these buffers; without any, kept draws are made anew."""
        self._follow_stream()
        self._buffers.zero_()
        if buffers is not None:
            for part, kept in zip(self._parts, buffers, strict=True):
                self._buffers[:, part] = torch.as_tensor(np.asarray(kept)).to(self.device)
        elif self.recipe.keep_draw:
            for past in range(max(0, step - self.recipe.buffers), step):
                self._counter.fill_(past)
                self._draw(self._buffers[past % self.recipe.buffers])
        self._counter.fill_(step)
        self._known_step = step

    def _draw(self, out: torch.Tensor) -> None:
        """Add the plain normals of the counter's step to a buffer."""
        one = torch.ones(1, dtype=torch.float32, device=self.device)
        exact = self._upload(np.array([[1, NO_GRID]], np.float32))
        for launch in self._build([torch.float32] * len(self.shards)):
            self._point(launch, [out[self._parts[number]].data_ptr() for number in launch.members])
            self._start(kernels.regenerate, launch, (exact, 1, 2**62, one, 1))

    def _row(self, launch: _Launch) -> None:
        recipe = self.recipe
        scales = (self._scales, len(recipe.scales), recipe.steps)
        kept = (self._buffers, recipe.buffers, self._buffers.stride(0))
        if recipe.kind == "regenerate":
            self._start(kernels.regenerate, launch, (*scales, self._taps, recipe.taps.shape[1]))
        elif recipe.kind == "ring":
            arguments = (*scales, self._taps, *recipe.taps.shape, *kept)
            options = {"KEEP_DRAW": recipe.keep_draw, "REMAKE": recipe.remade > 0, "AHEAD": self._knobs.ahead}
            self._start(kernels.ring, launch, arguments, **options)
        elif recipe.kind == "exponentials":
            self._start(kernels.exponentials, launch, (*scales, self._taps, *kept))
        else:
            self._start(kernels.fenwick, launch, (*scales, self._moves, self._buffers, kept[2]))

    def _start(self, kernel: Any, launch: _Launch, arguments: tuple[Any, ...], **options: Any) -> None:
        with self._on_device():  # Triton launches on the current stream of the current device
            kernel[(len(launch.programs),)](
                launch.programs,
                launch.rows,
                self._key,
                self._counter,
                *arguments,
                ROUNDS=chacha_rounds(self._generator),
                DTYPE=DTYPES[launch.dtype],
                WORDS=WORDS[self._generator],
                SPAN=self._knobs.span,
                PART=self._knobs.part,
                num_warps=1,
                maxnreg=self._knobs.registers,
                enable_fp_fusion=False,  # products and sums round one by one, as on the CPU
                **options,
            )

    def _build(self, dtypes: list[torch.dtype]) -> list[_Launch]:
        """The tables of each dtype's launch, pointers still missing."""
        launches = []
        for dtype in dict.fromkeys(dtypes):
            members = [i for i, shard in enumerate(self.shards) if dtypes[i] == dtype and shard.length]
            if not members:
                continue
            shards = [self.shards[i] for i in members]
            firsts = [shard.offset // self._knobs.span for shard in shards]
            counts = [-(-shard.stop // self._knobs.span) - first for shard, first in zip(shards, firsts, strict=True)]
            starts = list(accumulate(counts, initial=0))[:-1]
            key_size = self._key.shape[1]
            table = np.array(
                [
                    (0, start, first, shard.offset, shard.length, shard.tensor, self._parts[i].start, key_size * i)
                    for i, shard, start, first in zip(members, shards, starts, firsts, strict=True)
                ],
                np.int64,
            )
            programs = np.repeat(np.arange(len(members), dtype=np.int32), counts)
            launches.append(_Launch(dtype, members, table, self._upload(programs)))
        return launches

    def _point(self, launch: _Launch, pointers: list[int]) -> None:
        if launch.rows is None or pointers != launch.table[:, POINTER].tolist():
            if self.capturing():
                raise QuellError(_MOVED)
            launch.table[:, POINTER] = pointers
            launch.rows = self._upload(launch.table)

    def _on_device(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _follow_stream(self) -> None:
        """Order the current stream after the last one used, and keep what it will read until it has read it."""
        if self._stream is None or self.capturing():  # a capture begins with everything at rest
            return
        current = torch.cuda.current_stream(self.device)
        if current == self._stream:
            return
        current.wait_stream(self._stream)
        tables = [table for launch in self._launches for table in (launch.programs, launch.rows)]
        owned = [self._counter, self._key, self._taps, self._scales, self._moves, self._buffers]
        for tensor in [*owned, *tables, *self._staging.values()]:
            if tensor is not None:
                tensor.record_stream(current)
        self._stream = current

    def _upload(self, values: NDArray[Any]) -> torch.Tensor:
        """To the device without waiting for it, from pinned memory that torch keeps until the copy is done."""
        tensor = torch.from_numpy(np.ascontiguousarray(values).copy())
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


_MOVED = "the tensors moved while a CUDA graph is captured: call stream.prepare(tensors) before capturing"
