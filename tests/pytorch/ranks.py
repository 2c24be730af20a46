"""Worlds of gloo processes: `python ranks.py FOLDER WORLD...`; the results of each world land in FOLDER/WORLD."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from quell.errors import QuellError
from quell.noise import Key, claims
from quell.torch import make_private
from quell.watching import Log
from tests.pytorch.conftest import small_plan, unpriced_poisson_plan
from tests.pytorch.forks import fork, wait_all
from tests.pytorch.training import examples

SCENARIOS = {  # name: clipping, sharded, mechanism, sampling
    "ddp": ("layers", False, "bsr", "cyclic"),
    "microbatch": ("microbatch", False, "bsr", "cyclic"),
    "fsdp": ("layers", True, "bsr", "cyclic"),
    "ddp empty": ("layers", False, "identity", "poisson"),
    "fsdp empty": ("layers", True, "identity", "poisson"),
}
KINDS = ("ddp", "ddp, bf16", "fsdp", "fsdp, sharded", "fsdp, bf16")  # what launched.py runs, by a loop and in trainers
WAYS = [f"{way}{kind}" for way in ("", "hugging face ", "lightning ") for kind in KINDS]


def build(name: str, physical: int | None = None, width: int = 7, log: Log | None = None):
    """Model, optimizer and loader of a scenario; width 7 makes uneven shards."""
    clipping, sharded, mechanism, sampling = SCENARIOS[name]
    torch.manual_seed(dist.get_rank() if not sharded else 0)  # replicas start from rank 0's weights
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    if sharded:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    plan = unpriced_poisson_plan() if sampling == "poisson" else small_plan(mechanism, alone=True, momentum=0.9)
    momentum = plan.run.optimizer.momentum
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)
    if name.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        key = Key.from_seed(11)
    data = examples(plan.run.examples)
    options = {"clipping": clipping, "key": key, "physical_batch_size": physical, "ema": 0.9, "log": log}
    return make_private(model, optimizer, data, plan, 0.5, **options)


def train(model, optimizer, loader, steps=None, criterion=nn.functional.cross_entropy):
    while optimizer.run.step < optimizer.run.noise.steps:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            if steps is not None and optimizer.run.step == steps:
                return


def weights(model):
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.state_dict().items()}


def results(model, optimizer):
    """The weights at the end, and their averages."""
    with optimizer.averaged():
        averages = {f"averaged {name}": value.clone() for name, value in weights(model).items()}
    return {**weights(model), **averages}


def put_weights(model, saved):
    for name, parameter in model.named_parameters():
        value = saved[name]
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(value)


def audited(folder: Path, name: str) -> None:
    """Zero gradients: what each rank's optimizer is given is its shard of the noise."""
    model, optimizer, loader = build(name, width=300)
    rows = []

    def keep(opt):
        held = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in opt.params]
        rows.append([g.flatten() * opt.expected_batch_size for g in held])

    optimizer.step_hook = keep
    train(model, optimizer, loader, criterion=lambda out, y: 0.0 * out.sum())
    shards = [shard.length for shard in optimizer.run.noise._stream.shards]
    found = {"rows": [torch.stack(group) for group in zip(*rows, strict=True)], "drawn": shards}
    torch.save(found, folder / f"audit {name} {dist.get_rank()}.pt")


def disagreeing(folder: Path) -> None:
    """Ranks that were given different arguments, or a model that is half sharded: each says so before it trains."""
    rank = dist.get_rank()
    said = []
    for choice in ({"max_grad_norm": 1.0 + rank}, {"clipping": ("layers", "microbatch")[rank]}, {"plan": 8.0 + rank}):
        options = {"max_grad_norm": 1.0, "clipping": "layers", **choice}
        plan = small_plan("identity", alone=True, epsilon=options.pop("plan", 8.0))
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            make_private(model, optimizer, examples(), plan, **options)
        except QuellError as error:
            said.append(str(error))
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    fully_shard(model[0])
    try:
        make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), plan, max_grad_norm=1.0)
    except QuellError as error:
        said.append(str(error))
    torch.save(said, folder / f"disagreement {rank}.pt")


def unopened(folder: Path) -> None:
    """Files that rank 0 alone opens, and cannot: every rank says so, and none waits for the others."""
    rank = dist.get_rank()
    broken, loaded = folder / "broken", folder / "loaded.key"
    if rank == 0:
        broken.mkdir()
        Key.generate().save(loaded)
    dist.barrier()
    said = {}
    for name, options in {
        "key": {"key": folder / "nowhere" / "run.key"},
        "ledger": {"ledger": broken},
        "budget": {"budget": folder / "no budget"},
        "loaded": {"key": Key.load(loaded), "budget": folder / "no budget"},
    }.items():
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            make_private(model, optimizer, examples(), small_plan("identity", alone=True), **options)
        except QuellError as error:
            said[name] = str(error)
    torch.save(said, folder / f"unopened {rank}.pt")


def replaying(folder: Path, name: str) -> None:
    """Dropout on every rank, a key in a file: from a checkpoint of all ranks the same steps come again, or none do."""
    rank = dist.get_rank()

    def start(seed):
        claims._claims.clear()  # as in a new process
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 3))
        clipping, sharded = SCENARIOS[name][:2]
        if sharded:
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        plan = small_plan("bsr", alone=True)
        trio = make_private(model, optimizer, examples(), plan, key=folder / f"key {name}", clipping=clipping)
        torch.manual_seed(seed + rank)
        return trio

    first = start(0)
    train(*first, steps=2)
    held = {key: value.clone() for key, value in weights(first[0]).items()}
    saved = {"model": held, "optimizer": first[1].state_dict()}
    train(*first, steps=4)
    first[1].close()
    said = []
    for disturbed in (False, True):
        again = start(100)
        put_weights(again[0], saved["model"])
        again[1].load_state_dict(saved["optimizer"], replay=True)
        if disturbed and rank == 1:
            again[0][1].p = 0.4  # of dropout, on the rank that has no ledger
        try:
            train(*again, steps=4)
        except QuellError as error:
            said.append(str(error))
        else:
            before, now = weights(first[0]), weights(again[0])
            said.append(all(torch.equal(before[key], now[key]) for key in before))
        again[1].close()
    again = start(100)
    try:
        again[1].load_state_dict(saved["optimizer"])
    except QuellError as error:  # rank 0's, whose ledger knows of the later steps
        said.append(str(error))
    again[1].close()
    torch.save(said, folder / f"replay {name} {rank}.pt")


def live(folder: Path, rank: int, world: int) -> None:
    """One rank: all scenarios, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=world)
    for name in SCENARIOS:
        for physical in (None, 2) if world == 4 else (2,):
            trio = build(name, physical, log=Log(folder / f"log {name} {physical}", every=3, norms=True))
            train(*trio)
            final = results(*trio[:2])
            if rank == 0:
                torch.save(final, folder / f"final {name} {physical}.pt")
    for name in ("ddp", "fsdp"):
        other = folder.parent / f"checkpoint {name}.pt"  # left by another world
        trio = build(name)
        if other.exists():
            saved = torch.load(other, weights_only=True)
            put_weights(trio[0], saved["model"])
            trio[1].load_state_dict(saved["optimizer"])
            trio[2].load_state_dict(saved["loader"])
            assert trio[1].run.step == 7
            train(*trio)
            final = results(*trio[:2])
            if rank == 0:
                torch.save(final, folder / f"resumed {name}.pt")
        else:
            train(*trio, steps=7)
            state = {
                "model": weights(trio[0]),
                "optimizer": trio[1].state_dict(),
                "loader": trio[2].state_dict(),
            }
            if rank == 0:
                torch.save(state, other)
        audited(folder, name)
    if world == 2:
        disagreeing(folder)
        unopened(folder)
        for name in ("ddp", "fsdp"):
            replaying(folder, name)
    dist.destroy_process_group()


def main(folder: Path, world: int) -> None:
    home = folder / str(world)
    home.mkdir()
    if not wait_all([fork(lambda rank=rank: live(home, rank, world)) for rank in range(world)]):
        sys.exit(f"a rank of a world of {world} failed")


if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports much that the ranks would import again
    for size in sys.argv[2:]:
        main(Path(sys.argv[1]), int(size))
