"""A transformer split over all GPUs (or processes) by FSDP2; a killed run goes on where it stopped.

torchrun --nproc-per-node 8 examples/fsdp.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import TensorDataset

import quell
from quell.torch import load_checkpoint, make_private, save_checkpoint


class Network(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inside = nn.Embedding(100, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.blocks(self.inside(tokens)).mean(1))


def main(small: bool = False, folder: str = ".") -> float:
    gpu = torch.cuda.is_available() and not small
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    tokens = torch.randint(100, (160 if small else 100_000, 16), generator=torch.Generator().manual_seed(0))
    plan = quell.plan(  # every rank makes the same one; for long plans: quell plan --save, and Plan.load here
        examples=len(tokens),
        batch_size=32 if small else 1024,
        epochs=2 if small else 5,
        epsilon=8,
        delta=1e-6,
        optimizer="adamw",
        sampling="cyclic" if small else "best",
    )
    model = Network(32 if small else 1024, 2 if small else 12).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.blocks.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(tokens, tokens[:, 0] % 2)
    key = os.path.join(folder, "run.key")  # with it, and the ledger beside it, no step is released twice
    model, optimizer, loader = make_private(model, optimizer, data, plan, max_grad_norm=0.5, key=key)
    checkpoint = os.path.join(folder, "checkpoint.pt")
    step = load_checkpoint(checkpoint, model, optimizer, loader)
    while step < plan.steps:
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            step += 1
        save_checkpoint(checkpoint, model, optimizer, loader)
    if dist.get_rank() == 0:
        print(optimizer.privacy_report())
    dist.barrier()  # where one rank leaves while another still works, gloo's threads sometimes abort the process
    dist.destroy_process_group()
    return step / plan.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny network on CPUs")
    parser.add_argument("--folder", default=".", help="for the key and the checkpoint")
    main(**vars(parser.parse_args()))
