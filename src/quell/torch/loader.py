"""The plan's batches as a DataLoader: who is in a batch is decided by the plan's sampling scheme and the run's key.

Each rank computes the whole batch and takes its share, so batches do not depend on the world size. Iterating gives the
rest of the epoch that the optimizer is in. Nobody may be in a batch, or in one rank's share of it: then it has a row
that counts for nobody, or none.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from quell.errors import QuellError, require_count
from quell.torch.augmentation import Augmentation
from quell.torch.checks import PlanMismatchWarning
from quell.torch.in_memory import indexed_at_once
from quell.torch.nested import is_texts, leaves, mapped
from quell.torch.random_states import seed_all
from quell.torch.run import Portion, TrainingRun

# Not persistent_workers: workers are seeded when they start, so those of an earlier epoch could not come again.
_KEPT = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


def dataset_of(data: Any) -> Dataset[Any]:
    """The examples behind a Dataset or a DataLoader."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if _is_columns(dataset):
        raise QuellError(
            f"the data is a {type(dataset).__name__} of arrays, not of examples: pass TensorDataset(x, y), or "
            "StackDataset(x, y) for NumPy arrays, both of torch.utils.data"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise QuellError(
            f"{type(dataset).__name__} has no length and no index: the plan decides who is in a batch, so pass a "
            "map-style Dataset, or a DataLoader over one"
        )
    if isinstance(data, DataLoader) and data.batch_sampler is None:
        raise QuellError("the DataLoader forms no batches (batch_size=None): pass its dataset instead")
    return dataset


def _is_columns(data: Any) -> bool:
    """Whether these are inputs and labels, as other libraries take them: few arrays of many rows, or named ones."""
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if not isinstance(data, (tuple, Mapping)) or not all(isinstance(p, (Tensor, np.ndarray)) and p.ndim for p in parts):
        return False
    return len(parts) > 0 and len({len(part) for part in parts}) == 1 and len(parts) < len(parts[0])


class PlannedLoader(DataLoader[Any]):
    """The plan's batches: what `make_private` and `attach` return.

    Iterating gives the rest of the epoch in which the optimizer stands. Call `optimizer.step()` once for each batch, or
    part of one, before you take the next. It is for training only: to evaluate, use a `DataLoader` of your own.
    """

    def __init__(
        self,
        data: Any,
        run: TrainingRun,
        physical_batch_size: int | None = None,
        rows_per_example: int = 1,
        fixed_shape: bool | None = False,
        augment: Callable[[Any], Any] | None = None,
        never_empty: bool = False,
    ) -> None:
        self.run = run
        self._loaded_step: int | None = None
        dataset = dataset_of(data)
        given = data if isinstance(data, DataLoader) else None
        known = (None, 1, run.plan.run.batch_size)  # 1 is what a loader has that was given none
        if given is not None and physical_batch_size is None and given.batch_size not in known and run.owned is None:
            warnings.warn(
                f"the loader's batch_size={given.batch_size:,} is not used: the plan's batches have "
                f"{run.expected_batch_size:,.0f} examples; to have them handed out in parts of {given.batch_size:,} "
                f"pass physical_batch_size={given.batch_size}",
                PlanMismatchWarning,
                stacklevel=3,  # the caller of make_private or attach
            )
        kept = {} if given is None else {name: getattr(given, name) for name in _KEPT}
        kept["worker_init_fn"] = partial(_start_worker, kept.get("worker_init_fn"))
        collate = default_collate if given is None else given.collate_fn
        self.collate = collate
        at_once = indexed_at_once(dataset) if collate is default_collate else None
        if fixed_shape is None:
            fixed_shape = at_once is not None  # where rows of zeros are surely harmless
        self._planned = PlannedSampler(run, physical_batch_size, rows_per_example, fixed_shape, never_empty)
        self._planned.as_array = at_once is not None
        rows, size = self._planned.rows, self._planned.physical if fixed_shape else None
        self._augmentation = None if augment is None else Augmentation(augment, rows)
        self._planned.for_any_loader = augment is None
        if at_once is None:
            super().__init__(
                dataset,
                batch_sampler=self._planned,
                collate_fn=Collated(collate, dataset, size, rows, never_empty),
                **kept,
            )
        else:
            at_once.least, at_once.zeros = rows * (int(never_empty) if size is None else size), size is not None
            super().__init__(at_once, batch_sampler=self._planned, collate_fn=_whole, **kept)

    def __repr__(self) -> str:
        planned = self.run.plan.run
        stands = f"step {self.run.step:,} of {planned.steps:,}"
        return f"<planned loader: {planned.steps_per_epoch:,} batches per epoch, {stands}>"

    def __iter__(self) -> Any:
        if self._loaded_step is not None and self._loaded_step != self.run.step:
            raise QuellError(
                f"the loader's state is that of step {self._loaded_step:,}, but the optimizer stands at "
                f"{self.run.step:,}: load the optimizer's state of the same checkpoint"
            )
        self._loaded_step = None
        self.run.require_steps_left()
        self.run.seed(f"of workers from step {self.run.step}, rank {self.run.rank}")  # their seed is drawn from these
        ahead: deque[Portion] = deque()
        with self._planned.noting(ahead.append if self.num_workers else self.run.receive):
            return self._received(self._items(), ahead)

    def _items(self) -> Iterator[Any]:
        """What DataLoader gives, and where it only passes batches on, without it: small models would notice."""
        straight = self._planned.as_array and not self.num_workers and not self.pin_memory
        items: Iterator[Any] = map(self.dataset.__getitems__, self._planned) if straight else super().__iter__()
        return items

    def _received(self, items: Iterator[Any], ahead: deque[Portion]) -> Iterator[Any]:
        """The items. Workers fetch ahead, and that is nobody's step: what they bring is noted when the loop gets it."""
        for item in items:
            if ahead:
                self.run.receive(ahead.popleft())
            if self._augmentation is not None:
                item = self._augmentation(item)
            due = self.run.unfinished.received
            assert due is not None
            if self.run.guard is not None:
                self.run.guard.watch(item, due.rows)
            yield item

    @property
    def most_rows(self) -> int | None:
        """Of what is handed out at once; None where whole batches are."""
        return None if self._planned.physical is None else self._planned.physical * self._planned.rows

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, which is the optimizer's step; `save_checkpoint` has it."""
        return {"step": self.run.step, **self.run.name()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the run and the step with the optimizer's, whose state is to be loaded too."""
        self.run.require_own(state)
        self._loaded_step = int(state["step"])


class PlannedSteps:
    """The batches for trainers that count steps by items: an item is a planned step, to be iterated over for its parts.

    So every planned step is taken, whatever the number of parts, and schedules, logs and checkpoints count steps.
    """

    def __init__(self, loader: PlannedLoader) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        return self.loader.run.plan.run.steps_per_epoch

    def __iter__(self) -> Iterator[Iterator[tuple[Any, bool]]]:
        parts = iter(self.loader)
        for first in parts:
            yield self._parts(first, parts)

    def _parts(self, part: Any, rest: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """The parts of a step, each with whether it is the last; the next is fetched when it is asked for."""
        while True:
            due = self.loader.run.unfinished.received
            last = due is None or due.last
            yield part, last
            if last:
                return
            part = next(rest)


class PlannedSampler(Sampler[Any]):
    """This rank's indices of each batch, in physical portions if asked.

    Whoever starts it starts the due step anew. Portions count as received when they are drawn, unless a loader of ours
    has workers. Those of another loader, such as the one that Opacus's BatchMemoryManager makes, cannot fetch ahead.
    Where a portion is `never_empty`, one without examples has one that counts for nobody: many models cannot run on no
    rows, and the ranks of a sharded model run it together.
    """

    def __init__(
        self,
        run: TrainingRun,
        physical_batch_size: int | None,
        rows: int = 1,
        fixed_shape: bool = False,
        never_empty: bool = False,
    ) -> None:
        self.never_empty = never_empty
        self.run, self.repeats, self.fixed_shape = run, require_count("rows_per_example", rows), fixed_shape
        self.rows = self.repeats * (1 if run.owned is None else run.owned.most)  # of an example, or of a user
        self.physical = (
            None if physical_batch_size is None else require_count("physical_batch_size", physical_batch_size)
        )
        if fixed_shape and self.physical is None:
            self.physical = _usual_size(run)
        self._stream: Iterator[Any] = iter(())
        self._stream_step = -1  # the step whose batch `_stream` gives next
        self._note: Callable[[Portion], None] | None = None
        self.for_any_loader = True
        self.as_array = False  # whether indices stay an array, which is uploaded faster; other data sets expect a list

    @contextmanager
    def noting(self, note: Callable[[Portion], None]) -> Iterator[None]:
        """An iteration that is started meanwhile is our loader's, and tells `note` what it draws."""
        self._note = note
        try:
            yield
        finally:
            self._note = None

    def __len__(self) -> int:
        """Items per epoch; with a physical batch size, about so many."""
        return self.run.plan.run.steps_per_epoch * self._portions(round(self.run.expected_batch_size))

    def __iter__(self) -> Iterator[Any]:
        self.run.restart_step()
        if self._note is None and not self.for_any_loader:
            raise QuellError(
                "another loader than make_private's draws the batches, and would leave out augment: pass "
                "physical_batch_size= to make_private instead of using a BatchMemoryManager"
            )
        return self._draw(self._note or self.run.receive)

    def _draw(self, note: Callable[[Portion], None]) -> Iterator[Any]:
        run = self.run
        for step in range(run.step, run.epoch_end):
            batch = self._batch(step)
            own, count = batch[run.rank :: run.world], self._portions(len(batch))
            portions = [own] if count == 1 else np.array_split(own, count)
            for number, portion in enumerate(portions):
                filled_to = self.physical if self.fixed_shape else None
                if self.never_empty and not len(portion):
                    filled_to = filled_to or 1
                note(Portion(step, number, len(portions), len(portion), self.rows, filled_to))
                rows = portion if run.owned is None else run.owned.taken(portion, step)
                rows = rows.repeat(self.repeats)
                yield rows if self.as_array else rows.tolist()

    def _portions(self, batch_size: int) -> int:
        """How many items a batch makes: the same on every rank, because sharded models compute together."""
        share = -(-batch_size // self.run.world)
        return 1 if self.physical is None else max(1, -(-share // self.physical))

    def _batch(self, step: int) -> Any:
        if step != self._stream_step:  # some schemes remember who took part, so a stream goes on where it can
            self._stream, self._stream_step = self.run.batches.starting(step), step
        self._stream_step += 1
        return next(self._stream)


def _start_worker(given: Callable[[int], None] | None, worker: int) -> None:
    """Seed a worker by the whole of its number, of which torch takes 32 bits, and do what the user's function does."""
    seed_all(torch.initial_seed().to_bytes(8, "little"))
    if given is not None:
        given(worker)


def _usual_size(run: TrainingRun) -> int:
    """A size that few of a rank's batches exceed; those come in parts.

    Batches that are drawn at random have a standard deviation of about the root of their mean. Two of them cost the
    least time: rows of zeros on one side, second parts on the other.
    """
    mean = run.expected_batch_size / run.world
    spread = 0.0 if run.batches.scheme.equal_sizes else 2 * math.sqrt(mean)
    return max(1, math.ceil(mean + spread))


_LOOKS = 3  # first batches whose order of rows is checked


class Collated:
    """A collate function that can also make a batch of nobody, and fill batches up to one size.

    `size` is that size in units of so many `rows`, or None. Where a batch is `never_empty` and has no size, one of
    nobody has the rows of one unit instead.

    What it fills with are zeros, which no example has made: should a loop change the order of the rows, so that one of
    them is taken for an example, nothing about anybody is in it.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], dataset: Any, size: int | None, rows: int, never_empty: bool = False
    ) -> None:
        self.collate, self.dataset, self.size, self.rows = collate, dataset, size, rows
        self._never_empty, self._looks = never_empty, _LOOKS

    def __call__(self, examples: list[Any]) -> Any:
        if not examples and self._never_empty and self.size is None:
            return self._first(self.rows)
        batch = self._batch(examples)
        return batch if self.size is None else _filled(batch, len(examples), self.size * self.rows)

    def _batch(self, examples: list[Any]) -> Any:
        if not examples:
            return _without_rows(self._first(1))
        batch = self.collate(examples)
        if self.rows > 1 and self._looks and len(examples) > self.rows:
            self._require_order(examples, batch)
            self._looks -= 1
        return batch

    def _require_order(self, examples: list[Any], batch: Any) -> None:
        """Units are consecutive rows, so a function that sorts them would mix units up."""
        turned, count = self.collate(examples[::-1]), len(examples)
        pairs = zip(leaves(batch), leaves(turned), strict=True)
        rows = [(a, b) for a, b in pairs if isinstance(a, Tensor) and a.dim() and len(a) == count]
        if any(a.shape != b.shape or not torch.equal(a, b.flip(0)) for a, b in rows):
            raise QuellError(
                "the collate function changes the order of rows, or is random: several rows that are clipped as one "
                "must stay together, so leave their order alone"
            )

    def _first(self, rows: int) -> Any:
        """A batch of the first example, so many times."""
        return self.collate([self.dataset[0]] * rows)


def _whole(batch: Any) -> Any:
    """What the data set gives where it makes batches itself."""
    return batch


def _filled(batch: Any, real: int, rows: int) -> Any:
    """Every tensor, of so many `real` rows, with so many rows, the new ones zero."""

    def fill(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise QuellError(f"fixed_shape=True fills batches of tensors, not of {type(value).__name__}: leave it out")
        if not value.dim() or len(value) != real:
            raise QuellError(
                f"the collate function made a tensor of shape {tuple(value.shape)} from {real} items: fixed_shape=True "
                "needs one row for each of them"
            )
        return torch.cat([value, value.new_zeros(rows - real, *value.shape[1:])]) if real < rows else value

    return mapped(fill, batch)


def _without_rows(batch: Any) -> Any:
    """The batch of nobody, from one of somebody."""

    def emptied(value: Any) -> Any:
        if isinstance(value, Tensor) or is_texts(value):
            return value[:0]
        raise QuellError(
            f"an empty batch cannot be made of {type(value).__name__}: let the collate function return tensors, and "
            "mappings, lists, tuples and dataclasses of them"
        )

    return mapped(emptied, batch)
