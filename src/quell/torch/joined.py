"""Several optimizers as one: a plan has one row of noise per step, so all of them step together.

An example's gradient is clipped over the parameters of all of them at once. To step one of them alone, on a batch of
its own, would be another release, with another promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from quell.errors import QuellError


class JoinedOptimizer(Optimizer):
    """What `make_private` makes of a list of optimizers. Each keeps its own groups, options and state."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        if not self.parts:
            raise QuellError("optimizer is an empty list: pass at least one torch.optim optimizer")
        groups = [group for part in self.parts for group in part.param_groups]
        held = [id(parameter) for group in groups for parameter in group["params"]]
        if len(set(held)) < len(held):
            raise QuellError("two of the optimizers hold the same parameter, which would step twice: give it to one")
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups  # those of the parts, so that their schedulers go on

    @property
    def state(self) -> Any:
        return {parameter: held for part in self.parts for parameter, held in part.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """The parts keep their own."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        states = [part.state_dict() for part in self.parts]
        return {"param_groups": [group for state in states for group in state["param_groups"]], "parts": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if len(state_dict.get("parts", ())) != len(self.parts):
            raise QuellError(f"the state is not that of {len(self.parts)} optimizers: pass those of that run")
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def parts_of(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers that it steps: itself, unless several were joined."""
    yield from optimizer.parts if isinstance(optimizer, JoinedOptimizer) else [optimizer]
