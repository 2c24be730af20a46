"""A ConvNet on CIFAR-10 from scratch, at (8, 10⁻⁵)-DP. Needs torchvision; `--small` needs nothing.

python examples/cifar10.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quell
from quell.torch import make_private


def data(small: bool) -> tuple[TensorDataset, TensorDataset]:
    """Images from -1 to 1, scaled by constants: means of the private images would be a release of their own."""
    if small:
        y = torch.arange(400) % 10
        x = torch.randn(400, 3, 32, 32) + torch.randn(10, 3, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)[y]
        return TensorDataset(x[:300], y[:300]), TensorDataset(x[300:], y[300:])
    from torchvision.datasets import CIFAR10

    parts = (CIFAR10("data", train=train, download=True) for train in (True, False))
    train, test = (
        TensorDataset(torch.from_numpy(part.data).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor(part.targets))
        for part in parts
    )
    return train, test


def network() -> nn.Module:
    """Three blocks with GroupNorm: batch norm would mix the examples of a batch."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


@torch.no_grad()
def accuracy(model: nn.Module, part: TensorDataset, device: str) -> float:
    x, y = part.tensors
    guesses = torch.cat([model(images.to(device)).argmax(1).cpu() for images in x.split(1000)])
    return float((guesses == y).float().mean())


def main(small: bool = False) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, test = data(small)
    plan = quell.plan(
        examples=len(train),
        batch_size=50 if small else 500,
        epochs=2 if small else 10,
        epsilon=8,
        delta=1e-5,
        momentum=0.9,
        sampling="cyclic" if small else "best",
    )
    print(plan)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = make_private(model, optimizer, train, plan, max_grad_norm=1.0)
    for epoch in range(plan.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {accuracy(model, test, device):.1%} of the test images")
    print(optimizer.privacy_report())
    return accuracy(model, test, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="made-up images, two epochs")
    main(parser.parse_args().small)
