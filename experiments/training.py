"""Private training of the ConvNet on CIFAR-10: many runs, several at a time on one GPU.

A step is captured once as a CUDA graph (batch, per-example gradients, clipping, noise, update) and replayed to the end
of the plan, so that the processor only starts it; `lanes` runs take turns in starting theirs. Batches come from the
plan's own sampling scheme; as their sizes vary they are padded to the largest, and padding counts nothing. Sums are
divided by the expected batch size. Keys come from seeds, so that runs can be repeated: on data that are not public
they would have to be `Key.generate()`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import convnet
import numpy as np
import torch
from common import Entry, Results, noise_of, scheme_of
from torch import Tensor

from quell.noise import Key, NoiseStream, SeededKeyWarning
from quell.sampling import BallsInBins, Batches, Cyclic

SPLIT_SEED = 2505  # which 10,000 training images are held out


@dataclass(frozen=True)
class Job:
    """One training run. `size` is "full" (all training images, tested on the test set) or "held-out"."""

    plan: str
    size: str
    clip: float
    rate: float
    he: bool
    seed: int
    bf16: bool = False  # whether convolutions run in bfloat16; TF32 otherwise

    @property
    def name(self) -> str:
        start, precision = "he" if self.he else "torch", " | bf16" if self.bf16 else ""
        return f"{self.plan} | clip {self.clip:g} | lr {self.rate:.4g} | {start} | seed {self.seed}{precision}"


@dataclass(frozen=True)
class Images:
    """Images (N, 32, 32, 3) as float32 and their labels, on the device."""

    images: Tensor
    labels: Tensor


def load(folder: Path, device: torch.device, most: int | None = None) -> dict[str, tuple[Images, Images]]:
    """For each size what is trained on and what is tested on. Pixels are scaled by constants, not by statistics."""
    pixels = {name: torch.from_numpy(values[:most]) for name, values in read_cifar10(folder).items()}

    def images(part: str, chosen: slice | np.ndarray = slice(None)) -> Images:
        return Images(
            (pixels[f"x_{part}"][chosen].to(device).float() / 255 - 0.5) / 0.25,
            pixels[f"y_{part}"][chosen].to(device).long(),
        )

    order = np.random.default_rng(SPLIT_SEED).permutation(len(pixels["y_train"]))
    kept = len(order) * 4 // 5
    return {
        "full": (images("train"), images("test")),
        "held-out": (images("train", order[:kept]), images("train", order[kept:])),
    }


def read_cifar10(folder: Path) -> dict[str, np.ndarray]:
    """uint8 x_train, y_train, x_test, y_test from cifar10.npz, torchvision's cifar-10-batches-py, or a folder with a
    `load_cifar10.py`."""
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
    import importlib.util

    spec = importlib.util.spec_from_file_location("load_cifar10", folder / "load_cifar10.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.load_cifar10(str(folder)))


class Training:
    """One run, ready to take its steps."""

    def __init__(self, job: Job, plan: Entry, train: Images) -> None:
        self.job, self.plan, self.train = job, plan, train
        device = self.device = train.labels.device
        self.params = convnet.init(job.seed, job.he, device)
        self.moments = [torch.zeros_like(p) for p in self.params]
        self.grads = [torch.zeros(p.shape, device=device) for p in self.params]
        scheme = scheme_of(plan)
        batches = Batches(scheme, len(train.labels), secret(f"batches {job.seed}"))
        self.expected_size, self.steps = batches.expected_size, scheme.steps
        epoch = plan["separation"]
        # Ten epochs; where an epoch's steps do not divide all of them, what is left over belongs to the last one.
        self.epoch_ends = {*range(epoch, self.steps - epoch + 1, epoch), self.steps}
        repeats = isinstance(scheme, Cyclic | BallsInBins)  # every epoch has the same batches
        rows = [batches.at(step) for step in range(epoch if repeats else self.steps)]
        width = -(-max(map(len, rows)) // 32) * 32
        table = np.full((len(rows), width), -1)
        for row, batch in zip(table, rows, strict=True):
            row[: len(batch)] = batch
        self.table = torch.from_numpy(table).to(device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SeededKeyWarning)
            key = Key.from_seed(int.from_bytes(secret(f"noise {job.name}"), "little"))
        self.noise = NoiseStream(noise_of(plan, job.clip), self.params, key=key)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None

    def advance(self) -> None:
        """Take the next step: the first one as it is written, on a GPU the others as a graph of it."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.one_step()
        if self.stream is not None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.one_step()

    def one_step(self) -> None:
        self.put_gradients()
        self.noise.add_(self.grads)
        momentum = self.plan["momentum"]
        torch._foreach_mul_(self.moments, momentum)  # dampened, as in the authors' code: the rates assume it
        torch._foreach_add_(self.moments, self.grads, alpha=(1 - momentum) / self.expected_size)
        torch._foreach_mul_(self.params, self.plan["weight_decay"])
        torch._foreach_add_(self.params, self.moments, alpha=-self.job.rate)
        self.step += 1

    def put_gradients(self) -> None:
        chosen = self.table.index_select(0, self.step % len(self.table))[0]
        present = (chosen >= 0).float()
        chosen = chosen.clamp(min=0)
        images = self.train.images.index_select(0, chosen).permute(0, 3, 1, 2)
        if self.job.bf16:
            images = images.bfloat16()
        summed = convnet.clipped_sum(self.params, images, self.train.labels[chosen], present, self.job.clip)
        for grad, value in zip(self.grads, summed, strict=True):
            grad.copy_(value)

    @torch.no_grad()
    def accuracy(self, test: Images) -> Tensor:
        """Per cent, left on the device so that nobody waits for it."""
        right = torch.zeros((), device=self.device)
        for images, labels in zip(test.images.split(2500), test.labels.split(2500), strict=True):
            right += (convnet.logits(self.params, images.permute(0, 3, 1, 2)).argmax(1) == labels).sum()
        return 100 * right / len(test.labels)


def secret(purpose: str) -> bytes:
    return blake2b(purpose.encode(), digest_size=32).digest()


def run_all(
    jobs: list[Job],
    plans: dict[str, Entry],
    data: dict[str, tuple[Images, Images]],
    results: Results,
    lanes: int,
    deadline: float,
    smoke: bool = False,
) -> bool:
    """Train every job that has no result yet, `lanes` at a time; False where time.time() passed the deadline first."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    by_name = {job.name: job for job in jobs}
    todo = [by_name[name] for name in results.missing(by_name)]
    while todo:
        if time.time() > deadline:
            print(f"time is up with {len(todo)} runs left", flush=True)
            return False
        group, todo = todo[:lanes], todo[lanes:]
        started = time.time()
        runs = [Training(job, plans[job.plan], data[job.size][0]) for job in group]
        steps = 2 if smoke else max(run.steps for run in runs)
        curves: list[list[Tensor]] = [[] for _ in runs]
        for step in range(1, steps + 1):
            for run, curve in zip(runs, curves, strict=True):
                if step > run.steps:
                    continue
                with torch.cuda.stream(run.stream):  # does nothing where there is no GPU
                    run.advance()
                    if step in run.epoch_ends or step == steps:
                        curve.append(run.accuracy(data[run.job.size][1]))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = (time.time() - started) / len(group)  # of the GPU's time, as lanes share it
        for run, curve in zip(runs, curves, strict=True):
            assert smoke or run.noise.step == run.steps
            epochs = [round(float(value), 2) for value in curve]
            results.add(
                run.job.name,
                **asdict(run.job),
                label=run.plan["label"],
                epsilon=run.plan["epsilon"],
                sampling=run.plan["sampling"],
                noise_multiplier=run.plan["noise_multiplier"],
                accuracy=epochs[-1],
                epochs=epochs,
                seconds=round(seconds, 2),
            )
            print(f"{epochs[-1]:6.2f}%  {seconds:5.2f} s  {run.job.name}", flush=True)
        del runs, run
    return True
