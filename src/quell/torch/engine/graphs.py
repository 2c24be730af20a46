"""CUDA graphs: the model's forward pass, its backward pass and the clipping, recorded once and replayed.

Python sends a GPU its work kernel by kernel, and for many models that takes longer than the work. A recording is sent
by one call. It holds for inputs of one shape and dtype, parameters that stay where they lie in memory, and modules in
one mode; anything else runs as usual. What Python decides inside of the model is decided when it is recorded. The
loss, the noise and the optimizer's step are not part of it.

A recording has one set of buffers, and what it makes is clipped by itself. So a loop that makes several passes with
gradients in a step is not recorded. What a replay hands out, outputs and clipped sums, are copies. A model that reads
something else than its arguments would go on with what it read when it was recorded. So what was read is kept in
memory, recordings are dropped where somebody sets an attribute of a module, and the 1st, 2nd, 4th, 8th, ... replay is
compared with a pass that runs as usual.

Passes are recorded because the user asked for it, or by default where only the speed changes (`by_default.py`).
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quell.errors import QuellError
from quell.torch.coupling import differ
from quell.torch.engine.attributes import PLAIN, Contents
from quell.torch.engine.base import StandIn, is_differentiable
from quell.torch.engine.bounds import full_precision, norm_of
from quell.torch.engine.by_default import Pace, Trial, suit
from quell.torch.nested import tensors_in
from quell.torch.random_states import kept_states, own_states, set_own_states
from quell.torch.sharding import is_sharded
from quell.torch.tape import Onlooker
from quell.torch.writes import restored_buffers

if TYPE_CHECKING:
    from quell.torch.engine.layers import LayerEngine

_USUAL = 2  # passes of one kind that run as usual before they are recorded
_USUAL_BY_DEFAULT = 16  # so many show whether the loop sometimes does something else
_REMEMBERED = 100  # kinds of passes that are counted
_TRIES = 3  # after so many failed recordings of whatever kind there are no more
_MOST = 2  # recordings that are kept, because each holds the memory of its passes
_UNUSED = 64  # steps after which a recording that nobody needed is dropped
_CHANGES = 3  # of attributes, each before _WORTH replays, after which nothing is recorded any more
_WORTH = 64
_COMPARED = 1 << 10  # replays after which each so-many-th is compared, and before which those of powers of two
_APART, _APART_IN_HALF = 1e-3, 5e-2  # by which share of the largest number outputs may differ
_DEVICE = "cuda"


def are_recordable(parameters: Collection[nn.Parameter]) -> bool:
    """Whether passes with these trained parameters can be recorded: whole ones on the current GPU."""
    devices = [parameter.device for parameter in parameters if not is_sharded(parameter)]
    here = all((device.type, device.index) == (_DEVICE, _current()) for device in devices)
    return here and len(devices) == len(parameters)


def _current() -> int | None:
    return torch.cuda.current_device() if _DEVICE == "cuda" and torch.cuda.is_available() else None


def record_passes(engine: LayerEngine, model: nn.Module, busy: Callable[[], bool], asked: bool) -> None:
    """Let the model record and replay its passes. `busy` says whether somebody watches what the loop does."""
    model.forward = graphed = GraphedForward(engine, model, busy, asked)
    engine.cuda_graphs = graphed.status


class NotRecordedWarning(UserWarning):
    """A model's passes could not be recorded as CUDA graphs: they run as usual."""


class GraphedForward(StandIn):
    """What stands in for the model's forward method."""

    def __init__(self, engine: LayerEngine, model: nn.Module, busy: Callable[[], bool], asked: bool) -> None:
        self.engine: LayerEngine | None = engine  # None where nothing can be recorded
        self.before, self.busy, self._asked = model.forward, busy, asked
        self._last = -1  # `engine.collected` at the last pass; the same again is a second pass in the same step
        self._failures = 0
        self._seen: Counter[Any] = Counter()
        self._recordings: dict[Any, Recording] = {}
        self._changes = self._set(engine)  # when recordings were dropped last
        self._dropped = 0  # how often they were, for nothing
        self._modules = list(model.modules())
        self._trials: dict[Any, Trial] = {}  # by kind
        self._why = ""  # nothing is recorded any more
        engine.pace = None if asked else Pace()

    def status(self) -> str:
        """Whether passes are recorded, in a few words."""
        if self.engine is None:
            return f"not recorded: {self._why}"
        if self._recordings:
            return f"recorded, for {len(self._recordings)} shape{'s' if len(self._recordings) > 1 else ''} of batches"
        if self.engine.pace is not None and not self.engine.pace.gpu_waits:
            return "not recorded: the GPU has not waited for Python"
        if any(not trial.passed() for trial in self._trials.values()):
            return "not recorded: Python does more in a pass than its work, or there is too little memory"
        return "not recorded yet"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        if engine is None or torch.compiler.is_compiling() or not self._is_eligible(engine):
            return self.before(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        kind = self._kind(engine, leaves, structure)
        recording = self._recordings.get(kind)
        if recording is None and self._is_due(engine, kind, leaves):
            if not self._asked and kind not in self._trials:
                return self._tried(engine, kind, leaves, args, kwargs)
            recording = self._record(engine, kind, leaves, structure)
        outputs = None if recording is None else self._replayed(engine, recording, leaves, structure)
        return self._as_usual(engine, kind, args, kwargs) if outputs is None else outputs

    def _as_usual(self, engine: LayerEngine, kind: Any, args: Any, kwargs: Any) -> Any:
        outputs = self.before(*args, **kwargs)
        if engine.calls_anew():  # a layer; a recording would not show that it is to be compared with autograd
            self._seen[kind] = 0
        if engine.pace is not None:
            engine.pace.sent()
        return outputs

    def _is_eligible(self, engine: LayerEngine) -> bool:
        """Whether this is a training pass like others, and so far the only one of its step."""
        usual, pace = engine.trains() and not self.busy(), engine.pace
        if pace is not None:
            usual = (
                usual
                and engine.model.training
                and (not (pace.gpu_waits or self._recordings) or suit(self._modules[1:]))
            )
        if not usual:
            return False
        contents = any(recording.contents.changed() for recording in self._recordings.values())
        if contents or self._changes != self._set(engine):
            self._begin_anew(engine)
        is_second, self._last = self._last == engine.collected, engine.collected
        if engine.calls_parts or (is_second and not self._recordings):
            self._give_up("there are several of them in a step, or passes of parts of the model")
        return self.engine is not None and not engine.gathers()

    def _set(self, engine: LayerEngine) -> tuple[int, int]:
        """How often attributes were set; by the model itself only where it was seen to set none in its passes."""
        return engine.attributes.changes, 0 if self._asked else engine.attributes.own_changes

    def _begin_anew(self, engine: LayerEngine, why: str | None = None) -> None:
        """Drop recordings, by default because an attribute was set; the last ones, if that happens again and again."""
        used = max((recording.replays for recording in self._recordings.values()), default=0)
        self._changes, self._dropped = self._set(engine), 1 if used >= _WORTH else self._dropped + 1
        for kept in (self._recordings, self._seen, self._trials):
            kept.clear()
        self._modules = list(engine.model.modules())
        if self._dropped > _CHANGES:
            name = engine.attributes.last or "what an attribute holds"
            self._give_up(
                why or f"{name} of the model is set to something else again and again; pass it as an argument"
            )

    def _kind(self, engine: LayerEngine, leaves: list[Any], structure: Any) -> Any:
        device = engine.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return self._where(), autocast, repr(structure), *map(_described, leaves)

    def _is_due(self, engine: LayerEngine, kind: Any, leaves: list[Any]) -> bool:
        """Whether passes of this kind have come often enough to be recorded."""
        if len(self._seen) == _REMEMBERED:  # something changes at every step, such as a number that is passed
            self._seen.clear()
        self._seen[kind] += 1
        waits = engine.pace is None or engine.pace.gpu_waits
        often = self._seen[kind] > (_USUAL if self._asked else _USUAL_BY_DEFAULT)
        for other, recording in list(self._recordings.items()):
            if other[0] != kind[0] or engine.collected - recording.used > _UNUSED:
                del self._recordings[other]  # the weights have moved, or the loop has gone on to other inputs
        return often and waits and len(self._recordings) < _MOST and _recordable(leaves, engine.device)

    def _tried(self, engine: LayerEngine, kind: Any, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        """A pass that runs as usual, to see whether those that are like it can be recorded by default."""
        trial = self._trials[kind] = Trial(engine, leaves)
        with trial.watched():
            outputs = self._as_usual(engine, kind, args, kwargs)
        trial.end(outputs)
        return outputs

    def _record(self, engine: LayerEngine, kind: Any, leaves: list[Any], structure: Any) -> Recording | None:
        """A recording of this kind."""
        if not self._asked and not self._trials[kind].passed():
            return None
        try:
            self._recordings[kind] = Recording(engine, self.before, leaves, structure)
        except Exception as problem:  # the user's model: whatever cannot be recorded runs as usual
            self._failures += 1  # CUDA sometimes refuses at first: other work on the device can spoil a recording
            if self._failures == _TRIES:
                self._give_up(str(problem))
            return None
        if engine.calls_anew():  # a layer, which is compared with autograd only in a pass that runs as usual
            del self._recordings[kind]
        return self._recordings.get(kind)

    def _replayed(self, engine: LayerEngine, recording: Recording, leaves: list[Any], structure: Any) -> Any:
        """What a replay makes; None where it makes something else than the model."""
        try:
            outputs = recording.run(leaves, structure)
        except _NotComparedError as problem:
            self._give_up(str(problem.__cause__))
            return None
        except _KeptError:
            self._begin_anew(engine, "its passes keep tensors that they make, other than in buffers; return them")
            return None
        recording.used = engine.collected
        if outputs is None:  # at first because graphs draw other random numbers, later because something has changed
            number = recording.replays
            before = max(number // 2, number - _COMPARED)
            self._give_up(
                f"replay {number:,} differs from a pass that runs as usual, and others since replay {before:,} may "
                "have; pass what changes as an argument, or cuda_graphs=False to make_private",
                always=number > 1,
            )
        return outputs

    def _give_up(self, why: str, always: bool = False) -> None:
        """Record nothing any more, and say so where somebody asked for it, or `always`."""
        if self.engine is not None:
            self.engine.pace = None
        self.engine, self._why = None, why
        self._recordings.clear()
        if self._asked or always:
            warnings.warn(
                f"the model's passes cannot be recorded as CUDA graphs and run as usual: {why}",
                NotRecordedWarning,
                stacklevel=7,  # where the model is called, behind torch's own functions
            )

    def _where(self) -> Any:
        """What a recording takes for granted: where weights and buffers lie, what is trained, and all modes."""
        held = (values for module in self._modules for values in (module._parameters, module._buffers))
        tensors = tuple((_place(v), v.requires_grad) for values in held for v in values.values() if v is not None)
        return tensors, tuple(module.training for module in self._modules)


class _NotComparedError(Exception):
    """The model cannot run beside a replay, to be compared with it."""


class _KeptError(Exception):
    """Something has kept what was made in the recording's memory, where the next replay would write."""


class Recording:
    """One forward pass, its backward pass and the clipping, for inputs like these."""

    def __init__(self, engine: LayerEngine, forward: Callable[..., Any], leaves: list[Any], structure: Any) -> None:
        self.engine, self._usual, self.replays, self.used = engine, forward, 0, engine.collected
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._inputs = [value.clone() if isinstance(value, Tensor) else value for value in leaves]
        self._present = torch.zeros((), dtype=torch.int64, device=engine.device)
        args, kwargs = pytree.tree_unflatten(self._inputs, structure)

        def run() -> tuple[list[Any], Any, list[Tensor]]:
            outputs, structure = pytree.tree_flatten(forward(*args, **kwargs))
            return outputs, structure, [torch.empty_like(value) for value in outputs if is_differentiable(value)]

        with _alone(engine, self._tensors):
            versions = [value._version for value in self._tensors]
            with restored_buffers(engine.model), _beside(self._stream):  # libraries set up what cannot be recorded
                outputs, _, gradients = run()
                if versions != [value._version for value in self._tensors]:
                    raise QuellError("it changes its inputs in place")
                self._back(outputs, gradients)
                self._clipped(self._found())
            torch.cuda.empty_cache()  # of that, which needed as much memory as the recording will
            with ReadMemory() as self._read:
                self._forward, (outputs, self._structure, gradients) = self._recorded(run)
            self._places = [place for place, value in enumerate(outputs) if isinstance(value, Tensor)]
            self._has_gradient = [is_differentiable(outputs[place]) for place in self._places]
            self._outputs = [_memory_of(value) if isinstance(value, Tensor) else value for value in outputs]
            self._gradients = [_memory_of(value) for value in gradients]
            self._backward, _ = self._recorded(lambda: self._back(outputs, gradients))
            found = self._found()
            self._clip, (self.sums, self.norm, self.units) = self._recorded(lambda: self._clipped(found))
        self.contents = Contents(engine.model)

    def run(self, leaves: list[Any], structure: Any) -> Any:
        """The outputs for these inputs; None where a replay's are not those of the model."""
        torch._foreach_copy_(self._tensors, [value for value in leaves if isinstance(value, Tensor)])
        self.replays += 1
        compared = self.replays.bit_count() == 1 or self.replays % _COMPARED == 0
        before = own_states() if compared else {}
        usual = self._as_usual(*pytree.tree_unflatten(leaves, structure)) if compared else None
        made = _Replay.apply(self, self.engine.anchor)
        outputs = list(self._outputs)
        for place, value in zip(self._places, made, strict=True):
            outputs[place] = value
        if usual is not None and not (len(usual) == len(outputs) and all(map(_agree, outputs, usual))):
            set_own_states(before)
            return None
        self.engine.open = self
        return pytree.tree_unflatten(outputs, self._structure)

    def _as_usual(self, args: Any, kwargs: Any) -> list[Any]:
        """What the model makes of these arguments without a replay, with the random numbers that a replay will draw."""
        model, held = self.engine.model, self._held()
        try:
            with torch.no_grad(), kept_states(), restored_buffers(model), self._in_own_memory():
                made = pytree.tree_leaves(self.engine.unwatched(lambda: self._usual(*args, **kwargs)))
        except Exception as problem:
            raise _NotComparedError from problem
        self.contents = Contents(model)  # which this pass may have changed
        usual = [value.clone() if isinstance(value, Tensor) else value for value in made]
        del made
        if self._held() > held:
            gc.collect()  # nobody may need it any more
            if self._held() > held:
                raise _KeptError
        return usual

    @contextmanager
    def _in_own_memory(self) -> Iterator[None]:
        """New tensors lie in the recording's memory, which the next replay overwrites."""
        device = torch.cuda.current_device()
        with _without_copies(), _growing_segments(), _beside(self._stream):  # as what it has
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, self._pool)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)

    def _held(self) -> int:
        """Bytes of the recording's memory that tensors have."""
        own = (part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) == self._pool)
        return sum(part["allocated_size"] for part in own)

    def replay_forward(self) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Copies of the outputs, and those of them that have no gradient."""
        self._forward.replay()
        made = tuple(self._outputs[place].clone() for place in self._places)
        return made, [value for value, can in zip(made, self._has_gradient, strict=True) if not can]

    def replay_backward(self, gradients: Sequence[Tensor]) -> None:
        chosen = [value for value, can in zip(gradients, self._has_gradient, strict=True) if can]
        torch._foreach_copy_(self._gradients, chosen)
        self._backward.replay()

    def clip(self, present: int) -> None:
        """Make `sums`, and `norm`, of the first units that are present."""
        self._present.fill_(present)
        self._clip.replay()

    @property
    def _tensors(self) -> list[Tensor]:
        return [value for value in self._inputs if isinstance(value, Tensor)]

    def _recorded(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """A CUDA graph of this work, and what it made, which every replay makes anew in the same place."""
        graph = torch.cuda.CUDAGraph()
        # cuBLAS has a workspace for every thread and stream (32 MiB on an H200). This one's is made again in the pool,
        # where only this graph counts on it, and what is recorded after it can use the memory for other things.
        torch._C._cuda_clearCublasWorkspaces()
        # Meanwhile other threads use the device, such as one that pins the loader's batches, and torch asks whether
        # pinned memory is free again: by default either spoils a recording.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed")
        with _growing_segments(), captured:
            made = work()
        return graph, made

    def _back(self, outputs: list[Any], gradients: list[Tensor]) -> None:
        """The backward pass. Both lists are emptied, so that what comes later in it can use their memory.

        In this thread: another would bring workspaces of its own.
        """
        end = _End.apply(gradients, *(value for value in outputs if is_differentiable(value)))
        outputs.clear()
        calm = torch.autocast(self.engine.device.type, enabled=False)  # as where loops call backward()
        with calm, torch.autograd.set_multithreading_enabled(False):
            end.backward()

    def _found(self) -> Any:
        finished = self.engine.take_finished()
        if len(finished) != 1:
            raise QuellError(f"it has {len(finished)} backward passes")
        return finished[0]

    def _clipped(self, found: Any) -> tuple[dict[str, Tensor], Tensor, int]:
        with torch.no_grad(), full_precision():
            pieces, units = self.engine.pieces_of(found)
            sums = self.engine.clipped(pieces, units, self._present)
            self.measured = self.engine.measured
            return sums, norm_of(sums.values()), units


class ReadMemory(Onlooker):
    """Keeps the memory that operations read and did not make, such as that of a mask in a cache.

    Freed, it would hold somebody else's numbers when a replay reads it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = _memories((args, kwargs))
        self.kept |= {place: memory for place, memory in given.items() if place not in self._made}
        self._made |= _memories(made).keys() - given.keys()
        return made


def _memories(values: Any) -> dict[int, Any]:
    """What keeps the memory of tensors, by where it is."""
    found: dict[int, Any] = {}
    for value in tensors_in(values):
        try:
            memory = value.untyped_storage()
            found[memory.data_ptr()] = memory
        except RuntimeError:  # sparse and nested tensors have several
            found[id(value)] = value.detach()
    return found


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, anchor: Tensor) -> Any:
        ctx.recording, ctx.made_at, ctx.number = recording, recording.engine.collected, recording.replays
        made, without_gradient = recording.replay_forward()
        ctx.mark_non_differentiable(*without_gradient)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recording: Recording = ctx.recording
        recording.engine.replayed(recording, ctx.made_at, ctx.number == recording.replays)
        recording.replay_backward(gradients)
        return None, None


class _End(torch.autograd.Function):
    """Where a backward pass begins with these gradients, and lets go of them: autograd keeps its own arguments."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


def _memory_of(value: Tensor) -> Tensor:
    """A tensor over the same memory that does not own it: the recording does, and may use it for other things too."""
    storage = value.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), value.device, storage.nbytes())
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(
        memory, value.storage_offset(), value.shape, value.stride()
    )


def _agree(replayed: Any, usual: Any) -> bool:
    """Whether a replay makes this of an output; numbers that are the same say nothing about how large others are."""
    if not isinstance(replayed, Tensor) or not isinstance(usual, Tensor):
        return not isinstance(usual, (Tensor, *PLAIN)) or (type(usual) is type(replayed) and usual == replayed)
    if replayed.shape != usual.shape or replayed.dtype != usual.dtype:
        return False
    if not usual.is_floating_point():
        return True  # such as the largest of numbers that are apart by their rounding
    other = replayed.detach() != usual
    share = _APART_IN_HALF if usual.element_size() < 4 else _APART
    return not bool(differ(replayed.detach()[other], usual[other], share).any())


def _place(value: Tensor) -> int:
    """Where its numbers lie, if they lie in one place."""
    return value.data_ptr() if value.layout is torch.strided and not value.is_nested else id(value)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


def _recordable(leaves: list[Any], device: torch.device) -> bool:
    """Whether inputs are tensors on the device and plain values: what another object holds would be recorded too."""
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    others = [value for value in leaves if not isinstance(value, Tensor)]
    lie_here = all(value.device == device and not value.requires_grad for value in tensors)
    return bool(tensors) and lie_here and all(isinstance(value, PLAIN) for value in others)


@contextmanager
def _beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Another stream than the current one, as recording has it."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def _without_copies() -> Iterator[None]:
    """Nothing is made that outlives the work inside: autocast's copies of weights, and workspaces of cuBLAS."""
    cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()  # before anything else counts on them
        torch.set_autocast_cache_enabled(cached)


@contextmanager
def _growing_segments() -> Iterator[None]:
    """Let torch's allocator grow its segments meanwhile, where it can.

    A recording's memory is held between steps. In segments of fixed size, what does not fit beside what is in use takes
    one more segment: 446 instead of 346 MiB in all for a small ConvNet.
    """
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.9 has none
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    usual = settings.get("PYTORCH_CUDA_ALLOC_CONF", "").split(",")
    if change is None or settings.get("expandable_segments", True) or any("backend" in each for each in usual):
        yield
        return
    others = [each for each in usual if each and "expandable_segments" not in each]  # all are set at once
    change(",".join([*others, "expandable_segments:True"]))
    try:
        yield
    finally:
        change(",".join([*others, "expandable_segments:False"]))


@contextmanager
def _alone(engine: LayerEngine, inputs: list[Tensor]) -> Iterator[None]:
    """Random numbers stay as they were, and a failure leaves nothing behind."""
    given, anchor = engine.given, engine.anchor
    random, collects = torch.cuda.get_rng_state(engine.device), gc.isenabled()
    engine.given = {value.untyped_storage().data_ptr() for value in inputs}
    # While an output of an earlier pass is held, so is autograd's node of the anchor, which belongs to another stream.
    engine.anchor = torch.zeros_like(anchor, requires_grad=True)
    gc.collect()
    gc.disable()  # an old graph that is collected during a recording spoils it
    try:
        with torch.random.fork_rng([engine.device]), _without_copies():
            yield
    except BaseException:
        # The generator still waits for the recording's end: it gets another state, with the same numbers.
        fresh = torch.Generator(engine.device)
        fresh.set_state(random)
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh.graphsafe_get_state())
        raise
    finally:
        if collects:
            gc.enable()
        engine.take_finished()
        engine.given, engine.anchor = given, anchor
