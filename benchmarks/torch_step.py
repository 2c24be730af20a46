"""What a private training step costs, as multiples of the same loop's step without privacy, in the same run.

    python benchmarks/torch_step.py [--device cuda] [--models decoder135,vit] [--rounds 15] [--markdown FILE]

The private loop is what `make_private` returns: its loader, its clipping and λCGD noise from ChaCha20. The other loop
has the same model, optimizer (SGD with momentum), batch size and data, which lie on the device; on a GPU both run under
bfloat16 autocast. Opacus's hooks and ghost clipping take part under the same autocast where Opacus is installed, with
the models that they can do and that leave room for gradients per example. A step is everything from asking for a batch
to the new weights. Contenders take turns in a shuffled order, round after round, so that a busy machine slows them
alike; medians are compared.

By default `make_private` records CUDA graphs where a GPU waits for Python; it also runs with `cuda_graphs=True` and
`False`, and the other loop with `torch.cuda.make_graphed_callables`. A turn on a GPU is five steps in a row, as in
training, and takes what the clock says. On a CPU a turn is one step and takes what the process was given, by default
with one thread: on an idle machine that is the same, and on a shared one it leaves out the waiting. "Loading" is the
share of a step that passes before its batch is there; on a GPU, where a batch is indexed while the host goes on, it is
what the host spends on it.

On a GPU the ConvNet also trains for ten epochs of as many images as CIFAR-10 has, from `make_private` to the last step.

Memory is the peak with model, optimizer and data. On a GPU it is torch's count, with cuBLAS's workspaces and what CUDA
graphs hold for their replays, of the first steps, where make_private probes model and loss, and of later ones. On a CPU
it is the resident size over the first steps, each contender in a process of its own whose allocator keeps nothing.
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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from models import LORA, Task, task_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quell.torch
from quell.planning import Plan, Prices
from quell.run import Run

try:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
except ImportError:
    GradSampleModule = None

STEPS_PER_EPOCH, EPOCHS = 4, 250
WHOLE_RUN = {"convnet": (98, 10)}  # steps per epoch, and epochs
WARM_UP = 31  # make_private looks more closely at the first batches, and then decides whether to record CUDA graphs
IN_A_ROW = {"cuda": 5, "cpu": 1}  # steps of a turn
PLAIN, PLAIN_GRAPHS = "not private", "not private, CUDA graphs"
QUELL, QUELL_GRAPHS, QUELL_NO_GRAPHS = "Quell", "Quell, cuda_graphs=True", "Quell, cuda_graphs=False"
ASKED = {QUELL: None, QUELL_GRAPHS: True, QUELL_NO_GRAPHS: False}
HOOKS, GHOST = "Opacus hooks", "Opacus ghost"
OPACUS = {  # who takes part with which models
    "convnet": (HOOKS, GHOST),
    "cnn": (HOOKS, GHOST),
    "resnet9": (HOOKS,),
    "transformer": (HOOKS, GHOST),
    "vit": (HOOKS,),
    "decoder135": (HOOKS,),
}
DEFAULTS = {"cuda": "decoder135,vit,decoder1b,lora1b,convnet,cnn,resnet9", "cpu": "convnet,cnn,transformer"}
GOALS = {  # on a GPU: step and memory
    "decoder135": (1.45, 1.1),
    "vit": (1.35, 1.1),
    "decoder1b": (1.30, 1.1),
    "lora1b": (1.15, 1.1),
    "convnet": (2.0, 1.5),
    "cnn": (2.0, 1.5),
}
CHOSEN: set[str] = set()  # contenders beside the loop that is not private; empty: all
Peaks = tuple[float, float]  # bytes, of later steps and of the first ones
Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Step:
    """A step of a training loop, and how long it has waited for its batches."""

    batches: Batches
    take: Callable[[Tensor, Tensor], None]
    clock: Callable[[], float]
    waited: float = 0.0

    def __call__(self) -> None:
        start = self.clock()
        x, y = next(self.batches)
        self.waited += self.clock() - start
        self.take(x, y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)


def loop(task: Task, model: Any, optimizer: Any, batches: Batches, bf16: bool, criterion: Any = None) -> Step:
    """The training loop, a step at a time."""

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, -2), labels.flatten())

    def take(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(task.device, torch.bfloat16, enabled=bf16):
            value = (criterion or loss)(model(x), y)
        value.backward()
        optimizer.step()

    return Step(batches, take, clock(task))


def contender(task: Task, name: str, steps_per_epoch: int = STEPS_PER_EPOCH, epochs: int = EPOCHS) -> Step:
    model, data = task.model(), task.data(task.batch * steps_per_epoch)
    if name in (PLAIN, PLAIN_GRAPHS):
        optimizer = sgd(model)
        if name == PLAIN_GRAPHS:
            with torch.autocast(task.device, torch.bfloat16, cache_enabled=False):
                model = torch.cuda.make_graphed_callables(model, (task.data(task.batch).tensors[0],))
        return loop(task, model, optimizer, shuffled(task, data), bf16(task))
    if name in (HOOKS, GHOST):
        return opacus_loop(task, model, data, ghost=name == GHOST)
    plan = plan_of(task.batch, steps_per_epoch, epochs)
    model, optimizer, loader = quell.torch.make_private(model, sgd(model), data, plan, cuda_graphs=ASKED[name])
    return loop(task, model, optimizer, endless(loader), bf16(task))


def bf16(task: Task) -> bool:
    return task.device == "cuda"


def opacus_loop(task: Task, model: nn.Module, data: TensorDataset, ghost: bool) -> Step:
    common: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": task.batch}
    criterion: Any = None
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer: Any = DPOptimizerFastGradientClipping(sgd(wrapped), **common)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), loss_reduction="mean")
    else:
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(sgd(wrapped), **common)
    return loop(task, wrapped, optimizer, shuffled(task, data), bf16(task), criterion)


def names_of(task: Task) -> list[str]:
    """The contenders; the first is what the others are compared with."""
    peers = OPACUS.get(task.name, ()) if GradSampleModule is not None else ()
    names = [PLAIN, *([PLAIN_GRAPHS, *ASKED] if task.device == "cuda" else [QUELL]), *peers]
    return [name for name in names if name == PLAIN or not CHOSEN or name in CHOSEN]


@cache
def plan_of(batch: int, steps_per_epoch: int = STEPS_PER_EPOCH, epochs: int = EPOCHS) -> Plan:
    # Cyclic batches of data that they divide all have the same size, which is what the other loops are given.
    promised = {"epsilon": 8.0, "delta": 1e-5, "momentum": 0.9, "sampling": "cyclic"}
    run = Run.from_data(examples=batch * steps_per_epoch, batch_size=batch, epochs=epochs, **promised)
    return Plan(run, (Prices(run).price("lambda_cgd", **{"lambda": 0.9}),), 0)


def load_code(task: Task) -> None:
    """Compiled code and libraries take memory too, the same for any model: they are loaded before it is measured."""
    element = torch.zeros(1, device=task.device)
    quell.torch.CorrelatedNoise(plan_of(task.batch), [element], 1.0).add_([element])
    contender(replace(task, batch=1), PLAIN)()


def endless(loader: Any) -> Batches:
    while True:
        yield from loader


def shuffled(task: Task, data: TensorDataset) -> Batches:
    x, y = data.tensors
    while True:
        for chosen in torch.randperm(len(x), device=x.device).split(task.batch):
            yield x[chosen], y[chosen]


def clock(task: Task) -> Callable[[], float]:
    return time.process_time if task.device == "cpu" else time.perf_counter


def now(task: Task) -> float:
    if task.device != "cpu":
        torch.cuda.synchronize()
    return clock(task)()


def seconds(task: Task, steps: list[Step], rounds: int) -> list[tuple[float, float]]:
    """The median time of each contender's step, contenders taking turns, and the mean share of it spent on loading."""
    times: list[list[float]] = [[] for _ in steps]
    warm_up = WARM_UP if task.device == "cpu" else 1  # on_gpu has taken the first steps
    for number in range(warm_up + rounds):
        if number == warm_up:
            for step in steps:
                step.waited = 0.0
        for place in random.sample(range(len(steps)), len(steps)):
            start = now(task)
            for _ in range(IN_A_ROW[task.device]):
                steps[place]()
            if number >= warm_up:
                times[place].append((now(task) - start) / IN_A_ROW[task.device])
    counts = [IN_A_ROW[task.device] * len(found) for found in times]
    return [
        (statistics.median(found), step.waited / (count * statistics.mean(found)))
        for step, found, count in zip(steps, times, counts, strict=True)
    ]


def on_gpu(task: Task, name: str) -> tuple[Step, tuple[float, float]]:
    """A contender that has taken its first steps, and the bytes that later steps and those needed at their peaks."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each contender pays for its own, and none for freeing another's
    before, idle = torch.cuda.memory_allocated(), held_for_replays()
    torch.cuda.reset_peak_memory_stats()
    step = contender(task, name)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    idle, first = held_for_replays() - idle, torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    later = torch.cuda.max_memory_allocated() - before + idle
    return step, (later, max(first, later))


def held_for_replays() -> int:
    """Bytes in the pools of CUDA graphs that no tensor has, but replays use."""
    own = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    return sum(part["total_size"] - part["allocated_size"] for part in own)


def whole_run(task: Task, steps_per_epoch: int, epochs: int) -> str:
    """How long training takes from the first line to the last step, in a sentence."""
    found = {}
    plan_of(task.batch, steps_per_epoch, epochs)  # which users make once
    for name in (PLAIN, QUELL):
        start = now(task)
        step = contender(task, name, steps_per_epoch, epochs)
        for _ in range(steps_per_epoch * epochs):
            step()
        found[name] = now(task) - start
    return (
        f"{task.name}, {epochs} epochs of {steps_per_epoch} steps: {found[QUELL]:.1f} s, {found[PLAIN]:.1f} s without "
        f"privacy, {found[QUELL] / found[PLAIN]:.2f} times."
    )


def in_own_process(task: Task, name: str) -> float:
    context = multiprocessing.get_context("fork")  # before this process has started threads of its own
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, task, name))
    child.start()
    sender.close()
    value: float = receiver.recv()
    child.join()
    return value


def _child(sender: Any, task: Task, name: str) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    load_code(task)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step = contender(task, name)
    for _ in range(WARM_UP):
        step()
    sender.send(resident("VmHWM") - before)


def resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024.0 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def measured(
    tasks: list[Task], rounds: int, threads: int
) -> Iterator[tuple[Task, list[tuple[float, float]], list[Peaks]]]:
    """Seconds (with the share of loading) and bytes of every contender, task by task."""
    if tasks[0].device == "cpu":
        memory = [[(peak := in_own_process(task, name), peak) for name in names_of(task)] for task in tasks]
        torch.set_num_threads(threads)
        for task, peaks in zip(tasks, memory, strict=True):
            yield task, seconds(task, [contender(task, name) for name in names_of(task)], rounds), peaks
        return
    for task in tasks:
        load_code(task)
        started = [on_gpu(task, name) for name in names_of(task)]
        yield task, seconds(task, [step for step, _ in started], rounds), [peak for _, peak in started]
        del started
        gc.collect()
        torch.cuda.empty_cache()


def rows(task: Task, times: list[tuple[float, float]], peaks: list[Peaks]) -> Iterator[str]:
    """The lines of the table, each contender compared with the loop that is not private."""
    model = task.model()
    trained, size = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
    title = f"{task.name}, {size / 1e6:.3g}M" + ("" if trained == size else f", {trained / 1e6:.3g}M of them trained")
    title += f", {task.batch} × {' × '.join(map(str, task.shape))}"
    goals = [f"≤ {goal:g}" for goal in GOALS[task.name]] if task.device == "cuda" and task.name in GOALS else ["", ""]
    for name, (value, loading), peak in zip(names_of(task), times, peaks, strict=True):
        goal = goals if name == QUELL else ["", ""]
        yield (
            f"| {title} | {name} | {1e3 * value:.1f} | {value / times[0][0]:.2f} | {goal[0]} | {100 * loading:.1f}% | "
            f"{peak[0] / 2**30:.3f} | {peak[0] / peaks[0][0]:.2f} | {goal[1]} | {peak[1] / peaks[0][1]:.2f} |"
        )


def heading(options: argparse.Namespace) -> list[str]:
    cuda = options.device == "cuda"
    where = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, threads: {options.threads}"
    how = "wall time, bfloat16 autocast" if cuda else "processor time, float32"
    return [
        "# A private training step against the same loop without privacy",
        "",
        f"`benchmarks/torch_step.py` on {where}; torch {torch.__version__}; {how}; λCGD noise from ChaCha20; "
        f"medians of {options.rounds} rounds in which the contenders took turns of {IN_A_ROW[options.device]}. "
        f"LoRA of rank 16 on all linear layers, by {LORA}. "
        + ("Opacus is not installed here." if GradSampleModule is None else ""),
        "",
        "| model, batch | | step, ms | × not private | goal | loading | peak memory, GiB | × not private | goal "
        "| in the first steps |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", help=f"default: {DEFAULTS['cpu']}; on a GPU {DEFAULTS['cuda']}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contenders", default="", help=f"only these, such as '{QUELL},{HOOKS}'; default: all")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--batch", type=int, help="examples per step, for all models")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--tiny", action="store_true", help="tiny models and batches, to try the script")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    CHOSEN.update(filter(None, options.contenders.split(",")))
    torch.set_float32_matmul_precision("high")  # TF32 where something runs in float32 on a GPU
    names = (options.models or DEFAULTS[options.device]).split(",")
    tasks = [task_of(name, options.device, options.batch, options.tiny) for name in names]
    lines = heading(options)
    print("\n".join(lines), flush=True)
    runs = []
    for task, times, peaks in measured(tasks, options.rounds, options.threads):
        found = list(rows(task, times, peaks))
        print("\n".join(found), flush=True)
        lines += found
        if options.device == "cuda" and task.name in WHOLE_RUN:
            runs += ["", whole_run(task, *WHOLE_RUN[task.name])]
            print(runs[-1], flush=True)
        if options.markdown is not None:
            options.markdown.write_text("\n".join([*lines, *runs, ""]))


if __name__ == "__main__":
    main()
