"""LoRA adapters of BERT on IMDB's reviews, with Hugging Face's Trainer. Needs datasets and peft.

python examples/bert_lora.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import quell
from quell.torch.huggingface import PrivateTrainer

NAME = "bert-base-uncased"


class Reviews(Dataset):
    """Made-up reviews: the first word decides."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(1, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens[0] % 2}


def imdb() -> Dataset:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(NAME)
    texts = load_dataset("imdb", split="train").rename_column("label", "labels")
    options = {"truncation": True, "max_length": 256, "padding": "max_length"}
    return texts.map(lambda row: tokenizer(row["text"], **options), remove_columns=["text"]).with_format("torch")


def main(small: bool = False) -> float:
    reviews, tiny = Reviews() if small else imdb(), {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    if small:
        model = BertForSequenceClassification(BertConfig(vocab_size=50, num_attention_heads=2, **tiny))
    else:
        model = BertForSequenceClassification.from_pretrained(NAME, num_labels=2)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"]))
    plan = quell.plan(
        examples=len(reviews),
        batch_size=24 if small else 1000,
        epochs=2 if small else 4,
        epsilon=3,
        delta=1e-5,
        optimizer="adamw",
        sampling="cyclic" if small else "best",
    )
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=plan.epochs,
        per_device_train_batch_size=12 if small else 50,  # what fits into memory; a step is the plan's batch
        max_grad_norm=0.1,  # of every example's gradient
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = PrivateTrainer(model, arguments, train_dataset=reviews, plan=plan)
    trainer.train()
    print(trainer.privacy_report())
    return trainer.privacy_report().steps_done / plan.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny BERT on made-up reviews")
    main(parser.parse_args().small)
