"""The engine: one forward pass, one backward pass that makes no weight gradients, then norms, factors and sums.

Every layer with trained parameters is tapped (`taps.py`, `forward.py`). When the gradient of its output arrives, its
rule (`rules.py`) turns that and the layer's input into pieces (`pieces.py`). Pieces of one backward pass belong
together: they give every unit's norm over all layers, from that its clipping factor, and then each parameter's clipped
sum.

A parameter that is used anywhere but in its tapped layer gets a gradient from autograd, which is an error, because it
would not be clipped. On the first batch one row's gradient is also computed by autograd and compared, parameter by
parameter (`check.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quell.errors import QuellError
from quell.noise.stream import uncompiled
from quell.torch.clip_norms import Bounds, ClipNorm, Measured
from quell.torch.distributed import sum_over_ranks
from quell.torch.engine.attributes import Attributes
from quell.torch.engine.base import Engine
from quell.torch.engine.bounds import full_precision, norm_of
from quell.torch.engine.check import FirstBatch, Pass
from quell.torch.engine.forward import Layer, TappedForward, kind_of, layers_to_tap, other_rows
from quell.torch.engine.pieces import Piece, Rows, kept
from quell.torch.engine.rules import Rule
from quell.torch.engine.scales import scaled
from quell.torch.engine.shared import tap_shared
from quell.torch.engine.taps import Arrived, tap
from quell.torch.engine.together import Names, clipped, gathered, merged
from quell.torch.nested import tensors_in
from quell.torch.random_states import own_states
from quell.torch.sharding import own_share, own_square
from quell.torch.transfer import Awaited

if TYPE_CHECKING:
    from quell.torch.engine.by_default import Pace
    from quell.torch.engine.graphs import Recording

Found = dict[str, list[Piece]]  # by the parameter's name
_MODEL = ("the model", ())  # the layer that stands for the model itself, and its way of being called
_MOST_WAYS = 100  # of calling the model, and on average a layer: in others, a batch is not looked at for that


class LayerEngine(Engine):
    """Clips what layers with trained parameters show of every unit: `rows_per_unit` rows in a row of the batch."""

    clipping = "layers"
    unseen = "outside its layer"

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, nn.Parameter],
        max_grad_norm: ClipNorm | Bounds,
        loss_reduction: str,
        rows_per_unit: int = 1,
    ) -> None:
        super().__init__(params, max_grad_norm, loss_reduction)
        self.model, self.rows_per_unit = model, rows_per_unit
        self.layers: dict[int, Layer] = {}
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)  # makes autograd run every tap
        self.lowered = False  # whether a layer has computed in less than float32, wherever autocast was turned on
        self.running = False  # whether a forward pass for training is under way
        self.rows: int | None = None  # rows of the forward pass that runs now, or ran last
        self.given: set[int] = set()  # where its inputs lie in memory
        self.collected = 0  # how often sums were collected: gradients of older forward passes are refused
        self.open: Recording | None = None  # whose forward pass was replayed, and whose backward pass is to come
        self._replayed: list[Recording] = []  # whose backward pass was replayed, and that are still to be clipped
        self._finished: list[Found] = []  # of backward passes that are done and not clipped yet
        self._under_way: dict[int, Found] = {}  # by autograd's number of the backward pass
        self._outer: dict[int, int] = {}  # from a backward pass inside another (reentrant checkpoints) to the outermost
        self.way = 0  # the number of the way in which the model is being called
        self._ways: dict[Any, int] = {}
        self._known: set[Any] = set()  # ways of calling layers that were compared
        self._settings: set[Any] = set()  # those of them that are about attributes
        self.attributes = Attributes(model)
        self.calls_parts = False  # whether the loop calls parts of the model beside it
        self.pace: Pace | None = None  # where CUDA graphs may be recorded by default
        self._check = FirstBatch(self)
        self._compared = self.sharded  # whether a first batch was: ranks would have to compare sharded ones together
        self._current: Pass | None = None  # that is under way
        self._to_look: list[Pass] = []  # passes of this step that have gradients and are to be compared
        self.measured: Measured = []  # the units that were clipped last, before clipping
        self._last_sum: tuple[Awaited, int] | None = None  # its norm, not looked at yet, and how many examples it has
        model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._end)
        names = {id(parameter): name for name, parameter in self.params.items()}
        for module, layer in layers_to_tap(model, names):
            self.layers[id(module)] = layer
            module.forward = TappedForward(self, module, layer.forward)
        tap_shared(self, model)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "rows_per_example": self.rows_per_unit}

    def discard(self) -> None:
        super().discard()
        self._finished, self._under_way, self._outer, self._replayed, self._to_look = [], {}, {}, [], []

    # Forward

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is not self.model:
            return
        self.running = torch.is_grad_enabled() and not self.inside
        _untraced(self.attributes.before_call)()
        if self.running:
            _untraced(self._begin_pass)(args, kwargs)

    def _begin_pass(self, args: Any, kwargs: Any) -> None:
        tensors = [v for v in tensors_in((args, kwargs)) if v.dim()]
        self.rows = len(tensors[0]) if tensors else None
        self.given = {v.untyped_storage().data_ptr() for v in tensors}
        if not self.sharded and not self._check.busy:
            kind = kind_of(args, kwargs)
            self.way = self._ways.get(kind, len(self._ways))
            if self.way < _MOST_WAYS:
                self._ways[kind] = self.way
            self._current = Pass((args, kwargs), self.rows, own_states() if self._is_due() else {})
            self.note(*_MODEL)
            setting = self._setting()
            if setting not in self._known and len(self._settings) < _MOST_WAYS:
                self._current.ways.add(setting)

    def _end(self, model: nn.Module, args: Any, outputs: Any) -> None:
        if model is not self.model:
            return
        _untraced(self.attributes.after_call)()
        if self.running:
            self.running = False
            _untraced(self._end_pass)(outputs)

    def _end_pass(self, outputs: Any) -> None:
        done, self._current = self._current, None
        if done is not None and (done.ways or self._is_due()):
            done.watch(outputs, self.device.type, lambda arrived: self._to_look.append(arrived))

    def _setting(self) -> Any:
        """The attributes of modules that were ever set, all together: they are a part of how the model is called."""
        return "attributes", self.way, self.attributes.ways()

    def note(self, name: str, way: Any) -> None:
        """A layer is called in this way: if it is new, the pass is compared as the first one is."""
        most = _MOST_WAYS * (1 + len(self.layers)) + len(self._settings)
        if self._current is not None and (name, self.way, way) not in self._known and len(self._known) < most:
            self._current.ways.add((name, self.way, way))

    def _is_due(self) -> bool:
        """Before anything was compared, and after 4, 16, 64, ... steps while a parameter showed no gradient."""
        power = self.collected > 0 and self.collected & (self.collected - 1) == 0 and self.collected.bit_length() % 2
        return not self._compared or bool(power and not self.sharded and len(self._check.seen) < len(self.params))

    def _look(self) -> None:
        """Compare passes. Those without gradients say nothing about the ways in which they called layers."""
        passes, self._to_look = self._to_look, []
        for done in passes:
            if self._check.compare(done):
                self._compared = True
                self._known |= done.ways
                self._settings |= {way for way in done.ways if way[0] == "attributes"}

    def tapped(self, module: nn.Module, rule: Rule, outputs: Any, inputs: Any) -> tuple[Tensor, ...]:
        """The outputs, whose gradients will become pieces of the module's parameters by the rule."""
        return tap(outputs, inputs, self.anchor, self.arrival(module, rule))

    def sharing(self) -> set[tuple[str, Any]]:
        """The layers, and which of their inputs, that were seen to get something that all examples share."""
        layers = self.layers.values()
        ways = [(layer.name, way, places) for layer in layers for way, places in layer.shared_inputs.items()]
        inputs: set[tuple[str, Any]] = {(name, (way, place)) for name, way, places in ways for place in places}
        return inputs | {(layer.name, 0) for layer in layers if layer.shared is not None}

    def called(self, module: nn.Module) -> str:
        return f"{self.layers[id(module)].name} ({type(module).__name__})"

    # Backward

    def arrival(self, module: nn.Module, rule: Rule) -> Arrived:
        """What the tap behind a call of the module is to do when gradients arrive: keep their pieces, by the rule."""
        within, used, expected = torch._C._current_graph_task_id(), [False], self.rows
        made_at = self.collected
        if within >= 0:  # a reentrant checkpoint runs its layers again, and has a backward pass of its own
            self._pass(within)

        def arrived(inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
            self._require_current(partial(self.called, module), made_at, used[0])
            used[0] = True
            backward = torch._C._current_graph_task_id()
            if within >= 0:
                self._outer[backward] = self._outer.get(within, within)
            self._require_rows(module, gradients, expected)
            self._add_pieces(self._pass(self._outer.get(backward, backward)), module, rule, inputs, gradients)

        return arrived

    def _add_pieces(
        self, found: Found, module: nn.Module, rule: Rule, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
    ) -> None:
        self.lowered |= gradients[0].element_size() < 4
        trained = self.layers[id(module)].trained
        if not gradients[0].shape[0]:  # an empty batch, of which rules cannot tell the shapes
            for name in trained.values():
                found[name].append(Rows(gradients[0].new_zeros(0, self.params[name].numel())))
            return
        kind = gradients[0].device.type
        lowered = torch.is_autocast_enabled(kind)  # where backward() is called inside of autocast
        with torch.autocast(kind, enabled=False) if lowered else nullcontext():
            for name, piece in rule(module, inputs, gradients, self.rows_per_unit):
                if name in trained:
                    whose = trained[name]
                    found[whose].append(piece if self.scales else kept(piece, self.params[whose].shape))

    def _require_current(self, called: Callable[[], str], made_at: int, used: bool) -> None:
        if made_at != self.collected:
            raise QuellError(
                f"a gradient came to {called()} from a forward pass before the last optimizer.step(): call backward() "
                "and step() before the next batch"
            )
        if used:
            raise QuellError(
                f"a second backward pass came through one forward pass of {called()}: add the losses up and call "
                "backward() once"
            )

    def _require_rows(self, module: nn.Module, gradients: tuple[Tensor, ...], expected: int | None) -> None:
        sizes = {gradient.shape[0] if gradient.dim() else 0 for gradient in gradients}
        if len(sizes) > 1 or (expected is not None and sizes != {expected}) or next(iter(sizes)) % self.rows_per_unit:
            raise other_rows(f"{self.called(module)} made {', '.join(map(str, sorted(sizes)))}", expected)

    def _pass(self, backward: int) -> Found:
        """Where the pieces of the running backward pass go, which is done when autograd says so."""
        if backward not in self._under_way:
            self._under_way[backward] = defaultdict(list)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, backward))
        return self._under_way[backward]

    def _finish(self, backward: int) -> None:
        if found := self._under_way.pop(backward, None):
            self._finished.append(found)

    def take_finished(self) -> list[Found]:
        """What finished backward passes have left; what one that failed has left is dropped."""
        finished, self._finished, self._under_way, self._outer = self._finished, [], {}, {}
        return finished

    # Replays of CUDA graphs

    def trains(self) -> bool:
        """Whether the forward pass that begins is the loop's own, for training, and called in a way that was compared.

        A recording shows nothing of the layers that it calls.
        """
        ways = {(_MODEL[0], self.way, _MODEL[1]), self._setting()}
        is_new = self.calls_anew() or not ways <= self._known
        looking = self.inside or is_new or self._is_due() or torch._C._current_graph_task_id() >= 0
        return torch.is_grad_enabled() and not looking

    def calls_anew(self) -> bool:
        """Whether the forward pass under way has called the model, or a layer, in a way that was not compared."""
        return self._current is None or bool(self._current.ways)

    def gathers(self) -> bool:
        """Whether another pass of this step is under way, or has left gradients."""
        return bool(self.open or self._replayed or self._finished or self._under_way or self._sums)

    def replayed(self, recording: Recording, made_at: int, is_last: bool) -> None:
        """A backward pass comes to the forward pass that was replayed when sums had been collected `made_at` times."""
        self._require_current(lambda: "the model", made_at, self.open is not recording or not is_last)
        self.open = None
        self._replayed.append(recording)

    # Clipping

    def collect(self) -> tuple[int, list[Tensor]]:
        found = super().collect()
        self.collected += 1
        self.open = None
        return found

    def flush(self) -> None:
        finished = self.take_finished()
        replayed, self._replayed = self._replayed, []
        if finished and replayed:
            self.calls_parts = True  # the same batch again is not replayed
            raise QuellError(
                "the model, or a part of it, was called several times in one step, of which once was replayed from a "
                "CUDA graph, so the gradients cannot be clipped as one: pass cuda_graphs=False to make_private"
            )
        with torch.no_grad(), full_precision():
            if finished:
                self._look()
            for found in finished:
                self._clip(found)
        if finished and self.pace is not None:
            self.pace.clipped()
        for recording in replayed:
            examples = self.present(recording.units)
            recording.clip(examples)
            self._keep_norms(recording.measured, examples)
            own = torch._foreach_mul(list(recording.sums.values()), 1.0)  # the next replay overwrites its sums
            self._take(examples, dict(zip(recording.sums, own, strict=True)), recording.norm)

    def _clip(self, found: Found) -> None:
        pieces, units = self.pieces_of(found)
        examples = self.present(units)
        sums = self.clipped(pieces, units, examples)
        self._keep_norms(self.measured, examples)
        if self.sharded:
            self._refuse_too_large(*self._norm_over_ranks(sums, examples))
            self._add(examples, sums)
        else:
            self._take(examples, sums, norm_of(sums.values()))

    def pieces_of(self, found: Found) -> tuple[dict[Names, list[Piece]], int]:
        """All pieces of a backward pass, and of how many units they are."""
        if self.scales:
            found = {
                name: [scaled(piece, self.scales[name]) for piece in merged(parts)] for name, parts in found.items()
            }
        pieces: dict[Names, list[Piece]] = {}
        for bound in self.bounds.groups:
            pieces |= gathered({name: parts for name, parts in found.items() if name in bound.names})
        units = {piece.units for parts in pieces.values() for piece in parts}
        if len(units) > 1:
            raise QuellError(
                f"the layers saw different numbers of examples ({sorted(units)}): every input of a layer must have one "
                "row per example"
            )
        return pieces, units.pop()

    def clipped(self, pieces: Mapping[Names, list[Piece]], units: int, present: int | Tensor) -> dict[str, Tensor]:
        """The clipped sums of the first units that are `present`."""
        scale = units if self.mean_loss else 1 / self.rows_per_unit
        every = isinstance(present, int) and present >= units
        counts = None if every else torch.arange(units, device=self.device) < present
        made, self.measured = clipped(pieces, self.bounds, scale, counts)
        sums: dict[str, Tensor] = {}
        for names, total in made.items():
            own, total = [self.params[name] for name in names], total.float()
            parts = total.split([p.numel() for p in own]) if len(own) > 1 else (total,)
            sums |= {n: own_share(part.view(p.shape), p) for n, p, part in zip(names, own, parts, strict=True)}
        return sums

    def _take(self, examples: int, sums: Mapping[str, Tensor], norm: Tensor) -> None:
        """On a GPU the norm of sums is looked at one step later, when it has long arrived."""
        self.require_bounded()
        if not norm.is_cuda:
            super()._take(examples, sums, norm)
            return
        self._last_sum = Awaited(norm), examples
        self._add(examples, sums)

    def require_bounded(self) -> None:
        if self._last_sum is not None:
            self._refuse_too_large(float(self._last_sum[0]), self._last_sum[1])
            self._last_sum = None  # not after an error: what was too large has been released

    def _norm_over_ranks(self, sums: Mapping[str, Tensor], examples: int) -> tuple[float, int]:
        """The norm of sharded sums, and of how many examples on all ranks they are."""
        own = own_square([self.params[name] for name in sums], list(sums.values()))
        both = torch.stack([own, own.new_tensor(examples)])
        sum_over_ranks([both])
        square, number = both.tolist()
        return math.sqrt(square), int(number)


def _untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    return uncompiled(method) if torch.compiler.is_compiling() else method
