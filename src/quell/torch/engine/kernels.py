"""Where the fused kernels are used, with what sizes, and how much their rounding may take from a norm.

They serve bfloat16 and float16 on GPUs, and rows of float32. Products of half precision are exact in float32; what
rounds is adding them up.
Every result is the same each time: partial results are written apart and added in a fixed order, never by atomics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from quell.torch.engine.bounds import IN_A_ROW, UNDERFLOW, Allowance, filled, wide
from quell.torch.transfer import uploaded

if TYPE_CHECKING:
    from quell.torch.engine.patches import Window

_TILE, _DEPTH = 128, 64  # of the matrix products: rows and columns, and how deep one step of the loop goes
_PRODUCT: dict[str, Any] = {"TILE": _TILE, "DEPTH": _DEPTH, "num_warps": 8, "num_stages": 4}
_ROUNDING = 2.0**-23  # tensor cores cut off instead of rounding
_CHUNK = 1024  # as in triton_kernels.py
_MARGIN = 1.001  # as there, for the rounding of sizes
_POSITIONS = 4096  # for so many the clipped sum may always round
_BLOCK = 1024  # elements of a program that adds up rows
Factors = tuple[Tensor, Tensor]  # g (units, positions, outputs) and a (units, positions, inputs)
_HALF = (torch.bfloat16, torch.float16)
_tables: dict[Any, Tensor] = {}  # that were uploaded, by what they hold and for which stream
_MOST_TABLES = 512
interpreted = False  # whether CPU tensors go through Triton's interpreter: for tests


def take(*values: Tensor) -> bool:
    """Whether the kernels can take these factors of a product."""
    return all(value.dtype in _HALF and take_rows(value) for value in values)


def take_rows(rows: Tensor) -> bool:
    """Whether the kernels can take these rows."""
    if not (rows.is_cuda or interpreted) or _triton() is None:
        return False
    return rows.dtype in (*_HALF, torch.float32) and rows.numel() > 0


def gram_norms(pairs_of_factors: Sequence[Factors]) -> Tensor:
    """(layers, units) bounds of |Σ_t g_t a_tᵀ| by Gram matrices, of which no entry leaves the multiprocessor."""
    g, a = pairs_of_factors[0]
    (units, positions, outputs), inputs = g.shape, a.shape[2]
    pairs, layers = _pairs(positions), len(pairs_of_factors)
    found = torch.empty(layers, 2, units, pairs, device=g.device)
    with _table([factor for factors in pairs_of_factors for factor in factors]) as table:
        _triton().gram[(pairs, units, layers)](
            table, found, units, positions, outputs, inputs, pairs, TYPE=_type(g), **_PRODUCT
        )
    return _bounded(found, _summing(positions), outputs, inputs)


def allowance(g: Tensor, a: Tensor) -> Allowance:
    """What `gram_norms` raises norms by."""
    sizes = [torch.linalg.vector_norm(values, dim=2, dtype=torch.float32) for values in (g, a)]
    rate, unit = _roundings(g.shape[2], a.shape[2]) * _ROUNDING * _MARGIN**2, _ROUNDING * _MARGIN
    return Allowance((sizes[0] * sizes[1]).sum(1), _summing(g.shape[1]), rate, unit)


def token_norms(g: Tensor, tokens: Tensor) -> Tensor:
    """(units,) a bound of the norm of an embedding's gradient: Gram entries of equal tokens, added up."""
    units, positions, width = g.shape
    pairs = _pairs(positions)
    found = torch.empty(1, 2, units, pairs, device=g.device)
    with _table([g]) as table:
        _triton().token_gram[(pairs, units)](
            table, tokens.contiguous(), found, units, positions, width, pairs, TYPE=_type(g), **_PRODUCT
        )
    sizes = found[0, 1].sum(1) * (_MARGIN * _ROUNDING)
    return _bounded(found, 0, width)[0] + filled(g) * sizes


def weighted_sums(pairs_of_factors: Sequence[Factors], weights: Tensor) -> Tensor:
    """(layers, outputs, inputs) Σ_u weights_u Σ_t g_t a_tᵀ: each unit's tile is finished before it meets its weight."""
    g, a = pairs_of_factors[0]
    (units, positions, outputs), inputs = g.shape, a.shape[2]
    tiles = -(-outputs // _TILE) * -(-inputs // _TILE)
    sums = torch.empty(len(pairs_of_factors), outputs, inputs, device=g.device)
    with _table([factor for factors in pairs_of_factors for factor in factors]) as table:
        _triton().weighted[(tiles, len(pairs_of_factors))](
            table, weights, sums, units, positions, outputs, inputs, TYPE=_type(g), **_PRODUCT
        )
    return sums


def row_norms(rows: Sequence[Tensor]) -> Tensor:
    """(layers, units) norms of rows (units, size), one such tensor per layer."""
    units, size = rows[0].shape
    wanted = min(size // (4 * _BLOCK), 4 * _multiprocessors(rows[0].device) // (units * len(rows)))
    parts = max(1, wanted, size >> 22)  # of so few squares that adding them up loses less than a few 10⁻⁶
    found = torch.empty(len(rows), units, parts, device=rows[0].device)
    with _table(rows, aligned=False) as table:
        _triton().squared_rows[(parts, units, len(rows))](
            table, found, size, units, parts, -(-size // parts), TYPE=_type(rows[0]), BLOCK=_BLOCK, num_warps=4
        )
    return found[:, :, 0].sqrt() if parts == 1 else found.sum(2, dtype=torch.float64).sqrt().float()


def sums_of_rows(rows: Sequence[Tensor], weights: Tensor) -> Tensor:
    """(layers, size) Σ_u weights_u rows_u, without a float32 copy of the rows; in float64 if units are many."""
    units, size = rows[0].shape
    blocks = -(-size // _BLOCK)
    splits = max(1, min(units // 16, 8 * _multiprocessors(rows[0].device) // (blocks * len(rows))))
    kind = torch.float32 if units <= IN_A_ROW else torch.float64
    parts = torch.empty(splits, len(rows), size, dtype=kind, device=rows[0].device)
    with _table(rows, aligned=False) as table:
        _triton().weighted_rows[(blocks, len(rows), splits)](
            table, weights, parts, units, size, -(-units // splits), TYPE=_type(rows[0]), BLOCK=_BLOCK, FEW=IN_A_ROW,
            num_warps=4,
        )  # fmt: skip
    return parts[0] if splits == 1 else parts.sum(0)


def scale_gradients(x: Tensor, g: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """(units, width) the gradients of scale and shift of a normalisation over the last dimension, unit by unit."""
    units, positions, width = x.shape
    if not take_rows(x) or width > 1 << 14:
        normalised = (functional.layer_norm if centred else functional.rms_norm)(wide(x), (width,), eps=eps)
        return (normalised * g).sum(1), g.sum(1, dtype=normalised.dtype)
    x, g = x.contiguous(), g.contiguous()
    block = _power_of_two(width)
    parts = min(positions, max(1, 8 * _multiprocessors(x.device) // units))
    found = torch.empty(2, units, parts, width, device=x.device)
    _triton().scales[(parts, units)](
        x, g, found[0], found[1], positions, width, -(-positions // parts), eps,
        CENTRED=centred, BLOCK=block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    scales, shifts = found.sum(2)
    return scales, shifts


def channel_scale_gradients(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """(examples, channels) the gradients of scale and shift of channels that are normalised group by group.

    Args:
        x: (examples, channels, places) what is normalised.
        g: The gradient of the result, of the same shape.
        groups: Of channels; as many as channels for InstanceNorm.
        eps: Added to the variance.
    """
    examples, channels, places = x.shape
    size = _power_of_two(channels // groups)
    if not (take_rows(x) and take_rows(g)) or size > _BLOCK:
        normalised = functional.group_norm(wide(x), groups, eps=eps)
        return (normalised * g).sum(2), g.sum(2, dtype=normalised.dtype)
    found = torch.empty(2, examples, channels, device=x.device)
    _triton().channel_scales[(examples, groups)](
        x.contiguous(), g.contiguous(), found[0], found[1], groups, channels // groups, places, eps,
        CHANNELS=size, BLOCK=min(_power_of_two(places), 2 * _BLOCK // size), num_warps=4,
    )  # fmt: skip
    return found[0], found[1]


def unfold(x: Tensor, window: Window, padding: Sequence[int], places: Sequence[int]) -> Tensor:
    """(rows, channels in × kernel, places) the patches of images under the kernel of a convolution.

    Args:
        x: (rows, channels, height, width).
        window: The convolution's kernel, and how it moves.
        padding: Zeros before and after the last dimension, before and after the one before it.
        places: Of the output, in height and width.
    """
    kernel, width = math.prod(window.kernel), x.shape[1] * math.prod(window.kernel)
    found = x.new_empty(len(x), width, math.prod(places))
    block = min(_power_of_two(found.shape[2]), 128)
    entries = 2 * _BLOCK // block
    _triton().unfold[(len(x), -(-width // entries), -(-found.shape[2] // block))](
        x, found, *x.stride(), *x.shape[2:], padding[2], padding[0], *window.stride, *window.dilation,
        places[1], *found.shape[1:],
        KERNEL=kernel, ACROSS=window.kernel[1], ENTRIES=entries, PLACES=block, num_warps=4,
    )  # fmt: skip
    return found


@contextmanager
def _table(tensors: Sequence[Tensor], aligned: bool = True) -> Iterator[Tensor]:
    """The addresses of tensors, on their device, while they are held; with rows that start at 16-byte borders."""
    held = [_aligned(tensor) if aligned else tensor.contiguous() for tensor in tensors]
    device = held[0].device
    if aligned:
        _triton().triton.set_allocator(partial(_workspace, device=device))
    addresses = tuple(tensor.data_ptr() for tensor in held)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        yield uploaded(addresses, device)
        return
    # From step to step tensors mostly lie in the same places. Work on one stream comes in order, also freeing memory.
    place = addresses, device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if place not in _tables:
        if len(_tables) == _MOST_TABLES:
            _tables.clear()
        _tables[place] = uploaded(addresses, device)
    yield _tables[place]


def _aligned(values: Tensor) -> Tensor:
    if values.shape[2] % 8:
        values = functional.pad(values, (0, -values.shape[2] % 8))
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def _workspace(size: int, alignment: int, stream: int | None, device: torch.device) -> Tensor:
    """Where a kernel puts its tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device=device)


def _type(values: Tensor) -> Any:
    return _triton().TYPES[str(values.dtype)]


def _pairs(positions: int) -> int:
    """How many pairs of blocks of positions there are, each block with itself and those before it."""
    blocks = -(-positions // _TILE)
    return blocks * (blocks + 1) // 2


def _bounded(found: Tensor, summing: int, *widths: int) -> Tensor:
    """Norms from sums of Gram products, each of which may be off by so many roundings of |g_t||g_s||a_t||a_s|.

    `summing` is how many roundings in a row the clipped sum makes over the positions of a unit.
    """
    layers, _, units, pairs = found.shape
    norms = torch.empty(layers, units, device=found.device)
    off = _roundings(*widths) * _ROUNDING, (summing + 2) * _ROUNDING, UNDERFLOW * sum(widths)
    _triton().bounded[(units, layers)](found, norms, units, pairs, *off, BLOCK=max(2, _power_of_two(pairs)))
    return norms


def _roundings(*widths: int) -> int:
    """16 products enter a sum at once, with two roundings at most, in chunks that are added up; then come the pairs."""
    return sum(min(width, _CHUNK) // 8 + -(-width // _CHUNK) + 1 for width in widths) + 32


def _summing(positions: int) -> int:
    """How many roundings in a row a weighted sum makes, which adds 16 products at once too.

    As many as for so many positions, because the longest unit of a batch decides how many there are.
    """
    return max(positions, _POSITIONS) // 8


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _triton() -> Any:
    """The kernels, or None where there is no Triton."""
    try:
        from quell.torch.engine import triton_kernels
    except ImportError:
        return None
    return triton_kernels
