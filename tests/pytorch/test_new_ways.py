"""What the first batch does not show: layers called in another way later, and what zeros hide at the start.

Each was a way past the clipping: one example moved the sum by up to 25 clip norms. Refusing is as good as measuring
rightly.
"""

from __future__ import annotations

import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from quell.errors import QuellError
from quell.torch.engine.check import FirstBatch
from quell.torch.engine.layers import LayerEngine
from quell.torch.engine.microbatch import MicrobatchEngine
from quell.torch.engine.rules import rule_for

from .training import clipped_gradient

BATCH, WIDTH = 16, 6


class Scaled(nn.Module):
    """Scales features by a condition, given or kept from before."""

    def __init__(self, kept=None):
        super().__init__()
        self.scale, self.kept, self.condition = nn.Parameter(torch.zeros(WIDTH)), kept, None

    def forward(self, h, condition=None):
        if self.kept is not None:
            condition = self.kept(self.condition, h)
        return h * (1 + self.scale * condition)


class Conditioned(nn.Module):
    """Some features, scaled by a condition; the head starts at zero, behind which no gradient shows."""

    def __init__(self, kept=None):
        super().__init__()
        self.inside, self.scaled = nn.Linear(4, WIDTH), Scaled(kept)
        self.condition, self.head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x, condition=None):
        made = torch.zeros(1, WIDTH) if condition is None else self.condition(condition)
        self.scaled.condition = made
        h = torch.tanh(self.inside(x))
        return self.head(self.scaled(h) if self.scaled.kept else self.scaled(h, made))


def engine_of(model):
    return LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")


def one_step(model, engine, *inputs, criterion=functional.cross_entropy):
    y = torch.arange(len(inputs[0])) % 3
    criterion(model(*inputs), y, reduction="sum").backward()
    return dict(zip(engine.params, engine.collect()[1], strict=True))


def batch(size=BATCH):
    return torch.randn(size, 4), torch.randn(size, 2)


def test_a_condition_that_all_examples_shared_in_one_batch():
    """As without a class in diffusion models: what was shared once would be the first example's ever after."""
    model = Conditioned()
    engine = engine_of(model)
    one_step(model, engine, *batch())
    one_step(model, engine, batch()[0])
    with pytest.raises(QuellError, match=r"scaled \(Scaled\) makes something else of some rows alone.*expand"):
        one_step(model, engine, *batch())


@pytest.mark.parametrize("kept", [lambda kept, h: kept, lambda kept, h: kept[: len(h)]])
def test_a_condition_that_a_layer_holds(kept):
    model = Conditioned(kept)
    with pytest.raises(QuellError, match="makes something else of some rows alone"):
        one_step(model, engine_of(model), *batch())


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.condition, self.head = nn.Linear(4, WIDTH), nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x, condition):
        return self.head(torch.tanh(self.inside(x)) * self.condition(condition[: len(x)]))


def test_an_argument_that_all_examples_shared_in_one_batch():
    model = Sliced()
    engine = MicrobatchEngine(model, dict(model.named_parameters()), 1.0, "sum", 4)
    one_step(model, engine, *batch())
    one_step(model, engine, batch()[0], torch.zeros(1, 2))
    with pytest.raises(QuellError, match="the model makes something else of some rows alone"):
        one_step(model, engine, *batch())


class Labelled(nn.Module):
    """Adds what an embedding has for each example, or for all."""

    def __init__(self):
        super().__init__()
        self.inside, self.embedding, self.head = nn.Linear(4, WIDTH), nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, numbers, take=lambda found: found):
        return self.head(torch.tanh(self.inside(x)) + take(self.embedding(numbers)))


def test_one_number_for_all_examples():
    """Its row would be broadcast to the place of the positions, and everybody would get everybody's."""
    model = Labelled()
    engine = engine_of(model)
    one_step(model, engine, batch()[0], torch.arange(BATCH) % 5)
    with pytest.raises(QuellError, match=r"embedding \(Embedding\) is given a single number for 16 examples"):
        model(batch()[0], torch.tensor([7]))


def test_positions_are_not_told_from_numbers_of_examples():
    def mean(found):
        return found.mean(1) if found.dim() == 3 else found

    model = Labelled()
    engine = engine_of(model)
    one_step(model, engine, batch()[0], torch.arange(BATCH)[:, None] % 5, mean)
    model(batch()[0], torch.arange(7), mean)
    model(batch(7)[0], torch.arange(7), mean)  # as long as the batch by chance, and the same as before
    with pytest.raises(QuellError, match="was given numbers that all examples share before"):
        model(batch()[0], torch.arange(BATCH) % 5, mean)


def test_positions_of_which_one_row_is_taken_in_a_later_batch():
    """The copies of positions that a layer makes for the rows are not alike any more when one of them is taken."""
    model = Labelled()
    engine = engine_of(model)
    one_step(model, engine, batch()[0], torch.arange(BATCH)[:, None] % 5, lambda found: found[:, 0])
    with pytest.raises(QuellError, match=r"gradient of one example for embedding\.weight"):
        one_step(model, engine, batch()[0], torch.arange(7)[None], lambda found: found[0].mean(0))


class Placed(nn.Module):
    """Positions for one place, given once per row where that makes no difference: here it does."""

    def __init__(self, mixed):
        super().__init__()
        self.places, self.mixed = nn.Parameter(0.1 * torch.randn(1, WIDTH)), mixed

    def forward(self, h):
        return functional.layer_norm(h + self.mixed(self.places), (WIDTH,))


@pytest.mark.parametrize("mixed", [lambda p: p.mean(0), lambda p: p[0], lambda p: p[-1], lambda p: 2 * p - p.mean(0)])
def test_copies_of_a_parameter_that_a_layer_mixes(mixed):
    """A constant added to them is invisible behind a normalisation, and the head's zeros hide the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), Placed(mixed), nn.Linear(WIDTH, 3))
    nn.init.zeros_(model[2].weight)
    engine = engine_of(model)
    one_step(model, engine, batch()[0])
    nn.init.normal_(model[2].weight)
    x = batch()[0]
    found = one_step(model, engine, x)
    plain = nn.Sequential(nn.Linear(4, WIDTH), Placed(mixed), nn.Linear(WIDTH, 3))
    plain.load_state_dict(model.state_dict())
    expected = clipped_gradient(plain, functional.cross_entropy, (x, torch.arange(BATCH) % 3), 1.0)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_called_in_another_way_later():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(1, WIDTH))

        def forward(self, h=None):
            return self.places if h is None else h + self.places

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.twice, self.head = nn.Linear(4, WIDTH), Twice(), nn.Linear(WIDTH, 3)

        def forward(self, x, again=False):
            h = self.twice(torch.tanh(self.inside(x)))
            return self.head(h * self.twice()[0] if again else h)

    model = Network()
    engine = engine_of(model)
    one_step(model, engine, batch()[0])
    with pytest.raises(QuellError, match="row per example"):
        one_step(model, engine, batch()[0], True)


def test_mixing_behind_zeros_is_seen_in_the_first_batch():
    """A head of zeros makes all gradients before it zero, and so equal to anything."""

    class Mixes(nn.Module):
        def forward(self, h):
            return h + h.detach() * 0 + h.roll(1, 0)

    model = nn.Sequential(nn.Linear(4, WIDTH), Mixes(), nn.Linear(WIDTH, 3))
    nn.init.zeros_(model[2].weight)
    before = model[2].weight.detach().clone()
    with pytest.raises(QuellError, match="by autograd"):
        one_step(model, engine_of(model), batch()[0])
    assert torch.equal(before, model[2].weight)


class Exponential(nn.Module):
    """Is one more than its scales where they are zero, and nowhere else."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(WIDTH)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.exp()


def test_a_norm_is_told_by_what_it_does_at_any_scale():
    assert rule_for(Exponential()) is None


def test_a_layer_that_is_first_used_in_a_later_batch():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.late, self.head = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x, late=False):
            return self.head(self.inside(x) + (self.late(x.flip(0)) if late else 0))

    model = Late()
    engine = engine_of(model)
    engine._missing = set()  # the other layer would be refused for never having a gradient
    one_step(model, engine, batch()[0])
    with pytest.raises(QuellError, match=r"late\.weight"):
        one_step(model, engine, batch()[0], True)


# What a second reviewer got past the first repairs


class Rolled(nn.Module):
    """Layers that see each other's rows, which come back into their order: only the gradients show it."""

    def __init__(self, count=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, h):
        for number, layer in enumerate(self.layers, start=1):
            h = h + layer(h.roll(number, 0)).roll(-number, 0)
        return h


def test_rolled_rows_behind_zeros():
    model = nn.Sequential(nn.Linear(4, WIDTH), Rolled(), nn.Linear(WIDTH, 3))
    nn.init.zeros_(model[2].weight)
    with pytest.raises(QuellError, match="by autograd"):
        one_step(model, engine_of(model), batch()[0])


class Late(nn.Module):
    """A part of it is used in some passes only, which its own arguments need not tell."""

    def __init__(self):
        super().__init__()
        self.inside, self.rolled, self.head = nn.Linear(4, WIDTH), Rolled(2), nn.Linear(WIDTH, 3)
        self.late = False

    def forward(self, x, late=False):
        h = torch.tanh(self.inside(x))
        return self.head(self.rolled(h) if late or self.late else h)

    def now(self, late):
        self.late = late
        return self


@pytest.mark.parametrize("first", ["the new one", "the usual one"])
def test_every_pass_of_a_step_is_looked_at(first):
    """Not only the last one, nor one whose gradients never came, such as that of an accuracy."""
    model = Late()
    engine = engine_of(model)
    x = batch()[0]
    ways = [True, False] if first == "the new one" else [False, True]
    loss = sum((model(x, late).sum() for late in ways), torch.zeros(()))
    loss.backward()
    with pytest.raises(QuellError, match="by autograd"):
        engine.collect()


def test_a_pass_without_a_loss_compares_nothing():
    model = Late()
    engine = engine_of(model)
    engine._missing = set()
    x = batch()[0]
    one_step(model, engine, x)
    model.now(True)(x)  # of which no loss is made
    one_step(model.now(False), engine, x)
    with pytest.raises(QuellError, match="by autograd"):
        one_step(model.now(True), engine, x)


def test_a_way_that_is_new_in_a_batch_without_gradients():
    """Gradients of zero show nothing, so the next batch is looked at for it."""
    model = Late()
    engine = engine_of(model)
    engine._missing = set()
    x = batch()[0]
    for _ in range(2):
        one_step(model, engine, x)
    (model(x, True).sum() * 0.0).backward()
    engine.collect()
    with pytest.raises(QuellError, match="by autograd"):
        one_step(model, engine, x, True)


def test_a_way_that_a_reentrant_checkpoint_hides():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Late):
        def forward(self, x, late=False):
            h = torch.tanh(self.inside(x))
            return self.head(checkpoint(self.rolled, h, use_reentrant=True) if late or self.late else h)

    model = Checkpointed()
    engine = engine_of(model)
    engine._missing = set()
    for _ in range(2):  # the second one is looked at because a part has shown no gradient yet
        one_step(model, engine, batch()[0])
    with pytest.raises(QuellError, match="by autograd"):
        one_step(model.now(True), engine, batch()[0])


def test_a_condition_that_a_model_holds_under_microbatch():
    class Holds(Sliced):
        def forward(self, x, condition=None):
            return super().forward(x, self.kept)

    model = Holds()
    engine = MicrobatchEngine(model, dict(model.named_parameters()), 1.0, "sum", 4)
    x, model.kept = batch()
    with pytest.raises(QuellError, match="the model makes something else of some rows alone"):
        one_step(model, engine, x)


@pytest.mark.parametrize("later", ["a switch", "more dimensions"])
def test_a_layer_that_looks_as_if_it_were_called_in_the_same_way(later):
    """Its one row is given once per row of the batch, which another way of calling mixes."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = nn.Parameter(torch.randn(1, WIDTH))

        def forward(self, h, mean=False):
            return h * (self.row.mean(0) if mean else self.row)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.product, self.head = nn.Linear(4, WIDTH), Product(), nn.Linear(WIDTH, 3)

        def forward(self, x):
            h = torch.tanh(self.inside(x))
            if self.other and later == "more dimensions":  # as many places as there are examples
                places = torch.arange(1.0, BATCH + 1)[:, None]
                return self.head(self.product(h[:, None] * places, False).mean(1))
            return self.head(self.product(h, self.other))

    torch.manual_seed(0)
    model, plain = Network(), Network()
    plain.load_state_dict(model.state_dict())
    engine = engine_of(model)
    x = batch()[0]
    model.other = False
    one_step(model, engine, x)
    model.other = plain.other = True
    found = one_step(model, engine, x)
    expected = clipped_gradient(plain, functional.cross_entropy, (x, torch.arange(BATCH) % 3), 1.0)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-4, atol=1e-5)


def test_a_part_whose_gradients_begin_later():
    """A second loss with a weight that grows from zero: it is looked at now and then, after 4, 16, 64, ... steps."""

    class TwoHeads(Late):
        def forward(self, x, late=False):
            h = torch.tanh(self.inside(x))
            return self.head(h), self.rolled(h)

    model = TwoHeads()
    engine = engine_of(model)

    def step(weight):
        first, second = model(batch()[0])
        (first[:, 0].sum() + weight * second[:, 0].sum()).backward()
        assert engine.collect()[0] == BATCH

    for weight in (0.0, 0.0, 0.0, 1.0):
        step(weight)
    with pytest.raises(QuellError, match="by autograd"):
        step(1.0)


class Merges(nn.Linear):
    """Some LoRA layers merge their adapters into the weight where they are evaluated."""

    def train(self, mode=True):
        if not mode:
            self.weight.data += 1.0
        return super().train(mode)


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_looking_does_not_put_modules_into_eval_mode_themselves(clipping):
    model = nn.Sequential(Merges(4, WIDTH), Scaled(lambda kept, h: 1.0), nn.Linear(WIDTH, 3))
    before = model[0].weight.detach().clone()
    params = dict(model.named_parameters())
    engine = engine_of(model) if clipping == "layers" else MicrobatchEngine(model, params, 1.0, "sum", 4)
    one_step(model, engine, batch()[0])
    assert torch.equal(before, model[0].weight)
    assert all(module.training for module in model.modules())


class Positive(nn.Module):
    def __init__(self, refuse):
        super().__init__()
        self.scale, self.refuse = nn.Parameter(torch.full((1, WIDTH), 0.05)), refuse

    def forward(self, h):
        if not bool((self.scale > 0).all()):
            raise self.refuse("a scale must be positive")
        return torch.sigmoid(h / self.scale)  # which keeps its output for its own backward pass


@pytest.mark.parametrize("refuse", [ValueError, AssertionError])
def test_a_layer_that_wants_positive_numbers(refuse):
    """Random numbers in the place of constants must not make a model fail that works."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), Positive(refuse), nn.Linear(WIDTH, 3))
    plain = nn.Sequential(nn.Linear(4, WIDTH), Positive(refuse), nn.Linear(WIDTH, 3))
    plain.load_state_dict(model.state_dict())
    x = batch()[0]
    found = one_step(model, engine_of(model), x)
    expected = clipped_gradient(plain, functional.cross_entropy, (x, torch.arange(BATCH) % 3), 1.0)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-4, atol=1e-5)


def test_an_adversary_of_a_generator_is_looked_at_without_the_generators_graph():
    """The look repeats passes: the discriminator's inputs must not lead back into a graph that was used."""

    class Fixed(nn.Module):
        def forward(self, h):
            return h.view(BATCH, 3)  # with this batch size only

    discriminator = nn.Sequential(nn.Linear(4, 3), Fixed())
    generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
    engine = engine_of(discriminator)
    noise = torch.randn(BATCH, 2)
    discriminator(generator(noise)).square().sum().backward()
    assert engine.collect()[0] == BATCH


def test_ways_without_end_are_not_all_looked_at(monkeypatch):
    """A list of an example's parts has another length in every batch: memory and time stay bounded."""
    from quell.torch.engine import layers

    monkeypatch.setattr(layers, "_MOST_WAYS", 3)

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x, parts):
            return self.head(x) * len(parts)

    model = Listed()
    engine = engine_of(model)
    looks = []
    compare = engine._check.compare
    monkeypatch.setattr(engine._check, "compare", lambda done: (looks.append(done), compare(done))[1])
    for count in range(1, 20):
        one_step(model, engine, batch()[0], list(range(count)))
    assert len(looks) <= 6
    assert len(engine._ways) == 3
    assert len(engine._known - engine._settings) <= 8


@pytest.mark.parametrize("rows", [1, BATCH])
def test_passes_without_a_loss_are_not_kept(rows):
    """Such as an evaluation before the first step without torch.no_grad()."""
    model = Labelled()
    engine_of(model)
    x = torch.randn(rows, 4)
    kept = weakref.ref(x.untyped_storage())
    out = model(
        x, torch.arange(rows) % 5 if rows > 1 else torch.zeros(1, 1, dtype=torch.long), lambda e: e.flatten(0, -2)
    )
    del x, out
    assert kept() is None


class Phased(nn.Module):
    """Mixes rows in one of its phases."""

    def __init__(self):
        super().__init__()
        self.inside, self.head, self.phase = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3), 1

    def forward(self, x):
        h = torch.tanh(self.inside(x))
        return self.head(h.roll(1, 0)).roll(-1, 0) if self.phase == 2 else self.head(h)


@pytest.mark.parametrize("before", [2, 6])
def test_an_attribute_that_the_loop_sets(before):
    """Each example's gradient of the head would be that of its neighbour."""
    model = Phased()
    engine = engine_of(model)
    for _ in range(before):
        one_step(model, engine, batch()[0])
    model.phase = 2
    with pytest.raises(QuellError, match="by autograd"):
        one_step(model, engine, batch()[0])


def test_a_layer_that_the_loop_puts_into_another_phase_and_back(monkeypatch):
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.phased, self.last = Phased(), None

        def forward(self, x):
            self.last = x
            return self.phased(x)

    compared = []
    compare = FirstBatch.compare
    monkeypatch.setattr(FirstBatch, "compare", lambda self, done: (compared.append(done), compare(self, done))[1])
    model = Outside()
    engine = engine_of(model)
    for phase in (1, 1, 3, 3, 1, 3, 1, 4, 5, 6, 7, 8, 9, 10):
        model.phased.phase = phase
        one_step(model, engine, batch()[0])
    assert len(compared) == 2 + 9  # the first; what it keeps; each new value, also the one it began with


def test_a_model_that_counts_is_compared_less_and_less(monkeypatch):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.passes = nn.Linear(4, 3), 0

        def forward(self, x):
            if torch.is_grad_enabled():
                self.passes += 1
            return self.head(x)

    compared = []
    compare = FirstBatch.compare
    monkeypatch.setattr(FirstBatch, "compare", lambda self, done: (compared.append(done), compare(self, done))[1])
    model = Counts()
    engine = engine_of(model)
    for _ in range(64):
        one_step(model, engine, batch()[0])
    assert 4 <= len(compared) <= 10


def test_a_part_that_takes_the_place_of_another():
    class Rolls(nn.Module):
        def forward(self, h):
            return h.roll(1, 0)

    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3), nn.Identity())
    engine = engine_of(model)
    for _ in range(3):
        one_step(model, engine, batch()[0])
    model[1] = Rolls()
    model[3] = Rolls()
    with pytest.raises(QuellError, match="by autograd"):
        one_step(model, engine, batch()[0])


def test_an_attribute_that_is_set_while_a_part_is_replaced():
    model = nn.Sequential(Phased(), nn.Identity())
    engine = engine_of(model)
    for step in range(3):
        model[1] = nn.Dropout(0.1 * step)
        one_step(model, engine, batch()[0])
    model[1], model[0].phase = nn.Dropout(0.5), 2
    with pytest.raises(QuellError, match="by autograd"):
        one_step(model, engine, batch()[0])


def test_attributes_that_a_model_sets_do_not_use_up_what_is_looked_at():
    class Keeps(nn.Module):
        def forward(self, h):
            self.last = h
            return h

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.keep, self.head = nn.Sequential(*(Keeps() for _ in range(250))), nn.Linear(4, 3)

        def forward(self, x, mix=False):
            h = self.keep(x)
            return self.head(h.roll(1, 0)).roll(-1, 0) if mix else self.head(h)

    model = Mixing()
    engine = engine_of(model)
    for _ in range(3):
        one_step(model, engine, batch()[0])
    functional.cross_entropy(model(batch()[0], mix=True), torch.arange(BATCH) % 3, reduction="sum").backward()
    with pytest.raises(QuellError, match="by autograd"):
        engine.collect()


def test_what_a_model_keeps_is_not_kept_for_longer():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.last = nn.Linear(4, 3), None

        def forward(self, x):
            self.last = self.head(x)
            return self.last

    model = Keeps()
    engine = engine_of(model)
    for _ in range(3):
        one_step(model, engine, batch()[0])
    held = weakref.ref(model.last)
    model.last = None
    assert held() is None


def test_a_private_model_says_what_it_takes():
    """transformers reads the names of arguments there, to drop columns and to prepare inputs."""
    model = Labelled()
    before = inspect.signature(model.forward)
    engine_of(model)
    assert inspect.signature(model.forward) == before
    assert list(inspect.signature(model.head.forward).parameters) == ["input"]
