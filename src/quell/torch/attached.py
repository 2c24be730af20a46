"""`attach`: a plan's batches and noise for a loop that clips by itself, such as one written with torch.func.

`make_private` watches a model; here there is nothing to watch. The loop hands over the sums of its clipped gradients,
and everything after that is the same: one row of noise per batch, the plan's batches only, checkpoints, the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from quell.adapters.choice import require_clip_norm
from quell.errors import QuellError
from quell.noise import Key
from quell.torch.checks import refuse_wrong_arguments
from quell.torch.distributed import copy_from_first_rank, require_agreement
from quell.torch.engine.base import Engine
from quell.torch.engine.bounds import norm_of
from quell.torch.loader import PlannedLoader
from quell.torch.optimizer import PrivateOptimizer
from quell.torch.sharding import any_sharded
from quell.torch.start import NoiseOptions, started_run
from quell.torch.watch import Watch
from quell.watching.log import Log

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan


def attach(
    optimizer: Optimizer,
    params: Mapping[str, nn.Parameter],
    data: Dataset[Any] | DataLoader[Any],
    plan: Plan,
    max_grad_norm: float = 1.0,
    *,
    mechanism: str | Mechanism | None = None,
    physical_batch_size: int | None = None,
    key: Key | str | Path | None = None,
    seed: int | None = None,
    ledger: str | Path | None = None,
    generator: str = "chacha20",
    noise_memory: float = 0.0,
    budget: str | Path | None = None,
    log: Log | str | Path | None = None,
) -> tuple[AttachedOptimizer, PlannedLoader]:
    """A plan's batches and noise for a loop that computes clipped sums itself.

    For every item of the loader call `zero_grad`, `take` with the sums, and `step`. The promise rests on your clipping:
    no example may move the sums by more than `max_grad_norm`.

    Args:
        optimizer: The optimizer to wrap. It must train exactly `params`.
        params: The trained parameters by name, the names that the sums will have.
        data: The training set, or a `DataLoader` whose dataset, collate function and workers are used.
        plan: The plan whose batches, noise and promise to use.
        max_grad_norm: The norm to which you clip each example's gradient.
        mechanism: Another certified mechanism of the plan than the recommended one, by name or as an object.
        physical_batch_size: Most examples that the loader hands out at once; `step` acts after a batch's last part.
        key: The noise key, or the path of a key file, which is made if it does not exist.
        seed: Makes the run repeatable and voids its privacy: for tests.
        ledger: Where to record released steps. Default: beside the key file.
        generator: "chacha20", "chacha8" (faster, smaller security margin) or "philox" (not secure).
        noise_memory: Model copies that the noise may keep to save time.
        budget: A budget (`quell.Budget`) to charge before the first step, as in `make_private`.
        log: A folder, or a `quell.Log`, to log the run to, as in `make_private`.

    Returns:
        The wrapped optimizer and the loader of the plan's batches.

    >>> import quell, torch
    >>> from quell.torch import clipped_sum
    >>> data = torch.utils.data.TensorDataset(torch.randn(200, 4), torch.randn(200))
    >>> plan = quell.plan(examples=200, batch_size=20, epochs=1, epsilon=8, delta=1e-3, memory=0)
    >>> params = {"w": torch.nn.Parameter(torch.zeros(4))}
    >>> optimizer, loader = attach(torch.optim.SGD(params.values(), lr=0.1), params, data, plan)
    >>> def loss(params, x, y):
    ...     return (params["w"] @ x - y) ** 2
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     optimizer.take(clipped_sum(loss, params, (x, y), optimizer.max_grad_norm), examples=len(x))
    ...     _ = optimizer.step()
    >>> optimizer.privacy_report().epsilon_so_far
    8.0
    """
    bound = require_clip_norm(max_grad_norm)
    if isinstance(optimizer, PrivateOptimizer):
        raise QuellError("the optimizer is private already: make a new one for a new run")
    refuse_wrong_arguments(optimizer, data, plan, noise_memory)
    trained = _in_optimizer_order(optimizer, params)
    if any_sharded(trained.values()):
        raise QuellError("attach takes whole parameters, and these are sharded: use make_private")
    if log is not None and Log.of(log).norms:
        raise QuellError("norms=True needs gradients that Quell clips, and this loop clips its own: leave it out")
    options = NoiseOptions(mechanism, key, seed, ledger, generator, noise_memory, budget)
    with started_run(optimizer, trained, data, plan, bound, options) as run:
        require_agreement({**run.settings(), "physical_batch_size": physical_batch_size, "log": log})
        loader = PlannedLoader(data, run, physical_batch_size)
        copy_from_first_rank(list(trained.values()))
        if log is not None:
            run.watch = Watch(log, run, trained.values())
    return AttachedOptimizer(optimizer, run, GivenSums(trained, bound, "sum")), loader


class GivenSums(Engine):
    """Clipped sums that the loop computed."""

    clipping, clips = "given", False
    if_not_clipped = "clip every example's gradient before adding up"
    if_none_came = "call optimizer.take() before optimizer.step(), and zero_grad() before both"

    def flush(self) -> None:
        """Nothing waits: sums are handed over ready."""

    def take(self, sums: Mapping[str, Tensor], examples: int) -> None:
        if set(sums) != set(self.params):
            odd = sorted(set(sums) ^ set(self.params))
            raise QuellError(f"the sums and the parameters differ in {', '.join(odd)}: pass one sum per parameter")
        for name, total in sums.items():
            if total.shape != self.params[name].shape or total.dtype != torch.float32:
                raise QuellError(
                    f"the sum of {name} is {total.dtype} of shape {tuple(total.shape)}, the parameter has shape "
                    f"{tuple(self.params[name].shape)}: pass float32 sums of the parameters' shapes"
                )
        own = {name: total.clone() for name, total in sums.items()}  # the loop may write the next ones over its own
        self._take(examples, own, norm_of(own.values()))


class AttachedOptimizer(PrivateOptimizer):
    """A private optimizer that is given its gradients. Made by `attach`."""

    _engine: GivenSums

    def take(self, sums: Mapping[str, Tensor], examples: int) -> None:
        """The float32 sums of `examples` gradients, each clipped to `max_grad_norm`, which are copied."""
        with torch.no_grad():
            self._engine.take(sums, examples)


def _in_optimizer_order(optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    names = {id(parameter): name for name, parameter in params.items()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {id(parameter) for parameter in held} != set(names):
        raise QuellError("params are not the tensors that the optimizer trains: make it from params.values()")
    if frozen := [names[id(parameter)] for parameter in held if not parameter.requires_grad]:
        raise QuellError(f"{frozen[0]} does not require a gradient: leave it out, or make it an nn.Parameter")
    return {names[id(parameter)]: parameter for parameter in held}
