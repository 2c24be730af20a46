"""Data in memory is indexed a whole batch at once, and its batches are those that default_collate makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, TensorDataset, default_collate, random_split

from quell.errors import QuellError
from quell.torch import make_private
from quell.torch.in_memory import indexed_at_once
from quell.torch.nested import leaves, mapped

from .conftest import small_plan, unpriced_poisson_plan
from .training import examples, network, seeded

X, Y = examples(60).tensors
READ_ONLY = X.numpy().copy()
READ_ONLY.flags.writeable = False
DATA = {
    "tensors": TensorDataset(X, Y),
    "split": random_split(TensorDataset(X, Y), [40, 20], torch.Generator().manual_seed(1))[0],
    "nested": Subset(Subset(TensorDataset(X, Y), range(10, 60)), np.arange(49, 4, -1)),
    "from the end": Subset(TensorDataset(X, Y), list(range(-40, 0))),
    "stack": StackDataset(X, Y),
    "named": StackDataset(x=X, y=Y),
    "arrays": StackDataset(X.numpy(), Y.numpy()),
    "narrow arrays": StackDataset(X.numpy().astype(np.float16), Y.numpy().astype(np.uint8)),
    "labels alone": StackDataset(X.numpy()[:, 0], X.numpy()[:, 0] > 0),
    "read-only": StackDataset(READ_ONLY, Y.numpy()),
    "split arrays": random_split(StackDataset(X.numpy(), Y.numpy()), [40, 20])[0],
    "stacked splits": StackDataset(Subset(TensorDataset(X), range(40)), Subset(Y, range(20, 60))),
    "a tensor": X,
    "an array": X.numpy(),
}


def same(found, right):
    assert type(found) is type(right)
    if isinstance(right, dict):
        assert found.keys() == right.keys()
        found, right = list(found.values()), list(right.values())
    if isinstance(right, list):
        assert len(found) == len(right)
        for one, other in zip(found, right, strict=True):
            same(one, other)
    else:
        torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", DATA)
def test_batches_are_those_of_default_collate(name):
    data = DATA[name]
    whole = indexed_at_once(data)
    assert len(whole) == len(data)
    chosen = [3, 0, 3, 39, 17]
    same(whole.__getitems__(chosen), default_collate([data[index] for index in chosen]))


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("chosen", [[], [3, 0, 17], [3, 0, 3, 39, 17]])
def test_batches_are_filled_up_with_zeros(name, chosen):
    data = DATA[name]
    whole, plain = indexed_at_once(data), indexed_at_once(data)
    whole.least = 5
    filled, batch = whole.__getitems__(np.array(chosen, dtype=np.int64)), plain.__getitems__(chosen)
    same(whole.__getitems__(chosen), filled)
    assert all(len(rows) == 5 and not rows[len(chosen) :].any() for rows in leaves(filled))
    same(mapped(lambda rows: rows[: len(chosen)], filled), batch)


class Changed(TensorDataset):
    def __getitem__(self, index):
        return -super().__getitem__(index)[0], self.tensors[1][index]


class ByRow(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize(
    "data",
    [
        Changed(X, Y),
        Subset(Changed(X, Y), range(40)),
        ByRow(),
        StackDataset(X, [str(number) for number in range(60)]),
        StackDataset(np.array([str(number) for number in range(60)])),
        StackDataset(X.numpy()[::-1], Y),
        [(X[0], Y[0])] * 60,
    ],
)
def test_other_data_sets_are_asked_row_by_row(data):
    assert indexed_at_once(data) is None


@pytest.mark.parametrize("name", ["split", "named", "arrays", "stacked splits"])
@pytest.mark.parametrize("fixed", [None, True])
def test_they_serve_a_run(name, fixed):
    """With empty batches, filled ones, and the default where a model is on a GPU: fixed_shape=None asks the loader."""
    from quell.torch.loader import PlannedLoader

    data = Subset(DATA[name], range(12))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _, optimizer, loader = make_private(
        model, optimizer, data, unpriced_poisson_plan(), key=seeded(1), fixed_shape=True, loss_reduction="sum"
    )
    loader = PlannedLoader(data, optimizer.run, fixed_shape=fixed)
    assert loader.most_rows  # batches of one shape
    sizes = set()
    for batch in loader:
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        x = x[0] if isinstance(x, list) else x
        real = optimizer.run.unfinished.received.examples
        sizes.add(len(x))
        assert not bool(x[real:].any())
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert len(sizes) == 1


def test_workers_and_a_collate_function_of_ones_own():
    data = DataLoader(DATA["split"], num_workers=1)
    model = network()
    _, _, loader = make_private(model, torch.optim.SGD(model.parameters(), lr=0.5), data, small_plan(), key=seeded(1))
    assert len(next(iter(loader))[0]) == 8
    own = DataLoader(DATA["split"], collate_fn=lambda rows: default_collate(rows))
    model = network()
    _, _, loader = make_private(model, torch.optim.SGD(model.parameters(), lr=0.5), own, small_plan(), key=seeded(2))
    assert loader.dataset is DATA["split"]


@pytest.mark.parametrize("data", [(X, Y), (X.numpy(), Y.numpy()), {"x": X, "y": Y}])
def test_arrays_that_are_no_data_set(data):
    model = network()
    with pytest.raises(QuellError, match=r"of arrays, not of examples: pass TensorDataset\(x, y\), or StackDataset"):
        make_private(model, torch.optim.SGD(model.parameters(), lr=0.5), data, small_plan())
