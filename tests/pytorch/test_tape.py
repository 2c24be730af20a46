"""What the loop does with a batch is done again without touching what belongs to the loop."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate

from quell.errors import QuellError
from quell.torch import make_private
from quell.torch.probe import UncheckedLossWarning
from quell.torch.tape import Tape

from .conftest import small_plan
from .training import network, seeded, train

cross_entropy = functional.cross_entropy
X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(5)), torch.arange(40) % 3  # all labels in a batch


def private(batch_size=8, data=None, **options):
    model, plan = network(), small_plan("bisr", alone=True, batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(X, Y) if data is None else data
    return make_private(model, optimizer, data, plan, key=seeded(3), **options)


def three_steps(loss, probed=True, batch_size=8):
    """The loop's own tensors afterwards, and the weights."""
    model, optimizer, loader = private(batch_size)
    guard = optimizer.run.guard
    if not probed:
        guard._left, guard._checked = dict.fromkeys(guard._left, 0), set(guard._left)
    own = {}
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        loss(model(x), y, own).backward()
        optimizer.step()
    assert guard._checked
    assert not guard._why
    return {**own, **model.state_dict()}


def losses(out, y):
    return cross_entropy(out, y, reduction="none")


# Tensors of the loop's own that it writes into


def one_hot(out, y, own):
    own["target"] = torch.zeros(len(y), 3).scatter_(1, y[:, None], 1.0)
    return cross_entropy(out, own["target"])


def weights(out, y, own):
    own["weights"] = torch.ones(len(y))
    own["weights"][y == 1] = 2.0
    own["scale"] = torch.tensor(1.0)
    own["scale"] += (y >= 0).all()
    return (losses(out, y) * own["weights"] * own["scale"]).mean()


def metrics(out, y, own):
    own["correct"] = own.get("correct", torch.tensor(0))
    own["correct"] += (out.argmax(1) == y).sum()
    own.setdefault("confusion", torch.zeros(3, 3)).index_put_((y, out.argmax(1)), torch.ones(len(y)), accumulate=True)
    own.setdefault("histogram", torch.zeros(3)).index_add_(0, y, torch.ones(len(y)))
    return cross_entropy(out, y)


def buffer(out, y, own):
    target = own.setdefault("target", torch.ones(len(y), dtype=torch.long))
    target.zero_()
    target.copy_(y)
    return cross_entropy(out, target)


def given_memory(out, y, own):
    own["kept"] = torch.zeros(len(y))
    return (losses(out, y) * torch.mul(y, 0.5, out=own["kept"])).mean()


def several_parts(out, y, own):
    own["target"] = torch.zeros(len(y), 3)
    first, others = own["target"][:, :1], own["target"][:, 1:]
    first.copy_((y == 0)[:, None])
    others[:] = torch.stack([y == 1, y == 2], 1)
    return cross_entropy(out, own["target"])


def of_the_batchs_shape(out, y, own):
    own["weights"] = torch.zeros(len(y))
    own["weights"].view_as(y).copy_(y)
    return (losses(out, y) * own["weights"]).mean()


def rows(out, y, own):
    made = torch.zeros(len(y))
    for i in range(len(y)):
        made[i] = losses(out, y)[i]
    return made.mean()


LOSSES = [one_hot, weights, metrics, buffer, given_memory, several_parts, of_the_batchs_shape, rows]


@pytest.mark.parametrize("batch_size", [8, 20])  # all of its rows are probed, and some of them
@pytest.mark.parametrize("loss", LOSSES)
def test_what_the_loop_writes_into_its_own_tensors_stays_as_it_is(loss, batch_size):
    probed, plain = (three_steps(loss, probed, batch_size) for probed in (True, False))
    assert list(probed) == list(plain)
    for name, value in probed.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, plain[name])


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_own_tensors_between_several_backward_passes(clipping):
    model, optimizer, loader = private(clipping=clipping)
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        target = torch.zeros(len(y), 3).scatter_(1, y[:, None], 1.0)
        for half in torch.arange(len(y)).split(4):
            (cross_entropy(model(x[half]), target[half], reduction="sum") / len(y)).backward()
            assert torch.equal(target, functional.one_hot(y, 3).float())
        optimizer.step()
    assert optimizer.run.guard._checked
    assert not optimizer.run.guard._why


def test_copies_are_kept_of_what_is_written_only():
    tape = Tape(8, lambda tape: None)
    x, read, written = torch.ones(8), torch.ones(8), torch.ones(8)
    tape.start(x)
    x += read
    x.mul_(2)
    written[:4] += x[:4] * read[:4]
    written.add_(x)
    tape.close()
    ((whole, before),) = tape.kept.values()
    assert whole.data_ptr() == written.data_ptr()
    assert torch.equal(before, torch.ones(8))


# Losses that couple through such tensors


def by_the_sum(out, y, own):
    counted = torch.zeros(len(y))
    counted[:] = y > 0
    return losses(out, y).sum() / counted.sum()


def by_a_part(out, y, own):
    counted = torch.zeros(len(y))
    counted[:4].copy_(y[:4] > 0)
    return losses(out, y).sum() / (1 + counted.sum())


def by_a_histogram(out, y, own):
    histogram = torch.zeros(3).index_add_(0, y, torch.ones(len(y)))
    return (losses(out, y) / histogram[y]).sum()


def by_written_lists(out, y, own):
    total = torch.ones(())
    torch._foreach_add_([total], [(y > 0).sum()])
    return losses(out, y).sum() / total


def by_one_of_two_columns(out, y, own):
    first, second = torch.zeros(len(y), 2).unbind(1)
    first.copy_((y > 0).sum().expand_as(y))
    second.copy_(y >= 0)
    return (losses(out, y) / first).sum()


def by_a_number(out, y, own):
    return losses(out, y).sum() / (torch.ones(()) * (y > 0).sum().item())


def by_a_number_that_is_written(out, y, own):
    count = torch.ones(2)
    count[0] = (y > 0).sum().item()
    return losses(out, y).sum() / count[0]


def by_another_class(out, y, own):
    return losses(out, y).sum() / (y.as_subclass(torch.Tensor) > 0).sum()


COUPLED = [
    by_another_class,
    by_the_sum,
    by_a_part,
    by_a_histogram,
    by_written_lists,
    by_one_of_two_columns,
    by_a_number,
]


@pytest.mark.parametrize("batch_size", [8, 20])
@pytest.mark.parametrize("loss", [*COUPLED, by_a_number_that_is_written])
def test_losses_that_couple_through_tensors_of_the_loops_own(loss, batch_size):
    with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
        three_steps(loss, batch_size=batch_size)


# Batches that cannot be followed


class Labels(torch.Tensor):
    """As MONAI's and fastai's tensors."""


def by_counted(out, y):
    return losses(out, y).sum() / (y > 0).sum()


@pytest.mark.parametrize("batch_size", [8, 40])  # many steps, and two
@pytest.mark.parametrize("kinds", [(Labels, Labels), (Labels, torch.Tensor), (torch.Tensor, Labels)])
def test_batches_with_tensors_of_a_subclass_are_a_warning(kinds, batch_size):
    def collate(rows):
        return tuple(part.as_subclass(kind) for part, kind in zip(default_collate(rows), kinds, strict=True))

    def steps(loss):
        model, optimizer, loader = private(batch_size, DataLoader(TensorDataset(X, Y), collate_fn=collate))
        train(model, optimizer, loader, 3 if batch_size == 8 else 2, loss)

    with pytest.warns(UncheckedLossWarning, match="is a Labels, and only plain ones"):
        steps(cross_entropy)
    if kinds[1] is Labels:
        with pytest.warns(UncheckedLossWarning):
            steps(by_counted)


def test_labels_that_the_loop_makes_a_subclass_are_a_warning():
    model, optimizer, loader = private()
    with pytest.warns(UncheckedLossWarning, match="is a Labels, and only plain ones"):
        train(model, optimizer, loader, 3, lambda out, y: losses(out, y).sum() / (y.as_subclass(Labels) > 0).sum())


def test_labels_by_dlpack_are_a_warning():
    model, optimizer, loader = private()
    with pytest.warns(UncheckedLossWarning, match="was handed on by DLPack"):
        train(model, optimizer, loader, 3, lambda out, y: losses(out, y).sum() / (torch.from_dlpack(y) > 0).sum())


# Private runs side by side


def side_by_side(prepare, loss, of_both=lambda ours, others, x: ours(x)):
    """Two runs whose loops take turns; `prepare` looks at both batches before any model runs."""
    runs = [private(), private()]
    for step, *batches in zip(range(3), *(loader for _, _, loader in runs), strict=False):
        prepared = [prepare(y) for _, y in batches]
        for i, ((x, y), known) in enumerate(zip(batches, prepared, strict=True)):
            (model, optimizer, _), (other, _, _) = runs[i], runs[1 - i]
            optimizer.zero_grad()
            loss(of_both(model, other, x), y, known).backward()
            optimizer.step()
            assert optimizer.run.step == step + 1
    return [optimizer.run.guard for _, optimizer, _ in runs]


def test_two_runs_side_by_side_are_both_followed():
    weight = torch.tensor([1.0, 2.0, 3.0])
    for guard in side_by_side(lambda y: weight[y], lambda out, y, known: (losses(out, y) * known).mean()):
        assert guard._checked
        assert not guard._why
    for prepare in (lambda y: weight[y].sum(), lambda y: weight[y].sum().item() + 1):
        with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
            side_by_side(prepare, lambda out, y, known: losses(out, y).sum() / known)


def test_the_model_of_another_run_is_a_warning():
    with pytest.warns(UncheckedLossWarning, match="given to the model of another private run"):
        side_by_side(
            lambda y: None,
            lambda out, y, known: cross_entropy(out, y),
            lambda ours, others, x: ours(x) * torch.no_grad()(others)(x),
        )


def test_a_closed_tape_leaves_the_others_watching():
    tapes, batches = [Tape(8, lambda tape: None) for _ in range(2)], torch.ones(2, 8).unbind()
    for tape, batch in zip(tapes, batches, strict=True):
        tape.start(batch)
    both = batches[0] + batches[1]
    assert [tape.knows(both) for tape in tapes] == [True, True]
    tapes[0].close()
    assert type(batches[0]) is torch.Tensor
    batches[1].sum()
    assert [len(tape.entries) for tape in tapes] == [1, 2]
    tapes[1].close()
    assert type(batches[1]) is torch.Tensor
