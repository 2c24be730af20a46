"""A training process that is killed: `python crash.py FOLDER MECHANISM CLIPPING STEPS...`.

A life for each number of steps, ended by signal 9 once it has reported so many; then one that may finish. Each life
goes on from the checkpoint of those before, if there is one, and logs a hash of what each row of noise was added to.
The model has dropout, and the examples are augmented with NumPy's and Python's random numbers.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from attacks.kills import Augmented, resume, save
from quell.torch import make_private
from tests.pytorch.conftest import small_plan
from tests.pytorch.forks import fork


def build(key, mechanism, clipping):
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    plan = small_plan(mechanism, alone=True, epochs=4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return (plan, *make_private(model, optimizer, Augmented(40), plan, key=key, clipping=clipping))


def train(plan, model, optimizer, loader, after_step=lambda: None):
    while optimizer.run.step < plan.steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            after_step()


def live(folder: Path, mechanism: str, clipping: str, report: int) -> None:
    """Train from the last checkpoint to the end, writing a byte to `report` after each step."""
    plan, model, optimizer, loader = build(folder / "key", mechanism, clipping)
    resume(folder, model, optimizer, loader)
    log = (folder / "gradients.log").open("a", buffering=1)
    add = optimizer.run.noise.add_

    def logged(sums):
        content = b"".join(tensor.numpy().tobytes() for tensor in sums)
        log.write(f"{optimizer.run.step} {hashlib.sha256(content).hexdigest()}\n")
        add(sums)

    optimizer.run.noise.add_ = logged

    def after_step():
        if optimizer.run.step % 3 == 0:
            save(folder, model, optimizer, loader)
        os.write(report, b".")

    train(plan, model, optimizer, loader, after_step)
    torch.save(model.state_dict(), folder / "final.pt")


def main(folder: Path, mechanism: str, clipping: str, kills: list[int]) -> None:
    for kill_after in [*kills, None]:
        reports, report = os.pipe()
        child = fork(lambda report=report: live(folder, mechanism, clipping, report))
        os.close(report)
        steps = 0
        while os.read(reports, 1):
            steps += 1
            if steps == kill_after:
                os.kill(child, signal.SIGKILL)
                break
        status = os.waitpid(child, 0)[1]
        os.close(reports)
        expected = 0 if kill_after is None else -signal.SIGKILL
        if os.waitstatus_to_exitcode(status) != expected:
            sys.exit(f"a life that should have ended with {expected} had the wait status {status}")


if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports much that the lives would import again
    small_plan(sys.argv[2], alone=True, epochs=4)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [int(steps) for steps in sys.argv[4:]])
