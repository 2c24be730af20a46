"""The first batches are looked at for all that would be released without clipping and noise beside the gradients."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset

from quell.errors import QuellError
from quell.torch.probe import Probe, UncheckedLossWarning
from quell.torch.writes import checksums

from .test_probe import OwnLoss, Remembering, own_steps, private, sentences, three_steps, watched
from .training import examples, network, train

cross_entropy = functional.cross_entropy


def all_batches(trio, loss=cross_entropy):
    train(*trio, criterion=loss)
    assert trio[1].run.step == 10
    assert trio[1].run.guard._checked


# Parts of one example


def test_a_temperature_outside_the_model_in_parts_of_one_example():
    temperature = nn.Parameter(torch.ones(1))
    trio = private(physical_batch_size=1)
    for _ in range(5):  # a loop that goes on after the error gets it again
        with pytest.raises(QuellError, match=r"a trainable tensor of shape \(1,\) that is not the model's"):
            three_steps(trio, lambda out, y: cross_entropy(out / temperature, y))
    assert trio[1].run.step == 0


def test_buffers_that_keep_what_was_seen_in_parts_of_one_example():
    with pytest.raises(QuellError, match="writes what it sees into the buffer seen"):
        three_steps(private(Remembering(0.1), physical_batch_size=1))
    all_batches(private(Remembering(0.0), physical_batch_size=1))


def test_losses_of_one_example_couple_nothing():
    """What is divided by the tokens of the only example is divided by its own."""
    own_steps(private(OwnLoss(), data=sentences(1 + torch.arange(40) % 5), physical_batch_size=1))
    weights = torch.tensor([1.0, 20.0, 0.1])
    all_batches(private(physical_batch_size=1), lambda out, y: cross_entropy(out, y, weight=weights))


def test_batches_of_one_example_do_not_stand_for_larger_ones():
    """Single examples come first, and say nothing about a loss that couples."""
    model = network()
    probe = Probe(model, dict(model.named_parameters()))
    for count in (1, 1, 1, 1, 4):
        x, y = examples(count).tensors
        probe.watch((x, y), count)
        loss = cross_entropy(model(x), y, weight=torch.tensor([1.0, 20.0, 0.1]))
        if count == 1:
            loss.backward()
            probe.settle(last=True)
    with pytest.raises(QuellError, match="the loss couples the examples"):
        loss.backward()


def test_parts_of_one_example_that_cannot_be_followed_are_a_warning():
    model, optimizer, loader = private(physical_batch_size=1)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(x), y))
        if number == 2:
            with pytest.warns(UncheckedLossWarning, match="parts of one, could not be probed"):
                optimizer.step()
            break
        optimizer.step()


# What a forward pass writes


class Writing(nn.Module):
    """A linear layer that does something else with what it sees."""

    def __init__(self, write, **held):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.write, self.done = nn.Linear(6, 3), write, False
        for name, value in held.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        with torch.no_grad():
            self.write(self, x.detach())
        return self.layer(x)


def frozen():
    return nn.Parameter(torch.ones(6), requires_grad=False)


def once(write, mark="done"):
    """The first time only, as an attribute of the module says, which may be new then."""

    def first(module, x):
        if not getattr(module, mark, False):
            write(module, x)
            setattr(module, mark, True)

    return first


def replaced(module, x):
    module.seen = 0.9 * module.seen + 0.1 * x.mean(0)


def made_first(module, x):
    if module.seen is None:
        module.seen = x.mean(0)


def new(module, x):
    if not hasattr(module, "seen"):
        module.register_buffer("seen", x.mean(0))


BUFFERS = [
    (lambda m, x: m.seen.data.mul_(0.9).add_(0.1 * x.mean(0)), {"seen": torch.zeros(6)}),
    (lambda m, x: m.seen.data.copy_(x[0]), {"seen": torch.zeros(6)}),
    (replaced, {"seen": torch.zeros(6)}),
    (once(lambda m, x: m.seen.copy_(x.mean(0))), {"seen": torch.zeros(6)}),
    (once(lambda m, x: m.seen.copy_(x.mean(0)), "late"), {"seen": torch.zeros(6)}),
    (made_first, {"seen": None}),
    (new, {}),
]


@pytest.mark.parametrize(("write", "held"), BUFFERS)
@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_buffers_that_keep_what_was_seen_however_they_are_written(write, held, clipping):
    trio = private(nn.Sequential(Writing(write, **copy.deepcopy(held))))
    with pytest.raises(QuellError, match=r"writes what it sees into the buffer 0\.seen"):
        three_steps(trio)
    assert trio[1].run.step == 0


PARAMETERS = [
    (lambda m, x: m.seen.mul_(0.9).add_(0.1 * x.mean(0)), "seen"),
    (lambda m, x: setattr(m.seen, "data", 0.9 * m.seen + 0.1 * x.mean(0)), "seen"),
    (once(lambda m, x: m.seen.data.copy_(x[0])), "seen"),
    (once(lambda m, x: m.layer.bias.data.copy_(x[0, :3])), r"layer\.bias"),
    (once(lambda m, x: m.layer.weight.copy_(x[:3])), r"layer\.weight"),
]


@pytest.mark.parametrize(("write", "name"), PARAMETERS)
def test_parameters_that_a_forward_pass_writes(write, name):
    """Also at the first pass only, after which the loop goes on."""
    trio = private(Writing(write, seen=frozen()))
    with pytest.raises(QuellError, match=f"forward pass changes its parameter {name}: .*public data before"):
        three_steps(trio)
    with pytest.raises(QuellError, match="forward pass changes its parameter"):
        three_steps(trio)
    assert trio[1].run.step == 0


def longest(module, x):
    """As rotary embeddings keep their tables: Python and a buffer know how long they are."""
    if len(x) > getattr(module, "length", 0):
        module.length = len(x)
        module.table = torch.arange(len(x)).cos()
    assert len(module.table) >= len(x)


def power_iteration(module, x):
    module.u = functional.normalize(module.layer.weight @ module.layer.weight.T @ module.u, dim=0)


WRITERS = [
    (longest, {"table": torch.zeros(0)}),
    (lambda m, x: m.calls.data.add_(1), {"calls": torch.zeros(())}),
    (lambda m, x: m.calls.add_(1), {"calls": torch.full((2,), torch.nan)}),
    (power_iteration, {"u": torch.ones(3)}),
    (lambda m, x: setattr(m.seen, "data", m.seen.data.half()), {"seen": frozen()}),  # casts, as bitsandbytes' layers
    (lambda m, x: setattr(m.seen, "data", m.seen.data.clone()), {"seen": frozen()}),
]


@pytest.mark.parametrize(("write", "held"), WRITERS)
def test_what_does_not_depend_on_the_data_may_be_written(write, held):
    model = Writing(write, **copy.deepcopy(held))
    kept = copy.deepcopy(model)
    trio = private(model)
    three_steps(trio)
    assert not trio[1].run.guard._failed
    for x, _ in [examples(8).tensors] * 3:
        kept(x)
    own, expected = dict(model.named_buffers()), dict(kept.named_buffers())
    torch.testing.assert_close(own.get("table"), expected.get("table"))  # the probe's own passes leave nothing
    torch.testing.assert_close(own.get("calls"), expected.get("calls"), equal_nan=True)


def counted(module, x):
    module.done += 1
    module.calls += 1


def test_the_probes_own_passes_do_not_count():
    def loss(model, x, y):
        out = model(x)
        with torch.no_grad():
            model(x)
        return cross_entropy(out, y)

    model = Writing(counted, calls=torch.zeros(()))
    watched(model, loss, *examples(8).tensors)
    assert model.done == model.calls == 2


class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network().requires_grad_(False)

    def forward(self, x):
        return self.student(x), self.teacher(x)


def test_a_teacher_that_the_loop_averages():
    model, optimizer, loader = private(Taught())
    for _, (x, _) in zip(range(4), loader, strict=False):
        for average, own in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            average.data.lerp_(own.data, 0.1)
        optimizer.zero_grad()
        functional.mse_loss(*model(x)).backward()
        optimizer.step()
    assert optimizer.run.guard._checked
    assert optimizer.run.step == 4


def test_checksums_see_every_bit():
    values = torch.randn(3, 5)
    for kind in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool):
        before = values.to(kind)
        for place in range(before.numel()):
            after = before.clone()
            after.view(torch.uint8).view(-1)[place * before.element_size()] ^= 1
            assert checksums([before]) != checksums([after])
    other = values.clone()
    other[0, 0], other[2, 1] = values[2, 1], values[0, 0]  # the same numbers in other places
    assert checksums([values]) != checksums([other])
    assert checksums([values]) == checksums([values.clone()])


# Trainable tensors before the model, or inside


class Scaled(nn.Module):
    """A trainable tensor that is no parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), torch.ones(6, requires_grad=True)

    def forward(self, x):
        return self.layer(x * self.scale)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.others = nn.Linear(8, 3), [nn.Linear(6, 8)]

    def forward(self, x):
        return self.head(torch.relu(self.others[0](x)))


def attribute():
    model = Scaled()
    return model, [model.scale], model


def plain_list():
    model = Listed()
    return model, model.others[0].parameters(), model


def encoder():
    before, head = nn.Linear(6, 8), nn.Linear(8, 3)
    return head, before.parameters(), lambda x: head(torch.relu(before(x)))


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, shift):
        return self.layer(x + shift)


def argument():
    """As long as the batch by chance."""
    model, shift = Added(), torch.zeros(8, 6, requires_grad=True)
    return model, [shift], lambda x: model(x, shift[: len(x)] if len(x) < 8 else shift)


@pytest.mark.parametrize("make", [attribute, plain_list, encoder, argument])
@pytest.mark.parametrize("size", [None, 1])
def test_what_trains_without_clipping_and_noise_behind_the_outputs(make, size):
    model, strangers, call = make()
    other = torch.optim.SGD(strangers, lr=0.1)
    _, optimizer, loader = private(model, physical_batch_size=size)
    for _ in range(5):  # a loop that goes on after the error gets it again
        x, y = next(iter(loader))
        other.zero_grad()
        optimizer.zero_grad()
        cross_entropy(call(x), y).backward()
        with pytest.raises(QuellError, match=r"reaches, through the model, a trainable tensor of shape .*ModuleList"):
            optimizer.step()
    assert optimizer.run.step == 0


def test_microbatches_cut_the_graph_so_nothing_before_the_model_trains():
    model, strangers, call = encoder()
    strangers = list(strangers)
    trio = private(model, "microbatch")
    three_steps((call, *trio[1:]))
    assert all(stranger.grad is None for stranger in strangers)


def test_a_generator_behind_a_private_discriminator():
    """Its backward pass is forgotten before the private step."""
    generator, (model, optimizer, loader) = network(), private(nn.Linear(6, 3))
    generator[3] = nn.Linear(8, 6)
    other = torch.optim.SGD(generator.parameters(), lr=0.1)
    for _, (x, y) in zip(range(4), loader, strict=False):
        other.zero_grad()
        model(generator(torch.randn(len(x), 6))).square().mean().backward()
        other.step()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.run.step == 4
    assert optimizer.run.guard._checked


def own_inputs(model, optimizer, x, y):
    """Inputs with gradients, which adversarial examples and gradient penalties take from the same backward pass."""
    x.requires_grad_()
    (cross_entropy(model(x), y) + x.square().sum(1).mean()).backward()
    assert x.grad is not None


def moved_inputs(model, optimizer, x, y):
    moved = (x + 0.1 * torch.randn(x.shape)).detach().requires_grad_()
    cross_entropy(model(moved), y).backward()


def adversarial(model, optimizer, x, y):
    shift = torch.zeros(x.shape, requires_grad=True)
    cross_entropy(model(x + shift), y).backward()
    optimizer.zero_grad()
    cross_entropy(model(x + 0.1 * shift.grad.sign()), y).backward()


@pytest.mark.parametrize("passes", [own_inputs, moved_inputs, adversarial])
def test_inputs_may_have_gradients(passes):
    model, optimizer, loader = private()
    for _, (x, y) in zip(range(4), loader, strict=False):
        optimizer.zero_grad()
        passes(model, optimizer, x, y)
        optimizer.step()
    assert optimizer.run.step == 4


class Frozen(nn.Module):
    """Outputs of frozen layers that ask for gradients, as transformers' enable_input_require_grads makes them."""

    def __init__(self, reentrant):
        super().__init__()
        self.frozen, self.middle, self.head = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.register_forward_hook(lambda module, args, out: out.requires_grad_())
        self.reentrant = reentrant

    def forward(self, x):
        h = self.frozen(x)
        if self.reentrant is not None:
            h = checkpoint(self.middle, h, use_reentrant=self.reentrant)
        return self.head(torch.tanh(h if self.reentrant is not None else self.middle(h)))


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_what_a_forward_pass_makes_itself_may_have_gradients(reentrant):
    all_batches(private(Frozen(reentrant)))


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        self.h = torch.tanh(self.body(x))
        return self.head(self.h)


def test_what_the_model_keeps_in_an_attribute_is_to_be_returned():
    model, optimizer, loader = private(Keeping())
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match=r"does not get it from the model's outputs but from an attribute.*return it"):
        (cross_entropy(model(x), y) + model.h.square().sum(1).mean()).backward()
    assert optimizer.run.step == 0


# What cannot be seen in a batch


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_complex_parameters(clipping):
    model = nn.Linear(6, 3)
    model.register_parameter("filter", nn.Parameter(torch.ones(4, dtype=torch.cfloat)))
    with pytest.raises(QuellError, match=r"filter is complex, .*torch\.view_as_complex"):
        private(model, clipping)
    model.filter.requires_grad_(False)
    three_steps(private(model, clipping))


def test_examples_that_are_several_times_in_a_subset():
    data = examples(31)
    for rows in ([*range(30)] + [30] * 10, [*range(30), *range(-10, 0)]):
        with pytest.raises(
            QuellError, match=r"40 items, but only 3\d different ones: an example that is in it k times"
        ):
            private(data=Subset(data, rows))
    three_steps(private(data=Subset(examples(60), range(-40, 0))))


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y, scale: cross_entropy((out := model(x)) * scale.to(out), y),
        lambda model, x, y, scale: cross_entropy((out := model(x)) * scale.type_as(out), y),
        lambda model, x, y, scale: cross_entropy(model(x * scale.to(x).mean()), y),
    ],
)
def test_a_stranger_that_torch_hands_back_as_it_is(loss):
    """`to` has nothing to do, so what it gives is the stranger, and not something that is made of the batch."""
    model, optimizer, loader = private()
    scale = torch.ones(3, requires_grad=True)
    x, y = next(iter(loader))

    def step():
        loss(model, x, y, scale).backward()
        optimizer.step()

    with pytest.raises(QuellError, match="a trainable tensor of shape"):
        step()


def test_a_run_that_stops_in_its_first_batches_lets_go_of_its_model():
    model, optimizer, loader = private()
    x, y = next(iter(loader))
    cross_entropy(model(x), y)
    optimizer.close()
    assert type(x) is torch.Tensor
    gone = weakref.ref(model)
    del model, optimizer, loader
    gc.collect()
    assert gone() is None
