"""kill -9 at random moments of training, resumed as docs/pytorch.md says: no step may be released twice differently.

Two releases of one step share their noise, so their difference is free of it. The run has dropout, and a data set that
augments with numpy's and Python's random numbers; some scripts seed them, some do not. Every gradient that the wrapped
optimizer gets is logged by its hash before anything else happens to it. A life that Quell refuses with a sentence is
sound; two hashes for one step, or any other error, are a break.

A process imports torch once, then forks a child for each life (no threads are running: one worker is one process).
"""

from __future__ import annotations

import hashlib
import os
import random as python_random
import signal
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from attacks.outcome import Outcome, Trial, spread, summed
from quell.errors import QuellError
from quell.planning import Plan, Prices
from quell.run import Run
from quell.torch import load_checkpoint, make_private, save_checkpoint
from quell.torch.private import CLIPPING

MECHANISMS: dict[str, dict[str, Any]] = {
    "identity": {},
    "bisr": {"bands": 4},
    "blt": {"buffers": 2},
    "bsr": {"bands": 3},
    "tree": {},
}
_LIVES = 6  # of one run that are killed, before the last one may finish
_REFUSED, _FAILED = 3, 4  # exit codes of a life


class Augmented(Dataset[Any]):
    """Inputs with noise from numpy's and Python's global generators."""

    def __init__(self, examples: int) -> None:
        made = np.random.default_rng(5)
        self.x, self.y = made.standard_normal((examples, 6)).astype(np.float32), made.integers(0, 3, examples)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        turned = self.x[index] * np.float32(python_random.choice([-1.0, 1.0]))
        return torch.from_numpy(turned + 0.1 * np.random.randn(6).astype(np.float32)), int(self.y[index])


@dataclass(frozen=True)
class Script:
    """How one user trains."""

    mechanism: str
    sampling: str
    clipping: str
    every: int  # steps between checkpoints
    seeded: bool
    parts: int | None


def attack(count: int, seed: int, workers: int = 1) -> list[Outcome]:
    """So many kills, each followed by a life that goes on from the checkpoint."""
    runs = [(seed + number, min(_LIVES, count - number)) for number in range(0, count, _LIVES)]
    found = spread(one_run, runs, workers)
    trials = [trial for trials, _, _ in found for trial in trials]
    pairs, refused = sum(again for _, again, _ in found), sum(refused for _, _, refused in found)
    return [summed("kill -9 and resume", trials, f"{pairs:,} steps released again, {refused:,} lives refused")]


@cache
def _plan(mechanism: str, sampling: str) -> Plan:
    run = Run.from_data(examples=40, batch_size=8, epochs=6, epsilon=8.0, delta=1e-2, sampling=sampling)
    return Plan(run, (Prices(run).price(mechanism, **MECHANISMS[mechanism]),), 0)


@cache
def _warm_up(mechanism: str, sampling: str, clipping: str) -> None:
    """Train once before the first fork: a life then takes 0.2 s instead of 3, most of them for imports."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "wb") as nowhere:
        _train(Script(mechanism, sampling, clipping, 100, True, None), Path(folder), nowhere.fileno())


def one_run(task: tuple[int, int]) -> tuple[list[Trial], int, int]:
    """One run, killed so many times: a trial per kill, how many releases came again, how many lives were refused."""
    seed, kills = task
    torch.set_num_threads(1)
    random = np.random.default_rng([seed, 3])
    mechanism = str(random.choice(list(MECHANISMS)))
    script = Script(
        mechanism,
        "balls_in_bins" if mechanism == "identity" and random.random() < 0.5 else "cyclic",
        str(random.choice(CLIPPING)),
        int(random.integers(1, 8)),
        bool(random.random() < 0.5),
        4 if random.random() < 0.3 else None,
    )
    _warm_up(script.mechanism, script.sampling, script.clipping)
    trials: list[Trial] = []
    again = refused = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(4 * kills + 8):  # a life may end before it is killed
            dies = len(trials) < kills
            code = life(script, folder, random if dies else None)
            if code == -signal.SIGKILL:
                trials.append(Trial("kills"))
            refused += code == _REFUSED
            flaw = _differing(folder / "releases.log")
            if code not in (0, -signal.SIGKILL, _REFUSED):
                flaw = (folder / "error.txt").read_text(encoding="utf-8") if code == _FAILED else f"exit code {code}"
            if flaw:
                trials[-1:] = [Trial("kills", flaw=f"{script}: {flaw}")]
            if not dies:
                break
            if flaw or code != -signal.SIGKILL:  # the rest of the kills hit a new run
                again += _again(folder / "releases.log")
                for path in folder.iterdir():
                    path.unlink()
        again += _again(folder / "releases.log")
    return trials, again, refused


def life(script: Script, folder: Path, random: np.random.Generator | None) -> int:
    """One life of the run, killed at a random moment (or not, without `random`): how it ended."""
    reports, report = os.pipe()
    child = _forked(lambda: _train(script, folder, report), folder)
    os.close(report)
    try:
        if random is not None:
            if random.random() < 0.3:  # anywhere: while it starts, loads, saves
                time.sleep(float(random.uniform(0, 0.4)))
            else:
                for _ in range(int(random.integers(1, 20))):
                    if not os.read(reports, 1):
                        break
                time.sleep(float(random.exponential(0.003)))
            os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is still this child's
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(reports)


def _forked(work: Callable[[], None], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = _FAILED
    try:
        work()
        code = 0
    except QuellError:
        code = _REFUSED
    except BaseException as problem:
        (folder / "error.txt").write_text(f"{type(problem).__name__}: {problem}", encoding="utf-8")
    finally:
        os._exit(code)


def _train(script: Script, folder: Path, report: int) -> None:
    """The user's script: from the last checkpoint to the end of the plan."""
    warnings.simplefilter("ignore")
    seed = 0 if script.seeded else int.from_bytes(os.urandom(4), "big")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    torch.manual_seed(seed)
    np.random.seed(seed)
    python_random.seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    plan, data = _plan(script.mechanism, script.sampling), Augmented(40)
    log = os.open(folder / "releases.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    step = 0

    def note(stepping: Any, args: Any, kwargs: Any) -> None:
        content = b"".join(p.grad.numpy().tobytes() for group in stepping.param_groups for p in group["params"])
        os.write(log, f"{step} {hashlib.sha256(content).hexdigest()}\n".encode())

    optimizer.register_step_pre_hook(note)
    model, optimizer, loader = make_private(
        model, optimizer, data, plan, key=folder / "key", clipping=script.clipping, physical_batch_size=script.parts
    )
    checkpoint = folder / "checkpoint.pt"
    step = load_checkpoint(checkpoint, model, optimizer, loader)
    while step < plan.steps:  # an epoch each
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="mean").backward()
            before = optimizer.run.step
            optimizer.step()
            if optimizer.run.step > before:
                step += 1
                if step % script.every == 0:
                    save_checkpoint(checkpoint, model, optimizer, loader)
                os.write(report, b".")
    optimizer.close()
    os.close(log)


def _releases(log: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            step, digest = line.split()
            found[int(step)].append(digest)
    return found


def _differing(log: Path) -> str:
    for step, digests in _releases(log).items():
        if len(set(digests)) > 1:
            return f"step {step} was released {len(digests)} times, with {len(set(digests))} different gradients"
    return ""


def _again(log: Path) -> int:
    return sum(len(digests) - 1 for digests in _releases(log).values())
