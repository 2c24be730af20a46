"""Any LightningModule: a callback makes its optimizer private.

python examples/lightning_module.py
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quell
from quell.torch.lightning import Private


class Classifier(pl.LightningModule):
    """An ordinary module: the loss is a mean over the rows of `self(x)`."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def main(small: bool = False) -> float:
    examples = 300 if small else 20_000
    x = torch.randn(examples, 20)
    data = TensorDataset(x, (x @ torch.randn(20, 5)).argmax(1))  # yours here
    plan = quell.plan(
        examples=examples,
        batch_size=30 if small else 400,
        epochs=2 if small else 10,
        epsilon=4,
        delta=1e-5,
        momentum=0.9,
        sampling="cyclic" if small else "best",
    )
    private = Private(plan, data, max_grad_norm=1.0)  # key="run.key" to resume after a crash
    trainer = pl.Trainer(
        max_epochs=plan.epochs,
        callbacks=[private],
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=not small,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(20, 5), private.loader)
    print(private.privacy_report())
    return private.privacy_report().steps_done / plan.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="few examples, two epochs")
    main(parser.parse_args().small)
