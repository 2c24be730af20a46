"""The Lightning callback: `trainer.fit` trains as the plain private loop does."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch.nn import functional

from quell.errors import QuellError
from quell.noise import claims
from quell.torch import PlanMismatchWarning, make_private
from quell.watching import Log
from tests.pytorch.conftest import unpriced_poisson_plan
from tests.pytorch.training import examples, logged_rows, network, seeded, train, without_noise

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
    private = Private(plan, examples(), key=key)
    trainer(tmp_path, private).fit(resumed, private.loader, ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
    assert private.privacy_report().steps_done == plan.steps
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), straight.parameters(), strict=True))


class Stop(pl.Callback):
    """A crash after so many steps, when what was due to be saved is."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *arguments):
        if trainer.global_step == self.step:
            raise RuntimeError("a crash")


@pytest.mark.filterwarnings("ignore:Be aware that when using", "ignore:Checkpoint directory")
@pytest.mark.parametrize(("stop", "file"), [(2, "start.ckpt"), (5, "last.ckpt")])
def test_a_crash_is_resumed(stop, file, plan, tmp_path):
    """Before the first checkpoint; and where the newest was damaged, from the one that it replaced."""
    found = []
    for number, crash in enumerate((stop, None)):
        claims._claims.clear()
        torch.manual_seed(5 + number)
        log = Log(tmp_path / "log", every=2)
        module, private = Module(dropout=0.3), Private(plan, examples(), key=tmp_path / "key", log=log)
        keep = pl.callbacks.ModelCheckpoint(
            tmp_path, filename="last", every_n_train_steps=2, enable_version_counter=False
        )
        stops = [Stop(crash)] if crash else []
        fitted = trainer(tmp_path, private, keep, *stops, enable_checkpointing=True)
        if crash:
            with pytest.raises(RuntimeError, match="a crash"):
                fitted.fit(module, private.loader)
        else:
            path = tmp_path / file
            if file == "last.ckpt":
                path.write_bytes(path.read_bytes()[:-9])
                with pytest.warns(UserWarning, match="is damaged: going on from the checkpoint before"):
                    fitted.fit(module, private.loader, ckpt_path=path, weights_only=True)
            else:
                fitted.fit(module, private.loader, ckpt_path=path, weights_only=True)
        private.optimizer.close()
        found.append(private)
    assert found[1].privacy_report().steps_done == plan.steps
    assert [row["step"] for row in logged_rows(tmp_path / "log")] == ["2", "4", "6", "8", "10"]


@pytest.mark.parametrize("physical", [1, 3])
def test_every_planned_step_is_taken_where_batches_come_in_parts(physical, tmp_path):
    """Batches of random size; schedulers and the trainer count planned steps."""
    plan, found = without_noise(unpriced_poisson_plan()), []
    for size in (physical, None):
        claims._claims.clear()
        private, module = Private(plan, examples(12), key=seeded(5), physical_batch_size=size), Module(schedule=True)
        fitted = trainer(tmp_path, private)
        fitted.fit(module, private.loader)
        assert private.privacy_report().steps_done == fitted.global_step == plan.steps
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


class Habits(Module):
    """Logs means over epochs, and looks at the batch in hooks."""

    def __init__(self, hooks=True):
        super().__init__()
        self.hooks, self.seen, self.moved = hooks, [], []

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_epoch=True, batch_size=None if self.hooks else len(batch[1]))
        return loss

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.moved.append(len(batch[1]))
        return batch

    def on_train_batch_start(self, batch, index):
        if self.hooks:
            self.seen.append(len(batch[1]))

    def on_train_batch_end(self, outputs, batch, index):
        self.on_train_batch_start(batch, index)


def test_hooks_and_logs_get_the_batch(plan, tmp_path):
    private, module = Private(plan, examples()), Habits()
    fitted = trainer(tmp_path, private)
    fitted.fit(module, private.loader)
    assert module.seen == [8] * 2 * plan.steps
    assert module.moved == [8] * plan.steps
    assert "loss_epoch" in fitted.logged_metrics
    private, module = Private(plan, examples(), physical_batch_size=4), Habits(hooks=False)
    trainer(tmp_path, private).fit(module, private.loader)
    assert module.moved == [4] * 2 * plan.steps
    private = Private(plan, examples(), physical_batch_size=4)
    with pytest.raises(QuellError, match=r"this batch comes in parts.* pass batch_size= to self\.log"):
        trainer(tmp_path, private).fit(Habits(), private.loader)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("physical", [None, 4])
def test_inputs_have_the_precision_of_the_weights(precision, physical, plan, tmp_path):
    private = Private(plan, examples(), physical_batch_size=physical)
    trainer(tmp_path, private, precision=precision).fit(Module(), private.loader)
    assert private.privacy_report().steps_done == plan.steps


def test_an_end_before_the_plans_is_not_silent(plan, tmp_path):
    """Lightning takes a checkpoint that was saved after `fit` had stopped in the middle of an epoch for its end."""
    path = tmp_path / "stopped.ckpt"
    for options in ({"max_steps": 3, "max_epochs": -1}, {}):
        claims._claims.clear()
        private, module = Private(plan, examples(), key=tmp_path / "key"), Module()
        fitted = trainer(tmp_path, private, **options)
        if options:
            fitted.fit(module, private.loader)
            fitted.save_checkpoint(path)
        else:
            with pytest.warns(
                PlanMismatchWarning, match=r"5 of 10 planned steps were taken.* max_steps=10, max_epochs=-1"
            ):
                fitted.fit(module, private.loader, ckpt_path=path, weights_only=True)
        private.optimizer.close()


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


class TwoOptimizers(Module):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.5), torch.optim.SGD(self.parameters(), lr=0.1)]


def test_several_optimizers_are_refused(plan, tmp_path):
    private = Private(plan, examples())
    with pytest.raises(QuellError, match=r"Lightning steps one: return one, with parameter groups"):
        trainer(tmp_path, private).fit(TwoOptimizers(), private.loader)


def test_a_plan_that_is_none_is_named():
    with pytest.raises(QuellError, match=r"plan is a NoneType: pass what quell\.plan"):
        Private(None, examples())


def test_a_missing_package_is_named(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "quell.torch.lightning")
    with pytest.raises(QuellError, match=r"needs Lightning: pip install 'quell\[trainers\]'"):
        importlib.import_module("quell.torch.lightning")
