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
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))

from quell.noise import Key, Ledger, claims
from quell.torch import load_checkpoint, make_private, save_checkpoint
from quell.torch.lightning import Private
from tests.pytorch.conftest import small_plan
from tests.pytorch.ranks import weights
from tests.pytorch.test_huggingface import Stop, trainer_of
from tests.pytorch.test_lightning import Module, trainer
from tests.pytorch.test_lightning import Stop as Crash
from tests.pytorch.training import examples

CHECKPOINT = 4  # the step of it


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
    if name == "fsdp":
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    plan = small_plan("bsr", alone=True)
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    model, optimizer, loader = make_private(model, optimizer, examples(), plan, key=key_in(folder, name))
    step = load_checkpoint(folder / f"{name}.pt", model, optimizer, loader)
    while step < plan.steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step == stop:
                save_checkpoint(folder / f"{name}.pt", model, optimizer, loader)
                optimizer.close()
                return {}
    return weights(model)


def hugging_face(folder: Path, stop: int | None) -> dict[str, torch.Tensor]:
    from tests.pytorch.test_huggingface import bert

    saving = {"save_strategy": "steps", "save_steps": CHECKPOINT, "per_device_train_batch_size": 3, "use_cpu": True}
    private = {"key": key_in(folder, "hugging face")}
    made = trainer_of(bert(), folder / "hugging face", small_plan("bsr", alone=True), private, saving)
    if stop is not None:
        made.add_callback(Stop(stop))
        try:
            made.train()
        except KeyboardInterrupt:
            made.optimizer.close()
        return {}
    made.train(resume_from_checkpoint=any((folder / "hugging face").glob("checkpoint-*")) or None)
    return {name: value.clone() for name, value in made.model.state_dict().items()}


def lightning(folder: Path, stop: int | None) -> dict[str, torch.Tensor]:
    private = Private(small_plan("bsr", alone=True), examples(), key=key_in(folder, "lightning"), physical_batch_size=3)
    module, world = Module(), dist.get_world_size()
    strategy = {"strategy": "ddp", "devices": world} if world > 1 else {"devices": 1}
    path = folder / "lightning.ckpt"
    keep = pl.callbacks.ModelCheckpoint(folder, filename="lightning", every_n_train_steps=CHECKPOINT)
    extra = {"enable_checkpointing": True} if stop else {}
    fitted = trainer(folder, private, *([keep, Crash(stop)] if stop else []), **strategy, **extra)
    try:
        fitted.fit(module, private.loader, ckpt_path=path if path.exists() else None, weights_only=True)
    except RuntimeError:
        if stop is None:
            raise
    private.optimizer.close()
    return {} if stop else {name: value.clone() for name, value in module.state_dict().items()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = {"ddp": loop, "fsdp": loop, "hugging face": hugging_face, "lightning": lightning}
    shared, home = folder / "shared", folder / str(dist.get_world_size())
    first = dist.get_rank() == 0 and not shared.exists()
    leaves = [first]
    dist.broadcast_object_list(leaves)
    for path in (shared, home):
        path.mkdir(exist_ok=True)
    for name, way in ways.items():
        given = (name,) if way is loop else ()
        for place, stop in ((home, None), (shared, CHECKPOINT if leaves[0] else None)):
            dist.barrier()
            final = way(place, *given, stop)
            if dist.get_rank() == 0 and final:
                torch.save(final, home / f"{name}, {'whole' if place is home else 'resumed'}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
