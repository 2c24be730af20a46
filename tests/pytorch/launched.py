"""A script for torchrun: `torchrun --nproc-per-node N launched.py FOLDER`. Every way to train, results in FOLDER/N.

A world that finds no checkpoints in FOLDER leaves one of step 4 behind for each trainer; a later one goes on from them.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from quell.noise import Key, Ledger, claims
from quell.torch import load_checkpoint, make_private, save_checkpoint
from quell.torch.huggingface import PrivateTrainer
from quell.torch.lightning import Private
from tests.pytorch.conftest import small_plan
from tests.pytorch.ranks import KINDS, WAYS, results, weights
from tests.pytorch.test_huggingface import Stop, bert, trainer_of
from tests.pytorch.test_lightning import Module, trainer
from tests.pytorch.test_lightning import Stop as Crash
from tests.pytorch.training import examples

CHECKPOINT = 4  # the step of it
LOWERED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def key_in(folder: Path, name: str) -> Path:
    """The same key for every world, with a ledger of its own."""
    claims._claims.clear()  # as in a new process
    path = folder / f"{name}.key"
    if int(os.environ["RANK"]) == 0 and not path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Key.from_seed(11).save(path)
        Ledger(path.with_name(path.name + ".ledger")).close()
    return path


def loop(folder: Path, name: str, stop: int | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    sharded = name == "fsdp, sharded"
    if name.startswith("fsdp"):
        fully_shard(model, **({"mp_policy": LOWERED} if "bf16" in name else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    plan = small_plan("bsr", alone=True, momentum=0.5)
    if name.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    key = key_in(folder, name)
    model, optimizer, loader = make_private(model, optimizer, examples(), plan, key=key, ema=0.9)
    step = load_checkpoint(folder / f"{name}.pt", model, optimizer, loader, sharded=sharded)
    while step < plan.steps:
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "ddp, bf16"):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step == stop:
                save_checkpoint(folder / f"{name}.pt", model, optimizer, loader, sharded=sharded)
                optimizer.close()
                return {}
    return results(model, optimizer)


class ShardingTrainer(PrivateTrainer):
    """accelerate shards models on GPUs only, and would ignore `fsdp` here."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        state, plugin = self.accelerator.state, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        if self.args.bf16:
            plugin.set_mixed_precision("bf16")
        for each in (state, PartialState()):
            each.distributed_type, each.fsdp_plugin = DistributedType.FSDP, plugin
        self.is_fsdp_enabled = True


def hugging_face(folder: Path, name: str, stop: int | None) -> dict[str, torch.Tensor]:
    AcceleratorState._reset_state(True)  # as in a new process
    saving = {"save_strategy": "steps", "save_steps": CHECKPOINT, "per_device_train_batch_size": 3, "use_cpu": True}
    kind = PrivateTrainer
    saving["bf16"] = "bf16" in name
    if "fsdp" in name and ("bf16" in name or dist.get_world_size() > 1):
        files = "SHARDED_STATE_DICT" if "sharded" in name else "FULL_STATE_DICT"
        saving |= {
            "fsdp": True,
            "fsdp_config": {"state_dict_type": files, "transformer_layer_cls_to_wrap": "BertLayer"},
        }
        kind = ShardingTrainer
    private = {"key": key_in(folder, name), "ema": 0.9}
    made = trainer_of(bert(), folder / name, small_plan("bsr", alone=True), private, saving, kind=kind)
    if stop is not None:
        made.add_callback(Stop(stop))
        try:
            made.train()
        except KeyboardInterrupt:
            made.optimizer.close()
        return {}
    made.train(resume_from_checkpoint=any((folder / name).glob("checkpoint-*")) or None)
    assert all(isinstance(p, DTensor) == ("fsdp" in saving) for p in made.model.parameters())
    return results(made.model, made.optimizer)


class Sharded(Module):
    def configure_model(self):
        if not isinstance(self.network, FSDPModule):
            fully_shard(self.network)


def lightning(folder: Path, name: str, stop: int | None) -> dict[str, torch.Tensor]:
    private = Private(small_plan("bsr", alone=True), examples(), key=key_in(folder, name), physical_batch_size=3)
    world, sharded = dist.get_world_size(), "fsdp" in name
    module = Sharded() if sharded else Module()
    precision = {"precision": "bf16-mixed" if "bf16" in name else "32-true"}
    strategy = {"strategy": "ddp", "devices": world, **precision} if world > 1 else {"devices": 1, **precision}
    if sharded:
        meshes = {"data_parallel_size": world, "tensor_parallel_size": 1}
        kind = ModelParallelStrategy(**meshes, save_distributed_checkpoint="sharded" in name)
        strategy = {"strategy": kind, "devices": world, **precision}
    path = folder / f"{name}.ckpt"
    keep = pl.callbacks.ModelCheckpoint(folder, filename=name, every_n_train_steps=CHECKPOINT)
    extra = {"enable_checkpointing": True} if stop else {}
    fitted = trainer(folder, private, *([keep, Crash(stop)] if stop else []), **strategy, **extra)
    try:
        fitted.fit(module, private.loader, ckpt_path=path if path.exists() else None, weights_only=True)
    except RuntimeError as error:
        if stop is None or "a crash" not in str(error):
            raise
    private.optimizer.close()
    return {} if stop else weights(module)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = [way for way in (loop, hugging_face, lightning) for _ in KINDS]
    shared, home = folder / "shared", folder / str(dist.get_world_size())
    first = dist.get_rank() == 0 and not shared.exists()
    leaves = [first]
    dist.broadcast_object_list(leaves)
    for path in (shared, home):
        path.mkdir(exist_ok=True)
    for name, way in zip(WAYS, ways, strict=True):
        for place, stop in ((home, None), (shared, CHECKPOINT if leaves[0] else None)):
            dist.barrier()
            final = way(place, name, stop)
            if dist.get_rank() == 0 and final:
                torch.save(final, home / f"{name}, {'whole' if place is home else 'resumed'}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
