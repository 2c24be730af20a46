"""A small GPT that learns the lines of a text file: each line is one example and is protected as a whole.

python examples/gpt.py lines.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quell
from quell.torch import make_private

LENGTH, SYMBOLS, END = 64, 257, 256  # bytes, a fixed alphabet: a vocabulary found in the text would not be private


def tokens_of(lines: list[str]) -> Tensor:
    """(lines, LENGTH): bytes, filled up with END."""
    raw = [list(line.encode()[: LENGTH - 1]) for line in lines]
    return torch.tensor([each + [END] * (LENGTH - len(each)) for each in raw])


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.places = nn.Parameter(0.02 * torch.randn(1, LENGTH, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        ahead = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        return self.out(self.blocks(self.symbols(tokens) + self.places, mask=ahead, is_causal=True))


def losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """One loss per line, the mean over its own symbols. A mean over the whole batch would couple the lines."""
    each = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return each.view(len(tokens), LENGTH - 1).mean(1)


def main(file: str | None = None) -> float:
    small, device = file is None, "cuda" if torch.cuda.is_available() else "cpu"
    lines = [f"line {number} of many" for number in range(120)] if small else Path(file).read_text().splitlines()
    tokens = tokens_of(lines)
    plan = quell.plan(
        examples=len(lines),
        batch_size=24 if small else max(1, len(lines) // 50),
        epochs=2 if small else 20,
        epsilon=8,
        optimizer="adamw",
        sampling="cyclic" if small else "best",
    )
    model = (GPT(32, 2, 1) if small else GPT(384, 6, 6)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = make_private(model, optimizer, TensorDataset(tokens), plan, max_grad_norm=0.5)
    for epoch in range(plan.epochs):
        for (batch,) in loader:
            optimizer.zero_grad()
            losses(model(batch.to(device)), batch.to(device)).mean().backward()
            optimizer.step()
        print(f"epoch {epoch + 1} of {plan.epochs}")  # not the loss: it is computed from private lines
    print(optimizer.privacy_report())
    return optimizer.privacy_report().steps_done / plan.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", help="a text file, one example per line")
    parser.add_argument("--small", action="store_true", help="a tiny model on made-up lines")
    given = parser.parse_args()
    main(None if given.small else given.file)
