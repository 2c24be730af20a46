"""Fused kernels for bfloat16 and float16 on GPUs (Triton), and what takes their place elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor


def take(*values: Tensor) -> bool:
    return False


def gram_norms(g, a):
    raise NotImplementedError


direct_norms = add_weighted = token_norms = gram_norms


def scale_gradients(x: Tensor, g: Tensor, eps: float, centred: bool) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalised * g).sum(1)
