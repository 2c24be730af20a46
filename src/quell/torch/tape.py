"""What the user's loop does with a batch, written down so that it can be done again with other examples in the batch.

The loop is the user's: nobody hands over its loss as a function. So the tensors of a batch become `Watched`, a subclass
that notes every operation on them and on what is made of them. The model is one operation among these. `Tape.replay`
does all of it again, with some examples replaced, every shape unchanged and the same random numbers. What the loop
writes into a tensor of its own is written into a copy then. While `backward` runs, and when the tape is closed, all
watched tensors are plain ones.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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

    def as_subclass(self, cls: Any) -> Any:
        """One of the operations that torch does not hand to `__torch_function__`."""
        return _followed(Tensor.as_subclass, (self, cls), {})


def _followed(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on watched tensors or numbers."""
    if func is Tensor.backward:
        return _backward(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        tapes = Tape.that_know((args, kwargs))
        if not tapes:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        for tape in tapes:
            tape.strangers.update({id(t): t for t in given if t.requires_grad and t.is_leaf and not tape.knows(t)})
        versions = [_version(tensor) for tensor in given]
        keeping = [tape for tape in tapes if tape.meets(given)]
        with _Keeping(keeping) if keeping else nullcontext():
            made = func(*args, **kwargs)
        written = [tensor for tensor, before in zip(given, versions, strict=True) if _version(tensor) != before]
        for tape in tapes:
            made = tape.note(func, args, kwargs, made, written)
        return made


def _backward(loss: Tensor, **options: Any) -> None:
    """The loop calls backward: its work on a batch is known so far. Other losses of it may follow."""
    tapes = Tape.that_know(loss)
    Tape.pause()
    try:
        for tape in tapes:
            tape.before_backward(loss, options.get("gradient"))
        loss.backward(**options)
        for tape in tapes:
            tape.after_backward()
    finally:
        Tape.go_on()


class Onlooker(TorchDispatchMode):
    """Looks at operations and runs them as they are."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not in the way of torch's modes, which loads its compiler: what is looked at is never compiled."""
        return False


class _Keeping(Onlooker):
    """Inside, tapes are told what is about to be written into."""

    def __init__(self, tapes: Sequence[Tape]) -> None:
        super().__init__()
        self.tapes = tapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments if hasattr(func, "_schema") else ()  # other operators write nothing
        for place, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(argument.name)):
                    for tape in self.tapes:
                        tape.keep(tensor)
        return func(*args, **kwargs)


class _Number:
    """What `.item()` returned: a number that is looked up again when the loop's work is done again."""

    __torch_function__ = Watched.__torch_function__


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
        return _noted(function, given, function(*(value.real for value in given)))  # of the plain numbers

    return of_numbers


def _noted(function: Callable[..., Any], args: Any, made: Any) -> Any:
    """What an operation on numbers made, written down."""
    for tape in Tape.that_know(args):
        made = tape.note(function, args, {}, _numeric(made))
    return made


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
    written: list[Tensor] = field(default_factory=list)  # of its arguments, those that it wrote into
    random: Any = None  # of a pass through the model: the random numbers that it began with, and went on from

    @property
    def model(self) -> bool:
        return self.random is not None


@dataclass(eq=False)
class Tape:
    """The work on one batch of so many `examples`; `on_backward` is called with the tape when the loop calls it.

    Where a loop takes the batches of several runs side by side, each has a tape, and all of them pause together.
    """

    examples: int
    on_backward: Callable[[Tape], None]
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # tensors of the batch, and copies of their values
    entries: list[_Entry] = field(default_factory=list)
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # memory of the loop's own, and before writes
    loss: Tensor | None = None
    weights: Any = None  # backward's argument
    lost: str = ""  # why not all of the work could be followed
    model_nodes: list[Any] = field(default_factory=list)  # where the model's outputs hang in autograd's graph
    strangers: dict[int, Tensor] = field(default_factory=dict)  # leaves that operations were given
    _known: set[int] = field(default_factory=set)  # ids of what stands on the tape
    _foreign: set[int] = field(default_factory=set)  # memory of other tensors that operations were given
    _alive: list[weakref.ref[Tensor]] = field(default_factory=list)  # what is watched
    _started: Any = None  # the random numbers that the loop began with
    _done: int = 0  # so many entries are from before the end of the last backward pass

    running: ClassVar[weakref.WeakSet[Tape]] = weakref.WeakSet()  # those that were started and not closed
    paused: ClassVar[bool] = False

    def start(self, batch: Any) -> None:
        """Watch the tensors of a batch."""
        self._started = own_states()
        Tape.running.add(self)
        Tape.go_on()
        for tensor in tensors_in(batch):
            if type(tensor) is Tensor:
                self.add_rows(tensor)
            self._watch(tensor)

    def add_rows(self, tensor: Tensor) -> None:
        """A tensor that has one row per example, along its first dimension or its second."""
        if self._dim(tensor) is not None:
            self.rows.append((tensor, tensor.detach().clone()))
            self._known.add(id(tensor))

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

    def knows(self, values: Any) -> bool:
        """Whether any of these is of the batch, or made of it, so that replacing examples changes it."""
        return any(id(value) in self._known for value in leaves(values))

    def meets(self, tensors: Sequence[Tensor]) -> bool:
        """Whether any of these, which an operation is given, is in memory of the loop's own."""
        self._foreign |= {_memory(tensor) for tensor in tensors if id(tensor) not in self._known} - {0}
        return any(_memory(tensor) in self._foreign for tensor in tensors)

    def keep(self, tensor: Tensor) -> None:
        """Keep a copy of the memory of a tensor that is about to be written into, if that is the loop's own."""
        memory = _memory(tensor)
        if memory in self._foreign and memory not in self.kept:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
            self.kept[memory] = whole, whole.clone()

    def note(self, function: Any, args: Any, kwargs: Any, made: Any, written: Sequence[Tensor] = ()) -> Any:
        """Write an operation down; what it made, or wrote into, is watched from now on."""
        if function is Tensor.__dlpack__:
            self.lost = "a tensor that is made of the batch was handed on by DLPack, as torch.from_dlpack does"
        kinds: tuple[type, ...] = (Tensor, _Number)
        if function is Tensor.item and self._done:
            kinds = (float,)  # loops log and save it: a plain number, followed where it is used itself
        elif function is Tensor.item:
            made = _numeric(made)
        found = [value for value in leaves(made) if isinstance(value, kinds)]
        if found or written or getattr(function, "__name__", "") == "register_hook":
            self._write(function, args, kwargs, found, written)
        return made

    def note_model(self, model: Any, args: Any, kwargs: Any, made: Any, began: Any) -> None:
        """Write a pass through the model down."""
        found = tensors_in(made)
        self.model_nodes += [value.grad_fn for value in found]
        self._write(model, args, kwargs, found, random=(began, own_states()))

    def _write(
        self, function: Any, args: Any, kwargs: Any, made: list[Any], written: Sequence[Tensor] = (), random: Any = None
    ) -> None:
        whole = [tensor._base for tensor in written if tensor._base is not None]  # of which a part was written
        tensors = [value for value in made if isinstance(value, Tensor)]
        autocast = Autocast.now(tensors[0].device.type if tensors else "cpu")
        entry = _Entry(function, args, kwargs, made, autocast, [*written, *whole], random)
        self.entries.append(entry)
        self._learn(entry)
        for tensor in [*tensors, *entry.written]:
            self._watch(tensor)

    def _learn(self, entry: _Entry) -> None:
        self._known.update(id(value) for value in [*entry.made, *entry.written])

    def _watch(self, tensor: Tensor) -> None:
        if type(tensor) in (Tensor, Watched):
            tensor.__class__ = Watched
            self._alive.append(weakref.ref(tensor))
        else:
            self.lost = (
                f"a tensor of the batch, or one that is made of it, is a {type(tensor).__name__}, and only plain ones "
                "can be followed: make them with .as_subclass(torch.Tensor)"
            )

    @classmethod
    def that_know(cls, values: Any) -> list[Tape]:
        """The tapes that watch now and know any of these."""
        return [] if cls.paused else [tape for tape in cls.running if tape.knows(values)]

    @classmethod
    def pause(cls) -> None:
        """The tapes stand still, and all tensors are plain."""
        cls.paused = True
        for tape in cls.running:
            tape._all_become(Tensor)

    @classmethod
    def go_on(cls) -> None:
        cls.paused = False
        for tape in cls.running:
            tape._all_become(Watched)

    def begin_pass(self, args: Any) -> None:
        """A pass through the model of this tape's run begins, which is one operation on this tape and not on others."""
        for tape in Tape.that_know(args):
            if tape is not self:
                tape.lost = "its batch, or what is made of it, was given to the model of another private run"
        Tape.pause()

    def close(self) -> None:
        Tape.pause()
        Tape.running.discard(self)
        self._alive.clear()
        Tape.go_on()

    def before_backward(self, loss: Tensor, weights: Any) -> None:
        self.loss, self.weights = loss, weights
        self._drop_unreachable()
        self.on_backward(self)

    def after_backward(self) -> None:
        went_on = partial(set_own_states, own_states())  # where what is forgotten later drew random numbers
        self.entries.append(_Entry(went_on, (), {}, [], Autocast.now("cpu")))
        self._done = len(self.entries)

    def _drop_unreachable(self) -> None:
        """Drop what was done before an earlier backward pass if only the tape still has the results: no loss uses them.

        A loop that takes a batch in parts, one backward pass each, has memory for the outputs of one part only.
        """
        for place in reversed(range(self._done)):
            made = self.entries[place].made
            if made and max(_references(made)) == _references([object()])[0]:
                del self.entries[place]
                self._done -= 1
        self._known = {id(row) for row, _ in self.rows}
        for entry in self.entries:
            self._learn(entry)

    def passes(self) -> list[_Entry]:
        """The passes through the model that the loss was made of."""
        needed, found = _places((self.loss, self.weights)), []
        for entry in reversed(self.entries):
            if not needed.isdisjoint(_places((entry.made, entry.written))):
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
        values: Values = {id(row): self._filled(kept, sources) for row, kept in self.rows}
        own = _Own(self, sources)
        made: list[Tensor] = []
        passes = self.passes() if rerun else []
        set_own_states(self._started)
        with torch.set_grad_enabled(grad):
            for entry in self.entries:
                with entry.autocast.again():
                    found = self._again(entry, values, own, entry in passes)
                if entry.model:
                    made += [value for value in found if value.requires_grad]
                for before, now in zip(entry.made, found, strict=True):
                    if len(sources) < self.examples and _ran_dry(before, now):
                        raise RuntimeError("there are too few rows for what the loop does with them")
                    values[id(before)] = now
            loss = values[id(self.loss)]
            weights = values.get(id(self.weights), self.weights)
            return (loss if weights is None else loss * weights).sum(), made

    def _again(self, entry: _Entry, values: Values, own: _Own, rerun: bool) -> list[Any]:
        args, kwargs = mapped(
            lambda value: values[id(value)] if id(value) in values else own.before(value), (entry.args, entry.kwargs)
        )
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
            found = [self._filled(value, own.sources) for value in entry.made]
        set_own_states(went_on)
        return [
            now.detach().requires_grad_(before.requires_grad) for before, now in zip(entry.made, found, strict=True)
        ]


def nodes_behind(nodes: Iterable[Any], known: Iterable[Any] = ()) -> Iterator[Any]:
    """These nodes of autograd's graph and those it comes to from them, other than through those that are known."""
    waiting = list(nodes)
    seen: set[Any] = {None, *known}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


class _Own:
    """What a replay writes into in the place of tensors of the loop's own."""

    def __init__(self, tape: Tape, sources: Sequence[int]) -> None:
        self.tape, self.sources = tape, sources
        self._copies: dict[int, Tensor] = {}
        self._cut: dict[int, Any] = {}  # where fewer rows are left: which part of the memory was

    def before(self, value: Any) -> Any:
        """A copy of a tensor that the loop wrote into, as it was before; any other value as it is.

        Tensors that share memory share the copy.
        """
        memory = _memory(value) if isinstance(value, Tensor) else 0
        if memory not in self.tape.kept:
            return value
        kept = self.tape.kept[memory][1]
        place = value.dtype, value.size(), value.stride(), value.storage_offset()
        if len(self.sources) == self.tape.examples:
            if memory not in self._copies:
                self._copies[memory] = kept.clone()
            return _part(self._copies[memory], *place)
        if memory not in self._copies:
            self._copies[memory] = self.tape._filled(_part(kept, *place), self.sources).clone()
            self._cut[memory] = place
        if self._cut[memory] != place:
            raise RuntimeError("the loop writes into several parts of a tensor")
        return self._copies[memory]


def _part(memory: Tensor, dtype: torch.dtype, *place: Any) -> Tensor:
    """A part of a flat tensor, in which gradients flow where the type of the numbers is the same."""
    return (memory if memory.dtype == dtype else memory.view(dtype)).as_strided(*place)


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor is in; 0 where it has none of its own, as sparse ones."""
    with suppress(RuntimeError):
        return int(tensor.untyped_storage()._cdata)
    return 0


def _version(tensor: Tensor) -> int:
    """How often a tensor was written into."""
    with suppress(RuntimeError):
        return int(tensor._version)
    return 0  # made under torch.inference_mode()


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
