"""Private per user: people with many rows are protected with all of them.

python examples/users.py ratings.csv     # columns user, label, and numbers from -1 to 1
"""

from __future__ import annotations

import argparse
import csv

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quell
from quell.torch import make_private


def data(file: str | None) -> tuple[list[str], Tensor, Tensor]:
    """The user of each row, the rows and their labels."""
    if file is None:
        ids = [f"user {int(place)}" for place in 40 * torch.rand(400) ** 2]  # some have many rows, some few
        x = torch.randn(400, 8)
        return ids, x, (x.sum(1) > 0).long()
    with open(file, newline="") as text:
        rows = list(csv.DictReader(text))
    names = [name for name in rows[0] if name not in ("user", "label")]
    x = torch.tensor([[float(row[name]) for name in names] for row in rows])
    return [row["user"] for row in rows], x, torch.tensor([int(row["label"]) for row in rows])


def main(file: str | None = None) -> float:
    small = file is None
    ids, x, y = data(file)
    users = len(set(ids))  # public: a plan needs the number of users, not of rows
    plan = quell.plan(
        users=users,
        batch_size=max(1, users // 20),
        epochs=2 if small else 10,
        epsilon=8,
        sampling="cyclic" if small else "best",
    )
    model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = make_private(
        model,
        optimizer,
        TensorDataset(x, y),
        plan,
        max_grad_norm=1.0,
        users=ids,
        rows_per_user=4,  # of which the mean gradient is clipped as one
    )
    for _ in range(plan.epochs):
        for rows, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(rows), labels).backward()
            optimizer.step()
    report = optimizer.privacy_report()
    print(report)
    assert report.unit == "one user"
    return report.steps_done / plan.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", help="a table with columns user, label and numbers")
    parser.add_argument("--small", action="store_true", help="made-up users")
    given = parser.parse_args()
    main(None if given.small else given.file)
