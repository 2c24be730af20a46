"""What one example adds to the released sum, measured from outside: two runs that differ in it, under equal noise.

A run is repeated with one example zeroed (its input and the weight of its loss), with the same seed and therefore the
same noise. The difference of the two released gradients, times the expected batch size, is what the example has
contributed: it may not be longer than the clip norm. Odd models, every engine, float32 and bfloat16 autocast, inputs
that are huge, tiny, cancelling or not finite. A sum is released in float32, so its own rounding (a few 2⁻²⁴ of each
number) is allowed on top; a refusal is as good as a right measurement, any other error is a flaw.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from attacks.outcome import Outcome, Trial, spread, summed
from quell.errors import QuellError
from quell.planning import Plan, Prices
from quell.run import Run
from quell.torch import make_private
from quell.torch.private import CLIPPING

BATCH = 6
_ROUNDING = 2.0**-22  # of each released number: the sum, the noise and their total are each rounded to float32


class Twice(nn.Module):
    """One layer, used at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """Embedding and output layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        return self.out(self.embedding(x))


class Bare(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x * self.scale)


class Difference(nn.Module):
    """Positions of a sequence whose gradients nearly cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4, bias=False)

    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        return h[:, 0] - h[:, 1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x, x, x, need_weights=False)[0]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 5)

    def forward(self, x: Any) -> Any:
        return self.cell(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(6, 6, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x, x)


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, padding=1, dilation=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 2))


Models = dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]
MODELS: Models = {  # and the shape of one input; () for a row of five token numbers
    "linear": (lambda: nn.Linear(6, 3), (6,)),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 1, bias=False)), (6,)),
    "sequence": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), (4, 6)),
    "cancelling positions": (Difference, (2, 6)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (6,)),
    "group norm": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()), (2, 6)),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.Conv1d(2, 2, 2)), (2, 6)),
    "conv 1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=2), (2, 7)),
    "conv 2d": (_convolution, (2, 6, 6)),
    "conv 2d circular": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (1, 5, 5)),
    "conv 3d": (lambda: nn.Conv3d(1, 2, 2, padding=1, dilation=2), (1, 4, 4, 4)),
    "conv transposed": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 2)), ()),
    "tied weights": (Tied, ()),
    "layer used twice": (Twice, (6,)),
    "bare parameter": (Bare, (6,)),
    "frozen layer": (lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2)), (6,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), (6,)),
    "attention": (Attention, (3, 6)),
    "transformer layer": (_encoder, (3, 6)),
    "bilinear": (Pair, (6,)),
    "recurrent cell": (Cell, (6,)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)), (6,)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), (6,)),
}
INPUTS = ("plain", "outlier", "enormous", "largest", "tiny", "subnormal", "cancelling", "not finite", "zero")


def attack(count: int, seed: int, workers: int = 1) -> list[Outcome]:
    """So many cases of model × engine × precision × input."""
    return [summed("clipping, example by example", spread(one, [seed + number for number in range(count)], workers))]


@cache
def _plan() -> Plan:
    """One step with little noise, so that little of it is in the way."""
    run = Run.from_data(examples=BATCH, batch_size=BATCH, epochs=1, epsilon=50.0, delta=0.1, sampling="cyclic")
    return Plan(run, (Prices(run).price("identity"),), 0)


def one(seed: int) -> Trial:
    torch.set_num_threads(1)
    random = np.random.default_rng([seed, 4])
    name = str(random.choice(list(MODELS)))
    kind = str(random.choice(INPUTS))
    options = {
        "clipping": str(random.choice(CLIPPING)),
        "loss_reduction": str(random.choice(["mean", "sum"])),
        "max_grad_norm": float(random.choice([1e-3, 1.0, 30.0])),
        "physical_batch_size": None if random.random() < 0.7 else 2,
    }
    half = bool(random.random() < 0.4)
    label = f"{name} with {kind} input, {options}{', bfloat16 autocast' if half else ''}"
    data = _data(MODELS[name][1], kind, random)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            released = [_released(name, part, options, half) for part in (data, _without(data, 1))]
    except QuellError:
        return Trial("clipping", refused=True)
    except Exception as problem:
        return Trial("clipping", flaw=f"{label} raised {type(problem).__name__}: {str(problem)[:200]}")
    moved = float(torch.linalg.vector_norm(released[0] - released[1])) * BATCH
    rounding = float(torch.linalg.vector_norm(released[0].abs() + released[1].abs())) * BATCH * _ROUNDING
    ratio = max(0.0, moved - rounding) / options["max_grad_norm"]  # type: ignore[operator]
    if not ratio <= 1 + 1e-4:  # how exactly an engine knows a norm
        return Trial("clipping", ratio, f"{label} moved the sum by {ratio:.6g} clip norms")
    return Trial("clipping", ratio)


def _data(shape: tuple[int, ...], kind: str, random: np.random.Generator) -> tuple[Any, Any]:
    """Inputs of which number 1 is odd, and what each output is multiplied by in the loss."""
    if not shape:
        return torch.from_numpy(random.integers(0, 7, (BATCH, 5))), torch.ones(BATCH) * float(kind != "zero")
    x = torch.from_numpy(random.standard_normal((BATCH, *shape))).float()
    factor = {"outlier": 1e4, "enormous": 1e30, "tiny": 1e-20, "subnormal": 1e-41, "zero": 0.0}.get(kind, 1.0)
    x[1] *= factor
    if kind == "not finite":
        x[1].view(-1)[0] = float(random.choice([np.nan, np.inf]))
    if kind == "largest":  # floats have no digits to spare at the other end either
        x[1] = x[1].sign() * 2.0 ** float(random.uniform(110, 127.9))
    if kind == "cancelling":
        x[1] = 3e4 + x[1] * 1e-3
    return x, torch.full(
        (BATCH,), float(random.choice([1e-3, 1.0, 1e4] if kind != "largest" else [1e-38, 1e-20, 1e-3]))
    )


def _without(data: tuple[Any, Any], number: int) -> tuple[Any, Any]:
    x, weight = data[0].clone(), data[1].clone()
    x[number], weight[number] = 0, 0.0
    return x, weight


def _released(name: str, data: tuple[Any, Any], options: dict[str, Any], half: bool) -> Any:
    """The gradient that the user's optimizer gets in the only step, as one float64 vector."""
    torch.manual_seed(1)
    model = MODELS[name][0]()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen: list[Any] = []

    def note(stepping: Any, args: Any, kwargs: Any) -> None:
        grads = [p.grad.double().flatten() for group in stepping.param_groups for p in group["params"]]
        seen.append(torch.cat(grads))

    optimizer.register_step_pre_hook(note)
    private, optimizer, loader = make_private(model, optimizer, TensorDataset(*data), _plan(), seed=5, **options)
    for x, weight in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            losses = private(x).flatten(1).float().square().sum(1) * weight
        (losses.mean() if options["loss_reduction"] == "mean" else losses.sum()).backward()
        optimizer.step()
    (gradient,) = seen
    return gradient
