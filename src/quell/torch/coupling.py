"""Is a batch coupled? The loop's own work on it is done again, with some of its examples replaced.

Clipping bounds what one example adds to the sum, and says nothing about what it does to the gradients of the others. So
nobody's gradient may depend on another example. The work (`tape.py`) is done again with one group of the examples
replaced by one of them, then with all others replaced. Every number that belongs to one example stays the same in one
of the two. A number that changes in both belongs to several: in the model's outputs it says that the model mixes
examples, in the gradient of the loss with respect to the outputs that the loss does. A row that changes although its
own example stays is another one's: then an example has different places in different passes. A model that returns its
own loss has no output of one example; but a loss L that adds up over examples has L(neither) + L(both) = L(first) +
L(second), and one that divides by the tokens of the batch has not.

Shapes, batch size and random numbers are the same throughout, so dropout and kernels are too. Weights, buffers and
random states are left as they were. Three groups are tried.

A batch of one example is coupled with nothing: what is divided by the tokens in it is divided by its own. But its model
may keep what it saw, so it is done again with other numbers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quell.errors import QuellError
from quell.torch.engine.bounds import wide
from quell.torch.nested import tensors_in
from quell.torch.random_states import kept_states
from quell.torch.sharding import is_sharded
from quell.torch.tape import Tape
from quell.torch.writes import State, restored_buffers

_AT_ONCE = 1 << 22  # numbers that are compared at once
_PER_EXAMPLE = (
    "compute one loss per example, from the model's outputs, and add these up (with loss_reduction='sum') or divide by "
    "the number of examples"
)
_LOSS_COUPLES = (
    "the loss couples the examples of a batch: the gradient of one example's output changes with the other examples (a "
    "mean over all tokens, class weights or ignore_index in a mean, statistics of the batch, pairs of examples), so "
    f"clipping would bound nobody's influence: {_PER_EXAMPLE}"
)
_OWN_LOSS = (
    "the model returns its own loss, and that couples the examples of a batch: it does not add up over them (a mean "
    "over the tokens of the whole batch does not), so clipping would bound nobody's influence: leave the labels out of "
    f"the model's arguments, {_PER_EXAMPLE}"
)
_OUT_OF_PLACE = (
    "rows of the model's outputs belong to other examples than the same rows of the batch (shuffled, rolled or paired "
    "with others), so one example would be clipped in several places: give the model the rows in the loader's order, "
    "and let it keep them in order"
)


@dataclass(eq=False)
class _Way:
    """What the loop's work makes of the batch with some of its examples replaced."""

    loss: float
    outputs: list[Tensor]
    gradients: list[Tensor]  # of the loss, with respect to the outputs
    used: list[bool]  # whether the loss uses them
    buffers: dict[str, Tensor]  # that the pass has written


class CouplingTest:
    """A batch as it is, and with one group of its examples replaced by one of them, or the other group, or both."""

    def __init__(
        self,
        tape: Tape,
        model: nn.Module,
        seed: int,
        rerun: bool,
        examples: int,
        begin: Mapping[nn.Module, State] | None = None,
    ) -> None:
        self.tape, self.model, self.rerun = tape, model, rerun
        self.begin = begin  # what modules held that wrote into buffers, before the passes that are done again
        half_precision = any(entry.autocast.enabled for entry in tape.entries)
        self.tolerance = 1e-2 if half_precision else 1e-4
        self.plain = tape.extremes(examples)
        self._random = random.Random(seed)

    def problem(self) -> str | None:
        """What is coupled, in a sentence; None where nothing is."""
        self._require_same_loss()
        base, rows = self._run(self.plain), range(len(self.plain))
        if self.tape.examples == 1 and self.rerun:
            with _other_numbers(self.tape):
                return self._written(base, self._run(self.plain))
        coins = [self._random.randrange(2) for _ in rows]
        failed = []
        for group in ([i % 2 for i in rows], [2 * i // len(rows) for i in rows], coins):
            try:
                if found := self._problem(base, group):
                    return found
            except Exception as error:  # such as a division by zero, where nobody is left to count
                failed.append(error)
        if len(failed) == 3:
            raise failed[0]
        return None

    def _problem(self, base: _Way, group: list[int]) -> str | None:
        """Is anything coupled between the examples of a group, marked by 1, and the others?"""
        source, other = (self._random.choice(self.plain or [0]) for _ in range(2))
        ways = [
            [source if which else row for row, which in zip(self.plain, group, strict=True)],
            [row if which else other for row, which in zip(self.plain, group, strict=True)],
            [source if which else other for which in group],
        ]
        losses, outputs, gradients = [base.loss], [], []  # of the last two: where they change, of those that are used
        for sources in ways:
            way = self._run(sources)
            losses.append(way.loss)
            outputs.append(self._changed(base.outputs, way.outputs, base.used))
            gradients.append(self._changed(base.gradients, way.gradients, base.used))
            if written := self._written(base, way):
                return written
            del way  # before the next one takes its memory
        if _in_both(*outputs[:2]):
            return self._mixes(ways)
        if _in_both(*gradients[:2]):
            return _LOSS_COUPLES
        stays = [
            torch.tensor([row == now for row, now in zip(self.plain, sources, strict=True)]) for sources in ways[:2]
        ]
        if any(_out_of_place(both, stays) for both in zip(*outputs[:2], strict=True)):
            return _OUT_OF_PLACE
        own = [output for output, used in zip(base.outputs, base.used, strict=True) if used and not output.dim()]
        if own:  # a row's part of the loss is the same number in two ways each, so only their sum is rounded
            gap = losses[0] + losses[3] - losses[1] - losses[2]
            tolerance = 1e-2 if own[0].element_size() < 4 else 1e-5
            if abs(gap) > tolerance * max(map(abs, losses)):
                return _OWN_LOSS
        return None

    def _require_same_loss(self) -> None:
        """From the outputs that the loop had, the loss that it had: else it was not understood."""
        tape = self.tape
        assert tape.loss is not None
        loss = tape.loss.detach()
        real = (loss if tape.weights is None else loss * tape.weights).sum()
        if bool(differ(tape.replay(range(tape.examples), rerun=False, grad=False)[0], real, 1e-2)):
            raise RuntimeError("the loss came out differently")

    def _run(self, sources: Sequence[int]) -> _Way:
        with restored_buffers(self.model, self.begin) as written:
            loss, outputs = self.tape.replay(sources, self.rerun)
        found = torch.autograd.grad(loss, outputs, allow_unused=True) if loss.requires_grad else [None] * len(outputs)
        gradients = [torch.zeros_like(o) if g is None else g for o, g in zip(outputs, found, strict=True)]
        return _Way(float(loss.detach()), outputs, gradients, [g is not None for g in found], written)

    def _changed(self, before: Sequence[Tensor], after: Sequence[Tensor], used: Sequence[bool]) -> list[Tensor]:
        pairs = zip(before, after, used, strict=True)
        return [differ(a.detach(), b.detach(), self.tolerance) for a, b, counts in pairs if counts]

    def _written(self, base: _Way, way: _Way) -> str | None:
        for name in {**base.buffers, **way.buffers}:
            one, other = base.buffers.get(name), way.buffers.get(name)
            if (
                one is None
                or other is None
                or one.shape != other.shape
                or bool(differ(one, other, self.tolerance).any())
            ):
                return (
                    f"the model writes what it sees into the buffer {name} in the forward pass, without noise: use a "
                    "layer that keeps no statistics of the batches"
                )
        return None

    def _mixes(self, ways: list[list[int]]) -> str:
        return (
            f"the model mixes the examples of a batch{self._place(ways)}: one example's output "
            "changes with the others, so no example's gradient can be clipped; compute every row of the output from "
            "its own example (LayerNorm or GroupNorm in place of statistics over the batch)"
        )

    def _place(self, ways: list[list[int]]) -> str:
        """The first module, in the order in which they finish, that gives mixed rows, or is given them."""
        names = {module: name for name, module in self.model.named_modules()}
        runs = [self._calls(sources) for sources in (self.plain, *ways[:2])]
        for (module, *base), (_, *one), (_, *other) in zip(*runs, strict=False):
            for values, inside in zip(zip(base, one, other, strict=True), (False, True), strict=True):
                for before, a, b in zip(*values, strict=False):
                    if before.shape == a.shape == b.shape and before.dim():
                        both = differ(before, a, self.tolerance) & differ(before, b, self.tolerance)
                        if bool(both.any()):
                            called = f"{names[module]} ({type(module).__name__})" if names[module] else "its forward"
                            return f", in {called}" if inside else f", before {called}"
        return ""

    def _calls(self, sources: Sequence[int]) -> list[tuple[nn.Module, list[Tensor], list[Tensor]]]:
        """Every module's inputs and outputs."""
        calls: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []
        kept: Callable[..., Any] = lambda module, *both: calls.append((module, *map(_floats, both)))  # noqa: E731
        hooks = [module.register_forward_hook(kept) for module in self.model.modules()]
        try:
            with restored_buffers(self.model, self.begin):
                self.tape.replay(sources)
        finally:
            for hook in hooks:
                hook.remove()
        return calls


def differ(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """Where two tensors are apart by more than their rounding, as a share of the largest number in them."""
    a, b = torch.broadcast_tensors(a, b.to(a.device))
    if not a.numel():
        return torch.zeros_like(a, dtype=torch.bool)
    parts = [value.reshape(-1).split(_AT_ONCE) for value in (a, b)]  # float32 copies of logits would be the peak
    finite = (wide(part).nan_to_num(0.0, 0.0, 0.0) for part in itertools.chain(*parts))
    limit = tolerance * torch.stack([part.abs().amax() for part in finite]).amax()
    return torch.cat([_apart(wide(x), wide(y), limit) for x, y in zip(*parts, strict=True)]).view(a.shape)


def _apart(a: Tensor, b: Tensor, limit: Tensor) -> Tensor:
    return ((a - b).abs() > limit) | (a.isnan() != b.isnan()) | (a.isinf() != b.isinf())


@contextmanager
def _other_numbers(tape: Tape) -> Iterator[None]:
    """Inside, the only example of a batch is another one: with numbers that it has, so that models can take them."""
    kept = tape.rows
    tape.rows = [(row, _other(value)) for row, value in kept]
    try:
        yield
    finally:
        tape.rows = kept


def _other(value: Tensor) -> Tensor:
    """Half of each number, in the reverse order; of whole numbers (tokens, labels, masks) the largest everywhere."""
    if value.is_floating_point() or value.is_complex():
        return 0.5 * value.flip(tuple(range(value.dim())))
    return value.amax().expand_as(value).clone() if value.numel() else value


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode, without dropout; afterwards every module is in its own mode again.

    Not by `model.eval()`, which modules may override to do more (some LoRA layers merge their weights).
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def shaken(parameters: Iterable[nn.Parameter]) -> Iterator[bool]:
    """Inside, parameters that are as good as constant, and zeros in others that have many, are random; whether any are.

    Heads, gates and adapters often start as zeros, behind which nothing else of the model can be seen. Other numbers
    keep their sign, which a model may rely on.
    """
    generator = torch.Generator().manual_seed(0)
    changed = []
    try:
        for parameter in parameters:
            data = parameter.data
            if is_sharded(parameter) or not data.is_floating_point() or not data.numel():
                continue
            still, zero = float(wide(data).std(correction=0)) <= 1e-3, data == 0
            if still or 1000 * int(zero.sum()) > zero.numel():
                noise = 0.1 * torch.randn(data.shape, generator=generator).to(data)
                others = data + data.sign() * noise.abs() if still else data
                changed.append((parameter, data))
                parameter.data = torch.where(zero, noise, others)
        yield bool(changed)
    finally:
        for parameter, data in changed:
            parameter.data = data


def follow_the_batch(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    outputs: Callable[[slice], Sequence[Tensor]],
    examples: int,
    sure: bool = True,
) -> bool:
    """Whether the outputs of some examples stay the same without the others; `outputs(rows)` is given these alone.

    One example less hardly moves a mean over many, so only half of them, and single ones, are tried too: the last one
    has another place then. A model that draws random numbers in eval mode would differ anyway. It is refused where one
    has to be `sure`.
    """
    some = [slice(examples - 1), slice((examples + 1) // 2), slice(1), slice(examples - 1, examples)]
    parameters, shakes = list(parameters), True

    def both(rows: slice) -> list[Tensor]:
        made = list(outputs(rows))
        if shakes:
            with shaken(parameters) as others:
                made += list(outputs(rows)) if others else []
        return made

    with torch.no_grad(), kept_states(), in_eval_mode(model), restored_buffers(model):
        try:
            with shaken(parameters):
                outputs(slice(examples))
        except Exception:  # a model that cannot run with such numbers
            shakes = False
        try:
            whole, again = both(slice(examples)), both(slice(examples))
            if _alike(whole, again, slice(examples), examples):
                return all(_alike(whole, both(rows), rows, examples) for rows in some)
        except (RuntimeError, IndexError, ValueError):
            return False
    if sure:
        raise QuellError(
            "the model draws random numbers in eval mode too, so it cannot be seen which of its inputs all examples "
            "share: let it draw them in training only (if self.training), or give it a single input"
        )
    return True


def _alike(whole: Sequence[Tensor], some: Sequence[Tensor], rows: slice, examples: int) -> bool:
    """Whether these rows are the same in both, of what has a row per example."""
    for before, after in zip(whole, some, strict=True):
        if before.dim() and len(before) == examples:
            tolerance = 1e-2 if before.element_size() < 4 or before.is_cuda else 1e-3  # a GPU may use TF32
            if after.shape != before[rows].shape or bool(differ(before[rows], after, tolerance).any()):
                return False
    return True


def _in_both(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether a number, other than one for the whole batch, is marked in both."""
    return any(a.dim() > 0 and bool((a & b).any()) for a, b in zip(first, second, strict=True))


def _out_of_place(changes: Sequence[Tensor], stays: Sequence[Tensor]) -> bool:
    """Whether rows changed whose examples stay, in an output with a row per example; time may come first in it."""
    shape, examples = changes[0].shape, len(stays[0])
    return shape[:1] == (examples,) and not any(
        all(not bool(c.movedim(dim, 0)[kept.to(c.device)].any()) for c, kept in zip(changes, stays, strict=True))
        for dim in (0, 1)
        if shape[dim : dim + 1] == (examples,)
    )


def _floats(values: Any) -> list[Tensor]:
    return [v.detach() for v in tensors_in(values) if v.is_floating_point()]
