"""What the user's loop does with a batch, written down so that it can be done again with other examples in the batch.

The loop is the user's: nobody hands over its loss as a function. So the tensors of a batch become `Watched`, a subclass
that notes every operation on them and on what is made of them. The model is one operation among these. `Tape.replay`
does all of it again, with some examples replaced, every shape unchanged and the same random numbers. While
`backward` runs, and when the tape is closed, all watched tensors are plain ones.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from quell.noise.stream import uncompiled
from quell.torch.autocast import Autocast
from quell.torch.nested import leaves, mapped, tensors_in
from quell.torch.random_states import own_states, set_own_states

Values = dict[int, Any]  # by the id of what stands on the tape


class Watched(Tensor):
    """A tensor of the batch, or made of one. It has no data of its own: a plain tensor's class is changed in place."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A compiled loss runs as it is written: what torch.compile would make of it cannot be followed.
        run = uncompiled(_followed) if torch.compiler.is_compiling() else _followed
        return run(func, args, kwargs or {})


def _followed(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on watched tensors."""
    tape = Tape.running
    if tape is not None and func is Tensor.backward:
        return tape.backward(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        made = func(*args, **kwargs)
    return made if tape is None else tape.note(func, args, kwargs, made)


class _Number:
    """What `.item()` returned: a number that is looked up again when the loop's work is done again."""


class _Float(_Number, float):
    pass


class _Integer(_Number, int):
    pass


def _numeric(value: Any) -> Any:
    """The same number, watched."""
    return _Float(value) if type(value) is float else _Integer(value) if type(value) is int else value


def _operation(function: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def of_numbers(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        given = (*others, self) if reflected else (self, *others)
        made = function(*(value.real for value in given))  # of the plain numbers
        return made if Tape.running is None else Tape.running.note(function, given, {}, _numeric(made))

    return of_numbers


for _kind in (_Float, _Integer):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _operation(getattr(operator, _name)))
        setattr(_kind, f"__r{_name}__", _operation(getattr(operator, _name), reflected=True))
    for _function in (operator.neg, operator.pos, abs, round):
        setattr(_kind, f"__{_function.__name__}__", _operation(_function))


@dataclass(eq=False)
class _Entry:
    """One operation: what was called with what, what came out, and under which settings."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    made: list[Any]  # tensors and numbers, in the order of `leaves`
    autocast: Autocast
    random: Any = None  # of a pass through the model: the random numbers that it began with, and went on from

    @property
    def model(self) -> bool:
        return self.random is not None


@dataclass(eq=False)
class Tape:
    """The work on one batch of so many `examples`; `on_backward` is called with the tape when the loop calls it."""

    examples: int
    on_backward: Callable[[Tape], None]
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # tensors of the batch, and copies of their values
    entries: list[_Entry] = field(default_factory=list)
    loss: Tensor | None = None
    weights: Any = None  # backward's argument
    model_nodes: list[Any] = field(default_factory=list)  # where the model's outputs hang in autograd's graph
    _alive: list[weakref.ref[Tensor]] = field(default_factory=list)  # what is watched
    _started: Any = None  # the random numbers that the loop began with
    _done: int = 0  # so many entries are from before the end of the last backward pass

    running: ClassVar[Tape | None] = None  # the one that watches now

    def start(self, batch: Any) -> None:
        """Watch the tensors of a batch."""
        self._started = own_states()
        Tape.running = self
        for tensor in tensors_in(batch):
            if type(tensor) is Tensor:
                self.add_rows(tensor)
                self._watch(tensor)

    def add_rows(self, tensor: Tensor) -> None:
        """A tensor that has one row per example, along its first dimension or its second."""
        if self._dim(tensor) is not None:
            self.rows.append((tensor, tensor.detach().clone()))

    def _dim(self, tensor: Tensor) -> int | None:
        return next((d for d in (0, 1) if tensor.dim() > d and tensor.shape[d] == self.examples), None)

    def _filled(self, tensor: Tensor, sources: Sequence[int]) -> Tensor:
        """The tensor with row `sources[i]` in the place of row i; as it is where it has no rows of examples."""
        dim = self._dim(tensor)
        if dim is None:
            return tensor
        return tensor.index_select(dim, torch.tensor(list(sources), dtype=torch.long, device=tensor.device))

    def extremes(self, count: int) -> list[int]:
        """So many examples, first those with the least and the most in a tensor, such as a label that is ignored."""
        if count == self.examples:
            return list(range(count))
        found: list[int] = []
        for row, kept in self.rows:
            sums = kept.movedim(self._dim(row) or 0, 0).unsqueeze(-1).flatten(1).sum(1, dtype=torch.float64)
            found += [int(sums.argmin()), int(sums.argmax())]
        return list(dict.fromkeys([*found, *range(self.examples)]))[:count]

    def known(self) -> set[int]:
        return {id(row) for row, _ in self.rows} | {id(made) for entry in self.entries for made in entry.made}

    def has_rows(self, entry: _Entry) -> bool:
        """Whether anything that it was given is of the batch, or made of it, so that replacing examples changes it."""
        known = self.known()
        return any(id(value) in known for value in tensors_in((entry.args, entry.kwargs)))

    def note(self, function: Any, args: Any, kwargs: Any, made: Any) -> Any:
        """Write an operation down; what it made is watched from now on."""
        kinds: tuple[type, ...] = (Tensor, _Number)
        if function is Tensor.item and self._done:
            kinds = (float,)  # loops log and save it: a plain number, followed where it is used itself
        elif function is Tensor.item:
            made = _numeric(made)
        found = [value for value in leaves(made) if isinstance(value, kinds)]
        if found or getattr(function, "__name__", "") in ("__setitem__", "register_hook"):
            self._write(function, args, kwargs, found)
        return made

    def note_model(self, model: Any, args: Any, kwargs: Any, made: Any, began: Any) -> None:
        """Write a pass through the model down."""
        found = tensors_in(made)
        self.model_nodes += [value.grad_fn for value in found]
        self._write(model, args, kwargs, found, (began, own_states()))

    def _write(self, function: Any, args: Any, kwargs: Any, made: list[Any], random: Any = None) -> None:
        tensors = [value for value in made if isinstance(value, Tensor)]
        autocast = Autocast.now(tensors[0].device.type if tensors else "cpu")
        self.entries.append(_Entry(function, args, kwargs, made, autocast, random))
        for tensor in tensors:
            self._watch(tensor)

    def _watch(self, tensor: Tensor) -> None:
        if type(tensor) in (Tensor, Watched):
            tensor.__class__ = Watched
            self._alive.append(weakref.ref(tensor))

    def pause(self) -> None:
        """The tape stands still, and all tensors are plain."""
        Tape.running = None
        self._all_become(Tensor)

    def go_on(self) -> None:
        Tape.running = self
        self._all_become(Watched)

    def close(self) -> None:
        self.pause()
        self._alive.clear()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """The loop calls backward: its work on this batch is known so far. Other losses of it may follow."""
        self.loss, self.weights = loss, options.get("gradient")
        self.pause()
        self._drop_unreachable()
        try:
            self.on_backward(self)
            loss.backward(**options)
            went_on = partial(set_own_states, own_states())  # where what is forgotten later drew random numbers
            self.entries.append(_Entry(went_on, (), {}, [], Autocast.now("cpu")))
            self._done = len(self.entries)
        finally:
            self.go_on()

    def _drop_unreachable(self) -> None:
        """Drop what was done before an earlier backward pass if only the tape still has the results: no loss uses them.

        A loop that takes a batch in parts, one backward pass each, has memory for the outputs of one part only.
        """
        for place in reversed(range(self._done)):
            made = self.entries[place].made
            if made and max(_references(made)) == _references([object()])[0]:
                del self.entries[place]
                self._done -= 1

    def passes(self) -> list[_Entry]:
        """The passes through the model that the loss was made of."""
        needed, found = _places((self.loss, self.weights)), []
        for entry in reversed(self.entries):
            written = entry.made or entry.args[:1]  # of __setitem__, which returns nothing
            if not needed.isdisjoint(_places(written)):
                needed |= _places((entry.args, entry.kwargs))
                found += [entry] if entry.model else []
        return found

    def _all_become(self, kind: type[Tensor]) -> None:
        for reference in self._alive:
            tensor = reference()
            if tensor is not None and type(tensor) in (Tensor, Watched):
                tensor.__class__ = kind

    def replay(self, sources: Sequence[int], rerun: bool = True, grad: bool = True) -> tuple[Tensor, list[Tensor]]:
        """Loss and model outputs where row i is example `sources[i]`.

        Without `rerun` the model is believed not to mix, and its outputs are rows of those that the loop had. So are
        those of passes that the loss does not use.
        """
        values: Values = {}
        for row, kept in self.rows:
            values[id(row)] = self._filled(kept, sources)
        made: list[Tensor] = []
        passes = self.passes() if rerun else []
        set_own_states(self._started)
        with torch.set_grad_enabled(grad):
            for entry in self.entries:
                with entry.autocast.again():
                    found = self._again(entry, values, sources, entry in passes)
                if entry.model:
                    made += [value for value in found if value.requires_grad]
                for before, now in zip(entry.made, found, strict=True):
                    if len(sources) < self.examples and _ran_dry(before, now):
                        raise RuntimeError("there are too few rows for what the loop does with them")
                    values[id(before)] = now
            loss = values[id(self.loss)]
            weights = values.get(id(self.weights), self.weights)
            return (loss if weights is None else loss * weights).sum(), made

    def _again(self, entry: _Entry, values: Values, sources: Sequence[int], rerun: bool) -> list[Any]:
        args, kwargs = mapped(lambda value: values.get(id(value), value), (entry.args, entry.kwargs))
        if not entry.model:
            made = list(leaves(entry.function(*args, **kwargs)))
            number = entry.made and not isinstance(entry.made[0], Tensor)
            return made if number else [value for value in made if isinstance(value, Tensor)]
        began, went_on = entry.random
        if rerun:
            set_own_states(began)
            with torch.no_grad():
                found = tensors_in(entry.function(*args, **kwargs))
        else:
            found = [self._filled(value, sources) for value in entry.made]
        set_own_states(went_on)
        return [
            now.detach().requires_grad_(before.requires_grad) for before, now in zip(entry.made, found, strict=True)
        ]


def nodes_behind(values: Iterable[Tensor], known: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes that autograd comes to from the values, other than through those that are known."""
    waiting: list[Any] = [value.grad_fn for value in values]
    seen: set[Any] = {None, *known}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


def _places(values: Any) -> set[Any]:
    """The values, and the memory of tensors: what is written into a part of a tensor is in the whole one."""
    found: set[Any] = set()
    for value in leaves(values):
        found.add(id(value))
        if isinstance(value, Tensor):
            with suppress(RuntimeError):  # some kinds of tensors have no memory of their own, such as sparse ones
                found.add(("memory", value.untyped_storage().data_ptr() or id(value)))
    return found


def _references(values: list[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


def _ran_dry(before: Any, now: Any) -> bool:
    """Whether at most one row is left of several, such as of the second half of a batch that was cut to a few rows."""
    if not isinstance(before, Tensor) or before.dim() != now.dim():
        return False
    return any(was > 1 >= left for was, left in zip(before.shape, now.shape, strict=True))
