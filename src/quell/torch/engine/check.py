"""The first batch, looked at more closely: is what the engine measures for one unit what autograd computes for it?

The unit with the largest gradient runs twice, with equal random numbers: through the taps beside a few units, and
plainly beside the last one. Its gradient must be the same for every parameter. Then again in the opposite order, which
shows a model that sorts its rows. A layer whose rows are not examples, a rule that does not fit, or a model that mixes
rows shows here: a few units are never as many as the batch has, so what is as long as the batch by chance is not. A
model that returns its loss has no output of one unit, and there the gradients of all of the few units are compared.
A model that cannot run with a few units runs with all of them, as it did, and the same unit's gradient is compared.

All of it is done again with random numbers where parameters are constant or zero: a new head hides the gradients of
what is before it. Later passes are looked at too: where the model or a layer is called in a new way, and now and then
as long as there are parameters whose gradients were too small to be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from quell.errors import QuellError
from quell.torch.autocast import Autocast
from quell.torch.coupling import shaken
from quell.torch.engine.composite import COMPOSITES
from quell.torch.engine.rules import has_rows
from quell.torch.nested import mapped, tensors_in
from quell.torch.random_states import kept_states, own_states
from quell.torch.writes import restored_buffers

if TYPE_CHECKING:
    from quell.torch.engine.layers import LayerEngine

_FEW = 8  # units that are looked at


@dataclass(eq=False)
class Pass:
    """A forward pass: what it takes to run it again, in which new ways it called layers, and its outputs' gradients."""

    inputs: tuple[Any, Any] | None
    rows: int | None
    random: dict[str, Any]  # the states before it; those after it where it turned out only then that it is looked at
    ways: set[Any] = field(default_factory=set)
    autocast: Autocast | None = None
    gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def arrived(self) -> bool:
        """Whether gradients have."""
        return any(gradient is not None for gradient in self.gradients)

    def watch(self, outputs: Any, device: str, when_arrived: Callable[[Pass], None]) -> None:
        """It is looked at: keep the gradients of its outputs when they arrive. It lives as long as the outputs do."""
        self.autocast, self.random = Autocast.now(device), self.random or own_states()
        tensors = _differentiable(outputs)
        self.gradients = [None] * len(tensors)

        def keep(gradient: Tensor, place: int) -> None:
            if not self.arrived:
                when_arrived(self)
            self.gradients[place] = gradient

        for place, value in enumerate(tensors):
            value.register_hook(partial(keep, place=place))


class FirstBatch:
    """Runs forward and backward passes again to compare."""

    def __init__(self, engine: LayerEngine) -> None:
        self.engine = engine
        self.busy = False
        self.seen: set[str] = set()  # parameters whose gradients were large enough to be compared
        self._pass: Pass

    def compare(self, done: Pass) -> bool:
        """Refuse gradients that are not autograd's. Whether this pass could show it.

        One whose gradients are all zero cannot, nor one on which the loop called parts of the model instead of it.
        """
        engine, rows, inputs, gradients = self.engine, done.rows, done.inputs, list(done.gradients)
        done.inputs, done.gradients[:] = None, [None] * len(gradients)  # the loss, and with it the hooks, may live on
        if inputs is None or not rows or rows < 2 * engine.rows_per_unit:
            return False
        self._pass, self.busy = done, True
        try:
            seen = self._compare(inputs, gradients, rows)
            with shaken(engine.params.values()) as others:  # zeros, as of a new head, hide the gradients behind them
                return (others and self._compare_shaken(inputs, gradients, rows)) or seen
        finally:
            self.busy, engine.rows = False, rows
            del self._pass

    def _compare_shaken(self, inputs: Any, gradients: list[Tensor | None], rows: int) -> bool:
        try:
            return self._compare(inputs, gradients, rows)
        except QuellError:
            raise
        except Exception:  # a model that cannot run with such numbers
            self.engine.take_finished()
            return False

    def _compare(self, inputs: Any, gradients: list[Tensor | None], rows: int) -> bool:
        engine, unit = self.engine, self.engine.rows_per_unit
        known = [gradient for gradient in gradients if gradient is not None]
        own_loss = all(not g.dim() for g in known)
        with_rows = all(g.dim() and len(g) == rows for g in known)
        first = _largest(known, rows // unit) if with_rows else 0
        if own_loss or with_rows:
            try:
                return self._compare_few(inputs, gradients, rows, None if own_loss else first)
            except QuellError:
                raise
            except (RuntimeError, IndexError, ValueError):
                engine.take_finished()  # what was cut too is no example's, such as a mask that has as many rows
        alone = [_only(first, rows // unit, unit, g) for g in gradients] if with_rows else gradients
        inputs = mapped(lambda v: v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v, inputs)
        return self._look(rows, [inputs, inputs], gradients, alone, first if with_rows else None)

    def _compare_few(self, inputs: Any, gradients: list[Tensor | None], rows: int, first: int | None) -> bool:
        """The same with few units, in two orders, for the `first` of them, or for all if the model returns its loss."""
        unit, units = self.engine.rows_per_unit, rows // self.engine.rows_per_unit
        few = min(_FEW, max(2, units - 1))
        order = [first or 0, *(number for number in range(units) if number != (first or 0))]
        by_taps = by_autograd = order[:few]
        if first is not None:
            by_autograd = [first] + [order[-1] if units > 2 else first] * (few - 1)
        seen = True
        for place, orders in ((0, (by_taps, by_autograd)), (few - 1, (by_taps[::-1], by_autograd[::-1]))):
            cuts = [_cut(inputs, rows, unit, numbers) for numbers in orders]
            if first is None:
                seen &= self._look(rows, cuts, gradients, gradients, None)
            else:  # beside the gradients of others, and alone: hooks in the model must not mix them either
                together = _cut(gradients, rows, unit, orders[0])
                seen &= self._look(rows, cuts, together, [_only(place, few, unit, g) for g in together], place)
        return seen

    def _look(self, rows: int, inputs: list[Any], together: Any, alone: Any, place: int | None) -> bool:
        """Compare the gradients of the unit at this place, or of all units; whether there is anything to compare."""
        engine, shared = self.engine, self.engine.sharing()
        with restored_buffers(engine.model), _without_dropout(engine.model):
            measured = self._measured(inputs[0], together, place)
            real = engine.unwatched(lambda: self._by_autograd(inputs[1], alone))
        if found := engine.sharing() - shared:
            raise QuellError(
                f"{', '.join(sorted({name for name, _ in found}))} gets an input of {rows} rows whatever the batch "
                f"size, and the first batch has {rows} rows, so they were taken for one of each example; give what all "
                "examples share, such as positions or masks, a first dimension of 1 (mask[None])"
            )
        whole = torch.stack([g.double().norm() for g in real.values()]).norm()
        if not torch.isfinite(whole):
            return False
        coarse = 0.1 if engine.lowered else 1e-3
        for name, right in real.items():
            found = measured.get(name, torch.zeros_like(right))
            size, slack = float(right.double().norm()), 0.01 * float(whole)
            if size > coarse * slack:
                self.seen.add(name)
            if not float((found - right).double().norm()) <= coarse * (size + slack):
                raise QuellError(
                    f"the gradient of one example for {name} has norm {float(found.norm()):.4g} as measured and "
                    f"{float(right.norm()):.4g} by autograd: its layer is used in a way that per-example gradients "
                    "cannot follow (rows that are not examples, or examples that mix or change places); use "
                    "clipping='microbatch'"
                )
        return bool(whole)

    def _run(self, inputs: Any) -> list[Tensor]:
        assert self._pass.autocast is not None
        with kept_states(self._pass.random), torch.enable_grad(), self._pass.autocast.again():
            return _differentiable(self.engine.model(*inputs[0], **inputs[1]))

    def _measured(self, inputs: Any, gradients: list[Tensor | None], place: int | None) -> dict[str, Tensor]:
        """Float32 gradients of the unit at this place, or of all, by the engine's pieces."""
        engine = self.engine
        outputs = self._run(inputs)
        torch.autograd.backward(*_pairs(outputs, gradients))
        found: dict[str, Tensor] = {}
        for pieces in engine.take_finished():
            for name, parts in pieces.items():
                parameter = engine.params[name]
                for piece in parts:
                    numbers = torch.arange(piece.units, device=parameter.device)
                    wanted = numbers >= 0 if place is None else numbers == place
                    total = piece.sum(wanted.float())
                    found[name] = found.get(name, 0.0) + total.view(parameter.shape)
        return found

    def _by_autograd(self, inputs: Any, gradients: list[Tensor | None]) -> dict[str, Tensor]:
        torch.autograd.backward(*_pairs(self._run(inputs), gradients))  # checkpoints know no torch.autograd.grad
        made = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.engine.params.items()}
        self.engine.model.zero_grad()
        return made


def _cut(inputs: Any, rows: int, unit: int, units: list[int]) -> Any:
    """The inputs with these units only."""
    chosen = [unit * number + row for number in units for row in range(unit)]

    def cut(value: Any) -> Any:
        return value.detach()[chosen].requires_grad_(value.requires_grad) if has_rows(value, rows) else value

    return mapped(cut, inputs)


def _only(place: int, units: int, unit: int, gradient: Tensor | None) -> Tensor | None:
    """The gradient of the unit at this place among so many, and zeros for the others."""
    if gradient is None:
        return None
    others = torch.arange(units * unit, device=gradient.device) // unit != place
    return gradient.masked_fill(others.view(-1, *[1] * (gradient.dim() - 1)), 0.0)


def _largest(gradients: list[Tensor], units: int) -> int:
    """The unit with the largest gradients of the outputs that are finite: others have little to compare."""
    sizes = torch.zeros(units, dtype=torch.float64, device=gradients[0].device)
    for gradient in gradients:  # unit by unit: logits in float64 would be the peak of the first steps
        norms = [torch.linalg.vector_norm(own, dtype=torch.float64) for own in gradient.detach().chunk(units)]
        sizes += torch.stack(norms).square().to(sizes.device)
    return int(sizes.nan_to_num(-1.0, -1.0, -1.0).argmax())


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """No dropout around layers that the engine writes out.

    Their outputs lie in memory in another order than torch's, so equal random numbers would drop other values.
    """
    if not any(type(module) in COMPOSITES for module in model.modules()):
        yield
        return
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    layers = [(module, module.dropout) for module in model.modules() if isinstance(module, kinds)]
    try:
        for layer, _ in layers:
            layer.dropout = 0.0
        with _NoDropout():
            yield
    finally:
        for layer, share in layers:
            layer.dropout = share


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


_DROPOUTS = {
    torch.dropout,
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
}


def _differentiable(outputs: Any) -> list[Tensor]:
    return [value for value in tensors_in(outputs) if value.requires_grad]


def _pairs(outputs: list[Tensor], gradients: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    known = [(value, g.to(value.dtype)) for value, g in zip(outputs, gradients, strict=True) if g is not None]
    return [value for value, _ in known], [g for _, g in known]
