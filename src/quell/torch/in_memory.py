"""Data sets that lie in memory as tensors or arrays: a whole batch is taken from each by one index.

A `DataLoader` asks a data set for one row after the other and puts them together again, which takes longer than the
step of a small model. `TensorDataset`, `StackDataset`, a `Subset` of these (as `random_split` makes), tensors and NumPy
arrays give the same batches at once. Classes derived from them may do something else with a row, and are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

from quell.torch.nested import mapped
from quell.torch.transfer import uploaded


class IndexedAtOnce(Dataset[Any]):
    """The rows of such a data set; `__getitems__` gives the batch that `default_collate` would make of them.

    One of fewer than `least` rows is filled up, with `zeros` or with the first row of the data, as models may need it.
    """

    def __init__(self, dataset: Any, columns: Any) -> None:
        self.dataset, self.columns, self.least, self.zeros = dataset, columns, 0, True

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Any) -> Any:
        known: dict[Any, Tensor] = {}  # an index on each device serves all columns there
        count = len(indices)
        if count < self.least:
            filled = np.zeros(self.least, dtype=np.int64)
            filled[:count] = indices
            indices = filled

        def rows(column: _Column) -> Tensor:
            place = column.values.device, id(column.numbers)
            if place not in known:
                numbers = indices if column.numbers is None else column.numbers[indices]
                known[place] = uploaded(numbers, column.values.device)
            batch = column.values.index_select(0, known[place])
            if self.zeros and len(batch) > count:
                batch[count:].zero_()
            return batch

        return mapped(rows, self.columns)


class _Column:
    """A tensor, and which of its rows are the data set's; None: all."""

    def __init__(self, values: Tensor, numbers: Any) -> None:
        self.values, self.numbers = values, numbers


def indexed_at_once(dataset: Any) -> IndexedAtOnce | None:
    """The data set, if it can be indexed at once."""
    columns = _columns(dataset, None)
    return None if columns is None else IndexedAtOnce(dataset, columns)


def _columns(dataset: Any, numbers: Any) -> Any:
    """The data set's rows of these numbers, as columns in the structure of its batches; None if it has no columns."""
    if type(dataset) is Subset:
        own = np.asarray(dataset.indices)
        if own.ndim != 1 or own.dtype.kind not in "iu":
            return None
        own = np.where(own < 0, own + len(dataset.dataset), own)
        return _columns(dataset.dataset, own if numbers is None else own[numbers])
    if type(dataset) is TensorDataset:
        return _all(list(dataset.tensors), numbers)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return _all(parts if isinstance(parts, Mapping) else list(parts), numbers)
    values = _tensor(dataset)
    return None if values is None else _Column(values, numbers)


def _all(parts: Any, numbers: Any) -> Any:
    if isinstance(parts, Mapping):
        found = _all(list(parts.values()), numbers)
        return None if found is None else dict(zip(parts, found, strict=True))
    found = [_columns(part, numbers) for part in parts]
    return None if any(column is None for column in found) else found


def _tensor(values: Any) -> Tensor | None:
    """The numbers of a tensor or an array, without a copy; None where torch cannot look at them so."""
    if isinstance(values, Tensor):
        return values if values.dim() and values.layout == torch.strided and not values.is_nested else None
    if not isinstance(values, np.ndarray) or not values.ndim:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about arrays that cannot be written: nobody writes
            return torch.from_numpy(values)
    except (TypeError, ValueError):  # texts, objects, the other order of bytes, reversed views
        return None
