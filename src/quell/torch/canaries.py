"""Canaries in the sums of a run: planted beside clipped gradients, found again in what is released."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quell._types import Array
from quell.auditing import Canaries
from quell.errors import QuellError
from quell.schemes import Batches
from quell.torch.clip_norms import clip_factors
from quell.torch.run import TrainingRun, Unfinished
from quell.torch.sharding import any_sharded

_LOUD = 10.0  # how many clip norms a canary's gradient has before it is clipped


class PlantedCanaries:
    """The canaries of a run, each with a coordinate of the trained parameters that is its own."""

    def __init__(self, run: TrainingRun, params: Iterable[nn.Parameter], count: int) -> None:
        params = list(params)
        sizes = [parameter.numel() for parameter in params]
        if run.world > 1 or any_sharded(params):
            raise QuellError("canaries= needs the whole model in one process: audit a run of one process")
        if count > sum(sizes):
            raise QuellError(f"canaries={count:,} need a coordinate each, and the model has {sum(sizes):,}: use fewer")
        key = run.noise.key.derive("quell canaries")
        accounted = run.plan.prices.scheme_of(run.mechanism)
        self.watched = Canaries(run.mechanism, accounted, count, key)
        self._batches = Batches(run.batches.scheme, count, key)  # drawn apart: they say nothing of who else is drawn
        self._stream, self._step, self._drawn = self._batches.starting(0), -1, np.zeros(0, np.int64)
        self._unit = run.max_grad_norm
        # Coordinates of all parameters in a line, and for each parameter that has some, which canaries are where.
        coordinates = self.watched.random.choice(sum(sizes), count, replace=False)
        ends = np.cumsum(sizes)
        owners = np.searchsorted(ends, coordinates, side="right")
        self._places = [
            (place, torch.from_numpy(mine), torch.from_numpy(coordinates[mine] - (ends[place] - sizes[place])))
            for place in np.unique(owners).tolist()
            for mine in [np.flatnonzero(owners == place)]
        ]

    def plant(self, sums: Sequence[Tensor], unfinished: Unfinished, max_grad_norm: float) -> None:
        """Add the canaries of the step that are included, clipped as gradients are, and note what was there before."""
        due = unfinished.received
        if due is None:  # the step is about to be refused
            return
        before = self._at(sums)
        unfinished.known = before if unfinished.known is None else unfinished.known + before
        if due.number:  # canaries come with the first part of a batch
            return
        there = self._of(due.step)
        loud = torch.tensor([_LOUD * max_grad_norm])
        added = torch.zeros(self.watched.count)
        added[torch.from_numpy(there[self.watched.included[there]])] = loud * clip_factors(loud, max_grad_norm)
        for place, mine, offsets in self._places:
            flat, own = sums[place].view(-1), added[mine]
            flat.index_add_(0, offsets.to(flat.device), own.to(flat.device, flat.dtype))

    def find(self, step: int, released: Sequence[Tensor], unfinished: Unfinished) -> None:
        """Note what a step has released about the canaries, beside what was known before."""
        if step < self.watched.steps:
            left = (self._at(released) - unfinished.known) / self._unit
            self.watched.record(step, self._of(step), left)

    def state_dict(self) -> dict[str, Any]:
        """What was found so far, as secret as the noise."""
        return {"count": self.watched.count, "traces": torch.from_numpy(self.watched.traces.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was found before."""
        for step, left in enumerate(state["traces"].numpy()):
            self.watched.record(step, self._of(step), left)

    def _of(self, step: int) -> NDArray[np.int64]:
        """The canaries of a step's batch."""
        if step != self._step:
            if step != self._step + 1:
                self._stream = self._batches.starting(step)
            self._step, self._drawn = step, next(self._stream)
        return self._drawn

    def _at(self, sums: Sequence[Tensor]) -> Array:
        found = np.zeros(self.watched.count)
        for place, mine, offsets in self._places:
            flat = sums[place].view(-1)
            found[mine.numpy()] = flat[offsets.to(flat.device)].double().cpu().numpy()
        return found
