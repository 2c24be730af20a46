"""Optimise strategies that Quell has no family for: any parameterised C⁻¹, any workload, any aggregate of errors.

Appendix C.2 of arXiv:2405.15913: the per-query errors of a pair of streaming operators (Algorithm 4) are
computed with PyTorch tensors, aggregated by a function of yours, and differentiated by `torch.func`. This is
the slow, general way, O(n²) per evaluation; the families in `quell.strategy` have closed forms. It needs
PyTorch (`pip install 'quell[torch]'`) and is imported only when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quell._types import Array
from quell.algebra.descent import Convergence, minimise
from quell.algebra.streaming import StreamingOperator, compose
from quell.errors import QuellError
from quell.progress import announce

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["optimise"]


def optimise(
    noising: Callable[[Tensor], StreamingOperator],
    workload: StreamingOperator,
    steps: int,
    start: Array,
    aggregate: Callable[[Tensor], Tensor],
    squared_sensitivity: Callable[[Tensor], Tensor] | None = None,
    max_iterations: int = 500,
) -> tuple[Array, Convergence]:
    """The parameters that minimise squared_sensitivity(parameters) · aggregate(per-query variances).

    Args:
        noising: parameters (a float64 tensor of `start`'s shape) → the operator of C⁻¹, made of differentiable
        arithmetic. workload: the operator of A, for instance `Workload.operator()`. steps: n. start: first
        parameters; the loss there must be finite. aggregate: variances (n,) → loss, for instance `torch.sum` or
        `torch.max`. squared_sensitivity: parameters → sens². Leave it out where the parameterisation fixes it,
        as unit columns do. max_iterations: of L-BFGS.

    The result is a search, not a proof: price it with `quell.analysis.sensitivity` before any promise.

    >>> import torch
    >>> from quell.algebra import streaming
    >>> from quell.workload import prefix
    >>> def cgd(p):  # λCGD: C⁻¹ = 1 − λx
    ...     return streaming.banded(torch.stack([torch.ones(30, dtype=p.dtype), -p.expand(30)], dim=1))
    >>> energy = lambda p: torch.sum(p ** (2 * torch.arange(30)))
    >>> best, how = optimise(cgd, prefix(30).operator(), 30, np.array([0.5]), torch.sum, energy)
    >>> best.round(3), how.converged
    (array([0.77]), True)
    """
    try:
        import torch
        from torch.func import grad_and_value
    except ImportError as missing:
        raise QuellError("quell.research differentiates with PyTorch: pip install 'quell[torch]'") from missing

    def log_loss(parameters: Tensor) -> Tensor:
        decoder = compose(workload, noising(parameters))
        state, variances = decoder.init(), []
        for unit in torch.eye(steps, dtype=torch.float64):
            state, row = decoder.step(state, unit)
            variances.append((row * row).sum())
        loss = torch.log(aggregate(torch.stack(variances)))
        return loss if squared_sensitivity is None else loss + torch.log(squared_sensitivity(parameters))

    differentiated = grad_and_value(log_loss)

    def objective(point: Array) -> tuple[float, Array]:
        slope, value = differentiated(torch.tensor(point, dtype=torch.float64))
        return (float(value), slope.numpy()) if math.isfinite(float(value)) else (math.inf, np.zeros_like(point))

    return minimise(
        objective,
        np.asarray(start, dtype=np.float64),
        max_iterations=max_iterations,
        improvement_tolerance=1e-12,
        on_iteration=lambda so_far: announce(f"optimise: iteration {so_far.iterations}"),
    )
