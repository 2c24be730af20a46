"""Trainers that are killed at random moments: `python killed_trainers.py FOLDER WAY KILLS`.

Every run of a model with dropout is killed twice by signal 9, a while after a random step or while it starts, and goes
on as docs/trainers.md says. Its weights must be those of a run with the same key that nobody kills, to the last bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from attacks.kills import Augmented
from quell.errors import QuellError
from quell.noise import Key, Ledger
from quell.torch.folders import newest_whole_folder
from quell.torch.lightning import Private
from tests.pytorch.conftest import small_plan
from tests.pytorch.forks import fork
from tests.pytorch.test_huggingface import bert, trainer_of, transformers
from tests.pytorch.test_lightning import Module, trainer


class Reports(transformers.TrainerCallback):
    """A byte after each step."""

    def __init__(self, report: int) -> None:
        self.report = report

    def on_step_end(self, *arguments, **options) -> None:
        os.write(self.report, b".")


def hugging_face(folder: Path, report: int) -> torch.nn.Module:
    saving = {"save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 3}
    private = {"key": folder / "key"}
    plan = small_plan("bsr", alone=True, epochs=4)
    made = trainer_of(bert(0.2), folder / "run", plan, private, {**saving, "num_train_epochs": 4})
    made.add_callback(Reports(report))
    try:
        newest_whole_folder(folder / "run")
    except QuellError:  # killed before there was a first checkpoint
        made.train()
    else:
        made.train(resume_from_checkpoint=True)
    return made.model


def lightning(folder: Path, report: int) -> torch.nn.Module:
    plan = small_plan("bsr", alone=True, epochs=4)
    private, module = Private(plan, Augmented(40), key=folder / "key", physical_batch_size=3), Module(dropout=0.3)
    keep = pl.callbacks.ModelCheckpoint(folder, "last", every_n_train_steps=3, enable_version_counter=False)
    reports = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *arguments: os.write(report, b"."))
    fitted = trainer(folder, private, keep, reports, enable_checkpointing=True, max_epochs=4)
    names = ("last.ckpt", "start.ckpt")
    whole = [name for name in names for end in ("", ".before") if (folder / f"{name}{end}").exists()]
    fitted.fit(module, private.loader, ckpt_path=folder / whole[0] if whole else None, weights_only=True)
    return module


WAYS = {"hugging face": hugging_face, "lightning": lightning}


def live(folder: Path, way: str, report: int) -> None:
    """A script that was started once more seeds nothing, and has other random numbers than the first one."""
    started = any((folder / name).exists() for name in ("run/checkpoint-0/quell.json", "start.ckpt"))
    seed = int.from_bytes(os.urandom(4), "little") if started else 1
    for sow in (torch.manual_seed, np.random.seed, random.seed):
        sow(seed)
    model = WAYS[way](folder, report)
    torch.save(model.state_dict(), folder / "final.pt")


def life(folder: Path, way: str, dice: random.Random | None) -> int:
    reports, report = os.pipe()
    child = fork(lambda: live(folder, way, report))
    os.close(report)
    if dice is not None:
        for _ in range(dice.randint(0, 9)):
            if not os.read(reports, 1):
                break
        time.sleep(dice.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is still this child's
    while os.read(reports, 64):
        pass
    os.close(reports)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(folder: Path, way: str, seed: int) -> int:
    """How often a run was killed before its end."""
    dice, kills = random.Random(seed), 0
    homes = folder / "killed", folder / "straight"
    key = Key.generate()
    for home in homes:
        home.mkdir(parents=True)
        key.save(home / "key")
        Ledger(home / "key.ledger").close()
    for which in (dice, dice, None):
        code = life(homes[0], way, which)
        if code not in (0, -signal.SIGKILL):
            sys.exit(f"{way}, seed {seed}: a life ended with {code}")
        kills += code != 0
        if not code:
            break
    if life(homes[1], way, None):
        sys.exit(f"{way}: the run that nobody killed failed")
    final, straight = (torch.load(home / "final.pt", weights_only=True) for home in homes)
    if not all(torch.equal(final[name], value) for name, value in straight.items()):
        sys.exit(f"{way}, seed {seed}: the weights differ after {kills} kills")
    shutil.rmtree(folder)
    return kills


if __name__ == "__main__":
    torch.set_num_threads(1)
    small_plan("bsr", alone=True, epochs=4)
    kills = runs = 0
    while kills < int(sys.argv[3]):
        kills, runs = kills + killed(Path(sys.argv[1]) / str(runs), sys.argv[2], runs), runs + 1
    print(f"{sys.argv[2]}: {runs} runs, killed {kills} times, every one ended with the weights of one that was not")
