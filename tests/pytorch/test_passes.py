"""Forward and backward passes in any order, unfinished, failed, repeated: what is clipped is what belongs together."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quell.errors import QuellError
from quell.torch.engine.layers import LayerEngine
from quell.torch.engine.microbatch import MicrobatchEngine
from quell.torch.private import make_private

from .conftest import small_plan
from .training import clipped_gradient, examples, network, seeded, train, without_noise


def engine_of(model, bound=1.0, reduction="sum", unit=1):
    return LayerEngine(model, dict(model.named_parameters()), bound, reduction, unit)


def by_microbatch(model, bound=1.0):
    return MicrobatchEngine(model, dict(model.named_parameters()), bound, "sum", 3)


both_engines = pytest.mark.parametrize("engine_of", [engine_of, by_microbatch])


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))


def mean_sums(model, run, bound=0.1):
    engine = engine_of(model, bound, "mean")
    run(model)
    return engine.collect()


def squares(output, target):
    return output.square().flatten(1).mean(1).sum()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x):
        return self.left(x), self.right(x)


# Layers that a loss leaves out


@both_engines
def test_a_layer_without_a_gradient_in_the_first_step_is_named(engine_of):
    """It would get noise and never learn. Batches without examples tell nothing about it."""
    model = Heads()
    engine = engine_of(model)
    model(torch.randn(0, 5))[0].sum().backward()
    assert engine.collect()[0] == 0
    model(torch.randn(8, 5))[0].sum().backward()
    with pytest.raises(QuellError, match=r"no gradient came for right\.bias, right\.weight in the first step"):
        engine.collect()


@both_engines
def test_a_layer_that_no_output_depends_on_is_named(engine_of):
    class Idle(Heads):
        def forward(self, x):
            self.right(x)  # nobody looks at it
            return self.left(x)

    model = Idle()
    engine = engine_of(model)
    model(torch.randn(8, 5)).sum().backward()
    with pytest.raises(QuellError, match=r"no gradient came for right\.bias, right\.weight"):
        engine.collect()


@both_engines
def test_a_gradient_of_zero_is_a_gradient(engine_of):
    """As the first factor of LoRA has in the first step, because the second one is zero."""
    model = nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False))
    nn.init.zeros_(model[1].weight)
    engine = engine_of(model)
    model(torch.randn(8, 5)).sum().backward()
    seen, sums = engine.collect()
    assert seen == 8
    assert [bool(total.any()) for total in sums] == [False, True]


@both_engines
def test_a_head_may_be_left_out_later_and_trains_when_it_is_back(engine_of):
    model = Heads()
    engine = engine_of(model)
    for losses, trained in ((sum, 4), (lambda heads: heads[0], 2), (sum, 4)):
        losses(model(torch.randn(8, 5))).sum().backward()
        seen, sums = engine.collect()
        assert seen == 8
        assert [bool(total.any()) for total in sums] == [True] * trained + [False] * (4 - trained)


@both_engines
def test_a_part_of_a_batch_may_leave_out_a_head(engine_of):
    """Then another part has it, and both are parts of one step."""

    def parts(first_has_it):
        model = Heads()
        engine = engine_of(model, 1e6)
        if first_has_it:
            model(torch.ones(8, 5))[0].sum().backward()
        sum(model(torch.ones(8, 5))).sum().backward()
        return engine.collect()

    (seen, both), (_, one) = parts(True), parts(False)
    assert seen == 16
    torch.testing.assert_close(both, [2 * one[0], 2 * one[1], one[2], one[3]])


def test_the_comparison_with_autograd_waits_for_a_call_of_the_model():
    """Parts of a model that are called by themselves cannot be run again together."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 2)

        def forward(self, x):
            return self.layer(x.flip(0))

    model = Turned()
    engine = engine_of(model)
    model.layer(torch.randn(8, 5)).square().sum().backward()
    assert engine.collect()[0] == 8
    model(torch.randn(8, 5)).square().sum().backward()
    with pytest.raises(QuellError, match=r"the gradient of one example for layer\.\w+ has norm"):
        engine.collect()


# The order of passes


def test_an_example_of_an_earlier_batch_does_not_come_back():
    """Inputs that no backward pass fetched must not meet the gradients of a later batch."""

    def second_sums(first_batch):
        model = Heads()
        engine = engine_of(model)
        sum(model(torch.ones(8, 5))).sum().backward()
        engine.collect()
        model(first_batch)[0].sum().backward()
        engine.collect()
        model(torch.ones(8, 5))[1].sum().backward()
        return engine.collect()[1]

    first, second = second_sums(torch.zeros(8, 5)), second_sums(torch.full((8, 5), 50.0))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_inputs_meet_their_own_gradients_in_any_order():
    """Two losses, the older first: by the order of calls alone, each would meet the other's inputs."""
    x, y = torch.randn(8, 5), torch.randn(3, 5)

    def interleaved(model):
        first, second = model(x).square().mean(), model(y).square().mean()
        first.backward()
        second.backward()

    def apart(model):
        for part in (x, y):
            model(part).square().mean().backward()

    seen, sums = mean_sums(small(), interleaved)
    again, expected = mean_sums(small(), apart)
    assert seen == again == 11
    torch.testing.assert_close(sums, expected)
    by_hand = clipped_gradient(small(), squares, [torch.cat([x, y])] * 2, 0.1)
    torch.testing.assert_close(sums, list(by_hand.values()), rtol=1e-4, atol=1e-6)


def test_two_looks_at_one_batch_are_one_gradient_of_each_example():
    """As in contrastive losses: both forward passes belong to one backward pass, row by row."""
    x, y = torch.randn(8, 5), torch.randn(8, 5)
    model = small()
    engine = engine_of(model, 0.1)
    (model(x) * model(y)).sum().backward()
    seen, sums = engine.collect()
    assert seen == 8

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = small()

        def forward(self, pair):
            return self.model(pair[:, 0]) * self.model(pair[:, 1])

    by_hand = clipped_gradient(Both(), lambda out, _: out.sum(), [torch.stack([x, y], 1), x], 0.1)
    torch.testing.assert_close(sums, list(by_hand.values()), rtol=1e-4, atol=1e-6)


def test_two_passes_of_unequal_size_under_one_loss_are_refused():
    model = small()
    engine = engine_of(model)
    loss = model(torch.randn(8, 5)).sum() + model(torch.randn(3, 5)).sum()
    with pytest.raises(QuellError, match=r"different numbers of examples|rows from"):
        _backward_and_collect(engine, loss)


def _backward_and_collect(engine, loss):
    loss.backward()
    return engine.collect()


def test_two_backward_passes_through_one_forward_pass_are_refused():
    """Each would be clipped apart, and count as another set of examples."""
    model = small()
    engine_of(model)
    loss = model(torch.randn(8, 5)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(QuellError, match=r"add the losses up and call backward\(\) once"):
        loss.backward()


def test_a_penalty_on_gradients_is_refused():
    """The gradient of the outputs with respect to the inputs is a backward pass as well."""
    model = small()
    engine_of(model)
    x = torch.randn(8, 5, requires_grad=True)
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(QuellError, match="a second backward pass"):
        (output + slope.square().sum(1, keepdim=True)).sum().backward()


# Passes that failed


class Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Breaks.armed:
            raise MemoryError
        return gradient


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(Breaks.apply(self.first(x)))


class FragileCheckpoint(Fragile):
    def forward(self, x):
        return self.second(checkpoint(lambda h: Breaks.apply(self.first(h)), x, use_reentrant=True))


@pytest.mark.parametrize("make", [Fragile, FragileCheckpoint])
@pytest.mark.parametrize("told", [True, False])
def test_a_backward_pass_that_failed_leaves_nothing_behind(make, told, monkeypatch):
    """The promise of docs/pytorch.md: the batch comes again, and counts as if nothing had happened."""
    model, x = make(), torch.randn(8, 5, requires_grad=True)
    engine = engine_of(model)
    model(x).sum().backward()
    _, expected = engine.collect()
    with monkeypatch.context() as patch:
        patch.setattr(Breaks, "armed", True)
        with pytest.raises(MemoryError):
            model(torch.randn(8, 5, requires_grad=True)).sum().backward()
    if told:
        engine.discard()
    model(x).sum().backward()
    seen, sums = engine.collect()
    assert seen == 8
    torch.testing.assert_close(sums, expected)


def test_a_forward_pass_that_failed_leaves_nothing_behind():
    class Refuses(Fragile):
        def forward(self, x):
            hidden = self.first(x)
            if x.shape[0] == 5:
                raise MemoryError
            return self.second(hidden)

    model = Refuses()
    engine = engine_of(model)
    with pytest.raises(MemoryError):
        model(torch.randn(5, 5))
    assert model.first.weight.requires_grad  # parameters are the model's own again
    model(torch.randn(8, 5)).sum().backward()
    assert engine.collect()[0] == 8


def test_what_was_discarded_is_gone():
    model = small()
    engine = engine_of(model)
    model(torch.randn(8, 5)).sum().backward()
    engine.discard()
    seen, sums = engine.collect()
    assert seen == 0
    assert not any(bool(total.any()) for total in sums)


# What is kept


def test_no_inputs_are_kept_after_the_backward_pass():
    """Although the loss is still there, as it is in most loops, and the taps with it."""
    model = nn.Sequential(nn.Linear(5, 1))
    engine = engine_of(model)
    x = torch.randn(8, 5)
    kept = weakref.ref(x.untyped_storage())
    loss = model(x).sum()
    del x
    assert kept() is not None
    loss.backward()
    engine.collect()
    assert kept() is None


class Doubled(nn.Linear):
    """Its forward method is an attribute of the object, as some libraries replace it."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.forward = self.doubled

    def doubled(self, x):
        return 2 * nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("engine_for", [engine_of, by_microbatch])
@pytest.mark.parametrize("kind", [small, Doubled])
def test_copies_of_a_model_are_plain_and_the_model_is_not_pickled(kind, engine_for):
    """They compute with their own weights: those of the best epoch, an average, a teacher."""
    model, x = kind(), torch.randn(8, 5)
    engine = engine_for(model)
    twin = copy.deepcopy(model)
    before = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for again in (twin, copy.deepcopy(twin)):
        torch.testing.assert_close(again(x), before)
        again(x).sum().backward()
        assert all(parameter.grad is not None for parameter in again.parameters())
    assert engine.collect()[0] == 0
    with pytest.raises(QuellError, match=r"save model\.state_dict\(\)"):
        pickle.dumps(model)


# Checkpoints


class Blocks(nn.Module):
    """Two checkpoints, with and without something between them and the loss."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.reentrant = reentrant

    def forward(self, x):
        for layer in (self.first, self.second):
            x = layer(x).tanh() if self.reentrant is None else self.again(layer, x)
        return x

    def again(self, layer, x):
        return checkpoint(lambda h: layer(h).tanh(), x, use_reentrant=self.reentrant)


class Nested(Blocks):
    """A checkpoint of checkpoints, with a layer of each kind inside and outside."""

    def forward(self, x):
        if self.reentrant is None:
            return self.second(self.second(self.first(x).tanh()).tanh())
        return self.second(checkpoint(self.inner, self.first(x).tanh(), use_reentrant=self.reentrant))

    def inner(self, x):
        return self.again(self.second, x)


@pytest.mark.parametrize(("kind", "reentrant"), [(Blocks, True), (Blocks, False), (Nested, False)])
def test_checkpoints_of_both_kinds(kind, reentrant):
    x = torch.randn(8, 5, requires_grad=True)
    seen, sums = mean_sums(kind(reentrant), lambda model: model(x).square().mean().backward())
    assert seen == 8
    by_hand = clipped_gradient(kind(None), squares, [x.detach()] * 2, 0.1)
    torch.testing.assert_close(sums, list(by_hand.values()), rtol=1e-4, atol=1e-6)


def test_reentrant_checkpoints_inside_of_others_are_never_taken_for_one_gradient():
    """Their backward passes do not know each other: the examples count twice, which no step accepts."""
    x = torch.randn(8, 5, requires_grad=True)
    assert mean_sums(Nested(True), lambda model: model(x).square().mean().backward())[0] == 16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_compiled_model_is_clipped_like_any_other(compiled):
    def trained(how):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        given = torch.compile(model, backend="eager") if how == "before" else model
        plan = without_noise(small_plan())
        private, optimizer, loader = make_private(given, optimizer, examples(), plan, 0.3, key=seeded(3))
        train(torch.compile(private, backend="eager") if how == "after" else private, optimizer, loader)
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(compiled), trained(None))


def test_a_copy_of_the_model_is_an_ordinary_model():
    """As an average of the weights has: its layers are not followed, and the run goes on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = make_private(model, optimizer, examples(), small_plan(), 0.3)
    held_out, labels = examples(8, seed=6).tensors
    for x, y in loader:
        twin = copy.deepcopy(model)
        nn.functional.cross_entropy(twin(held_out), labels).backward()
        assert all(p.grad is not None for p in twin.parameters())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.run.step == 5
