"""PrivateTrainer with the habits that people have: collators, parts, tasks, evaluation, checkpoints."""

from __future__ import annotations

import copy
import logging
import shutil
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import quell
from quell.budget import Budget
from quell.errors import QuellError
from quell.noise import Key, Ledger, claims
from quell.torch import PlanMismatchWarning, make_private
from quell.torch.folders import is_whole_folder, mark_whole
from tests.pytorch.architectures import LENGTH, SPECIAL, WORDS, tiny, transformers
from tests.pytorch.conftest import small_plan, unpriced_poisson_plan
from tests.pytorch.test_huggingface import Stop, arguments
from tests.pytorch.training import seeded, without_noise

from quell.torch.huggingface import PrivateTrainer  # isort: skip - skipped without transformers
from quell.torch.losses import losses_for, span_losses  # isort: skip


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({str(number): number for number in range(WORDS)}, unk_token="3"))
    special = {"pad_token": "0", "bos_token": "1", "eos_token": "2", "mask_token": "4"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=LENGTH, **special)


class Sentences(Dataset):
    """Sentences of different lengths, as a tokenizer leaves them: lists that a collator has to pad."""

    def __init__(self, name, count=40):
        maker = np.random.default_rng(2)
        self.tokens = [maker.integers(5, WORDS, maker.integers(2, LENGTH)).tolist() for _ in range(count)]
        self.name = name

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        found = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
        if self.name == "T5":
            return {**found, "labels": tokens[::-1]}
        return {**found, "label": tokens[0] % 3} if self.name == "BERT" else found


def collator(name, tokenizer, model=None):
    if name == "T5":
        return transformers.DataCollatorForSeq2Seq(tokenizer)
    if name == "BERT":
        return transformers.DataCollatorWithPadding(tokenizer)
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)


def trainer_of(name, folder, plan, tokenizer, options=None, private=None, model=None, count=40, **more):
    return PrivateTrainer(
        model or tiny(name),
        arguments(folder, **(options or {})),
        data_collator=collator(name, tokenizer),
        train_dataset=Sentences(name, count),
        processing_class=tokenizer,
        plan=plan,
        private=private,
        **more,
    )


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def by_hand(name, data, batches, collate, expected, rate, bound=1e3):
    """Clipped SGD by transformers' own loss, one unpadded example at a time."""
    model = tiny(name)
    trained = list(model.parameters())
    for batch in batches:
        total = [torch.zeros_like(p) for p in trained]
        for index in batch:
            model.zero_grad()
            model(**collate([data[index]])).loss.backward()
            for found, p in zip(total, trained, strict=True):
                found += p.grad
        with torch.no_grad():
            for found, p in zip(total, trained, strict=True):
                p -= rate * found / expected
    return torch.cat([p.detach().flatten() for p in trained])


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5"])
def test_collators_as_they_are_and_a_loss_that_fits_the_task(name, tmp_path, tokenizer):
    """Without noise, a step is plain SGD by the model's own loss of each example alone: padding changes nothing."""
    plan = without_noise(small_plan())
    trainer = trainer_of(name, tmp_path, plan, tokenizer, {"max_steps": 2, "max_grad_norm": 1e3})
    assert trainer.train().global_step == 2
    batches = [batch for _, batch in zip(range(2), trainer.optimizer.run.batches.starting(0), strict=False)]
    expected = by_hand(name, trainer.train_dataset, batches, collator(name, tokenizer), 8, trainer.args.learning_rate)
    torch.testing.assert_close(weights(trainer), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:the plan's noise is shaped for SGD")
def test_options_of_make_private_that_are_recipes(tmp_path, tokenizer):
    """AdamW with scaled and normalised gradients, a tied embedding among them, and averaged weights to evaluate."""
    private = {"max_grad_norm": "automatic", "ema": 0.5, "scale_gradients": True}
    options = {"max_steps": 3, "optim": "adamw_torch"}
    trainer = trainer_of(
        "GPT-2", tmp_path, small_plan(), tokenizer, options, private, eval_dataset=Sentences("GPT-2", 8)
    )
    trainer.train()
    assert trainer.optimizer.max_grad_norm == 1.0
    assert float(trainer.optimizer._engine.scales["transformer.wte.weight"].rows.std()) > 0
    last, plain = weights(trainer), trainer.evaluate()["eval_loss"]
    with trainer.optimizer.averaged():
        assert trainer.evaluate()["eval_loss"] != plain
        assert not torch.equal(weights(trainer), last)
    assert torch.equal(weights(trainer), last)


TASKS = [
    ("BertForSequenceClassification", {"num_labels": 1}, {"labels": torch.randn(3)}),
    (
        "BertForSequenceClassification",
        {"num_labels": 4, "problem_type": "multi_label_classification"},
        {"labels": torch.randint(0, 2, (3, 4)).float()},
    ),
    (
        "BertForSequenceClassification",
        {"num_labels": 4, "problem_type": "regression"},
        {"labels": torch.randn(3, 4)},
    ),
    ("BertForSequenceClassification", {"num_labels": 4}, {"labels": torch.tensor([0, 3, 1])}),
    ("BertForTokenClassification", {"num_labels": 4}, {"labels": torch.tensor([[1, -100, 2, 0, 3]] * 3)}),
    ("BertForMaskedLM", {}, {"labels": torch.tensor([[-100, 7, -100, -100, 9]] * 3)}),
    ("BertForMultipleChoice", {}, {"labels": torch.tensor([0, 1, 1])}),
    (
        "BertForQuestionAnswering",
        {},
        {"start_positions": torch.tensor([0, 2, 4]), "end_positions": torch.tensor([1, 4, 3])},
    ),
    ("LlamaForCausalLM", {}, {"labels": torch.tensor([[-100, 7, 8, -100, 9]] * 3)}),
    ("LlamaForSequenceClassification", {"num_labels": 4}, {"labels": torch.tensor([0, 3, 1])}),
]


@pytest.mark.parametrize(("kind", "options", "labels"), TASKS)
def test_losses_are_the_models_own_of_each_example_alone(kind, options, labels):
    family = "Bert" if kind.startswith("Bert") else "Llama"
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **SPECIAL}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, intermediate_size=8, **options)
    model = getattr(transformers, kind)(config).eval()
    tokens = torch.randint(5, WORDS, (3, 2, 5) if "Choice" in kind else (3, 5))
    together = model(input_ids=tokens)
    found = losses_for(model)(together, labels if len(labels) > 1 else labels["labels"])
    for row in range(3):
        alone = model(input_ids=tokens[row : row + 1], **{name: value[row : row + 1] for name, value in labels.items()})
        torch.testing.assert_close(found[row], alone.loss, rtol=1e-4, atol=1e-5)


class OwnClassifier(transformers.BertForSequenceClassification):
    """A name of one's own."""


def test_the_task_of_a_subclass_and_of_images():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    model = OwnClassifier(transformers.BertConfig(vocab_size=WORDS, num_labels=1, **sizes)).eval()
    tokens, labels = torch.randint(5, WORDS, (3, 5)), torch.randn(3)
    own = model(input_ids=tokens, labels=labels)
    torch.testing.assert_close(losses_for(model)(own, labels).mean(), own.loss)
    several = {"num_labels": 4, "problem_type": "multi_label_classification"}
    config = transformers.ViTConfig(image_size=8, patch_size=4, **sizes, **several)
    model, labels = transformers.ViTForImageClassification(config).eval(), torch.randint(0, 2, (3, 4)).float()
    own = model(torch.randn(3, 3, 8, 8), labels=labels)
    torch.testing.assert_close(losses_for(model)(own, labels).mean(), own.loss)
    with pytest.raises(QuellError, match=r"shape \(3, 4\) and the labels \(3,\): give one number to each logit"):
        losses_for(model)(own, labels[:, 0])


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_several_choices_are_rows_of_one_example(clipping, plan, tmp_path):
    """The model makes a row of every choice, which "layers" cannot follow."""
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=8, attn_implementation="eager")
    data = [{"input_ids": torch.randint(5, WORDS, (3, 6)), "labels": number % 3} for number in range(40)]
    trainer = PrivateTrainer(
        transformers.BertForMultipleChoice(config),
        arguments(tmp_path, max_steps=1),
        train_dataset=data,
        plan=plan,
        private={"clipping": clipping},
    )
    if clipping == "microbatch":
        assert trainer.train().global_step == 1
    else:
        with pytest.raises(QuellError, match=r"gets 24 rows from 8 examples.* try clipping='microbatch'"):
            trainer.train()


def test_answers_that_were_cut_off_do_not_count():
    outputs = {"start_logits": torch.randn(1, 5), "end_logits": torch.randn(1, 5)}
    found = span_losses(outputs, {"start_positions": torch.tensor([7]), "end_positions": torch.tensor([1])})
    torch.testing.assert_close(found, functional.cross_entropy(outputs["end_logits"], torch.tensor([1]))[None] / 2)


def test_outputs_without_logits_want_a_loss_of_ones_own():
    with pytest.raises(QuellError, match="PrivateTrainer example_losses=, a function"):
        losses_for(torch.nn.Linear(1, 1))({"embedding": torch.zeros(2, 3)}, torch.zeros(2))
    with pytest.raises(QuellError, match="give one label to each"):
        losses_for(torch.nn.Linear(1, 1))({"logits": torch.zeros(2, 3, 4)}, torch.zeros(2).long())


class SFTTrainer(transformers.Trainer):
    """As TRL's: the loss is that of the model's task, computed in a way of its own."""

    def compute_loss(self, *arguments, **options):
        raise AssertionError("the trainer's own loss is that of a whole batch")


class DPOTrainer(SFTTrainer):
    def compute_loss(self, *arguments, **options):
        raise AssertionError


def test_trainers_whose_loss_is_that_of_the_task(tmp_path, tokenizer):
    class Private(PrivateTrainer, SFTTrainer):
        pass

    class Other(PrivateTrainer, DPOTrainer):
        pass

    given = {"train_dataset": Sentences("GPT-2"), "data_collator": collator("GPT-2", tokenizer), "plan": small_plan()}
    assert Private(tiny("GPT-2"), arguments(tmp_path, max_steps=1), **given).train().global_step == 1
    with pytest.raises(
        QuellError, match="DPOTrainer, SFTTrainer computes a loss of its own, which PrivateTrainer would"
    ):
        Other(tiny("GPT-2"), arguments(tmp_path), **given)
    for name, value, message in (
        ("packing", True, "several examples into one row"),
        ("loss_type", "dft", "loss_type='d"),
    ):
        odd = arguments(tmp_path)
        setattr(odd, name, value)
        with pytest.raises(QuellError, match=message):
            Private(tiny("GPT-2"), odd, **given)


# Padding


def padded(name, tokenizer, side, **options):
    """A collator that pads on this side."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    if name == "BERT":
        return transformers.DataCollatorWithPadding(tokenizer, **options)
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm=name == "BERT, masked words", **options)


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "BERT, masked words", "Llama"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_moves_examples_to_other_positions_is_refused(name, side, tmp_path, tokenizer):
    """Learned positions, also where the collator masks words at random. Rotary positions are relative."""
    options = {"max_steps": 1, "bf16": name == "GPT-2"}
    trainer = trainer_of(name, tmp_path, small_plan(), tokenizer, options)
    trainer.data_collator = padded(name, tokenizer, side)
    if side == "left" and name != "Llama":
        with pytest.raises(QuellError, match=r"pads it to the length of a longer one.*tokenizer\.padding_side='right'"):
            trainer.train()
    else:
        assert trainer.train().global_step == 1


@pytest.mark.parametrize(
    ("more", "size"), [({"pad_to_multiple_of": LENGTH}, 8), ({}, 1)], ids=["one length", "one by one"]
)
def test_padding_on_the_left_that_does_not_depend_on_others(more, size, tmp_path, tokenizer):
    options = {"max_steps": 1, "per_device_train_batch_size": size}
    trainer = trainer_of("GPT-2", tmp_path, small_plan(), tokenizer, options)
    trainer.data_collator = padded("GPT-2", tokenizer, "left", **more)
    assert trainer.train().global_step == 1


def test_the_first_token_is_not_predicted_from_padding(tmp_path, tokenizer):
    """Padding on the left changes nothing: each example's loss is that of its own tokens."""
    found = []
    for side in ("left", "right"):
        claims._claims.clear()
        plan, options = without_noise(small_plan()), {"max_steps": 2, "max_grad_norm": 1e3}  # which clips nothing
        trainer = trainer_of("Llama", tmp_path, plan, tokenizer, options, {"key": seeded(5)})
        trainer.data_collator = padded("Llama", tokenizer, side)
        trainer.model.get_input_embeddings().weight.data[0] = 1.0  # of padding: zeros would have no gradient
        trainer.train()
        found.append(weights(trainer))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


LONGROPE = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 4}


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 4),
        ({**LONGROPE, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}, 4),
        ({**LONGROPE, "short_factor": [4.0] * 4, "long_factor": [4.0] * 4}, 9),
    ],
)
def test_rotary_frequencies_that_follow_the_longest_example_are_refused(rope, most):
    """Where no example of a batch is longer than that they are fixed."""
    model = tiny("Llama", max_position_embeddings=4, rope_parameters=rope)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randint(5, WORDS, (40, 9)))
    model, optimizer, loader = make_private(model, optimizer, data, small_plan())
    (tokens,) = next(iter(loader))
    if most < 9:
        with pytest.raises(QuellError, match=r"longest has more than 4 tokens.* truncate examples to 4 tokens"):
            model(tokens)
        with torch.no_grad():
            model(tokens)  # to evaluate is everyone's own matter
    losses_for(model)(model(tokens[:, :most]), tokens[:, :most]).mean().backward()
    optimizer.step()


# Parts of batches


def test_every_planned_step_is_taken_where_batches_have_random_sizes(tmp_path, tokenizer):
    """Also empty ones, on which BERT cannot run; parts are one step, whatever their size."""
    plan = without_noise(unpriced_poisson_plan())
    found = []
    for number, physical in enumerate((1, 50)):
        options = {"per_device_train_batch_size": physical, "lr_scheduler_type": "linear"}
        claims._claims.clear()
        private = {"key": seeded(5)}
        trainer = trainer_of("BERT", tmp_path / str(number), plan, tokenizer, options, private, count=12)
        with pytest.warns(PlanMismatchWarning, match="learning rate"):
            assert trainer.train().global_step == plan.steps
        assert trainer.privacy_report().steps_done == plan.steps
        found.append(weights(trainer))
    sizes = [len(batch) for _, batch in zip(range(plan.steps), trainer.optimizer.run.batches.starting(0), strict=False)]
    assert 0 in sizes
    assert max(sizes) > 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_accumulation_is_taken_as_parts(tmp_path, tokenizer, caplog):
    """Steps, schedules and logs count planned batches of 8, four of which are on the device at a time."""
    plan = without_noise(small_plan())
    straight = trainer_of("BERT", tmp_path, plan, tokenizer, {"max_steps": 3})
    straight.train()
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "log_level": "info"}
    parts = trainer_of("BERT", tmp_path, plan, tokenizer, options, {"key": straight.optimizer.run.noise.key})
    seen = []
    parts.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    claims._claims.clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    assert parts.train().global_step == 3
    logger.removeHandler(caplog.handler)
    assert max(seen) == 2
    assert "Total train batch size (w. parallel, distributed & accumulation) = 8" in caplog.text
    assert "Instantaneous batch size per device = 2" in caplog.text
    torch.testing.assert_close(weights(parts), weights(straight), rtol=1e-4, atol=1e-6)
    with pytest.warns(PlanMismatchWarning, match=r"processes is 4, but the plan's batches have 8 examples"):
        trainer_of("BERT", tmp_path, plan, tokenizer, {**options, "gradient_accumulation_steps": 2})


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpoints_change_nothing(reentrant, tmp_path, tokenizer):
    found = []
    for options in (
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}},
    ):
        claims._claims.clear()
        private = {"key": seeded(5)}
        trainer = trainer_of("Llama", tmp_path, small_plan(), tokenizer, {"max_steps": 2, **options}, private)
        if options and reentrant:
            trainer.model.enable_input_require_grads()
        trainer.train()
        found.append(weights(trainer))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


# Evaluation


def test_evaluation_metrics_best_model_and_early_stopping(plan, tmp_path, tokenizer):
    scores = iter([0.1, 0.9, 0.5, 0.4])
    trainer = trainer_of(
        "BERT",
        tmp_path / "run",
        plan,
        tokenizer,
        {
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "score",
            "greater_is_better": True,
            "save_total_limit": 2,
        },
        eval_dataset=Sentences("BERT", 10),
        compute_metrics=lambda predicted: {"score": next(scores), "rows": len(predicted.label_ids)},
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    )
    assert trainer.train().global_step == 8  # two evaluations after the best one
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    assert trainer.privacy_report().steps_done == 8
    assert any(entry.get("eval_rows") == 10 for entry in trainer.state.log_history)
    best = tiny("BERT").from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), best.parameters(), strict=True))
    with pytest.raises(QuellError, match="every trial of a search is a run on the private data"):
        trainer.hyperparameter_search()


# Checkpoints


SAVING = {"save_strategy": "steps", "save_steps": 3, "logging_strategy": "steps", "logging_steps": 1}


def crashed(folder, plan, tokenizer, step):
    claims._claims.clear()
    trainer = trainer_of("BERT", folder, plan, tokenizer, SAVING, model=tiny("BERT", hidden_dropout_prob=0.2))
    trainer.add_callback(Stop(step))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.optimizer.close()
    return trainer


def resumed(folder, plan, tokenizer, checkpoint=True):
    claims._claims.clear()
    torch.manual_seed(5)  # what Trainer and checkpoint do not set would show
    trainer = trainer_of("BERT", folder, plan, tokenizer, SAVING, model=tiny("BERT", hidden_dropout_prob=0.2))
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.optimizer.close()
    return trainer


def tear(folder):
    (folder / "quell.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(("step", "damage"), [(2, None), (7, tear)])
def test_a_crash_is_resumed_as_in_the_plain_trainer(step, damage, plan, tmp_path, tokenizer):
    """Also before the first checkpoint, and where the last one was cut off."""
    folder = tmp_path / "run"
    crashed(folder, plan, tokenizer, step)
    key = (tmp_path / "run.key").read_bytes()
    if damage is not None:
        damage(folder / "checkpoint-6")
        with pytest.raises(QuellError, match=r"checkpoint-6 is not a whole checkpoint .* resume_from_checkpoint=True"):
            resumed(folder, plan, tokenizer, str(folder / "checkpoint-6"))
        with pytest.warns(UserWarning, match="checkpoint-6 was not written to its end"):
            trainer = resumed(folder, plan, tokenizer)
    else:
        trainer = resumed(folder, plan, tokenizer)
    assert trainer.privacy_report().steps_done == plan.steps
    logged = [(entry["step"], entry["epoch"]) for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [(number, pytest.approx(number / 5)) for number in range(1, 11)]
    claims._claims.clear()
    shutil.rmtree(folder)
    straight = trainer_of(
        "BERT",
        folder,
        plan,
        tokenizer,
        SAVING,
        {"key": Key(Key.load(tmp_path / "run.key").reveal())},
        model=tiny("BERT", hidden_dropout_prob=0.2),
    )
    straight.train()
    assert torch.equal(weights(straight), weights(trainer))
    assert (tmp_path / "run.key").read_bytes() == key


def test_a_new_run_has_a_new_key(plan, tmp_path, tokenizer):
    folder = tmp_path / "run"
    crashed(folder, plan, tokenizer, 4)
    first = (tmp_path / "run.key").read_bytes()
    with pytest.warns(UserWarning, match=r"has released 4 steps with the key .*the promises of both add up"):
        crashed(folder, plan, tokenizer, 0)
    assert (tmp_path / "run.key").read_bytes() != first
    assert (tmp_path / "run.key.1").read_bytes() == first
    with Ledger(tmp_path / "run.key.1.ledger") as ledger:
        assert ledger.released == 4
    crashed(folder, plan, tokenizer, 1)  # nothing was released with the second key
    assert not (tmp_path / "run.key.2").exists()
    assert not list(folder.glob("*.key"))  # what is published lies in the folder
    with pytest.raises(QuellError, match="has no whole checkpoint of PrivateTrainer: call train"):
        resumed(tmp_path / "elsewhere", plan, tokenizer)


def files_beside(folder):
    return {path.name: path.read_bytes() for path in folder.parent.glob(f"{folder.name}.key*")}


def refused(folder, plan, tokenizer, match, resume=None, side="right", **more):
    """A start that ends in an error leaves the keys beside the folder as they were, and warns of no second run."""
    claims._claims.clear()
    before = files_beside(folder)
    more = {"model": tiny("BERT", hidden_dropout_prob=0.2), "options": SAVING, **more}
    trainer = trainer_of("BERT", folder, plan, tokenizer, **more)
    trainer.data_collator = padded("BERT", tokenizer, side)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "an earlier run")
        with pytest.raises(QuellError, match=match):
            trainer.train(resume_from_checkpoint=resume)
    assert files_beside(folder) == before


@pytest.mark.parametrize("what", ["data of another size", "a budget without room", "padding that counts"])
def test_a_start_that_is_refused_leaves_a_killed_run_as_it_was(what, tmp_path, tokenizer):
    """Whoever forgot resume_from_checkpoint, and was refused, can still resume."""
    sizes = {"examples": 40, "batch_size": 8, "epochs": 2, "epsilon": 2.0, "delta": 1e-3}
    plan, folder = quell.plan(**sizes, sampling="cyclic", memory=0, draws=1), tmp_path / "run"
    crashed(folder, plan, tokenizer, 4)
    assert set(files_beside(folder)) == {"run.key", "run.key.ledger"}
    for _ in range(2):
        if what == "a budget without room":
            budget = Budget.create(tmp_path / "small", name="x", epsilon=1.0, delta=1e-3).path
            refused(folder, plan, tokenizer, "does not suffice", private={"budget": budget})
            budget.unlink()
        elif what == "padding that counts":
            refused(folder, plan, tokenizer, "padding_side='right'", side="left")
        else:
            refused(folder, plan, tokenizer, "41 examples", count=41)
    trainer = resumed(folder, plan, tokenizer)
    assert trainer.privacy_report().steps_done == plan.steps
    assert set(files_beside(folder)) == {"run.key", "run.key.ledger"}


def test_a_first_start_that_is_refused_hinders_no_other(plan, tmp_path, tokenizer):
    folder = tmp_path / "deep" / "run"
    with pytest.raises(QuellError, match="41 examples"):
        trainer_of("BERT", folder, plan, tokenizer, SAVING, count=41).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "an earlier run")
        crashed(folder, plan, tokenizer, 4)
    assert set(files_beside(folder)) == {"run.key", "run.key.ledger"}


@pytest.mark.filterwarnings("ignore:an earlier run has released")
def test_a_run_is_not_resumed_without_its_key(plan, tmp_path, tokenizer):
    folder = tmp_path / "run"
    for _ in range(2):
        crashed(folder, plan, tokenizer, 4)
    names = ("run.key", "run.key.ledger")
    for name in names:
        (tmp_path / name).rename(tmp_path / f"kept-{name}")
    for checkpoint in (True, str(folder / "checkpoint-3")):
        refused(folder, plan, tokenizer, r"run\.key of the run is missing \(run\.key\.1 beside it", checkpoint)
    for name in names:
        (tmp_path / name.replace("key", "key.1")).unlink()
    refused(folder, plan, tokenizer, r"run\.key of the run is missing: restore it and its ledger", True)
    assert not files_beside(folder)
    for name in names:
        (tmp_path / f"kept-{name}").rename(tmp_path / name)
    assert resumed(folder, plan, tokenizer).privacy_report().steps_done == plan.steps


def test_a_key_that_has_lost_its_ledger_is_kept(plan, tmp_path, tokenizer):
    """Nobody knows whether it released anything."""
    folder = tmp_path / "run"
    crashed(folder, plan, tokenizer, 4)
    key = (tmp_path / "run.key").read_bytes()
    (tmp_path / "run.key.ledger").unlink()
    refused(folder, plan, tokenizer, "padding_side='right'", side="left")  # when there is a new key, with a ledger
    with pytest.warns(UserWarning, match="an earlier run has released steps with the key"):
        crashed(folder, plan, tokenizer, 4)
    assert (tmp_path / "run.key.1").read_bytes() == key
    assert (tmp_path / "run.key").read_bytes() != key


@pytest.mark.filterwarnings("ignore:the plan's noise is shaped for SGD")
def test_a_run_goes_on_with_its_own_optimizer(plan, tmp_path, tokenizer):
    folder = tmp_path / "run"
    crashed(folder, plan, tokenizer, 4)
    match = r"saved with optimizer=SGD and this run has optimizer=AdamW: pass what that run was given"
    refused(folder, plan, tokenizer, match, True, options={**SAVING, "optim": "adamw_torch"})
    assert resumed(folder, plan, tokenizer).privacy_report().steps_done == plan.steps


def test_labels_that_the_collator_drops_are_asked_for(plan, tmp_path):
    rows = [{"input_ids": torch.arange(5, 9), "labels": "yes"} for _ in range(40)]
    trainer = PrivateTrainer(tiny("BERT"), arguments(tmp_path), train_dataset=rows, plan=plan)
    with pytest.raises(QuellError, match="no labels: call the data set's column of them 'labels', with numbers in it"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:an earlier run has released")
def test_checkpoints_of_another_key_are_passed_over(plan, tmp_path, tokenizer):
    folder = tmp_path / "run"
    crashed(folder, plan, tokenizer, 7)
    crashed(folder, plan, tokenizer, 4)
    with pytest.warns(UserWarning, match="checkpoint-6 is of a run with another key"):
        trainer = resumed(folder, plan, tokenizer)
    assert trainer.privacy_report().steps_done == plan.steps
    Key.generate().save(tmp_path / "other.key")
    claims._claims.clear()
    trainer = trainer_of("BERT", folder, plan, tokenizer, SAVING, {"key": tmp_path / "other.key"})
    with (
        pytest.warns(UserWarning, match="another key"),
        pytest.raises(QuellError, match=r"has no whole checkpoint of this key.* newest checkpoint is checkpoint-10"),
    ):
        trainer.train(resume_from_checkpoint=True)


def test_an_older_checkpoint_stays_until_the_new_one_is_whole(plan, tmp_path, tokenizer, monkeypatch):
    folder, marked = tmp_path / "run", []

    def mark(path):
        assert len(list(folder.glob("checkpoint-*"))) == 1 + bool(marked)
        marked.append(path.name)
        mark_whole(path)

    monkeypatch.setattr("quell.torch.huggingface.mark_whole", mark)
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 4}
    trainer_of("BERT", folder, plan, tokenizer, options).train()
    assert marked == ["checkpoint-0", "checkpoint-2", "checkpoint-4"]
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [None, shorten, lambda path: path.unlink(), lambda path: path.write_bytes(bytes(9))])
@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "quell.json"])
def test_folders_that_were_cut_off_are_noticed(name, damage, tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "optimizer.pt")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert not is_whole_folder(tmp_path)
    mark_whole(tmp_path)
    if damage is not None:
        damage(tmp_path / name)
    assert is_whole_folder(tmp_path) == (damage is None)
