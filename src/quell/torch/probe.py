"""The first batches are probed: does anything in the model, or in the loss, couple the examples of a batch?

`coupling.py` says how that is found out. Where the ranks of a sharded model compute together, the model is not run
again, and only the loss is probed. It costs eleven passes without gradient for each loss of the first three batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quell.errors import QuellError
from quell.torch.checks import refuse_unprotected
from quell.torch.coupling import CouplingTest
from quell.torch.distributed import gather
from quell.torch.nested import tensors_in
from quell.torch.random_states import kept_states, own_states
from quell.torch.sharding import any_sharded
from quell.torch.tape import Tape, nodes_behind

BATCHES = 3  # so many are probed
EXAMPLES = 8  # of each, so that the probe takes little memory beside the loop's own


class UncheckedLossWarning(UserWarning):
    """The probe could not follow the loss: that it does not couple examples is the user's word."""


class Probe:
    """Watches the first batches of a run. Passes `inside` of an engine's work are not the loop's.

    `watch` is given each batch that the loop gets, `settle` is called before each step. Every loss whose backward pass
    comes in between is probed.
    """

    def __init__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], inside: Callable[[], bool] = lambda: False
    ) -> None:
        self.model, self.params, self._inside = model, dict(params), inside
        self._sharded = any_sharded(params.values())  # ranks compute together
        self._left, self._checked, self._why = BATCHES, False, ""
        self._nothing = self._failed = ""  # of the present batch: why no loss was probed yet, and why one could not be
        self._settled = 0
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._tape: Tape | None = None
        self._began: Any = None
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
        if self._left and (examples > 1 or self._sharded):
            self._tape = Tape(examples, self._check)
            self._tape.start(batch)

    def forget(self) -> None:
        """The gradients of all backward passes so far are dropped, so it does not matter whether they were probed."""
        self._nothing = "backward() was not called on a tensor that is computed from the batch and the model's output"
        self._failed = ""

    def settle(self, last: bool) -> None:
        """Before a step: nothing can be trained but what is private. Say so, once, if no loss could be followed.

        Parameters that were frozen are looked at every step, new ones now and then, because that takes the host longer,
        and before the last step and each checkpoint, so that no run ends or is saved with them.
        """
        if last or self._settled % 64 == 0 or any(parameter.requires_grad for parameter in self._frozen):
            self.require_protected()
        self._settled += 1
        self._stop(last)

    def require_protected(self) -> None:
        """Refuse a model of which more can be trained than what is private."""
        refuse_unprotected(self.model, self.params.values())

    def _stop(self, last: bool = False) -> None:
        if self._tape is not None:
            self._tape.close()
            self._why = self._failed or (self._nothing and (self._tape.lost or self._nothing))
            self._tape = None
            self._left -= 1
            self._checked |= not self._why
        if (not self._left or (last and self._why)) and not self._checked:
            self._checked = True
            warnings.warn(
                f"the loss could not be probed for coupled examples ({self._why}): make sure that the loss of an "
                "example depends on no other example, or the promise does not hold",
                UncheckedLossWarning,
                stacklevel=4,
            )

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._tape is not None and module is self.model and not self._inside():
            self._tape.begin_pass((args, kwargs))
            self._began = own_states()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        tape = self._tape
        if tape is None or module is not self.model or self._inside():
            return
        tape.go_on()
        if torch.is_grad_enabled():
            for value in tensors_in((args, kwargs)):
                if not tape.knows(value):
                    tape.add_rows(value)
        elif not tape.knows((args, kwargs)):
            return  # an evaluation on other data
        tape.note_model(module, args, kwargs, outputs, self._began)

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
            self._left += 1  # a loop that goes on after the error gets it again
            raise
        finally:
            self._tape = tape
        self._nothing = ""

    def _problem(self, tape: Tape) -> str | None:
        for most in (EXAMPLES, tape.examples):  # few, unless the loop's work is for so many rows and no others
            try:
                examples = min(most, tape.examples)
                return CouplingTest(tape, self.model, BATCHES - self._left, not self._sharded, examples).problem()
            except Exception as error:  # the loop's own code, done again: anything can happen
                failed = f"doing it again failed with {type(error).__name__}: {error}"
        self._failed = failed
        return None

    def _refuse_strangers(self, tape: Tape) -> None:
        """A trainable tensor that is not the model's; the model's own parameters are the engine's to refuse."""
        assert tape.loss is not None
        own = {id(parameter) for parameter in self.model.parameters()}
        own |= {id(value) for entry in tape.entries if entry.model for value in entry.made}
        for node in nodes_behind([tape.loss], tape.model_nodes):
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self._failed = f"the loss uses {node.name()}, whose own backward pass cannot be followed"
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in own:
                raise QuellError(
                    f"the loss uses a trainable tensor of shape {tuple(leaf.shape)} that is not the model's, and would "
                    "be trained without clipping and noise: make it a parameter of the model, and let the optimizer "
                    "hold it, or detach it"
                )
