"""Private training of a ConvNet on CIFAR-10 through `quell.torch.make_private`: many runs, several at a time.

The loop is the README's. With several lanes each run has a process of its own, and they share the GPU. Keys come from
names, so that runs can be repeated: on data that are not public they would have to be drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Entry, Results, module_of, plan_of, seeded_key
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from quell.planning import Plan
from quell.torch import make_private

SPLIT_SEED = 2505  # which 10,000 training images are held out
CHANNELS = (3, 32, 32, 64, 64, 128, 128)
Pixels = dict[str, np.ndarray]
Map = Callable[..., Iterable[Any]]  # as the built-in one


@dataclass(frozen=True)
class Job:
    """One training run. `size` is "full" (all training images, tested on the test set) or "held-out"."""

    plan: str
    size: str
    clip: float
    rate: float
    he: bool
    seed: int
    bf16: bool = False  # whether the passes run in bfloat16; TF32 otherwise

    @property
    def name(self) -> str:
        start, precision = "he" if self.he else "torch", " | bf16" if self.bf16 else ""
        return f"{self.plan} | clip {self.clip:g} | lr {self.rate:.4g} | {start} | seed {self.seed}{precision}"


def convnet(seed: int, he: bool) -> nn.Sequential:
    """The BISR paper's ConvNet: 3×3 convolutions 32-32, 64-64, 128-128, each pair then pooled; linear 2048 → 10.

    Weights are uniform with variance 2/fan-in and no bias (He et al. 2015), or as PyTorch's layers start.
    """
    layers: list[nn.Module] = []
    for number, (into, out) in enumerate(pairwise(CHANNELS)):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU()] + [nn.MaxPool2d(2)] * (number % 2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                fan_in = math.prod(layer.weight.shape[1:])
                layer.weight.uniform_(-1, 1, generator=random).mul_(math.sqrt((6 if he else 1) / fan_in))
                layer.bias.uniform_(-1, 1, generator=random).mul_(0 if he else math.sqrt(1 / fan_in))
    return model


class DecoupledSGD(torch.optim.SGD):
    """SGD with momentum whose weight decay multiplies the weights by 1 − lr·weight_decay, past the momentum.

    That is the optimizer that plans are about; torch's own puts the decay into the gradient, and so into the momentum.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = group["params"]
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            moments = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_mul_(moments, group["momentum"])
            torch._foreach_add_(moments, [p.grad for p in params])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, moments, alpha=-group["lr"])


def sgd(model: nn.Module, plan: Plan, rate: float) -> DecoupledSGD:
    """The papers' optimizer: momentum is dampened, m ← μm + (1 − μ)g, which is a factor 1 − μ on the learning rate."""
    momentum, decay = plan.run.optimizer.momentum, plan.run.optimizer.weight_decay
    lr = rate * (1 - momentum)
    return DecoupledSGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=(1 - decay) / lr)


def prepared(job: Job, line: Entry, train: TensorDataset) -> Any:
    """Model, optimizer and loader of a private run."""
    plan, device = plan_of(line, len(train)), train.tensors[0].device
    model = convnet(job.seed, job.he).to(device)
    options = {"key": seeded_key(job.name), "cuda_graphs": device.type == "cuda"}
    return make_private(model, sgd(model, plan, job.rate), train, plan, job.clip, **options)


def trained(job: Job, line: Entry, train: TensorDataset, test: TensorDataset, steps: int | None = None) -> list[float]:
    """Accuracies in per cent after every epoch, or after so many steps; a last epoch includes what is left over."""
    model, optimizer, loader = prepared(job, line, train)
    autocast = partial(torch.autocast, train.tensors[0].device.type, torch.bfloat16, enabled=job.bf16)
    curve: list[float] = []
    for _ in range(1 if steps else math.ceil(line["steps"] / line["separation"])):
        for x, y in islice(loader, steps):
            optimizer.zero_grad()
            with autocast():
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        curve.append(accuracy(model, test))
    optimizer.close()
    return curve[: line["epochs"] - 1] + curve[-1:]


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    right = torch.zeros((), device=test.tensors[1].device)
    for images, labels in zip(*(part.split(2500) for part in test.tensors), strict=True):
        right += (model(images).argmax(1) == labels).sum()
    return round(100 * float(right) / len(test), 2)


def read_cifar10(folder: Path, most: int | None = None) -> Pixels:
    """uint8 x_train, y_train, x_test, y_test from cifar10.npz, torchvision's cifar-10-batches-py, or a folder with a
    `load_cifar10.py`; of each the first `most`."""
    return {name: values[:most] for name, values in _all_of_cifar10(folder).items()}


def _all_of_cifar10(folder: Path) -> Pixels:
    if (folder / "cifar10.npz").exists():
        return dict(np.load(folder / "cifar10.npz"))
    if (folder / "cifar-10-batches-py").is_dir():
        import pickle

        found: dict[str, list[np.ndarray]] = {}
        for part, files in (("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])):
            for file in files:
                content = pickle.loads((folder / "cifar-10-batches-py" / file).read_bytes(), encoding="latin1")
                rows = np.asarray(content["data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                found.setdefault(f"x_{part}", []).append(rows)
                found.setdefault(f"y_{part}", []).append(np.asarray(content["labels"], np.uint8))
        return {name: np.concatenate(parts) for name, parts in found.items()}
    return dict(module_of(folder / "load_cifar10.py").load_cifar10(str(folder)))


def data_sets(pixels: Pixels) -> dict[str, tuple[TensorDataset, TensorDataset]]:
    """For each size what is trained on and what is tested on, as (images, labels) on the GPU if there is one.

    Pixels are scaled by constants, not by statistics.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors: dict[str, tuple[Tensor, Tensor]] = {}
    for part in ("train", "test"):
        images = torch.from_numpy(pixels[f"x_{part}"]).to(device).permute(0, 3, 1, 2).contiguous()
        tensors[part] = (images.float() / 255 - 0.5) / 0.25, torch.from_numpy(pixels[f"y_{part}"]).to(device).long()

    def images(part: str, chosen: Any = slice(None)) -> TensorDataset:
        return TensorDataset(*(tensor[chosen] for tensor in tensors[part]))

    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(len(pixels["y_train"]))).to(device)
    kept = len(order) * 4 // 5
    return {
        "full": (images("train"), images("test")),
        "held-out": (images("train", order[:kept]), images("train", order[kept:])),
    }


@contextmanager
def lanes_of(pixels: Pixels, lanes: int) -> Iterator[Map]:
    """A `map` that does `lanes` things at a time, each in a process with the data on its GPU."""
    if lanes == 1:
        _start(pixels)
        yield map
        return
    with ProcessPoolExecutor(lanes, get_context("spawn"), _start, (pixels,)) as pool:
        yield pool.map


_data: dict[str, tuple[TensorDataset, TensorDataset]] = {}  # of this process


def _start(pixels: Pixels) -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    _data.update(data_sets(pixels))


def _run(job: Job, line: Entry, deadline: float, steps: int | None) -> tuple[list[float], float] | None:
    """The accuracies of a run and its seconds; None where the time is up."""
    started = time.time()
    return None if started > deadline else (trained(job, line, *_data[job.size], steps), time.time() - started)


def run_all(
    jobs: list[Job], plans: dict[str, Entry], each: Map, results: Results, lanes: int, deadline: float, smoke: bool
) -> bool:
    """Train every job that has no result yet; False where time.time() passed the deadline first."""
    by_name = {job.name: job for job in jobs}
    todo = [by_name[name] for name in results.missing(by_name)]
    lines = [plans[job.plan] for job in todo]
    outcomes = each(partial(_run, deadline=deadline, steps=2 if smoke else None), todo, lines)
    for number, (job, line, outcome) in enumerate(zip(todo, lines, outcomes, strict=True)):
        if outcome is None:
            print(f"time is up with {len(todo) - number} runs left", flush=True)
            return False
        epochs, seconds = outcome[0], outcome[1] / lanes  # of the GPU's time, as lanes share it
        results.add(
            job.name,
            **asdict(job),
            label=line["label"],
            epsilon=line["epsilon"],
            sampling=line["sampling"],
            noise_multiplier=line["noise_multiplier"],
            accuracy=epochs[-1],
            epochs=epochs,
            seconds=round(seconds, 2),
        )
        print(f"{epochs[-1]:6.2f}%  {seconds:5.2f} s  {job.name}", flush=True)
    return True
