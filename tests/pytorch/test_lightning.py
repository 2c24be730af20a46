"""The Lightning callback: `trainer.fit` trains as the plain private loop does."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch.nn import functional

from quell.errors import QuellError
from quell.torch import make_private
from tests.pytorch.training import examples, network, seeded, train

pl = pytest.importorskip("pytorch_lightning")
from quell.torch.lightning import Private  # noqa: E402


class Module(pl.LightningModule):
    def __init__(self, schedule=False, dropout=0.0):
        super().__init__()
        self.network, self.schedule = network(), schedule
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x):
        return self.network(self.dropout(x))

    def training_step(self, batch, index):
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=1.0)]


def trainer(folder, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        **{**quiet, "max_epochs": 2, "enable_checkpointing": False, **options},
    )


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_fit_trains_as_the_plain_loop(plan, tmp_path, clipping):
    key = seeded(5)
    private = Private(plan, examples(), 0.7, clipping=clipping, key=key)
    module = Module(schedule=clipping == "layers")
    trainer(tmp_path, private).fit(module, private.loader)
    assert private.privacy_report().steps_done == plan.steps
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(*make_private(model, optimizer, examples(), plan, 0.7, clipping=clipping, key=seeded(5)))
    assert all(torch.equal(a, b) for a, b in zip(module.network.parameters(), model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:Be aware that when using")
def test_fit_goes_on_from_a_checkpoint(plan, tmp_path):
    key = tmp_path / "key"
    straight = Module(dropout=0.3)
    private = Private(plan, examples(), key=key)
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer(tmp_path, private, keep, enable_checkpointing=True).fit(straight, private.loader)
    private.optimizer.close()
    resumed = Module(dropout=0.3)
    private = Private(plan, examples(), key=key, replay=True)
    trainer(tmp_path, private).fit(resumed, private.loader, ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
    assert private.privacy_report().steps_done == plan.steps
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), straight.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epochs": 3}, "allow more than the plan: pass max_epochs=2"),
        ({"max_epochs": -1}, "allow more than the plan"),
        ({"accumulate_grad_batches": 2}, "must be 1"),
        ({"gradient_clip_val": 1.0}, "leave it out"),
        ({"limit_train_batches": 2}, "would skip batches"),
    ],
)
def test_trainers_that_would_break_the_promise_are_refused(plan, tmp_path, options, message):
    private = Private(plan, examples())
    with pytest.raises(QuellError, match=message):
        trainer(tmp_path, private, **options).fit(Module(), private.loader)


def test_other_data_than_the_plans_is_refused(plan, tmp_path):
    with pytest.raises(QuellError, match=r"trainer\.fit\(module, private\.loader\)"):
        trainer(tmp_path, Private(plan, examples())).fit(Module(), torch.utils.data.DataLoader(examples()))
    with pytest.raises(QuellError, match="inside trainer"):
        next(iter(Private(plan, examples()).loader))


def test_a_missing_package_is_named(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "quell.torch.lightning")
    with pytest.raises(QuellError, match=r"needs Lightning: pip install 'quell\[trainers\]'"):
        importlib.import_module("quell.torch.lightning")
