"""What all engines share: the face they show the optimizer.

An engine attaches itself to the model (which stays the user's own object), watches forward and backward passes, and
`collect` hands over how many examples it saw since last time and the float32 sum of their clipped gradients.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quell.errors import QuellError
from quell.noise.secrecy import never_copied
from quell.torch.clip_norms import Bounds, ClipNorm, Measured, lengths
from quell.torch.engine.scales import Scale
from quell.torch.sharding import any_sharded, local


class Engine(ABC):
    """What the optimizer asks of a way of clipping."""

    clipping: ClassVar[str]  # as the user names it
    if_not_clipped: ClassVar[str] = "a parameter is used where clipping cannot see it; use another clipping="
    if_none_came: ClassVar[str] = (
        "no backward pass has reached the model since the last zero_grad(): call zero_grad() before backward(), run "
        "the model without torch.no_grad(), and compute the loss from its output"
    )
    clips: ClassVar[bool] = True  # False where the loop does, unchecked
    model: nn.Module  # of engines that see one
    unseen: ClassVar[str | None] = None  # how a loss can pass the engine by, in an error; None: that is not refused

    def __init__(
        self, params: Mapping[str, nn.Parameter], max_grad_norm: ClipNorm | Bounds, loss_reduction: str
    ) -> None:
        self.params = dict(params)
        self.sharded = any_sharded(self.params.values())
        self.bounds = Bounds.of(max_grad_norm, self.params)
        self.max_grad_norm = self.bounds.norm
        self.mean_loss = loss_reduction == "mean"
        self.present: Callable[[int], int] = lambda units: units  # how many of a batch's units count: the first ones
        self.scales: Mapping[str, Scale] = {}  # what gradients are multiplied with before they are clipped, if at all
        self.cuda_graphs: Callable[[], str] = lambda: "off"  # whether passes are recorded, in a few words
        self.keeps_norms = False  # whether `take_norms` is asked; they are private, so nobody keeps them unasked
        self.anchor: Tensor | None = None  # a leaf of autograd's graph behind all taps
        self.inside = False  # whether the model is being run by the engine, within or between the loop's own passes
        self._seen = 0
        self._sums: dict[str, Tensor] = {}
        self._norms: list[Tensor] = []
        self._missing = set(self.params)  # that no example has brought a gradient for yet

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    def settings(self) -> dict[str, Any]:
        """What the same batch and weights must be clipped with to give the same sums."""
        return {
            "clipping": self.clipping,
            "loss_reduction": "mean" if self.mean_loss else "sum",
            "max_grad_norm": self.bounds.settings,
            "scale_gradients": bool(self.scales),
        }

    def collect(self) -> tuple[int, list[Tensor]]:
        """(examples, sums by parameter) since the last call; the sums are this rank's unless parameters are sharded."""
        self._refuse_unseen()
        self.flush()
        if self._seen and self._missing:
            raise QuellError(
                f"no gradient came for {', '.join(sorted(self._missing))} in the first step, so it would get noise and "
                "never train: freeze it (requires_grad_(False)), or let the loss use it"
            )
        seen, sums = self._seen, self._sums
        self._seen, self._sums = 0, {}
        return seen, [sums[name].float() if name in sums else _zeros(p) for name, p in self.params.items()]

    def take_norms(self) -> list[Tensor]:
        """The `lengths`, before clipping, of the gradients that were collected; none unless they are kept."""
        norms, self._norms = self._norms, []
        return norms

    def discard(self) -> None:
        """Forget gradients that were computed and not collected."""
        self._seen, self._sums, self._norms = 0, {}, []

    def unscale_(self, sums: Sequence[Tensor]) -> None:
        """From the space in which gradients were clipped and got their noise back to that of the parameters."""
        for name, total in zip(self.params, sums, strict=True):
            if name in self.scales:
                self.scales[name].undo_(total)

    def require_bounded(self) -> None:  # noqa: B027 - most engines look at their sums at once
        """Refuse sums that were too large, where an engine has not looked at all of them yet."""

    def unwatched(self, run: Callable[[], Any]) -> Any:
        """Run the model, or a part of it, as if it was not private."""
        before, self.inside = self.inside, True
        try:
            return run()
        finally:
            self.inside = before

    def __deepcopy__(self, memo: Any) -> Engine:
        """A copy of the model has this engine's hooks, which ignore every model but their own."""
        return self

    __reduce_ex__ = never_copied("a private model is never pickled: save model.state_dict()")

    @abstractmethod
    def flush(self) -> None:
        """Clip whatever finished backward passes have left."""

    def _refuse_unseen(self) -> None:
        """Refuse gradients that autograd made for a parameter: they came by a way on which nothing is clipped."""
        reached = [name for name, parameter in self.params.items() if parameter.grad is not None]
        if self.unseen is not None and reached:
            raise QuellError(
                f"the loss reaches {reached[0]} {self.unseen}, where it cannot be clipped: call the layer instead of "
                "using its parameter (peft: target_modules, not target_parameters), and leave parameters out of the "
                "loss (an L2 penalty is the optimizer's weight_decay)"
            )

    def _take(self, examples: int, sums: Mapping[str, Tensor], norm: Tensor) -> None:
        """Add the sums of this rank's examples, whose `norm` must be one that so many clipped gradients can have."""
        self._refuse_too_large(float(norm), examples)
        self._add(examples, sums)

    def _keep_norms(self, measured: Measured, present: int | None = None) -> None:
        """Where they are asked for: those of the first units, which are `present` (default: all)."""
        if self.keeps_norms:
            self._norms.append(lengths(measured)[:present])

    def _refuse_too_large(self, norm: float, examples: int) -> None:
        if not norm <= examples * self.max_grad_norm * (1 + 1e-3):
            raise QuellError(
                f"the sum has norm {norm:.4g}, more than {examples:,} gradients clipped to {self.max_grad_norm:g} can "
                f"have: {self.if_not_clipped}"
            )

    def _add(self, examples: int, sums: Mapping[str, Tensor]) -> None:
        """Add a physical batch's sums, of the parameters that its loss uses.

        In float64 from the second one on, so that none changes how others round.
        """
        self._seen += examples
        self._missing -= sums.keys()
        for name, value in sums.items():
            self._sums[name] = self._sums[name].double().add_(value) if name in self._sums else value


class StandIn:
    """What an engine puts in the place of a module's method. A copy of the module has the method itself, of its own."""

    before: Callable[..., Any]  # the method

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's own: transformers reads there what a model takes."""
        return inspect.signature(self.before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.before, memo)

    __reduce_ex__ = never_copied("a private model is never pickled: save model.state_dict()")


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(local(parameter), dtype=torch.float32, requires_grad=False)


def is_differentiable(value: Any) -> bool:
    """Whether an output can carry a gradient; without autograd's record of it, every floating-point one may."""
    return (
        isinstance(value, Tensor) and value.is_floating_point() and (value.requires_grad or not torch.is_grad_enabled())
    )
