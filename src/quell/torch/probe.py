"""The first batches are probed: does anything in the model, or in the loss, couple the examples of a batch?

`coupling.py` says how that is found out. Where the ranks of a sharded model compute together, the model is not run
again, and only the loss is probed. It costs eleven passes without gradient for each loss of the first three batches.
Batches of one example, or parts of one, have three of their own: nothing is coupled there, and all else is looked at.

All else is what would be released without clipping and noise: what the model's forward pass writes (`writes.py`), and
trainable tensors that are not the model's. Such a tensor may lie behind the model's outputs (a module before the model,
or in a plain list). As a GAN's generator does, whose gradients come through a private discriminator: so it is refused
at the step, unless `zero_grad` has said that the backward pass was not for this step.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from quell.errors import QuellError
from quell.noise.stream import uncompiled
from quell.torch.checks import refuse_unprotected
from quell.torch.coupling import CouplingTest
from quell.torch.distributed import gather
from quell.torch.nested import tensors_in
from quell.torch.random_states import kept_states, own_states
from quell.torch.sharding import any_sharded
from quell.torch.tape import Tape, nodes_behind
from quell.torch.writes import ModelBefore, State

BATCHES = 3  # so many are probed
EXAMPLES = 8  # of each, so that the probe takes little memory beside the loop's own

_SEVERAL, _ONE = (
    "the loss could not be probed for coupled examples",
    "batches of one example, or parts of one, could not be probed",
)
_UNCHECKED = {
    _SEVERAL: "make sure that the loss of an example depends on no other example, or the promise does not hold",
    _ONE: "make sure that the model keeps nothing of what it sees, and that the loss trains nothing but the model, or "
    "the promise does not hold",
}
_WRITTEN = (
    "the model's forward pass changes its parameter {name}: what it sees of the data would be released there without "
    "noise. To begin with statistics of data (ActNorm, learned quantisers), run the model on public data before "
    "make_private; change weights by rules of their own (averages, constraints) in the loop, after optimizer.step(); "
    "use a layer that keeps no statistics of the batches. The model has the change now: load its weights again"
)
_BESIDE_THE_OUTPUTS = (
    "the loss uses what a layer of the model made, and does not get it from the model's outputs but from an attribute, "
    "a hook, or a part of the model that was called by itself, where it cannot be probed: let the model's forward "
    "return it"
)
_AROUND = (
    "the loss uses a trainable tensor of shape {shape} that is not the model's, and would be trained without clipping "
    "and noise: make it a parameter of the model, and let the optimizer hold it, or detach it"
)
_THROUGH = (
    "the loss reaches, through the model, a trainable tensor of shape {shape} that is not the model's (of a module "
    "before the model or in a plain list, or an attribute), and it would be trained without clipping and noise: make "
    "it a parameter of the model (nn.ModuleList for lists), and let the optimizer hold it, or freeze it, or detach "
    "what is made of it; after the backward pass of another model's loss (a GAN's generator) call zero_grad() of the "
    "private optimizer"
)


class UncheckedLossWarning(UserWarning):
    """The probe could not follow the loss: that it does not couple examples is the user's word."""


class Probe:
    """Watches the first batches of a run. Passes `inside` of an engine's work are not the loop's.

    `watch` is given each batch that the loop gets, `settle` is called before each step. Every loss whose backward pass
    comes in between is probed. `anchor` gives the engine's own leaf of autograd's graph, behind its layers.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, nn.Parameter],
        inside: Callable[[], bool] = lambda: False,
        anchor: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self.model, self.params, self._inside, self._anchor = model, dict(params), inside, anchor
        self._sharded = any_sharded(params.values())  # ranks compute together
        self._left = {_SEVERAL: BATCHES, _ONE: BATCHES}  # to be probed, by how many examples they have
        self._checked: set[str] = set()  # of which a loss was followed
        self._why: dict[str, str] = {}  # no loss of the last batch of this kind was probed
        self._nothing = self._failed = ""  # of the present batch: why no loss was probed yet, and why one could not be
        self._strangers = ""  # of the present batch: what else its backward passes have left gradients for
        self._written = ""  # what a forward pass wrote into, for good
        self._settled = 0
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._tape: Tape | None = None
        self._began: Any = None
        self._before_pass: ModelBefore | None = None
        self._states: WeakKeyDictionary[Any, dict[nn.Module, State]] = WeakKeyDictionary()  # what modules held before
        # they wrote into buffers, by the tape's entry of the pass
        self._given: set[int] = set()  # what the model was given beside tensors of the batch, by id
        model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._after, with_kwargs=True)

    def __deepcopy__(self, memo: Any) -> Probe:
        """A copy of the model has the hooks, which ignore every model but their own."""
        return self

    @property
    def watching(self) -> bool:
        """Whether the loop's work on the present batch is written down."""
        return self._tape is not None

    def watch(self, batch: Any, examples: int) -> None:
        """The loop is about to get this batch."""
        self._stop()
        self.forget()
        self._before_pass, self._states, self._given = None, WeakKeyDictionary(), set()
        if self._left[self._kind(examples)] and (examples or self._sharded):
            self._tape = Tape(examples, self._check)
            self._tape.start(batch)

    def _kind(self, examples: int) -> str:
        return _ONE if examples == 1 and not self._sharded else _SEVERAL

    def close(self) -> None:
        """Nothing more is looked at."""
        tape, self._tape = self._tape, None
        if tape is not None:
            tape.close()

    def forget(self) -> None:
        """The gradients of all backward passes so far are dropped, so it does not matter whether they were probed."""
        self._nothing = "backward() was not called on a tensor that is computed from the batch and the model's output"
        self._failed = self._strangers = ""

    def settle(self, last: bool) -> None:
        """Before a step: nothing can be trained but what is private. Say so, once, if no loss could be followed.

        Parameters that were frozen are looked at every step, new ones now and then, because that takes the host longer,
        and before the last step and each checkpoint, so that no run ends or is saved with them.
        """
        if last or self._settled % 64 == 0 or any(parameter.requires_grad for parameter in self._frozen):
            self.require_protected()
        self._settled += 1
        found = self._written or self._strangers
        if self._sharded and self._tape is not None:
            found = next(filter(None, gather(found)), "")
        if found:
            self._come_again(self._tape)
            raise QuellError(found)
        self._stop(last)

    def _come_again(self, tape: Tape | None) -> None:
        """A loop that goes on after the error gets it again: this batch is not one of those to be probed."""
        if tape is not None:
            self._left[self._kind(tape.examples)] += 1

    def require_protected(self) -> None:
        """Refuse a model of which more can be trained than what is private."""
        refuse_unprotected(self.model, self.params.values())

    def _stop(self, last: bool = False) -> None:
        """The loop is done with the batch. After the `last` one there are no more that could be probed."""
        tape, self._tape = self._tape, None
        if tape is not None:
            kind = self._kind(tape.examples)
            tape.close()
            self._left[kind] -= 1
            why = self._failed or (self._nothing and (tape.lost or self._nothing))
            self._why.pop(kind, None)
            if why:
                self._why[kind] = why
            else:
                self._checked.add(kind)
        for kind, why in self._why.items():
            if (last or not self._left[kind]) and kind not in self._checked:
                self._checked.add(kind)
                warnings.warn(f"{kind} ({why}): {_UNCHECKED[kind]}", UncheckedLossWarning, stacklevel=4)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._tape is not None and module is self.model and not self._inside():
            self._tape.begin_pass((args, kwargs))
            _untraced(self._look_before)()
            self._began = own_states()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        tape = self._tape
        if tape is None or module is not self.model or self._inside():
            return
        states = _untraced(self._look_at_writes)()
        tape.go_on()
        if torch.is_grad_enabled():
            for value in tensors_in((args, kwargs)):
                if not tape.knows(value):
                    tape.add_rows(value)
                    self._given.add(id(value))
        elif not tape.knows((args, kwargs)):
            return  # an evaluation on other data
        tape.note_model(module, args, kwargs, outputs, self._began)
        if states:
            self._states[tape.entries[-1]] = states

    def _look_before(self) -> None:
        """Only passes that may be for training: an evaluation of all data should not take longer."""
        if torch.is_grad_enabled() or self.model.training:
            self._before_pass = ModelBefore(self.model)

    def _look_at_writes(self) -> dict[nn.Module, State]:
        """What modules held that wrote into buffers in the forward pass that has ended; parameters are refused."""
        before, self._before_pass = self._before_pass, None
        if before is None:
            return {}
        name = before.written_parameter()
        if name is not None:
            self._written = _WRITTEN.format(name=name)
            if not self._sharded:
                raise QuellError(self._written)
        return before.states()

    def _check(self, tape: Tape) -> None:
        """The loop has called backward, and its own pass has not begun yet."""
        passes = tape.passes()
        if not passes:  # another model's loss, perhaps
            if self._nothing:
                self._nothing = "the loop did not call the model that was made private, but parts of it"
            return
        self._tape = None  # passes that come now are the probe's own
        try:
            self._refuse_strangers(tape)
            self._failed = tape.lost or self._failed
            if not all(tape.knows((entry.args, entry.kwargs)) for entry in passes):
                self._failed = (
                    "the model was given no tensor with a row per example, so nobody could be replaced: pass tensors, "
                    "or mappings, lists, tuples and dataclasses of them"
                )
                return
            with kept_states():
                problem = self._problem(tape)
            if self._sharded:
                problem = next(filter(None, gather(problem)), None)
            if problem:
                raise QuellError(problem)
        except QuellError:
            self._come_again(tape)
            raise
        finally:
            self._tape = tape
        self._nothing = ""

    def _problem(self, tape: Tape) -> str | None:
        seed, passes = BATCHES - self._left[self._kind(tape.examples)], tape.passes()
        begin: dict[nn.Module, State] = {}
        for entry, states in self._states.items():
            begin = {**states, **begin} if entry in passes else begin
        # Few rows, unless the loop's work is for so many and no others. From what modules held before they wrote,
        # unless they cannot begin there again, because they count in something that is not known here.
        for held, most in itertools.product((begin, {}) if begin else ({},), (EXAMPLES, tape.examples)):
            try:
                examples = min(most, tape.examples)
                return CouplingTest(tape, self.model, seed, not self._sharded, examples, held).problem()
            except Exception as error:  # the loop's own code, done again: anything can happen
                failed = f"doing it again failed with {type(error).__name__}: {error}"
        self._failed = failed
        return None

    def _refuse_strangers(self, tape: Tape) -> None:
        """A trainable tensor that is not the model's; the model's own parameters are the engine's to refuse.

        Tensors of the batch, and what is made of them, may have gradients, as adversarial examples do: none of them is
        there in another batch. What is reached through the model's outputs is refused at the step.
        """
        assert tape.loss is not None
        own, anchor = {id(parameter) for parameter in self.model.parameters()}, self._anchor()
        harmless = own | {id(value) for entry in tape.entries if entry.model for value in entry.made}
        around = list(nodes_behind([tape.loss.grad_fn], tape.model_nodes))
        reached = {tape.loss.grad_fn, *(before for node in around for before, _ in node.next_functions)}
        for node in around:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self._failed = f"the loss uses {node.name()}, whose own backward pass cannot be followed"
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf is anchor:
                raise QuellError(_BESIDE_THE_OUTPUTS)
            if leaf is not None and id(leaf) not in harmless and not self._is_of_batch(leaf, tape):
                raise QuellError(_AROUND.format(shape=tuple(leaf.shape)))
        for node in nodes_behind(reached.intersection(tape.model_nodes)):
            leaf = getattr(node, "variable", None)
            if leaf is None or leaf is anchor or id(leaf) in harmless or self._is_of_batch(leaf, tape):
                continue
            del leaf  # it would be held here
            if _is_held(node):
                self._strangers = _THROUGH.format(shape=tuple(node.variable.shape))

    def _is_of_batch(self, leaf: Tensor, tape: Tape) -> bool:
        return tape.knows(leaf) and id(leaf) not in self._given and id(leaf) not in tape.strangers


def _untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    return uncompiled(method) if torch.compiler.is_compiling() else method


@torch.enable_grad()
def _is_held(node: Any) -> bool:
    """Whether anything but autograd's graph holds its leaf, as an optimizer must.

    A forward pass lets go of tensors that it made and asked gradients of, as checkpoints of frozen embeddings need.
    """
    free = torch.zeros((), requires_grad=True).exp().grad_fn.next_functions[0][0]
    return sys.getrefcount(node.variable) > sys.getrefcount(free.variable)
