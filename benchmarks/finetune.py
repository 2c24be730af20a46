"""What private fine-tuning costs through PrivateTrainer, as multiples of Hugging Face's Trainer, in the same run.

    python benchmarks/finetune.py [--device cuda] [--steps 3] [--physical 32] [--markdown FILE] [--tiny]

A decoder of 10⁹ parameters (Llama's architecture, random weights, in bfloat16) is trained by LoRA of rank 16 on all
linear layers, with gradient checkpoints, on sentences of 512 tokens in batches of 512. Both trainers get the same
model, arguments and data; the private one λCGD noise from ChaCha20 for a plan whose batches all have that size. A step
is everything between the ends of two steps. The first steps, in which make_private probes model and loss, are left out
of the times, and shown apart for the memory, which is torch's peak with model, optimizer and data.

It takes about two minutes on an H200.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch.utils.data import Dataset

from quell.planning import Plan, Prices
from quell.run import Run
from quell.torch.huggingface import PrivateTrainer

FIRST = 3  # steps that are not timed: make_private looks more closely at the first three batches
GOALS = (1.25, 1.15)  # step and memory
SIZES = {  # as TinyLlama's
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
}
TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


class Sentences(Dataset[Any]):
    """Random tokens, as a tokenizer leaves them."""

    def __init__(self, count: int, length: int, words: int) -> None:
        self.tokens = torch.randint(3, words, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Clock(transformers.TrainerCallback):
    """When steps ended, and the most memory until the probes were over and after them."""

    def __init__(self, device: str) -> None:
        self.cuda, self.ends, self.peaks = device == "cuda", [], []

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if self.cuda and len(self.ends) == FIRST:
            self.peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, *arguments: Any, **options: Any) -> None:
        self.peaks.append(torch.cuda.max_memory_allocated() if self.cuda else 0)

    def seconds(self) -> float:
        gaps = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        return statistics.median(gaps[FIRST - 1 :])


def model_of(sizes: dict[str, int], device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2)
    with torch.device(device):
        base = transformers.LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora)


def plan_of(batch: int, steps: int) -> Plan:
    # Cyclic batches of data that they divide all have the same size, which is what the other trainer is given.
    promised = {"epsilon": 8.0, "delta": 1e-6, "adaptive": True, "sampling": "cyclic"}
    run = Run.from_data(examples=batch * steps, batch_size=batch, epochs=1, **promised)
    return Plan(run, (Prices(run).price("lambda_cgd", **{"lambda": 0.9}),), 0)


def run(private: bool, options: argparse.Namespace, batch: int, length: int, sizes: dict[str, int]) -> Clock:
    steps = FIRST + options.steps
    clock, model = Clock(options.device), model_of(sizes, options.device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=options.physical,
            gradient_accumulation_steps=batch // options.physical,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=options.device == "cuda",
            optim="adamw_torch",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
        )
        kind, more = (PrivateTrainer, {"plan": plan_of(batch, steps)}) if private else (transformers.Trainer, {})
        data = Sentences(batch * steps, length, sizes["vocab_size"])
        trainer = kind(model, arguments, train_dataset=data, callbacks=[clock], **more)
        trainer.train()
    del trainer, model
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return clock


def table(options: argparse.Namespace, clocks: dict[str, Clock], size: str) -> list[str]:
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    lines = [
        "# Private fine-tuning through PrivateTrainer against Hugging Face's Trainer",
        "",
        f"`benchmarks/finetune.py` on {device}; torch {torch.__version__}, transformers {transformers.__version__}, "
        f"peft {peft.__version__}; {size}; LoRA r = 16 on all linear layers, gradient checkpoints; {options.physical} "
        f"examples at a time; AdamW; λCGD noise from ChaCha20; median of {options.steps} steps.",
        "",
        "| trainer | step, s | × not private | goal | peak memory, GiB | × not private | goal | in the first steps |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    plain = next(iter(clocks.values()))
    for name, clock in clocks.items():
        goals = ["", ""] if clock is plain else [f"≤ {goal:g}" for goal in GOALS]
        memory = [peak / 2**30 for peak in clock.peaks]
        of_plain = [a / b if b else 0.0 for a, b in zip(clock.peaks, plain.peaks, strict=True)]
        shown = (
            [f"{memory[-1]:.2f}", f"{of_plain[-1]:.2f}", goals[1], f"{of_plain[0]:.2f}"] if memory[-1] else ["–"] * 4
        )
        times = [f"{clock.seconds():.3g}", f"{clock.seconds() / plain.seconds():.2f}", goals[0]]
        lines.append(f"| {name} | {' | '.join(times + shown)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=3, help="that are timed, after the first three")
    parser.add_argument("--physical", type=int, default=32, help="examples that are on the device at a time")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and batch, to try the script")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    sizes, batch, length = (TINY, 8, 16) if options.tiny else (SIZES, 512, 512)
    options.physical = min(options.physical, batch // 2)
    clocks = {
        name: run(private, options, batch, length, sizes) for name, private in (("Trainer", 0), ("PrivateTrainer", 1))
    }
    parameters = sum(p.numel() for p in model_of(sizes, "meta").parameters())
    lines = table(options, clocks, f"{parameters / 1e6:,.0f}M parameters, {batch} × {length} tokens")
    print("\n".join(lines))
    if options.markdown is not None:
        options.markdown.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
