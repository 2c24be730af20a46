"""Training processes that are killed: `python crash.py FOLDER MECHANISM CLIPPING RANKS STEPS...`.

A life for each number of steps, of so many processes on gloo, all ended by signal 9 once the first has reported so many
steps; then one that may finish, and in FOLDER/straight a run with the same key that nobody kills. Each life goes on
from the checkpoint of those before, if there is one, and logs a hash of what each row of noise was added to. The model
has dropout, and the examples are augmented with NumPy's and Python's random numbers, other ones on every rank.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from attacks.kills import Augmented
from quell.noise import Ledger
from quell.torch import load_checkpoint, make_private, save_checkpoint
from quell.watching import Log
from tests.pytorch.conftest import small_plan
from tests.pytorch.forks import fork


def build(key, mechanism, clipping, rank):
    torch.manual_seed(1 + 10 * rank)
    np.random.seed(2 + 10 * rank)
    random.seed(3 + 10 * rank)
    plan = small_plan(mechanism, alone=True, epochs=4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    log = Log(key.parent / "log", every=2, norms=True)
    return (plan, *make_private(model, optimizer, Augmented(40), plan, key=key, clipping=clipping, log=log))


def train(plan, model, optimizer, loader, after_step=lambda: None):
    while optimizer.run.step < plan.steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            after_step()


def live(folder: Path, mechanism: str, clipping: str, rank: int, ranks: int, report: int) -> None:
    """Train from the last checkpoint to the end, writing a byte to `report` after each step."""
    if ranks > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    plan, model, optimizer, loader = build(folder / "key", mechanism, clipping, rank)
    load_checkpoint(folder / "checkpoint.pt", model, optimizer, loader)
    log = (folder / "gradients.log").open("a", buffering=1)
    add = optimizer.run.noise.add_

    def logged(sums):
        content = b"".join(tensor.numpy().tobytes() for tensor in sums)
        log.write(f"{optimizer.run.step} {hashlib.sha256(content).hexdigest()}\n")
        add(sums)

    optimizer.run.noise.add_ = logged

    def after_step():
        if optimizer.run.step % 3 == 0:
            save_checkpoint(folder / "checkpoint.pt", model, optimizer, loader)
        if rank == 0:
            os.write(report, b".")

    train(plan, model, optimizer, loader, after_step)
    if rank == 0:
        torch.save(model.state_dict(), folder / "final.pt")
    if ranks > 1:
        torch.distributed.destroy_process_group()


def lives(folder: Path, mechanism: str, clipping: str, ranks: int, kills: list[int]) -> None:
    for kill_after in [*kills, None]:
        (folder / "meet").unlink(missing_ok=True)
        reports, report = os.pipe()
        children = [
            fork(lambda rank=rank, report=report: live(folder, mechanism, clipping, rank, ranks, report))
            for rank in range(ranks)
        ]
        os.close(report)
        steps = 0
        while os.read(reports, 1):
            steps += 1
            if steps == kill_after:
                for child in children:
                    os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is still this child's
                break
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.close(reports)
        if set(ends) != {0 if kill_after is None else -signal.SIGKILL}:
            sys.exit(f"a life that was to end after {kill_after} steps ended with {ends}")


def main(folder: Path, mechanism: str, clipping: str, ranks: int, kills: list[int]) -> None:
    lives(folder, mechanism, clipping, ranks, kills)
    straight = folder / "straight"
    straight.mkdir()
    shutil.copy(folder / "key", straight / "key")
    Ledger(straight / "key.ledger").close()
    lives(straight, mechanism, clipping, ranks, [])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports much that the lives would import again
    small_plan(sys.argv[2], alone=True, epochs=4)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), [int(steps) for steps in sys.argv[5:]])
