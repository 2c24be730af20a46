"""A small classification task, and the reference to compare with: clipping by one backward pass per example."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from quell.noise import Key, SeededKeyWarning
from quell.planning import Plan


def examples(count: int = 40, seed: int = 5) -> TensorDataset:
    maker = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=maker), torch.randint(0, 3, (count,), generator=maker))


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def seeded(seed: int) -> Key:
    """A key that can be made again; the warning is part of it."""
    with pytest.warns(SeededKeyWarning):
        return Key.from_seed(seed)


def without_noise(plan: Plan) -> Plan:
    """The same plan with a noise multiplier of practically zero."""
    rows = [
        dataclasses.replace(m, claim=dataclasses.replace(m.guarantee, noise_multiplier=1e-30)) for m in plan.mechanisms
    ]
    return Plan(plan.run, tuple(rows), plan.recommended)


def train(model, optimizer, loader, steps: int | None = None, criterion=nn.functional.cross_entropy) -> int:
    """The user's loop, as in the README; stops after so many steps."""
    done = 0
    while steps is None or done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == steps:
                return done
        if optimizer.run.step == optimizer.run.noise.steps:
            break
    return done


def clipped_gradient(model, criterion, batch, bound):
    """Σ of clipped per-example gradients by name, one backward pass per example."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for example in zip(*batch, strict=True):
        model.zero_grad()
        criterion(model(example[0][None]), example[1][None]).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
        norm = torch.sqrt(sum(g.double().square().sum() for g in grads.values()))
        for name, g in grads.items():
            total[name] += g * min(1.0, bound / float(norm))
    model.zero_grad()
    return total


def logged_rows(folder: Path) -> list[dict[str, str]]:
    """What `make_private(..., log=folder)` has written."""
    with open(folder / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


def reference_run(model, optimizer, dataset, batches, expected, bound, criterion=nn.functional.cross_entropy) -> None:
    """Non-private clipped SGD over given batches of indices."""
    for indices in batches:
        chosen = torch.as_tensor(indices)
        sums = clipped_gradient(model, criterion, [t[chosen] for t in dataset.tensors], bound)
        for name, p in model.named_parameters():
            p.grad = sums[name] / expected if name in sums else None
        optimizer.step()
