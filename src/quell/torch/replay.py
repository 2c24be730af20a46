"""Where a step starts from. Steps that come again after a crash must start from where they did before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from quell.errors import QuellError
from quell.torch.sharding import whole


@dataclass(frozen=True)
class Start:
    """A digest of the trained weights, what gradients are clipped with, and the options of each parameter group."""

    weights: str
    gradients: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]

    def require_same(self, now: Start) -> None:
        """Refuse to go on from `now` in the place of this one."""
        wrong = []
        if now.weights != self.weights:
            wrong.append("the weights are not those of the checkpoint: load the model's state of the same checkpoint")
        wrong += [
            f"{name} was {self.gradients.get(name)} and is {value}: call make_private as that run did"
            for name, value in now.gradients.items()
            if self.gradients.get(name) != value
        ]
        for number, (before, group) in enumerate(zip(self.groups, now.groups, strict=True)):
            wrong += [
                f"{name} of parameter group {number} was {value} and is {group.get(name)}: set it back, or load the "
                "scheduler's state"
                for name, value in before.items()
                if group.get(name) != value
            ]
        if wrong:
            raise QuellError(
                f"released steps would come again with other gradients, under the same noise: {'; '.join(wrong)}"
            )


def digest(parameters: Iterable[nn.Parameter]) -> str:
    """Of the weights, whole, whatever the number of ranks."""
    found = blake2b(digest_size=16)
    for parameter in parameters:
        flat = whole(parameter.detach()).cpu().contiguous().view(-1)
        found.update(flat.view(torch.uint8).numpy())
    return found.hexdigest()


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and switches of a parameter group, as plain values."""
    plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}
    return {name: value for name, value in plain.items() if name != "params"}
