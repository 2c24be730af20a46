"""The compression of `quell.noise.fingerprint` on a GPU: one launch for all tensors, then one per further level."""

# mypy: ignore-errors
# The compiler infers the types.

from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl

BLOCKS = 32  # per program, so that a thread loads its words of the key once
WARPS = 1


class GpuCompression:
    """`fingerprint.compress` for CUDA tensors, level by level, until few words are left."""

    def __init__(self, keys, device) -> None:
        self._keys = torch.from_numpy(keys.astype(np.uint32).view(np.int32)).to(device)
        self._device = device

    def __call__(self, tensors, few: int):
        """The words that are left, on the host: waits for the device."""
        words = self._level([_whole_words(tensor) for tensor in tensors], 0)
        level = 1
        while words.numel() > few:
            words = self._level([words], level)
            level += 1
        return words.cpu().numpy().view(np.uint32)

    def _level(self, parts, level: int):
        size = self._keys.shape[2]
        spans = [(part.data_ptr(), part.numel() * part.element_size() // 4) for part in parts if part.numel()]
        counts = np.array([-(-words // size) for _, words in spans], np.int64)
        programs = -(-counts // BLOCKS)
        out = torch.empty((int(counts.sum()), 2), dtype=torch.int64, device=self._device)
        if spans:
            firsts = np.stack([np.cumsum(programs) - programs, np.cumsum(counts) - counts], axis=1)
            rows = np.concatenate([np.array(spans, np.int64), firsts], axis=1)
            members = np.repeat(np.arange(len(spans)), programs)
            table = self._upload(np.concatenate([rows.reshape(-1), members]).astype(np.int64))
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                _compress[(len(members),)](
                    table[rows.size :], table, self._keys[level], out, HALF=size // 2, BLOCKS=BLOCKS, num_warps=WARPS
                )
        return out.view(torch.int32).view(-1)

    def _upload(self, values):
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def _whole_words(tensor):
    """The tensor, or a copy where its values are not whole words in order."""
    return tensor.float().contiguous() if tensor.element_size() == 2 else tensor.contiguous()


@triton.jit
def _compress(members, rows, keys, out, HALF: tl.constexpr, BLOCKS: tl.constexpr):
    """Each program: up to BLOCKS blocks of one tensor. `rows` has pointer, words, first program and first block."""
    program = tl.program_id(0)
    row = rows + 4 * tl.load(members + program)
    data = tl.load(row).to(tl.pointer_type(tl.uint32))
    length = tl.load(row + 1)
    begin = (program - tl.load(row + 2)) * BLOCKS
    at = tl.arange(0, HALF)
    left0, right0 = tl.load(keys + at), tl.load(keys + HALF + at)
    left1, right1 = tl.load(keys + 2 * HALF + at), tl.load(keys + 3 * HALF + at)
    for number in range(BLOCKS):
        block = begin + number
        there = block * 2 * HALF < length
        first = block * 2 * HALF + at
        left = tl.load(data + first, mask=first < length, other=0)
        right = tl.load(data + first + HALF, mask=first + HALF < length, other=0)
        place = out + 2 * (tl.load(row + 3) + block)
        tl.store(place, tl.sum(_product(left, left0, right, right0), axis=0), mask=there)
        tl.store(place + 1, tl.sum(_product(left, left1, right, right1), axis=0), mask=there)


@triton.jit
def _product(left, left_key, right, right_key):
    a = left.to(tl.uint32, bitcast=True) + left_key.to(tl.uint32, bitcast=True)
    b = right.to(tl.uint32, bitcast=True) + right_key.to(tl.uint32, bitcast=True)
    return (a.to(tl.uint64) * b.to(tl.uint64)).to(tl.int64, bitcast=True)
