"""TRL, bitsandbytes, timm and sentence-transformers, each where it is installed."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional

from quell.errors import QuellError
from quell.torch import make_private, replace_batch_norm
from quell.torch.engine.layers import LayerEngine
from tests.pytorch.architectures import SPECIAL, WORDS, check_gradients, tiny, transformers
from tests.pytorch.conftest import small_plan
from tests.pytorch.test_layers import clipped
from tests.pytorch.training import without_noise

from quell.torch.huggingface import PrivateTrainer  # isort: skip - skipped without transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's code


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({str(number): number for number in range(WORDS)}, unk_token="3"))
    words.pre_tokenizer = Whitespace()
    special = {"pad_token": "0", "bos_token": "1", "eos_token": "2", "mask_token": "4"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=16, **special)


def sentences(count=40):
    maker = torch.Generator().manual_seed(1)
    return [" ".join(map(str, torch.randint(5, WORDS, (3 + n % 5,), generator=maker).tolist())) for n in range(count)]


def configured(kind, folder, **options):
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    plain = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "num_train_epochs": 2}
    return kind(str(folder), **{**quiet, **plain, "max_grad_norm": 0.5, "per_device_train_batch_size": 4, **options})


@pytest.mark.parametrize("adapter", [False, True])
def test_the_real_sft_trainer(adapter, tmp_path):
    """Its data set, its collator, its defaults; completions alone are learned, as a loop by hand does it."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class PrivateSFTTrainer(PrivateTrainer, trl.SFTTrainer):
        pass

    rows = sentences()
    data = datasets.Dataset.from_dict({"prompt": rows, "completion": [" " + row for row in rows[::-1]]})
    plan, given = without_noise(small_plan()), {}
    if adapter:
        peft = pytest.importorskip("peft")
        given["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = tiny("Llama")
    options = configured(trl.SFTConfig, tmp_path, max_steps=1)
    made = PrivateSFTTrainer(model, options, train_dataset=data, processing_class=tokenizer(), plan=plan, **given)
    trained = [p for p in made.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    made.train()
    assert made.privacy_report().steps_done == 1
    moved = torch.cat([(old - new).flatten() for old, new in zip(before, trained, strict=True)]) / 0.5 * 8
    with torch.no_grad():
        for old, new in zip(before, trained, strict=True):
            new.copy_(old)
    total = torch.zeros_like(moved)
    for index in next(iter(made.optimizer.run.batches.starting(0))):
        (row,) = (made.data_collator([made.train_dataset[int(index)]]),)
        assert (row["labels"] == -100).any()

        def loss(row=row):
            made.model.zero_grad()
            logits = made.model(**{name: value for name, value in row.items() if name != "labels"}).logits
            functional.cross_entropy(logits[0, :-1], row["labels"][0, 1:]).backward()
            return torch.cat([p.grad.flatten() for p in trained])

        gradient = made.optimizer._engine.unwatched(loss)
        total += gradient * min(1.0, 0.5 / float(gradient.norm()))
    torch.testing.assert_close(moved, total, rtol=0, atol=1e-3 * float(total.norm()))


@pytest.mark.parametrize(("kind", "message"), [("nf4", None), ("fp4", None), ("int8", None), ("int8, 6.0", "llm_int8")])
def test_a_frozen_base_of_few_bits(kind, message):
    """Adapters on layers of bitsandbytes have the gradients of autograd, and the base stays as it is."""
    bits, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")

    def small(layer):
        if kind.startswith("int8"):
            threshold = 6.0 if message else 0.0
            made = bits.nn.Linear8bitLt(*layer.weight.shape[::-1], False, has_fp16_weights=False, threshold=threshold)
            made.weight = bits.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            made = bits.nn.Linear4bit(*layer.weight.shape[::-1], False, compute_dtype=torch.float32, quant_type=kind)
            made.weight = bits.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type=kind)
        return made.to("cpu")

    model = tiny("Llama", hidden_size=64, intermediate_size=64)
    for parent in [*model.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, small(child))
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, adapters)
    assert any("bit" in type(module).__name__ for module in model.modules())
    if message is None:
        check_gradients("Llama", model)
    else:
        trained = [p for p in model.parameters() if p.requires_grad]
        data = torch.utils.data.TensorDataset(torch.zeros(40, 3).long())
        with pytest.raises(QuellError, match=message):
            make_private(model, torch.optim.SGD(trained, lr=0.1), data, small_plan())


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_models_of_timm(name):
    try:
        timm = pytest.importorskip("timm")
    except RuntimeError as error:  # torchvision for another build of torch
        pytest.skip(str(error))
    sizes = {"img_size": 32} if name.startswith("vit") else {}
    torch.manual_seed(0)
    model = replace_batch_norm(timm.create_model(name, num_classes=5, drop_rate=0.0, **sizes)).train()
    x, y = torch.randn(3, 3, 32, 32), torch.randint(0, 5, (3,))
    parameters = list(model.parameters())
    alone = [
        torch.autograd.grad(functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters) for i in range(3)
    ]
    bound, expected = clipped(alone)
    engine = LayerEngine(model, dict(model.named_parameters()), bound, "sum")
    functional.cross_entropy(model(x), y, reduction="sum").backward()
    for found, right in zip(engine.collect()[1], expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4 * bound)


def test_an_encoder_of_sentence_transformers(tmp_path):
    """Its own modules and its own cosine similarity; contrasts with other examples' sentences are refused."""
    st = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, **SPECIAL
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    class Pairs(torch.utils.data.Dataset):
        rows, scores = sentences(80), torch.rand(40, generator=torch.Generator().manual_seed(2))

        def __len__(self):
            return 40

        def __getitem__(self, index):
            return self.rows[index], self.rows[79 - index], float(self.scores[index])

    for contrast in (False, True):
        words = modules.Transformer(str(tmp_path / "bert"))
        encoder = st.SentenceTransformer(modules=[words, modules.Pooling(16)], device="cpu").train()

        def collate(examples, encoder=encoder):
            first, second, scores = zip(*examples, strict=True)
            held = ("input_ids", "attention_mask")
            return [
                *({name: encoder.preprocess(list(each))[name] for name in held} for each in (first, second)),
                torch.tensor(scores),
            ]

        data = torch.utils.data.DataLoader(Pairs(), collate_fn=collate)
        words.model.pooler.requires_grad_(False)  # not used by the mean over tokens
        optimizer = torch.optim.SGD([p for p in encoder.parameters() if p.requires_grad], lr=0.1)
        encoder, optimizer, loader = make_private(encoder, optimizer, data, small_plan())
        first, second, scores = next(iter(loader))
        optimizer.zero_grad()
        a, b = (encoder(dict(each))["sentence_embedding"] for each in (first, second))
        if contrast:
            with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
                functional.cross_entropy(20 * a @ b.T, torch.arange(len(a))).backward()
        else:
            (functional.cosine_similarity(a, b) - scores).square().mean().backward()
            optimizer.step()
            assert optimizer.acted
