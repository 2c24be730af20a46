"""The noise of a run, one step at a time: `add_` adds the next row of scale·C⁻¹Z to the summed clipped gradients.

A row is added once. The stream refuses to go past the plan's last step, to load the state of another plan or key, and
to release a step a second time, unless the caller declares a replay: that the same gradients come again, because the
data order is the plan's own. Then the noise is the same too, and a repeated release tells nothing new. Whether they are
the same is checked, by a digest of every release (`quell.noise.guard`).
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quell.costs import draws_to_keep
from quell.errors import QuellError, require_count
from quell.noise import arrays, state
from quell.noise.fingerprint import Fingerprint
from quell.noise.guard import REPLAY, ReleaseGuard
from quell.noise.key import Key
from quell.noise.layout import Shard, require_disjoint, require_generator, whole
from quell.noise.ledger import Ledger
from quell.noise.secrecy import never_copied
from quell.noise.spec import NoiseSpec
from quell.strategy.recurrence import Regenerate

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan


class UnrecordedKeyWarning(UserWarning):
    """A key from a file is used without a ledger: nothing stops its noise from being used twice."""


Agreement = Callable[[bytes, Callable[[bytes], None]], None]
"""How ranks release together: given one's own fingerprint, and what notes (or refuses) that of all of them."""


class NoiseEngine(Protocol):
    """What makes the rows: `quell.noise.cpu` or `quell.noise.gpu`."""

    @property
    def step(self) -> int: ...
    def prepare(self, tensors: list[Any]) -> None: ...
    def capturing(self) -> bool: ...
    def add(self, tensors: list[Any]) -> None: ...
    def export(self) -> list[Any]: ...
    def restore(self, step: int, buffers: list[Any] | None) -> None: ...


class NoiseStream:
    """The rows of scale·C⁻¹Z for a set of tensors, or for one rank's shards of them.

    `source` is a plan or a mechanism, with the `max_grad_norm` the gradients are clipped to, or a `NoiseSpec`.
    `tensors` are the unsharded parameters (arrays, shapes or element counts) in an order that never changes; a rank
    that holds only slices passes `shards` instead, one per tensor it will hand to `add_`.

    Old draws of a banded-inverse strategy with p coefficients are made again by default, which needs no memory. Allow
    `memory`, counted in float32 copies of the model, and as many of them as fit are kept where that is faster on the
    device at hand (`quell.costs`): a buffer for each draw less per step, at most p−1, the same bits.
    `buffered` decides by hand: all of them or none.

    >>> import numpy as np
    >>> from quell.noise import Key, NoiseSpec, NoiseStream
    >>> from quell.strategy.recurrence import Regenerate
    >>> spec = NoiseSpec(Regenerate(np.array([1.0, -0.9])), steps=100, scale=2.0)
    >>> stream = NoiseStream(spec, [(1000, 50), 50], key=Key.generate())
    >>> gradients = [np.zeros((1000, 50), np.float32), np.zeros(50, np.float32)]
    >>> stream.add_(gradients)
    >>> stream.step, bool(1.9 < gradients[0].std() < 2.1)
    (1, True)
    """

    def __init__(
        self,
        source: NoiseSpec | Mechanism | Plan,
        tensors: Sequence[Any] | None = None,
        *,
        key: Key,
        max_grad_norm: float | None = None,
        generator: str = "chacha20",
        shards: Sequence[Shard] | None = None,
        buffered: bool | Literal["auto"] = "auto",
        memory: float = 0.0,
        ledger: Ledger | str | Path | None = None,
        replay: bool = False,
        threads: int | None = None,
        agree: Agreement | None = None,
    ) -> None:
        if not isinstance(key, Key):
            raise QuellError("key must be a quell.noise.Key: make one with Key.generate()")  # its value stays unnamed
        if (tensors is None) == (shards is None):
            raise QuellError("a stream is made for tensors or for shards: pass one of the two")
        self.spec = NoiseSpec.of(source, max_grad_norm)
        self.generator = require_generator(generator)
        served = whole(tensors) if tensors is not None else tuple(shards or ())
        require_disjoint(served)
        if buffered not in (True, False, "auto"):
            raise QuellError(f"buffered={buffered!r} must be True, False or 'auto'")
        copies = _require_memory(memory)
        self._memory = copies if buffered == "auto" else None  # None: decided by hand
        self._recipe = self.spec.recipe(math.inf if buffered is True else 0)
        self._threads = None if threads is None else require_count("threads", threads)
        self._key = key
        if ledger is None and key.loaded and not key.seeded:
            warnings.warn(UNRECORDED, UnrecordedKeyWarning, stacklevel=2)
        opened = Ledger(ledger) if isinstance(ledger, (str, Path)) else ledger
        self._agree = agree or _alone
        try:
            self._guard = ReleaseGuard(key, self._run, served, opened, replay)
        except QuellError:
            if opened is not None and opened is not ledger:
                opened.close()
            raise
        self._fingerprint: Fingerprint | None = None
        self._torn = False  # whether a failure may have left counter and buffers apart
        self._turn, self._process = threading.Lock(), os.getpid()
        self._engine: NoiseEngine | None = None
        self._home: Any = None  # the device of its tensors; None while there is no engine, or for NumPy
        self._waiting: tuple[int, list[Any] | None] = (0, None)  # step and buffers, until there is an engine

    @property
    def step(self) -> int:
        """The next step, counted from 0: how many rows have been added."""
        return self._waiting[0] if self._engine is None else self._engine.step

    @property
    def _run(self) -> str:
        """What a ledger belongs to, beside the key."""
        return self.spec.made_by(self.generator)

    @property
    def _unwitnessed(self) -> bool:
        """Whether releases go without a digest: on a GPU, where the host would wait for it, if no ledger keeps it.

        Then a step that was released never comes again, also not within this process.
        """
        on_gpu = self._home is not None and self._home.type == "cuda"
        return on_gpu and self._guard.ledger is None and self._agree is _alone

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The slices it serves, in the order of the tensors that `add_` takes."""
        return self._guard.shards

    @property
    def ledger(self) -> Ledger | None:
        return self._guard.ledger

    @property
    def released(self) -> int:
        """How many steps of its elements count as released under its key, by this stream or before it."""
        return self._guard.released

    @property
    def steps(self) -> int:
        return self.spec.steps

    @property
    def buffers(self) -> int:
        """Model-sized float32 vectors kept between steps (where Quell may choose, none before the first step)."""
        return self._recipe.buffers

    def add_(self, tensors: Any, *, step: int | None = None) -> None:
        """Add the next row of noise to the gradients in place. `step`, if given, must be the one that is due."""
        uncompiled(self._add_alone)(tensors, step)

    def _add_alone(self, tensors: Any, step: int | None) -> None:
        if os.getpid() != self._process:
            raise QuellError("a noise stream does not survive a fork: parent and child would add the same rows")
        if not self._turn.acquire(blocking=False):
            raise QuellError("two threads asked one noise stream for a row at the same time: call add_ from one thread")
        try:
            self._add(tensors, step)
        finally:
            self._turn.release()

    def _add(self, tensors: Any, step: int | None) -> None:
        self._require_whole()
        listed = arrays.as_list(tensors)
        engine = self._ready(listed)
        due = engine.step
        if step is not None and step < due:
            raise QuellError(f"step {step:,} was added already; the next is {due:,}: {REPLAY}")
        if step is not None and step > due:
            raise QuellError(f"step {step:,} was asked for, but step {due:,} is due: rows come in order")
        if due >= self.steps:
            raise QuellError(f"the plan ends after {self.steps:,} steps: stop here, or make a new plan and a new key")
        if engine.capturing():
            self._guard.before(due, until=self.steps, fingerprint=None)  # a graph may run to the end
        elif (self._guard.watched or self._agree is not _alone) and not self._unwitnessed:  # all ranks agree, or none
            if self._fingerprint is None:
                self._fingerprint = Fingerprint(self._key, self.shards, self._home)
            self._agree(self._fingerprint(listed), partial(self._guard.before, due, due + 1))
        else:
            self._guard.before(due, due + 1, fingerprint=None)
        self._torn = True
        engine.add(listed)
        self._torn = False

    def prepare(self, tensors: Any) -> None:
        """Set everything up for `add_` without releasing a step: call it before capturing a CUDA graph."""
        listed = arrays.as_list(tensors)
        self._ready(listed).prepare(listed)

    def state_dict(self) -> dict[str, Any]:
        """The step and copies of the buffers, to be saved in a checkpoint. The key is not in it."""
        self._require_whole()
        step, buffers = self._waiting
        if self._engine is not None:
            step, buffers = self._engine.step, self._engine.export() if self._recipe.saved_buffers else None
            if buffers is not None and self._home is not None:
                buffers = arrays.to_torch(buffers)
        return state.make(
            self.spec.fingerprint, self.generator, self._key.id, step, max(step, self.released), self.shards, buffers
        )

    def load_state_dict(self, saved: Mapping[str, Any], *, replay: bool = False) -> None:
        """Go on from a saved state of the same plan and key; `reshard` takes the states of other ranks.

        `replay` lets steps that were released after the state was saved come again, if they are the same.
        """
        self._check(saved)
        if state.shards_of(saved) != self.shards:
            raise QuellError("the state was saved for other shards: call stream.reshard(shards, states) instead")
        self._move(saved["step"], saved["released"], saved["buffers"], replay)

    def reshard(
        self, shards: Sequence[Shard], states: Sequence[Mapping[str, Any]] | None = None, *, replay: bool = False
    ) -> None:
        """Serve other slices from here on. `states` are those of all ranks that hold them; by default, one's own."""
        new = tuple(shards)
        require_disjoint(new)
        given = [self.state_dict()] if states is None else list(states)
        if not given:
            raise QuellError("resharding needs at least one state: pass those of all ranks of the checkpoint")
        for one in given:
            self._check(one)
        buffers = state.gather(given, new)
        old = self._guard, self._engine, self._fingerprint
        self._guard = ReleaseGuard(self._key, self._run, new, self.ledger)
        self._engine = self._fingerprint = None  # the next add_ makes them
        try:
            self._move(given[0]["step"], max(one["released"] for one in given), buffers, replay)
        except QuellError:
            self._guard, self._engine, self._fingerprint = old
            raise

    def _check(self, saved: Mapping[str, Any]) -> None:
        state.check(saved, self.spec.fingerprint, self.generator, self._key.id, self.steps)
        if saved["buffers"] is not None:
            state.check_buffers(saved["buffers"], self._recipe.saved_buffers, state.shards_of(saved))

    def _require_whole(self) -> None:
        if self._torn:
            raise QuellError("an earlier step failed half-way: load the last saved state before going on")

    def _move(self, step: int, released: int, buffers: list[Any] | None, replay: bool) -> None:
        self._guard.check_resuming(step, released, replay)
        if step and buffers is None and self._recipe.saved_buffers:
            raise QuellError(
                f"the state of step {step:,} lacks the {self._recipe.saved_buffers} buffers that this noise needs"
            )
        if self._engine is None:
            self._waiting = (step, buffers)
        else:
            self._torn = True
            self._engine.restore(step, buffers)
        self._torn = False
        self._guard.resumed(released, replay)

    def _ready(self, tensors: list[Any]) -> NoiseEngine:
        arrays.check(tensors, self.shards)
        device = arrays.device_of(tensors[0]) if tensors else None
        if self._engine is None:
            engine = self._make_engine(device)
            engine.restore(*self._waiting)  # may run out of memory: the state keeps waiting for the next try
            self._engine, self._home, self._waiting = engine, device, (0, None)
        if device != self._home:
            raise QuellError(
                f"the stream works on {self._home or 'NumPy arrays'}, these tensors are {device or 'NumPy arrays'}: "
                "to move, load its state into a stream made for the new place"
            )
        return self._engine

    def _make_engine(self, device: Any) -> NoiseEngine:
        kind = "cpu" if device is None else device.type
        if self._memory is not None and isinstance(self.spec.recurrence, Regenerate) and kind in ("cpu", "cuda"):
            kept = draws_to_keep(self._recipe.taps.shape[1], kind, self.generator, self._memory)
            self._recipe = self.spec.recipe(kept)
        if kind == "cpu":
            from quell.noise.cpu import CpuEngine

            return CpuEngine(self._recipe, self.generator, self._key, self.shards, self._threads)
        if kind != "cuda":
            raise QuellError(f"noise is made on a CPU or a CUDA GPU, not on {device}: move the gradients first")
        try:
            from quell.noise.gpu import GpuEngine
        except ImportError as problem:
            raise QuellError("noise on a GPU needs Triton: pip install triton") from problem
        return GpuEngine(self._recipe, self.generator, self._key, self.shards, device)

    def __repr__(self) -> str:
        return (
            f"<NoiseStream step {self.step:,} of {self.steps:,}, {len(self.shards)} tensors, {self.generator}, "
            f"{self.buffers} buffers, {self._key!r}>"
        )

    __reduce_ex__ = never_copied("a noise stream holds a key and is never pickled or copied: save stream.state_dict()")


UNRECORDED = (
    "this key was loaded from a file, or made before a fork, and no ledger says which steps it has released: another "
    "run with it would use the same noise twice; pass ledger=, the same file every time"
)


def _alone(own: bytes, note: Callable[[bytes], None]) -> None:
    note(own)


def _require_memory(copies: float) -> float:
    if not isinstance(copies, Real) or not copies >= 0:  # infinity is welcome
        raise QuellError(f"memory={copies!r} must be a number of model copies, 0 or more")
    return float(copies)


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, to be called and not traced where torch.compile is at work (its module is loaded then)."""
    dynamo = sys.modules.get("torch._dynamo")
    wrapped: Callable[..., Any] = method if dynamo is None else dynamo.disable(method)
    return wrapped
