"""Where the fused kernels are used, with what sizes, and how much their rounding may take from a norm.

They serve bfloat16 and float16 on GPUs. Products of such numbers are exact in float32; what rounds is adding them up.
Every result is the same each time: partial results are written apart and added in a fixed order, never by atomics.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quell.torch.engine.bounds import UNDERFLOW

_TILE, _DEPTH = 128, 64  # of the matrix products: rows and columns, and how deep one step of the loop goes
_PRODUCT: dict[str, Any] = {"TILE": _TILE, "DEPTH": _DEPTH, "num_warps": 8, "num_stages": 4}
_ROUNDING = 2.0**-23  # tensor cores cut off instead of rounding
_CHUNK = 1024  # as in triton_kernels.py
_BLOCK = 1024  # elements of a program that adds up rows
_WAVES = 4  # so many programs per multiprocessor keep a GPU busy
interpreted = False  # whether CPU tensors go through Triton's interpreter: for tests


def take(*values: Tensor) -> bool:
    """Whether the kernels can take these."""
    if not all(value.is_cuda or interpreted for value in values) or _triton() is None:
        return False
    return all(value.dtype in (torch.bfloat16, torch.float16) for value in values) and values[0].numel() > 0


def gram_norms(g: Tensor, a: Tensor) -> Tensor:
    """(units,) a bound of |Σ_t g_t a_tᵀ| by Gram matrices, of which no entry leaves the multiprocessor."""
    (units, positions, outputs), inputs = g.shape, a.shape[2]
    pairs = _pairs(positions)
    found = torch.empty(2, units, pairs, device=g.device)
    _triton().gram[(pairs, units)](
        _described(g, _TILE, _DEPTH), _described(a, _TILE, _DEPTH), found, outputs, inputs, pairs, **_PRODUCT
    )
    return _bounded(found, outputs, inputs)


def token_norms(g: Tensor, tokens: Tensor) -> Tensor:
    """(units,) a bound of the norm of an embedding's gradient: Gram entries of equal tokens, added up."""
    units, positions, width = g.shape
    pairs = _pairs(positions)
    found = torch.empty(2, units, pairs, device=g.device)
    _triton().token_gram[(pairs, units)](
        _described(g, _TILE, _DEPTH), tokens.contiguous(), found, positions, width, pairs, **_PRODUCT
    )
    return _bounded(found, width)


def direct_norms(g: Tensor, a: Tensor) -> Tensor:
    """(units,) |Σ_t g_t a_tᵀ| by the very tiles that `weighted_sum` adds up."""
    (units, positions, outputs), inputs = g.shape, a.shape[2]
    tiles = -(-outputs // _TILE) * -(-inputs // _TILE)
    squares = torch.empty(units, tiles, device=g.device)
    _triton().direct[(tiles, units)](
        _described(g, _DEPTH, _TILE), _described(a, _DEPTH, _TILE), squares, positions, outputs, inputs, tiles, **_PRODUCT
    )
    return squares.sum(1, dtype=torch.float64).sqrt().float()


def weighted_sum(g: Tensor, a: Tensor, weights: Tensor) -> Tensor:
    """Σ_u weights_u Σ_t g_t a_tᵀ: each unit's tile is finished before it meets its weight, in float32."""
    (units, positions, outputs), inputs = g.shape, a.shape[2]
    tiles = -(-outputs // _TILE) * -(-inputs // _TILE)
    splits = max(1, min(units, _WAVES * _multiprocessors(g.device) // tiles))
    parts = torch.empty(splits, outputs, inputs, device=g.device)
    _triton().weighted[(tiles, splits)](
        _described(g, _DEPTH, _TILE), _described(a, _DEPTH, _TILE), weights, parts, units, positions, outputs, inputs,
        -(-units // splits), **_PRODUCT,
    )  # fmt: skip
    return parts[0] if splits == 1 else parts.sum(0)


def sum_of_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_u weights_u rows_u, without a float32 copy of the rows."""
    units, size = rows.shape
    found = torch.empty(size, device=rows.device)
    _triton().weighted_rows[(-(-size // _BLOCK),)](rows, weights, found, units, size, BLOCK=_BLOCK, num_warps=4)
    return found


def scale_gradients(x: Tensor, g: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """(units, width) the gradients of scale and shift of a normalisation over the last dimension, unit by unit."""
    units, positions, width = x.shape
    if not (x.is_cuda or interpreted) or _triton() is None or x.dtype == torch.float64 or width > 1 << 14 or not x.numel():
        wide = x if x.dtype == torch.float64 else x.float()
        if centred:
            wide = wide - wide.mean(-1, keepdim=True)
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normalised * g).sum(1), g.sum(1, dtype=wide.dtype)
    x, g = x.contiguous(), g.contiguous()
    block = _power_of_two(width)
    parts = min(positions, max(1, 8 * _multiprocessors(x.device) // units))
    found = torch.empty(2, units, parts, width, device=x.device)
    _triton().scales[(parts, units)](
        x, g, found[0], found[1], positions, width, -(-positions // parts), eps,
        CENTRED=centred, BLOCK=block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return found[0].sum(1), found[1].sum(1)


def _described(values: Tensor, rows: int, columns: int) -> Any:
    """A tensor descriptor that loads (1, rows, columns); it wants rows that start at multiples of 16 bytes."""
    if values.shape[2] % 8:
        values = functional.pad(values, (0, -values.shape[2] % 8))
    values = values.contiguous()
    if values.data_ptr() % 16:
        values = values.clone()
    return _descriptor()(values, values.shape, values.stride(), [1, rows, columns])


def _pairs(positions: int) -> int:
    """How many pairs of blocks of positions there are, each block with itself and those before it."""
    blocks = -(-positions // _TILE)
    return blocks * (blocks + 1) // 2


def _bounded(found: Tensor, *widths: int) -> Tensor:
    """The norm from sums of Gram products, each of which may be off by so many roundings of |g_t||g_s||a_t||a_s|."""
    # 16 products enter a sum at once, with two roundings at most, in chunks that are added up; then come the pairs.
    roundings = sum(min(width, _CHUNK) // 8 + -(-width // _CHUNK) + 1 for width in widths) + 32
    units, pairs = found.shape[1:]
    norms = torch.empty(units, device=found.device)
    _triton().bounded[(units,)](
        found, norms, units, pairs, roundings * _ROUNDING, UNDERFLOW * sum(widths), BLOCK=max(2, _power_of_two(pairs))
    )
    return norms


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _triton() -> Any:
    """The kernels, or None where there is no Triton with tensor descriptors."""
    try:
        import triton.tools.tensor_descriptor  # noqa: F401

        from quell.torch.engine import triton_kernels
    except ImportError:
        return None
    return triton_kernels


@cache
def _descriptor() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor
