"""What a private training step costs, as multiples of Opacus's own DP-SGD step in the same run.

    python benchmarks/torch_step.py [--device cuda] [--models cnn,transformer] [--rounds 15] [--markdown FILE]

Contenders take turns in a shuffled order, round after round, so that a busy machine slows them alike; medians are
compared. Every banded inverse mechanism is run with each way of clipping, and Opacus anew beside each: `flat` against
its hooks, `ghost` against its ghost clipping, and `microbatch`, which Opacus does not have, against the hooks. Goal: at
most 1.00 times the step and the memory.

On a GPU a step takes what the clock says. On a CPU it takes what the process was given, by default with one thread:
on an idle machine that is the same, and on a shared one it leaves out the waiting.

Memory is what the first steps need at their peak over model and optimizer: torch's count on a GPU; on a CPU the
resident size, each contender in a process of its own whose allocator keeps nothing. What `noise_memory` keeps counts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import quell.torch
from quell.noise.layout import WORDS
from quell.planning import Plan, problem_of
from quell.setup import Setup

STEPS_PER_EPOCH, EPOCHS = 100, 10
MECHANISMS: dict[str, tuple[str, dict[str, float], int]] = {  # family, parameters, noise_memory
    "λCGD": ("lambda_cgd", {"lambda": 0.9}, 0),
    "BISR p=4": ("bisr", {"bands": 4}, 0),
    "BISR p=16": ("bisr", {"bands": 16}, 0),
    "BISR p=16, noise_memory=15": ("bisr", {"bands": 16}, 15),
    "BandInvMF p=16": ("band_inv", {"bands": 16}, 0),
    "BandInvMF p=16, noise_memory=15": ("band_inv", {"bands": 16}, 15),
}
RIVAL = {"flat": "hooks", "ghost": "ghost", "microbatch": "hooks"}


class Contender(NamedTuple):
    step: Callable[[], None]
    between: Callable[[], None]  # before every step, not measured
    past_the_start: Callable[[], None]  # to where a step's noise costs what it costs from then on


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0))
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Classifies sequences; 20 million parameters."""

    def __init__(self, width: int = 512, layers: int = 6, heads: int = 8, vocabulary: int = 2000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))).mean(1))


def cnn() -> nn.Module:
    """Classifies 32×32 images; 0.3 million parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 96), nn.ReLU(), nn.Linear(96, 10))


@dataclass(frozen=True)
class Task:
    name: str
    device: str
    batch: int
    length: int
    micro_batch: int
    generator: str

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return (cnn() if self.name == "cnn" else Transformer()).to(self.device)

    def data(self) -> tuple[Tensor, Tensor]:
        maker = torch.Generator().manual_seed(1)
        x = (
            torch.randn(self.batch, 3, 32, 32, generator=maker)
            if self.name == "cnn"
            else torch.randint(0, 2000, (self.batch, self.length), generator=maker)
        )
        return x.to(self.device), torch.randint(0, 10, (self.batch,), generator=maker).to(self.device)


class Numbers(Dataset[int]):
    """As many examples as planned. The loader must be asked for batches, but loading is not what is measured."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


@cache
def plan_of(batch: int, family: str, options: tuple[tuple[str, float], ...]) -> Plan:
    # Cyclic batches of data that they divide all have the same size, which is what Opacus is given.
    examples = batch * STEPS_PER_EPOCH
    setup = Setup(examples, batch_size=batch, epochs=EPOCHS, epsilon=8.0, delta=1e-5, sampling="cyclic")
    return Plan(setup, (problem_of(setup).price(family, **dict(options)),), 0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def opacus_step(task: Task, mode: str) -> Contender:
    common: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": task.batch}
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "hooks":
        model: Any = GradSampleModule(task.model())
        optimizer: Any = DPOptimizer(sgd(model), **common)
    else:
        model = GradSampleModuleFastGradientClipping(task.model(), max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(sgd(model), **common)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion, loss_reduction="mean")
    x, y = task.data()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return Contender(step, lambda: optimizer.zero_grad(), lambda: None)


def quell_step(task: Task, clipping: str, mechanism: str) -> Contender:
    family, options, noise_memory = MECHANISMS[mechanism]
    plan = plan_of(task.batch, family, tuple(options.items()))
    load_kernels(plan, task, noise_memory)
    model = task.model()
    model, optimizer, loader = quell.torch.make_private(
        model,
        sgd(model),
        Numbers(plan.setup.examples),
        plan,
        clipping=clipping,
        micro_batch=task.micro_batch,
        generator=task.generator,
        noise_memory=noise_memory,
    )
    x, y = task.data()
    batches = endless(loader)

    def past_the_start() -> None:
        sizes = [p.numel() for p in model.parameters()]
        nothing = torch.zeros(sum(sizes), device=task.device)  # in one piece, which goes back to the system
        for _ in range(16):
            optimizer.run.noise.add_(nothing.split(sizes))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def between() -> None:
        optimizer.zero_grad()
        next(batches)

    return Contender(step, between, past_the_start)


def load_kernels(plan: Plan, task: Task, memory: float) -> None:
    """Compiled code takes memory too, the same for any model: it is loaded before memory is measured."""
    element = torch.zeros(1, device=task.device)
    noise = quell.torch.CorrelatedNoise(plan, [element], 1.0, generator=task.generator, memory=memory)
    noise.add_([element])


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def contenders() -> dict[tuple[str, str], Callable[[Task], Contender]]:
    found: dict[tuple[str, str], Callable[[Task], Contender]] = {}
    for mode in ("hooks", "ghost"):
        found["Opacus DP-SGD", mode] = lambda task, mode=mode: opacus_step(task, mode)
    for clipping in RIVAL:
        for mechanism in MECHANISMS:
            found[mechanism, clipping] = lambda task, c=clipping, m=mechanism: quell_step(task, c, m)
    return found


def compared(clipping: str) -> list[tuple[str, str]]:
    """Opacus, and every mechanism with this way of clipping."""
    return [("Opacus DP-SGD", RIVAL[clipping]), *((mechanism, clipping) for mechanism in MECHANISMS)]


def seconds(task: Task, names: list[tuple[str, str]], rounds: int, warm_up: int) -> list[float]:
    """The median time of a step, contenders taking turns."""
    made = contenders()
    taking_part = [made[name](task) for name in names]
    times: list[list[float]] = [[] for _ in names]
    for contender in taking_part:
        contender.past_the_start()
    for number in range(warm_up + rounds):
        for place in random.sample(range(len(names)), len(names)):
            taking_part[place].between()
            start = now(task)
            taking_part[place].step()
            if number >= warm_up:
                times[place].append(now(task) - start)
    return [statistics.median(found) for found in times]


def now(task: Task) -> float:
    if task.device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_megabytes(task: Task, name: tuple[str, str], steps: int) -> float:
    """The peak over the first steps; before them, a CPU's allocator holds no freed memory that would hide it."""
    contender = contenders()[name](task)
    gc.collect()
    if task.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
    contender.past_the_start()
    for _ in range(steps):
        contender.between()
        contender.step()
    after = torch.cuda.max_memory_allocated() / 2**20 if task.device == "cuda" else resident("VmHWM")
    return after - before


def resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory(task: Task, steps: int) -> dict[tuple[str, str], float]:
    if task.device == "cuda":
        found = {}
        for name in contenders():
            found[name] = peak_megabytes(task, name, steps)
            gc.collect()
            torch.cuda.empty_cache()
        return found
    return {name: in_own_process(task, name, steps) for name in contenders()}


def in_own_process(task: Task, name: tuple[str, str], steps: int) -> float:
    context = multiprocessing.get_context("fork")  # before this process has started threads of its own
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, task, name, steps))
    child.start()
    sender.close()
    value: float = receiver.recv()
    child.join()
    return value


def _child(sender: Any, task: Task, name: tuple[str, str], steps: int) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    sender.send(peak_megabytes(task, name, steps))


def heading(task: Task) -> list[str]:
    size = sum(p.numel() for p in task.model().parameters())
    shape = f"batch {task.batch}" + (f" of {task.length} tokens" if task.name == "transformer" else "")
    return [
        "",
        f"## {task.name}: {size / 1e6:.2g} million parameters, {shape}, micro-batches of {task.micro_batch}",
        "",
        "| mechanism | clipping | step, ms | × Opacus | peak memory, MiB | × Opacus |",
        "|---|---|---:|---:|---:|---:|",
    ]


def rows(names: list[tuple[str, str]], times: list[float], peaks: dict[tuple[str, str], float]) -> list[str]:
    """Each compared with the first, which is Opacus."""
    return [
        f"| {mechanism} | {clipping} | {1e3 * value:.1f} | {value / times[0]:.2f} | {peaks[mechanism, clipping]:.0f} | "
        f"{peaks[mechanism, clipping] / max(peaks[names[0]], 1e-9):.2f} |"
        for (mechanism, clipping), value in zip(names, times, strict=True)
    ]


def quiet() -> None:
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap over attention on a CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", default="cnn,transformer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--batch", type=int, help="examples per step (default: 64 and 8; on a GPU 256 and 32)")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: 32; on a GPU 128)")
    parser.add_argument("--micro-batch", type=int, help="default: 16 and 2; on a GPU 128 and 8")
    parser.add_argument("--generator", default="chacha20", choices=list(WORDS))
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    options = parser.parse_args()
    quiet()
    cuda = options.device == "cuda"
    tasks = [task_of(name, options, cuda) for name in options.models.split(",")]
    peaks = [memory(task, 1 + options.warm_up) for task in tasks]
    torch.set_num_threads(options.threads)
    where = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, threads: {options.threads}"
    lines = [
        "# A private training step against Opacus's DP-SGD step",
        "",
        f"`benchmarks/torch_step.py` on {where}; torch {torch.__version__}, noise from {options.generator}; medians of "
        f"{options.rounds} rounds in which the contenders took turns; {'wall' if cuda else 'processor'} time. "
        "microbatch is compared with Opacus's hooks.",
    ]
    for task, peak in zip(tasks, peaks, strict=True):
        lines += heading(task)
        for clipping in RIVAL:
            names = compared(clipping)
            lines += rows(names, seconds(task, names, options.rounds, options.warm_up), peak)
            if options.markdown is not None:
                options.markdown.write_text("\n".join([*lines, ""]))
            gc.collect()
    print("\n".join(lines))


def task_of(name: str, options: argparse.Namespace, cuda: bool) -> Task:
    small, divisor = name == "cnn", 1 if cuda else 4
    return Task(
        name,
        options.device,
        options.batch or (256 if small else 32) // divisor,
        options.length or 128 // divisor,
        options.micro_batch or ((128 if cuda else 16) if small else 8 // divisor),
        options.generator,
    )


if __name__ == "__main__":
    main()
