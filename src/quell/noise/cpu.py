"""The CPU engine: cuts the tensors into runs of units and works through them with a few threads, in place.

The cut decides only who computes what, never a value, so any number of threads gives the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quell.noise import cpu_kernels as kernels
from quell.noise.arrays import is_torch, to_torch
from quell.noise.generators import key_words
from quell.noise.key import Key
from quell.noise.layout import UNIT, Shard, chacha_rounds
from quell.noise.secrecy import never_copied
from quell.noise.spec import NO_GRID, Recipe

RUN = 2**17  # elements per task; fewer than this in all are not worth a second thread

Floats = NDArray[np.float32]


class CpuEngine:
    """Adds the rows of one recipe to NumPy arrays and torch CPU tensors. `step` is the next row."""

    def __init__(
        self, recipe: Recipe, generator: str, key: Key, shards: tuple[Shard, ...], threads: int | None
    ) -> None:
        self.recipe, self.shards, self.step = recipe, shards, 0
        self._rounds = chacha_rounds(generator)
        self._keys = [key_words(generator, key, shard.tensor) for shard in shards]
        ends = list(accumulate((shard.length for shard in shards), initial=0))
        self._parts = [slice(start, stop) for start, stop in pairwise(ends)]  # of the buffers, by shard
        self._buffers: Floats = np.zeros((recipe.buffers, ends[-1]), np.float32)
        self._threads = threads or _processors()

    __reduce_ex__ = never_copied("an engine holds key material and is never pickled or copied")

    def prepare(self, tensors: list[Any]) -> None:
        """Nothing to prepare; a GPU has."""

    def capturing(self) -> bool:
        return False

    def add(self, tensors: list[Any]) -> None:
        targets = [_flat_float32(tensor) for tensor in tensors]
        staged = [
            _copied_float32(tensor) if target is None else target
            for tensor, target in zip(tensors, targets, strict=True)
        ]
        self._run(lambda number, first, last: self._row(number, staged[number], first, last))
        for tensor, target, released in zip(tensors, targets, staged, strict=True):
            if target is None:
                _write(tensor, released)
        self.step += 1

    def export(self) -> list[Any]:
        """A copy of each shard's buffers, (buffers, length)."""
        return [self._buffers[:, part].copy() for part in self._parts]

    def restore(self, step: int, buffers: list[Any] | None) -> None:
        """Stand before row `step` with these buffers; without any, kept draws are made anew."""
        self.step = step
        self._buffers[:] = 0
        if buffers is not None:
            for part, kept in zip(self._parts, buffers, strict=True):
                self._buffers[:, part] = np.asarray(kept)
        elif self.recipe.keep_draw:
            for past in range(max(0, step - self.recipe.buffers), step):
                self._run(partial(self._draw, self._buffers[past % self.recipe.buffers], past))

    def _draw(self, out: Floats, step: int, number: int, first: int, last: int) -> None:
        """Add the plain normals of one step to a buffer."""
        shard, one = self.shards[number], np.ones(1, np.float32)
        where = (out[self._parts[number]], shard.offset, first, last, self._rounds)
        rest = (one, one[0], NO_GRID, self._buffers[:0], 0, True)  # nothing of it is kept
        kernels.ring(*where, self._keys[number], shard.tensor, step, *rest)

    def _row(self, number: int, target: Floats, first: int, last: int) -> None:
        recipe, step, shard = self.recipe, self.step, self.shards[number]
        taps, scale, kept = recipe.taps_at(step), recipe.scale_at(step), (self._buffers, self._parts[number].start)
        rest: tuple[Any, ...]
        if recipe.kind in ("regenerate", "ring"):
            kernel, rest = kernels.ring, (taps, *scale, *kept, recipe.keep_draw)
        elif recipe.kind == "exponentials":
            kernel, rest = kernels.exponentials, (taps, *scale, *kept)
        else:
            assert recipe.moves is not None
            kernel, rest = kernels.fenwick, (*scale, *kept, *map(int, recipe.moves[step]))
        # The key's words are in no local variable: some tracebacks print those.
        kernel(target, shard.offset, first, last, self._rounds, self._keys[number], shard.tensor, step, *rest)

    def _run(self, work: Callable[[int, int, int], None]) -> None:
        """Call work(number, first, last) for runs of units that cover every shard."""
        tasks = []
        for number, shard in enumerate(self.shards):
            if shard.length:
                first, last = shard.offset // UNIT, -(-shard.stop // UNIT)
                for start in range(first, last, RUN // UNIT):
                    tasks.append((number, start, min(start + RUN // UNIT, last)))
        if self._threads == 1 or sum(shard.length for shard in self.shards) <= RUN:
            for task in tasks:
                work(*task)
        else:
            for done in [_pool(self._threads).submit(work, *task) for task in tasks]:
                done.result()


def _flat_float32(tensor: Any) -> Floats | None:
    """The tensor's own memory as a flat float32 array; None where it must go through a staging array."""
    if is_torch(tensor):
        if str(tensor.dtype) != "torch.float32" or not tensor.is_contiguous():
            return None
        return np.asarray(tensor.detach().reshape(-1).numpy())
    if tensor.dtype != np.float32 or not tensor.flags.c_contiguous:
        return None
    return np.asarray(tensor.reshape(-1))


def _copied_float32(tensor: Any) -> Floats:
    """A flat copy, rounded to float32: noise made in float32 does not hide what lies below."""
    if is_torch(tensor):
        return np.array(tensor.detach().float().reshape(-1).numpy())
    return np.array(tensor.reshape(-1), np.float32)


def _write(tensor: Any, released: Floats) -> None:
    if is_torch(tensor):
        tensor.detach().copy_(to_torch([released])[0].view(tensor.shape))
    else:
        np.copyto(tensor, released.reshape(tensor.shape), casting="same_kind")


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_pools: dict[int, ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="quell-noise")
    return _pools[threads]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # threads do not survive a fork
