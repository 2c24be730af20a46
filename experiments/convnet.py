"""The BISR paper's ConvNet (3×3 convolutions 32-32, 64-64, 128-128, each pair then pooled; linear 2048 → 10) with
gradients clipped per example.

Per-example gradients come from one forward and one backward pass: the gradient of a convolution's weights for one
example is the product of its input patches and the gradient of its output. That costs what the ordinary backward pass
costs, where `torch.func.vmap` falls back to grouped convolutions.
Every gradient is stored before it is measured and clipped, so the clipped norm holds exactly, whatever precision the
convolutions run in.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

CHANNELS = (3, 32, 32, 64, 64, 128, 128)
Params = list[Tensor]  # weight, bias of each layer in turn


def init(seed: int, he: bool, device: torch.device) -> Params:
    """Weights uniform with variance 2/fan-in and no bias (He et al. 2015), or as PyTorch's layers start."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(out, into, 3, 3) for into, out in pairwise(CHANNELS)] + [(10, 2048)]
    params = []
    for shape in shapes:
        fan_in = math.prod(shape[1:])
        weight = torch.empty(shape).uniform_(-1, 1, generator=random) * math.sqrt((6 if he else 1) / fan_in)
        bias = torch.empty(shape[0]).uniform_(-1, 1, generator=random) * (0 if he else math.sqrt(1 / fan_in))
        params += [weight.to(device), bias.to(device)]
    return params


def logits(
    params: Params, images: Tensor, inputs: list[Tensor] | None = None, outputs: list[Tensor] | None = None
) -> Tensor:
    """(B, 10) from images (B, 3, 32, 32); every layer's input and output are put into the lists, if given."""
    x = images
    for layer in range(7):
        weight, bias = params[2 * layer : 2 * layer + 2]
        if layer == 6:
            x = x.flatten(1)
        y = functional.conv2d(x, weight, bias, padding=1) if layer < 6 else functional.linear(x, weight, bias)
        if inputs is not None and outputs is not None:
            if layer == 0:
                y.requires_grad_()  # the weights are no leaves of the graph; gradients are taken at the outputs
            inputs.append(x.detach())
            outputs.append(y)
        if layer == 6:
            return y
        x = functional.relu(y)
        if layer % 2:
            x = functional.max_pool2d(x, 2)
    raise AssertionError


def clipped_sum(params: Params, images: Tensor, labels: Tensor, present: Tensor, max_norm: float) -> list[Tensor]:
    """The sum over examples of min(1, max_norm/‖g‖)·g, g the gradient of one example's cross-entropy.

    Where `present` is 0 the example is padding and counts nothing. Images in bfloat16 make both passes run in it;
    gradients, their norms and the sum are float32 all the same.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    weights = [p.to(images.dtype) for p in params]
    found = logits(weights, images, inputs, outputs)
    loss = functional.cross_entropy(found.float(), labels, reduction="sum")
    grads = [per_example(x, dy) for x, dy in zip(inputs, torch.autograd.grad(loss, outputs), strict=True)]
    norms = [torch.linalg.vector_norm(part.flatten(1), dim=1) for pair in grads for part in pair]
    scale = present * (max_norm / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    summed = []
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    for (weight, bias), like in zip(grads, params[::2], strict=True):
        total = scale @ weight.flatten(1)
        if like.dim() == 4:  # patches are (row, column, channel), weights (channel, row, column)
            out, into = like.shape[:2]
            total = total.view(out, 3, 3, into).permute(0, 3, 1, 2)
        summed += [total.reshape(like.shape), scale @ bias]
    torch.backends.cuda.matmul.allow_tf32 = before
    return summed


def per_example(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients (B, out, in) and (B, out) of a layer's weight and bias from its input and output gradient."""
    if x.dim() == 2:
        return dy.float()[:, :, None] * x.float()[:, None, :], dy.float()
    padded = functional.pad(x, (1, 1, 1, 1)).permute(0, 2, 3, 1)
    patches = padded.unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3)  # (B, H, W, 3, 3, C)
    flat = dy.permute(0, 2, 3, 1).flatten(1, 2)  # (B, H·W, out)
    left, right = flat.transpose(1, 2), patches.reshape(*flat.shape[:2], -1)
    if x.dtype == torch.bfloat16 and x.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32), flat.sum(1, dtype=torch.float32)
    return torch.bmm(left.float(), right.float()), flat.sum(1, dtype=torch.float32)
