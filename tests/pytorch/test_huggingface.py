"""Hugging Face's Trainer under a plan, on tiny models with random weights."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial

import pytest
import torch
from torch.utils.data import Dataset

from quell.errors import QuellError
from quell.noise import claims
from quell.torch import PlanMismatchWarning, make_private
from quell.watching import Log
from tests.pytorch.conftest import small_plan
from tests.pytorch.training import logged_rows, without_noise

transformers = pytest.importorskip("transformers")
from quell.torch.huggingface import PrivateTrainer  # noqa: E402
from quell.torch.losses import next_token_losses, token_losses  # noqa: E402

LENGTH, BOUND, RATE = 7, 0.3, 0.5


class Sentences(Dataset):
    """Random tokens, some of them padding; the label is a class or the sentence itself."""

    def __init__(self, causal: bool, count: int = 40) -> None:
        maker = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(1, 20, (count, LENGTH), generator=maker)
        self.lengths = torch.randint(2, LENGTH + 1, (count,), generator=maker)
        self.causal = causal

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, mask = self.tokens[index], (torch.arange(LENGTH) < self.lengths[index]).long()
        labels = tokens.masked_fill(mask == 0, -100) if self.causal else tokens[0] % 3
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "position_ids": torch.arange(LENGTH),
            "labels": labels,
        }


def bert(dropout=0.0):
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2(tied=True):
    """Tied weights, and Conv1D layers, whose weights are transposed."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",  # which vmap understands
        tie_word_embeddings=tied,
    )
    return transformers.GPT2LMHeadModel(config)


def arguments(folder, **options):
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    plain = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "num_train_epochs": 2}
    return transformers.TrainingArguments(str(folder), **{**quiet, **plain, "max_grad_norm": BOUND, **options})


def trainer_of(model, folder, plan, private=None, options=None, kind=PrivateTrainer, **more):
    causal = isinstance(model, transformers.GPT2LMHeadModel)
    return kind(
        model,
        arguments(folder, **(options or {})),
        train_dataset=Sentences(causal),
        plan=plan,
        private=private,
        **more,
    )


class Stop(transformers.TrainerCallback):
    """A crash after so many steps, when what was due to be saved is."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def step_by_hand(model, data, batch, bound):
    """One step of clipped SGD by transformers' own loss, one example at a time."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for index in batch:
        model.zero_grad()
        model(**{name: value[None] for name, value in data[index].items()}).loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        for sums, p in zip(total, model.parameters(), strict=True):
            sums += p.grad * min(1.0, bound / float(norm))
    with torch.no_grad():
        for sums, p in zip(total, model.parameters(), strict=True):
            p -= RATE * sums / 8


LOOSE = 1e3  # clips nothing: the norms of an embedding that is the output layer too are added, which clips more


@pytest.mark.parametrize(
    ("make", "clipping", "bound"),
    [
        (bert, "layers", BOUND),
        (partial(gpt2, tied=False), "layers", BOUND),
        (gpt2, "layers", LOOSE),
        (gpt2, "microbatch", BOUND),
    ],
)
def test_without_noise_training_is_clipped_sgd(tmp_path, make, clipping, bound):
    plan = without_noise(small_plan())
    options = {"max_steps": 3, "max_grad_norm": bound}
    trainer = trainer_of(make(), tmp_path, plan, {"clipping": clipping}, options)
    assert trainer.train().global_step == 3
    expected = make()
    for _, batch in zip(range(3), trainer.optimizer.run.batches.starting(0), strict=False):
        step_by_hand(expected, trainer.train_dataset, batch, bound)
    for ours, theirs in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_bfloat16_inside_the_model_of_a_trainer(plan, tmp_path):
    """Trainer turns autocast on inside the model's forward, where a hook before it does not see it."""
    trainer = trainer_of(bert(0.3), tmp_path, plan, {}, {"bf16": True})
    trainer.train()
    assert trainer.privacy_report().steps_done == plan.steps


def test_training_resumes_from_a_checkpoint(plan, tmp_path):
    key = tmp_path / "key"
    saving = {"save_strategy": "steps", "save_steps": 3}
    private = {"key": key, "log": Log(tmp_path / "log", every=5)}
    straight = trainer_of(bert(0.3), tmp_path, plan, private, saving)
    (tmp_path / "checkpoint-3").mkdir()
    torch.save({"state": {}, "ranks": 1}, tmp_path / "checkpoint-3" / "rank-0.pt")  # of an earlier run, in slices
    straight.train()
    straight.optimizer.close()
    resumed = trainer_of(bert(0.3), tmp_path / "again", plan, private)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.privacy_report().steps_done == plan.steps
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [row["step"] for row in logged_rows(tmp_path / "log")] == ["5", "10"]
    with pytest.raises(QuellError, match="taken all 10 steps of its plan: make a new trainer"):
        resumed.train()


def test_an_evaluation_after_a_checkpoint_does_not_keep_a_run_from_resuming(plan, tmp_path):
    """At the end of an epoch the checkpoint comes first, and a resumed run skips the evaluation."""
    saving = {"save_strategy": "steps", "save_steps": plan.run.steps_per_epoch, "eval_strategy": "epoch"}
    private, more = {"key": tmp_path / "key"}, {"eval_dataset": Sentences(False)}
    straight = trainer_of(bert(0.3), tmp_path, plan, private, saving, **more)
    straight.train()
    straight.optimizer.close()
    resumed = trainer_of(bert(0.3), tmp_path / "again", plan, private, saving | {"save_strategy": "no"}, **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{plan.run.steps_per_epoch}"))
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:at step 6 the learning rate is")
@pytest.mark.parametrize("stopped", [9, 5])
@pytest.mark.parametrize("changed", [{"lr_scheduler_type": "linear"}, {"per_device_train_batch_size": 3}])
def test_what_must_not_change_where_steps_come_again(changed, stopped, plan, tmp_path):
    """Another schedule shows two steps after the checkpoint, whose optimizer has the next learning rate."""
    saving = {"save_strategy": "steps", "save_steps": 5}
    first = trainer_of(bert(), tmp_path / "run", plan, None, saving)
    first.add_callback(Stop(stopped))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    first.optimizer.close()
    claims._claims.clear()
    resumed = trainer_of(bert(), tmp_path / "run", plan, None, {**saving, **changed})
    if stopped == 9:
        message = r"go on as before the crash, .* learning-rate schedule, .* per_device_train_batch_size"
        with pytest.raises(QuellError, match=message):
            resumed.train(resume_from_checkpoint=True)
        assert resumed.optimizer.run.released == 9
    else:
        resumed.train(resume_from_checkpoint=True)
        assert resumed.privacy_report().steps_done == plan.steps


def test_training_for_fewer_epochs_than_planned_is_a_warning(plan, tmp_path):
    trainer = trainer_of(bert(), tmp_path, plan, None, {"num_train_epochs": 1})
    with pytest.warns(PlanMismatchWarning, match="after 5 of the 10 planned steps"):
        trainer.train()


@pytest.mark.parametrize("make", [bert, gpt2])
def test_ones_own_loop_with_a_loss_per_example(make):
    """Padding masks, several outputs in a ModelOutput, and a loss that is computed outside."""
    causal = make is gpt2
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, Sentences(causal), small_plan())
    for _, batch in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        labels = batch.pop("labels")
        losses = (next_token_losses if causal else token_losses)(model(**batch), labels)
        losses.mean().backward()
        optimizer.step()
    assert optimizer.run.guard._checked
    assert not optimizer.run.guard._why


@pytest.mark.parametrize("lowered", [False, True])
def test_the_loss_inside_a_language_model_is_refused(lowered):
    """It divides by the tokens of the whole batch. A classifier's divides by the examples, which is fine."""
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, Sentences(True), small_plan())
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        loss = model(**next(iter(loader))).loss
    with pytest.raises(QuellError, match="the model returns its own loss, and that couples"):
        loss.backward()
    assert optimizer.run.step == 0
    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, Sentences(False), small_plan())
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        loss = model(**next(iter(loader))).loss
    loss.backward()
    optimizer.step()
    assert optimizer.run.guard._checked


def test_evaluation_and_logs_work_and_show_no_gradient_norm(plan, tmp_path):
    trainer = trainer_of(
        bert(), tmp_path, plan, None, {"logging_strategy": "steps", "logging_steps": 5}, eval_dataset=Sentences(False)
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert any("loss" in entry for entry in trainer.state.log_history)
    assert not any("grad_norm" in entry for entry in trainer.state.log_history)


def test_an_examples_loss_does_not_depend_on_the_others():
    logits, labels = torch.randn(3, 5, 4), torch.randint(0, 4, (3, 5))
    labels[0, 2:], labels[1] = -100, -100
    together = token_losses({"logits": logits}, labels)
    with pytest.raises(QuellError, match="the model's outputs have no logits"):
        token_losses(logits, labels)
    alone = torch.cat([token_losses({"logits": logits[i : i + 1]}, labels[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone)
    assert together[1] == 0
    torch.testing.assert_close(together[0], torch.nn.functional.cross_entropy(logits[0, :2], labels[0, :2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train_epochs": 3}, "pass num_train_epochs=2"),
        ({"max_steps": 11}, "the plan covers 10 steps: pass max_steps=10, or make a plan for more"),
        ({"save_only_model": True, "save_strategy": "steps"}, "checkpoints from which the run cannot go on"),
        ({"fp16": True}, "use bf16"),
        ({"label_smoothing_factor": 0.1}, "pass example_losses"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha makes noise by the length"),
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        ({"include_num_input_tokens_seen": True}, "how long the private examples are"),
    ],
)
def test_arguments_that_would_break_the_promise_are_refused(plan, tmp_path, options, message):
    with pytest.raises(QuellError, match=message):
        trainer_of(bert(), tmp_path, plan, None, options)


def test_a_plan_that_is_none_is_named(tmp_path):
    with pytest.raises(QuellError, match=r"plan is a NoneType: pass what quell\.plan"):
        trainer_of(bert(), tmp_path, None)


def test_the_reduction_of_the_loss_is_not_an_option(plan, tmp_path):
    with pytest.raises(QuellError, match="pass example_losses"):
        trainer_of(bert(), tmp_path, plan, {"loss_reduction": "sum"})


def test_a_loss_of_ones_own_is_declared_per_example(plan, tmp_path):
    class Summed(PrivateTrainer):
        def compute_loss(self, *arguments, **options):
            return 8 * super().compute_loss(*arguments, **options)

    with pytest.raises(QuellError, match=r"Summed overrides compute_loss.* pass example_losses="):
        trainer_of(bert(), tmp_path, plan, kind=Summed)


def test_training_losses_are_not_published(plan, tmp_path):
    trainer = trainer_of(bert(), tmp_path, plan)
    with pytest.raises(QuellError, match=r"push what is private, the model: trainer\.model\.push_to_hub"):
        trainer.push_to_hub()
    with pytest.raises(QuellError, match="lists training losses"):
        trainer.create_model_card()
    trainer.args.push_to_hub = True
    assert any("training losses in its model card and logs" in said for said in trainer._problems(trainer.args))


def test_a_loss_that_is_not_per_example_is_refused(plan, tmp_path):
    trainer = trainer_of(bert(), tmp_path, plan)
    trainer.example_losses = lambda outputs, labels: torch.nn.functional.cross_entropy(outputs["logits"], labels)
    with pytest.raises(QuellError, match="return one loss for each"):
        trainer.train()
    with pytest.raises(QuellError, match="call train"):
        trainer_of(bert(), tmp_path, plan).privacy_report()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "quell.torch.huggingface")
    with pytest.raises(QuellError, match=r"needs transformers and accelerate: pip install 'quell\[trainers\]'"):
        importlib.import_module("quell.torch.huggingface")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"is_deepspeed_enabled": True}, "DeepSpeed is not supported"),
        ({"is_fsdp_enabled": True}, r"FSDP1 .* fsdp_config=\{'version': 2\}"),  # accelerate shards nothing on a CPU
        ({"is_distributed_loading_by_transformers": True}, "was sharded when it was loaded"),
    ],
)
def test_ways_to_shard_that_are_refused(state, message, plan, tmp_path):
    trainer = trainer_of(bert(), tmp_path, plan)
    vars(trainer).update(state)
    assert any(re.search(message, said) for said in trainer._problems(trainer.args))
