"""Adapters of peft: the only thing that trains, with the per-example gradients of autograd."""

from __future__ import annotations

import pytest
import torch

from quell.errors import QuellError
from quell.noise import Key, Ledger, claims
from quell.torch import make_private
from quell.torch.huggingface import PrivateTrainer
from tests.pytorch.architectures import batch_for, check_gradients, losses, tiny
from tests.pytorch.conftest import small_plan
from tests.pytorch.test_huggingface import Stop, arguments
from tests.pytorch.training import without_noise

peft = pytest.importorskip("peft", reason="peft is not installed")


def lora(*layers, **options):
    return lambda: peft.LoraConfig(r=2, lora_alpha=4, target_modules=list(layers), **options)


def prompt(kind, **options):
    return lambda: getattr(peft, kind)(num_virtual_tokens=3, **options)


CAUSAL = {"task_type": "CAUSAL_LM"}
ADAPTERS = {
    "LoRA, linear": ("Llama", lora("q_proj", "v_proj", "down_proj")),
    "LoRA, BERT with its head": ("BERT", lora("query", "value", task_type="SEQ_CLS")),
    "LoRA, Conv1D": ("GPT-2", lora("c_attn", fan_in_fan_out=True)),
    "LoRA, convolution": ("ViT", lora("projection", "query", modules_to_save=["classifier"])),
    "LoRA, embedding": ("Llama", lora("embed_tokens", "q_proj")),
    "LoRA, tied embedding": ("GPT-2", lora("wte")),
    "LoRA, T5": ("T5", lora("q", "v")),
    "DoRA": ("Llama", lora("q_proj", "v_proj", use_dora=True)),
    "DoRA, Conv1D": ("GPT-2", lora("c_attn", fan_in_fan_out=True, use_dora=True)),
    "DoRA, embedding": ("Llama", lora("embed_tokens", use_dora=True)),
    "IA³": (
        "Llama",
        lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    ),
    "prompt tuning": ("Llama", prompt("PromptTuningConfig", **CAUSAL)),
    "prompt tuning, BERT": ("BERT", prompt("PromptTuningConfig", task_type="SEQ_CLS")),
    "P-tuning": ("Llama", prompt("PromptEncoderConfig", encoder_hidden_size=8, **CAUSAL)),
    "prefix tuning": ("GPT-2", prompt("PrefixTuningConfig", **CAUSAL)),
    "prefix tuning, projected": (
        "Llama",
        prompt("PrefixTuningConfig", prefix_projection=True, encoder_hidden_size=8, **CAUSAL),
    ),
}


def adapted(name):
    base, config = ADAPTERS[name]
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny(base), config())
    for parameter in model.parameters():  # what starts at zero would hide the gradients of its neighbours
        if parameter.requires_grad and not parameter.any():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return base, model.train()


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_have_the_gradients_of_autograd(name):
    check_gradients(*adapted(name))


class Examples(torch.utils.data.Dataset):
    def __init__(self, name):
        self.inputs, self.labels = batch_for(name, 40)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {name: value[index] for name, value in self.inputs.items()}, self.labels[index]


@pytest.mark.parametrize("name", ["LoRA, linear", "IA³", "prompt tuning"])
def test_adapters_alone_move_as_without_noise(name):
    """A few steps with practically no noise are plain steps of the adapter; nothing else changes."""
    base, model = adapted(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.3)
    data, plan = Examples(base), without_noise(small_plan())
    _, private, loader = make_private(model, optimizer, data, plan, 1e3)
    for _, (inputs, labels) in zip(range(3), loader, strict=False):
        private.zero_grad()
        losses(base, model(**inputs), labels).mean().backward()
        private.step()
    _, plain = adapted(name)
    plain_trained = [p for p in plain.parameters() if p.requires_grad]
    stepped = torch.optim.SGD(plain_trained, lr=0.3)
    for _, batch in zip(range(3), private.run.batches.starting(0), strict=False):
        stepped.zero_grad()
        chosen = {key: value[torch.as_tensor(batch)] for key, value in data.inputs.items()}
        losses(base, plain(**chosen), data.labels[torch.as_tensor(batch)]).mean().backward()
        stepped.step()
    for (key, ours), theirs in zip(trained.items(), plain_trained, strict=True):
        assert not torch.equal(ours, before[key])
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    for key, value in model.state_dict().items():
        if not any(key == own for own in trained):
            assert torch.equal(value, before[key])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_trainer_saves_and_resumes_adapters(plan, tmp_path):
    """Checkpoints hold the adapter alone; a run that was stopped goes on from them as if it had not been."""
    found = []
    for number, stop in enumerate((None, 4, None)):
        claims._claims.clear()
        folder = tmp_path / ("straight" if number == 0 else "stopped")
        key = tmp_path / f"{folder.name}.key"
        if not key.exists():
            (Key.load(tmp_path / "straight.key") if number else Key.generate()).save(key)
            Ledger(key.with_name(key.name + ".ledger")).close()
        _, model = adapted("LoRA, linear")
        saving = arguments(folder, save_strategy="steps", save_steps=3)
        trainer = PrivateTrainer(model, saving, train_dataset=Words(), plan=plan, private={"key": key})
        if stop is None:
            trainer.train(resume_from_checkpoint=number == 2)
        else:
            trainer.add_callback(Stop(stop))
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        trainer.optimizer.close()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert not list(folder.glob("checkpoint-3/model*.safetensors"))
    assert (folder / "checkpoint-3" / "adapter_model.safetensors").exists()


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_checkpoint_of_adapters_is_resumed_with_adapters(plan, tmp_path):
    """Trainer would look for the index of a model in pieces, and say that it is missing."""
    saving = arguments(tmp_path / "run", save_strategy="steps", save_steps=3)
    trainer = PrivateTrainer(adapted("LoRA, linear")[1], saving, train_dataset=Words(), plan=plan)
    trainer.add_callback(Stop(4))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.optimizer.close()
    files = {path.name: path.read_bytes() for path in tmp_path.glob("run.key*")}
    claims._claims.clear()
    for checkpoint in (True, str(tmp_path / "run" / "checkpoint-3")):
        plain = PrivateTrainer(tiny("Llama"), saving, train_dataset=Words(), plan=plan)
        with pytest.raises(QuellError, match=r"checkpoint-3 has adapters \(LoRA\), and the model has none: add them"):
            plain.train(resume_from_checkpoint=checkpoint)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("run.key*")} == files
    trainer = PrivateTrainer(adapted("LoRA, linear")[1], saving, train_dataset=Words(), plan=plan)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.privacy_report().steps_done == plan.steps


class Words(Examples):
    def __init__(self):
        super().__init__("Llama")

    def __getitem__(self, index):
        inputs, labels = super().__getitem__(index)
        return {**inputs, "labels": labels}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Llama", lora(target_parameters=["q_proj.weight"]), "peft: target_modules, not target_parameters"),
        ("Llama", lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"]), "if both ways refuse a layer, freeze it"),
        ("BERT", lora("position_embeddings"), "needs one row per example.* freeze it"),
    ],
)
def test_what_to_do_about_adapters_that_are_refused(name, config, message):
    model = peft.get_peft_model(tiny(name), config())
    data = torch.utils.data.TensorDataset(torch.randint(5, 30, (40, 6)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, data, small_plan())
    (tokens,) = next(iter(loader))

    def step():
        model(input_ids=tokens).logits.square().flatten(1).mean(1).mean().backward()
        optimizer.step()

    with pytest.raises(QuellError, match=message):
        step()
