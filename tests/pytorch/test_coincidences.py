"""What all examples share may be as long as a batch by chance, and is not taken for rows of examples then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quell import QuellError
from quell.torch.engine.layers import LayerEngine
from quell.torch.engine.microbatch import MicrobatchEngine

PLACES, WIDTH = 16, 4
SIGNS = torch.where(torch.arange(PLACES) < 4, 1.0, -1.0)[:, None].contiguous()


class Weigh(nn.Module):
    """A layer without a rule, which takes a weight for every position."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, weights):
        return x * weights * self.w


class Network(nn.Module):
    """Gets the weights from the loop, has them as a buffer, or computes them."""

    def __init__(self, where):
        super().__init__()
        self.layer, self.where = Weigh(), where
        self.register_buffer("signs", SIGNS.clone())

    def forward(self, x, *given):
        weights = {"argument": given, "buffer": (self.signs,), "computed": (self.signs * 1.0,)}[self.where]
        return self.layer(x, *weights).mean(1).sum(1)


def clipped(clipping, where, sizes):
    """The sums of the last of several batches of these sizes."""
    model = Network(where)
    params = dict(model.named_parameters())
    if clipping == "layers":
        engine = LayerEngine(model, params, 1.0, "sum")
    else:
        engine = MicrobatchEngine(model, params, 1.0, "sum", 32)
    data = 3 + torch.randn(40, PLACES, WIDTH, generator=torch.Generator().manual_seed(0)).abs()
    for size in sizes:
        model(data[:size], *((SIGNS,) if where == "argument" else ())).sum().backward()
        (total,) = engine.collect()[1]
    return total


WAYS = [("layers", "argument"), ("layers", "buffer"), ("layers", "computed"), ("microbatch", "argument")]


@pytest.mark.parametrize(("clipping", "where"), [*WAYS, ("microbatch", "buffer")])
def test_a_batch_as_long_as_a_shared_input_is_like_any_other(clipping, where):
    before, there = (clipped(clipping, where, [7, size]) for size in (PLACES - 1, PLACES))
    assert float((there - before).norm()) <= 1 + 1e-4


@pytest.mark.parametrize(("clipping", "where"), WAYS)
def test_a_first_batch_as_long_as_a_shared_input(clipping, where):
    """It is refused where nobody can tell yet."""
    if where == "buffer":
        assert torch.equal(clipped(clipping, where, [PLACES]), clipped(clipping, where, [7, PLACES]))
    else:
        with pytest.raises(QuellError, match=r"first batch|by autograd"):
            clipped(clipping, where, [PLACES])


def clipped_in_parts(sizes, signs=SIGNS):
    """The sums of the last of several batches, by a loop that calls the model's layer and not the model."""
    model = Network("argument")
    engine = LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
    data = 3 + torch.randn(40, PLACES, WIDTH, generator=torch.Generator().manual_seed(0)).abs()
    for size in sizes:
        model.layer(data[:size], signs).mean(1).sum().backward()
        (total,) = engine.collect()[1]
    return total


def test_a_loop_that_calls_parts_of_the_model():
    """Nothing says how many examples there are before the gradient comes, and no first batch is compared."""
    before, there = (clipped_in_parts([7, size]) for size in (PLACES - 1, PLACES))
    assert float((there - before).norm()) <= 1 + 1e-4
    with pytest.raises(QuellError, match=r"layer \(Weigh\) gets 2 inputs of 16 rows, and without their last ones"):
        clipped_in_parts([PLACES])
    torch.testing.assert_close(clipped_in_parts([PLACES], SIGNS[None]), clipped_in_parts([7, PLACES]))


class TwoWays(nn.Module):
    """Weights of the positions are not always given."""

    def __init__(self):
        super().__init__()
        self.layer = Weigh()

    def forward(self, x, factors=None, weights=None):
        return self.layer(x, 1.0 if weights is None else weights).mean(1).sum(1) * (1.0 if factors is None else factors)


@pytest.mark.parametrize("nothing", [{}, {"weights": None}])
def test_a_model_that_is_called_in_several_ways(nothing):
    """Each of them has a first batch: what was seen in one says nothing about the inputs of another."""
    model = TwoWays()
    engine = MicrobatchEngine(model, dict(model.named_parameters()), 1.0, "sum", 32)
    x = torch.randn(PLACES, PLACES, WIDTH)
    model(x[:5], factors=torch.ones(5), **nothing).sum().backward()
    engine.collect()
    with pytest.raises(QuellError, match="one may be shared by all examples and be as long as the first batch"):
        model(x, factors=torch.ones(PLACES) if nothing else None, weights=SIGNS)


class Factors(nn.Module):
    """Has a factor for every example, or weights of the positions, in the same place."""

    def __init__(self):
        super().__init__()
        self.layer = FactorsOrWeights()

    def forward(self, x, **given):
        return self.layer(x, **given).mean(1).sum(1)


class FactorsOrWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, factors=None, weights=None):
        return x * (weights if factors is None else factors) * self.w


def called_in_two_ways(first, size):
    """The sum of a batch with factors, the first of which is given, after one with weights, of another size."""
    model = Factors()
    engine = LayerEngine(model, dict(model.named_parameters()), 1.0, "sum")
    data = 3 + torch.randn(40, PLACES, WIDTH, generator=torch.Generator().manual_seed(0)).abs()
    factors = torch.ones(12, 1, 1)
    factors[0] = first
    for rows, given in ((12, {"factors": factors}), (size, {"weights": SIGNS}), (12, {"factors": factors})):
        model(data[:rows], **given).sum().backward()
        (total,) = engine.collect()[1]
    return total


def test_what_is_shared_in_one_way_is_not_in_another():
    """It was, by its place: then the first example's factor was everybody's."""
    assert float((called_in_two_ways(1.0, 7) - called_in_two_ways(-1.0, 7)).norm()) <= 2 + 1e-4
    with pytest.raises(QuellError, match="one may be shared by all examples and be as long as the first batch"):
        called_in_two_ways(1.0, PLACES)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, one, other):
        return self.layer(one * other)


def test_several_tensors_of_a_batch_are_rows():
    model, plain = Both(), Both()
    plain.load_state_dict(model.state_dict())
    engine = MicrobatchEngine(model, dict(model.named_parameters()), 1e6, "sum", 3)
    one, other = torch.randn(2, 5, WIDTH)
    model(one, other).sum().backward()
    plain(one, other).sum().backward()
    for found, parameter in zip(engine.collect()[1], plain.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


class ByMean(nn.Module):
    """All examples share some prototypes, of which only the mean counts: one of them more hardly moves it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, prototypes):
        return x * self.w * prototypes.mean(0)


class WithPrototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = ByMean()

    def forward(self, x, prototypes):
        return self.layer(x, prototypes)


@pytest.mark.parametrize("clipping", ["parts", "microbatch"])
def test_what_is_shared_as_a_mean_over_many_rows_is_seen_too(clipping):
    prototypes = 1 + torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    model = WithPrototypes()
    params = dict(model.named_parameters())
    LayerEngine(model, params, 1.0, "sum") if clipping == "parts" else MicrobatchEngine(model, params, 1.0, "sum", 32)
    with pytest.raises(QuellError, match="one may be shared by all examples and be as long as the first batch"):
        (model.layer if clipping == "parts" else model)(torch.randn(64, WIDTH), prototypes).sum().backward()


class DrawsAlways(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, condition):
        return self.layer(x + torch.randn_like(x)) + condition


def test_a_model_that_draws_in_eval_mode_is_named_as_such():
    model = DrawsAlways()
    MicrobatchEngine(model, dict(model.named_parameters()), 1.0, "sum", 4)
    x = torch.randn(8, WIDTH)
    with pytest.raises(QuellError, match="draws random numbers in eval mode too"):
        model(x, x)
    before = torch.random.get_rng_state()
    with pytest.raises(QuellError, match="draws random numbers in eval mode too"):
        model(x, x)
    assert torch.equal(before, torch.random.get_rng_state())
