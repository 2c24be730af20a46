"""`make_private`: from the user's model, optimizer and data to the same three, private."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from quell.errors import QuellError
from quell.noise import Key
from quell.torch.adam import SecondMoments
from quell.torch.averages import require_rate
from quell.torch.canaries import PlantedCanaries
from quell.torch.checks import (
    refuse_leaking_layers,
    refuse_wrong_arguments,
    trainable_parameters,
)
from quell.torch.clip_norms import Bounds, ClipNorm
from quell.torch.distributed import copy_from_first_rank, require_agreement
from quell.torch.engine.base import Engine
from quell.torch.engine.by_default import is_compiled
from quell.torch.engine.graphs import are_recordable, record_passes
from quell.torch.engine.layers import LayerEngine
from quell.torch.engine.microbatch import MicrobatchEngine
from quell.torch.joined import JoinedOptimizer
from quell.torch.loader import PlannedLoader
from quell.torch.moments import CorrectedMoments, require_correctable
from quell.torch.optimizer import PrivateOptimizer
from quell.torch.probe import Probe
from quell.torch.run import TrainingRun
from quell.torch.sharding import any_sharded, is_sharded
from quell.torch.start import NoiseOptions, started_run
from quell.torch.watch import Watch
from quell.watching.log import Log

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan

CLIPPING = ("layers", "microbatch")


def make_private(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    data: Dataset[Any] | DataLoader[Any],
    plan: Plan,
    max_grad_norm: ClipNorm = 1.0,
    *,
    clipping: str = "layers",
    mechanism: str | Mechanism | None = None,
    loss_reduction: str = "mean",
    physical_batch_size: int | None = None,
    micro_batch: int = 32,
    rows_per_example: int = 1,
    augment: Callable[[Any], Any] | None = None,
    users: Any = None,
    rows_per_user: int = 1,
    fixed_shape: bool | None = None,
    cuda_graphs: bool | None = None,
    key: Key | str | Path | None = None,
    seed: int | None = None,
    ledger: str | Path | None = None,
    generator: str = "chacha20",
    noise_memory: float = 0.0,
    budget: str | Path | None = None,
    canaries: int = 0,
    ema: float | None = None,
    scale_gradients: bool = False,
    correct_moments: bool = False,
    log: Log | str | Path | None = None,
) -> tuple[nn.Module, PrivateOptimizer, PlannedLoader]:
    """Make a training loop private: returns model, optimizer and loader for the loop you already have.

    The promise is the plan's: (ε, δ) per example, or per user where the plan was made with `users=` (docs/users.md), by
    the accountant of the plan's sampling scheme (docs/privacy.md). It needs a model and a loss that do not couple
    examples; the first batches are checked for that (docs/pytorch.md).

    Args:
        model: The model to train. Hooks are attached; nothing is wrapped.
        optimizer: Your optimizer over all parameters of the model that require gradients; or several, in a list, which
            then step together, on gradients that are clipped over all of their parameters at once.
        data: The training set, or a `DataLoader` whose dataset, collate function and workers are used. Workers start
            anew in every epoch: `persistent_workers` is left out.
        plan: The plan whose batches, noise and promise to use.
        max_grad_norm: The norm to which each example's (or user's) gradient is clipped. "automatic" brings every
            gradient to norm 1, without a number to choose. A mapping gives groups of parameters, by the beginnings of
            their names, bounds of their own: `{"encoder": "automatic", "head": 0.5}`.
        clipping: "layers" follows every layer through one forward and one backward pass. "microbatch" runs the model by
            `torch.func`, for models that "layers" refuses.
        mechanism: Another certified mechanism of the plan than the recommended one, by name or as an object.
        loss_reduction: "mean" or "sum", as your loss does it. A mean must divide by the number of rows only. With class
            weights, `ignore_index` or a mean over tokens it depends on other examples, which breaks the promise: sum
            the examples' own losses instead, and pass "sum".
        physical_batch_size: Most examples that the loader hands out at once, for batches that do not fit into memory.
            Call `optimizer.step()` for each part; it acts after the last.
        micro_batch: How many examples "microbatch" runs at a time.
        rows_per_example: How many rows the loader takes of each example, asking the data set that many times. The mean
            of their gradients is clipped as one, so augmentation costs no privacy.
        augment: Changes the inputs of every batch at random, each row by itself, such as `quell.torch.crop_and_flip`.
            It gets the first element of a batch that is a list or tuple, or the whole of any other batch. With
            `rows_per_example=8` each example comes in eight views.
        users: For a plan per user: the id of each example's user, in the order of the data set. Default: its attribute
            `users`. Batches and `physical_batch_size` then count users.
        rows_per_user: How many rows a user brings to a step, taken in turn from all of the user's. The mean of their
            gradients is clipped as one. Users with fewer rows bring some of them more than once.
        fixed_shape: Fill batches of random size up to one size with rows of zeros, which count for nobody. Default: on
            GPUs, for data in memory (`TensorDataset`, `StackDataset` of tensors or arrays, and a `Subset` of these).
        cuda_graphs: Record the model's passes and the clipping after some steps and replay them, for steps that Python
            slows down. Default: on one GPU, where it waits for Python and only the speed would change. True: wherever
            it is possible, with a warning where it is not; what Python decides in the model is decided once. False:
            never. Needs batches of one shape (docs/pytorch.md).
        key: The noise key, or the path of a key file that only its owner can read; it is made if it does not exist.
            Default: a new key that is not kept.
        seed: Makes the run repeatable and voids its privacy: for tests.
        ledger: Where to record released steps, to notice repeated ones after a crash. Default: beside the key file.
        generator: "chacha20", "chacha8" (faster, smaller security margin) or "philox" (not secure); see docs/noise.md.
            A run keeps the generator it began with.
        noise_memory: Model copies (float32) that the noise may keep to save time. The noise is the same for any value,
            and a resumed run may use another one.
        budget: A budget (`quell.Budget`) that the run is charged to before its first step, once, also if it is resumed
            with its key. A run that the budget has no room for is refused here, and again at its first step.
        canaries: So many made-up gradients are added beside the data, and `optimizer.audit()` says after the run how
            well an attacker finds them (docs/auditing.md). They do not touch the promise.
        ema: Average the weights after each step, with this share of the past, such as 0.98. Inside `with
            optimizer.averaged():` the model has the averaged weights. They cost no privacy, and a copy of the model.
            Default: the plan's own, if it was made with `ema=`.
        scale_gradients: For Adam and AdamW: scale gradients before they are clipped by the second moments that the
            optimizer has of the released ones, so that the noise is as large as what it is divided by.
        correct_moments: For AdamW where gradients are not scaled: subtract the variance of the noise from the second
            moments that it divides by. Otherwise they are mostly noise, and AdamW steps like SGD.
        log: A folder to log the run to, for `quell watch`: ε so far, noise-to-signal, times. A `quell.Log` says more:
            TensorBoard, Weights & Biases, how often, and what is not private and off by default (docs/watching.md).

    Returns:
        The model, the wrapped optimizer, and the loader of the plan's batches.

    >>> import quell, torch
    >>> data = torch.utils.data.TensorDataset(torch.randn(200, 4), torch.randn(200, 1))
    >>> plan = quell.plan(examples=200, batch_size=20, epochs=1, epsilon=8, delta=1e-3, memory=0)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer, loader = make_private(model, optimizer, data, plan, clipping="microbatch")
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    ...     _ = optimizer.step()
    >>> optimizer.privacy_report().epsilon_so_far
    8.0
    """
    ema = require_rate(ema)
    if clipping not in CLIPPING:
        raise QuellError(f"clipping={clipping!r} is not known: use {', '.join(CLIPPING)}")
    if scale_gradients and correct_moments:
        raise QuellError("scale_gradients=True needs no correct_moments=True, which is for noise of one size: pass one")
    if loss_reduction not in ("mean", "sum"):
        raise QuellError(f"loss_reduction={loss_reduction!r} must be 'mean' or 'sum', as your loss does it")
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        refuse_wrong_arguments(each, data, plan, noise_memory)
    if isinstance(optimizer, (list, tuple)):
        optimizer = JoinedOptimizer(optimizer)
    ema = plan.run.optimizer.ema if ema is None else ema
    if not isinstance(model, nn.Module):
        raise QuellError(f"model is a {type(model).__name__}: pass the torch.nn.Module to train")
    if isinstance(model, DistributedDataParallel):
        model = model.module  # gradients are added up after clipping, by the optimizer
    if isinstance(optimizer, PrivateOptimizer) or getattr(model, "_quell_private", False):
        raise QuellError(
            "model and optimizer are private already: make new ones for a new run, and close the previous optimizer: "
            "optimizer.close()"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise QuellError(f"{name} has no shape yet: run the model once on a made-up batch before make_private")
    params = trainable_parameters(model, optimizer)
    bounds = Bounds.of(max_grad_norm, params)
    refuse_leaking_layers(model)
    sharded = any_sharded(params.values())
    if sharded and not all(map(is_sharded, params.values())):  # sums of the others stay a rank's
        raise QuellError("some trained parameters are sharded and others are not: call fully_shard on the whole model")
    if clipping == "microbatch":
        if fixed_shape or (rows_per_example, rows_per_user) != (1, 1):
            raise QuellError("rows_per_example, rows_per_user and fixed_shape need clipping='layers': leave them out")
        if cuda_graphs:
            raise QuellError("cuda_graphs needs clipping='layers': leave it out")
        if sharded:
            raise QuellError("clipping='microbatch' needs whole parameters, and these are sharded by fully_shard")
    if cuda_graphs and not are_recordable(params.values()):
        raise QuellError("cuda_graphs=True needs whole parameters on a CUDA GPU, the current one: leave it out")
    if correct_moments:
        require_correctable(optimizer)
    options = NoiseOptions(mechanism, key, seed, ledger, generator, noise_memory, budget)
    with started_run(optimizer, params, data, plan, bounds.norm, options, users, rows_per_user) as run:
        own: dict[str, Any] = {
            "clipping": clipping,
            "loss_reduction": loss_reduction,
            "physical_batch_size": physical_batch_size,
            "rows_per_example": rows_per_example,
            "fixed_shape": fixed_shape,
            "canaries": canaries,
            "ema": ema,
            "max_grad_norm": bounds.settings,
            "scale_gradients": scale_gradients,
            "correct_moments": correct_moments,
            "log": log,
        }
        require_agreement({**run.settings(), **own})
        if fixed_shape is None and (clipping == "microbatch" or not next(iter(params.values())).is_cuda):
            fixed_shape = False
        filled = clipping == "layers"  # batches of nobody too, because many models cannot run on no rows
        loader = PlannedLoader(data, run, physical_batch_size, rows_per_example, fixed_shape, augment, filled)
        if canaries:
            run.planted = PlantedCanaries(run, params.values(), canaries)
        scales = SecondMoments(optimizer, params).scales if scale_gradients else {}
        if log is not None:
            run.watch = Watch(log, run, params.values())
        if not sharded:
            copy_from_first_rank([*model.parameters(), *model.buffers()])
        # From here on nothing is refused: another try would find what this one has put into the model.
        engine: Engine
        if clipping == "microbatch":
            engine = MicrobatchEngine(model, params, bounds, loss_reduction, micro_batch)
        else:
            engine = LayerEngine(model, params, bounds, loss_reduction, rows_per_example * rows_per_user)
        engine.present, engine.scales = run.present, scales
        engine.keeps_norms = run.watch is not None and run.watch.log.norms
        run.guard = probe = Probe(model, params, lambda: engine.inside, lambda: engine.anchor)
        if isinstance(engine, LayerEngine) and (
            cuda_graphs or (cuda_graphs is None and _may_record(model, run, params))
        ):
            record_passes(engine, model, lambda: probe.watching, asked=bool(cuda_graphs))
        private = PrivateOptimizer(optimizer, run, engine, ema)
        if correct_moments:
            deviation = run.noise.scale / run.expected_batch_size
            CorrectedMoments(optimizer, run.mechanism.strategy, deviation, lambda: run.step)
    model._quell_private = True
    return model, private, loader


def _may_record(model: nn.Module, run: TrainingRun, params: Mapping[str, nn.Parameter]) -> bool:
    """Whether CUDA graphs may be recorded by default: on one GPU, because nobody has tried it on several."""
    return run.world == 1 and not is_compiled(model) and are_recordable(params.values())
