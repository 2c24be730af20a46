"""What a reviewer got past the clipping: examples that move the sum by far more than the clip norm, lost gradients.

Refusing is as good as measuring rightly.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from quell.errors import QuellError
from quell.torch.engine.layers import LayerEngine

from .training import clipped_gradient

BATCH = 200  # the sum of so many is only refused when it is above 200 clip norms


def engine_of(model, bound=1.0, reduction="sum", unit=1):
    return LayerEngine(model, dict(model.named_parameters()), bound, reduction, unit)


def _norm_of_sum(engine, loss) -> float:
    loss.backward()
    _, sums = engine.collect()
    return float(torch.sqrt(sum(total.double().square().sum() for total in sums)))


class Difference(nn.Module):
    """Two positions of a sequence whose gradients nearly cancel."""

    def __init__(self, inputs, outputs) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        h = self.body(x)
        return h[:, 0] - h[:, 1]


@pytest.mark.parametrize("size", [(16, 4), (64, 48)])  # per-example gradients are kept, or their norms by Gram matrices
def test_norms_hold_where_positions_cancel(size):
    """|Σ_t g_t a_tᵀ|² as Σ_ts (g_t·g_s)(a_t·a_s) loses all its digits; clamped at 0, it clips nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(Difference(*size))
    engine = engine_of(model)
    norms = []
    for _ in range(20):
        x = torch.zeros(BATCH, 2, size[0])
        x[1, 1] = torch.randn(size[0]) * 3e4
        x[1, 0] = x[1, 1] + torch.randn(size[0])
        norms.append(_norm_of_sum(engine, (model(x) * 10).sum()))
    assert 0 < max(norms) <= 1.001


def test_a_first_batch_that_cancels_is_clipped_and_not_refused():
    """The comparison with autograd on the first batch is of gradients that are all rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(Difference(64, 48))
    engine = engine_of(model)
    for _ in range(3):
        x = torch.randn(8, 1, 64) * 1e5 + torch.randn(8, 2, 64)
        model(x).sum().backward()
        seen, sums = engine.collect()
        assert seen == 8
        assert float(sum(total.square().sum() for total in sums)) > 0


@pytest.mark.parametrize("channels", [2, 90])  # per-example gradients are kept, or patches unfolded again
def test_norms_hold_for_padding_that_is_not_zeros(channels):
    """Unfolding with zeros is wrong here. The one example that is compared need not show the difference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1, padding_mode="circular", bias=False))
    engine = engine_of(model)
    x = torch.zeros(BATCH, 1, 6, 6)
    x[0, :, 2:4, 2:4] = 0.01  # black borders
    x[1, :, 5] = 10.0  # seen from row 0 only around the edge
    weights = torch.zeros(BATCH, channels, 6, 6)
    weights[0], weights[1, :, 0] = 1.0, 1.0
    assert 1 < _norm_of_sum(engine, (model(x) * weights).sum()) <= 2.001


# Rows that are not examples


def sums_without(make, x, left_out=1, first=None):
    """(all, all but one): sums of clipped gradients after a first batch that may look harmless."""
    found = []
    for rows in (x, torch.cat([x[:left_out], x[left_out + 1 :]])):
        torch.manual_seed(0)
        model = make()
        engine = engine_of(model)
        if first is not None:
            model(first).square().sum().backward()
            engine.collect()
        model(rows).square().sum().backward()
        found.append(torch.cat([total.flatten() for total in engine.collect()[1]]))
    return found


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        return self.layer(10 * (x - x.mean(0)))


class MixingBetween(Mixing):
    """Between two layers: the gradient of one row of the output goes to all rows of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)

    def forward(self, x):
        return super().forward(self.first(x))


@pytest.mark.parametrize("make", [Mixing, MixingBetween])
def test_examples_that_mix_are_refused_on_the_first_batch(make):
    """Then one example's gradient is not its own: whoever is left out changes all of them."""
    model = make()
    engine = engine_of(model)
    model(torch.randn(8, 5)).square().sum().backward()
    with pytest.raises(QuellError, match=r"\.weight has norm .* by autograd: .* examples that mix"):
        engine.collect()


def test_examples_that_mix_are_refused_however_often_the_loop_tries():
    model = Mixing()
    engine = engine_of(model)
    for _ in range(3):
        model(torch.randn(8, 5)).square().sum().backward()
        with pytest.raises(QuellError, match="examples that mix"):
            engine.collect()


@pytest.mark.parametrize("weights", [[0.0, 0.0, *[1.0] * 6], [*[1.0] * 7, 0.0], [float("nan"), *[1.0] * 7]])
def test_examples_that_mix_are_refused_where_some_have_no_gradient(weights):
    """Zero and what is not finite have nothing to compare: the largest gradient is looked at."""
    torch.manual_seed(0)
    model = Mixing()
    engine = engine_of(model)
    (model(torch.randn(8, 5)).square().sum(1) * torch.tensor(weights)).sum().backward()
    with pytest.raises(QuellError, match="examples that mix"):
        engine.collect()


def test_examples_that_mix_are_refused_when_the_first_batch_has_no_gradient():
    model = Mixing()
    engine = engine_of(model)
    (0 * model(torch.randn(8, 5))).sum().backward()
    engine.collect()
    model(torch.randn(8, 5)).square().sum().backward()
    with pytest.raises(QuellError, match="examples that mix"):
        engine.collect()


def test_examples_that_mix_are_refused_when_the_first_batch_has_one_row():
    """One row cannot show it: the first batch that can is looked at."""
    model = Mixing()
    engine = engine_of(model)
    model(torch.ones(1, 5)).square().sum().backward()
    engine.collect()
    model(torch.randn(8, 5)).square().sum().backward()
    with pytest.raises(QuellError, match="examples that mix"):
        engine.collect()


class Transposed(nn.Module):
    """Positions first: what the layer takes for examples are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


def test_layers_with_other_rows_than_the_batch_are_refused():
    for length, message in ((3, r"layer \(Linear\) made 3 rows from 8 examples"), (8, "rows from|rows that are not")):
        model = Transposed()
        engine = engine_of(model)
        with pytest.raises(QuellError, match=message):
            _norm_of_sum(engine, model(torch.randn(8, length, 5)).square().sum())


class OneSize(Transposed):
    """It runs with a batch of eight only, so fewer rows cannot be looked at."""

    def forward(self, x):
        return super().forward(x.view(8, 8, 5))


class Replaced(nn.Module):
    """A layer that computes something else than its kind, in a model that returns an output without rows too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.layer.forward = lambda x: functional.linear(2 * x, self.layer.weight, self.layer.bias)

    def forward(self, x):
        made = self.layer(x)
        return made, made.transpose(0, 1)[:3]


@pytest.mark.parametrize("make", [OneSize, Replaced])
def test_models_that_cannot_run_with_a_few_rows_are_looked_at_whole(make):
    torch.manual_seed(0)
    model = make()
    engine = engine_of(model)
    made = model(torch.randn(8, 8, 5))
    loss = made.square().sum() if isinstance(made, torch.Tensor) else sum(value.square().sum() for value in made)
    with pytest.raises(QuellError, match=r"layer.weight has norm .* by autograd: .*rows that are not examples"):
        _norm_of_sum(engine, loss)


class Sorting(nn.Module):
    """By length and back, as packed sequences once wanted it: the layer between has its rows in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        order = x[:, 0].argsort(descending=True)
        return self.layer(self.first(x)[order])[order.argsort()]


@pytest.mark.parametrize("descending", [True, False])
def test_models_that_sort_are_refused_also_where_the_first_batch_is_in_order(descending):
    torch.manual_seed(0)
    model = Sorting()
    engine = engine_of(model)
    x = torch.randn(12, 5)
    x = x[x[:, 0].argsort(descending=descending)]
    with pytest.raises(QuellError, match="change places"):
        _norm_of_sum(engine, model(x).square().sum())


class MixingBackwards(nn.Module):
    """Its outputs do not mix, the gradients of its first layer do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / gradient.norm())
        return self.layer(h)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        return torch.tanh(x @ self.weight) * self.side


class SideInput(nn.Module):
    """The gate is told of all rows by an attribute, and has them all when it is run for one row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        self.gate.side = x[:, :1]
        return self.gate(x)


@pytest.mark.parametrize("make", [MixingBackwards, SideInput])
def test_gradients_that_mix_on_their_way_back_are_refused(make):
    torch.manual_seed(0)
    model = make()
    engine = engine_of(model)
    with pytest.raises(QuellError, match=r"examples that mix|of some rows alone"):
        _norm_of_sum(engine, model(torch.randn(12, 5)).square().sum())


class Shifted(nn.Module):
    """Positions of all examples, the first of them 2, in a model that returns its outputs or its loss."""

    def __init__(self, own_loss) -> None:
        super().__init__()
        self.words, self.places, self.own_loss = nn.Embedding(9, 4), nn.Embedding(20, 4), own_loss

    def forward(self, x):
        made = (self.words(x) + self.places(torch.arange(2, 2 + x.shape[1]))).square()
        return made.sum() if self.own_loss else made


@pytest.mark.parametrize("own_loss", [False, True])
def test_positions_as_many_as_examples_are_refused(own_loss):
    model = Shifted(own_loss)
    engine = engine_of(model)
    with pytest.raises(QuellError, match=r"places gets an input of 12 rows whatever the batch size"):
        _norm_of_sum(engine, model(torch.randint(0, 9, (12, 12))).sum())


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(20, 4)


def test_positions_where_only_parts_of_the_model_are_called():
    """Then nothing says how many examples there are, and nothing is compared."""
    model = Parts()
    engine_of(model)
    tokens = torch.randint(0, 9, (12, 12))
    with pytest.raises(QuellError, match=r"places \(Embedding\) is given the numbers 0 to 11"):
        model.words(tokens) + model.places(torch.arange(12))


class TransposedWithLoss(Transposed):
    def forward(self, x):
        return super().forward(x).square().sum()


def test_models_that_return_their_loss_are_looked_at_too():
    model = TransposedWithLoss()
    engine = engine_of(model)
    with pytest.raises(QuellError, match=r"layer \(Linear\) made 8 rows from 7 examples"):
        _norm_of_sum(engine, model(torch.randn(8, 8, 5)))


class Category(nn.Module):
    """One token for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.words(x))


@pytest.mark.parametrize("tokens", [[0, 1], [1, 0], [0, 1, 2, 3, 4]])
def test_single_tokens_that_look_like_positions(tokens):
    """[0, 1, 2] may be a batch of three examples as well as positions that all examples share."""
    torch.manual_seed(0)
    model = Category()
    x = torch.tensor(tokens)
    plain = model(x).detach()
    engine = engine_of(model, 1e6)
    output = model(x)
    torch.testing.assert_close(output.detach(), plain)
    output.square().sum().backward()
    seen, sums = engine.collect()
    assert seen == len(tokens)
    expected = clipped_gradient(copy.deepcopy(model), lambda out, _: out.square().sum(), [x, x], 1e6)
    torch.testing.assert_close(sums, list(expected.values()))


class FirstOfOne(nn.Module):
    """A parameter of shape (1, n) that is used without its first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 5))

    def forward(self, x):
        return x * self.scale[0]


class MeanOfOne(FirstOfOne):
    def forward(self, x):
        return x * self.scale.mean(0)


@pytest.mark.parametrize("make", [FirstOfOne, MeanOfOne])
@pytest.mark.parametrize("first", [None, 0, 1])
def test_parameters_with_one_row_that_are_not_one_per_example(make, first):
    """Batches of one example, or none, cannot tell whether such a parameter may be handed out row by row."""
    torch.manual_seed(0)
    x = torch.randn(8, 5)
    x[1] *= 100
    try:
        whole, without = sums_without(make, x, first=None if first is None else torch.randn(first, 5))
    except QuellError:
        return
    torch.manual_seed(0)
    by_hand = clipped_gradient(make(), lambda out, _: out.square().sum(), [x, x], 1.0)["scale"]
    torch.testing.assert_close(whole, by_hand.flatten(), rtol=1e-4, atol=1e-5)
    assert float((whole - without).norm()) <= 1.001


class OwnLossOfOne(nn.Module):
    """A weight of shape (1, n) in a model that returns its loss: a copy of it per row would meet every example."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 5))

    def forward(self, x):
        return (x @ self.weight.t() - 1).square().sum()


class LayerScale(nn.Module):
    """As timm's, behind a layer that starts at zero: at first no output shows which numbers the scale meets."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.gamma


def test_a_scale_of_tokens_that_are_as_many_as_examples():
    model = nn.Sequential(LayerScale())
    engine = LayerEngine(model, dict(model.named_parameters()), 1e-3, "sum")
    model(torch.zeros(4, 4, 3)).sum().backward()
    engine.collect()
    x = torch.zeros(4, 4, 3)
    x[0] = torch.randn(4, 3)  # one example, which moves the sum by no more than the bound
    model(x).sum().backward()
    assert float(engine.collect()[1][0].norm()) <= 1e-3


def test_a_loss_does_not_show_whose_copy_of_a_parameter_it_used():
    x = torch.randn(8, 5)
    x[1] *= 100
    with pytest.raises(QuellError, match=r"the model \(OwnLossOfOne\) made 0 rows from 8 examples"):
        sums_without(OwnLossOfOne, x)


# Others' numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_an_example_whose_gradient_is_not_finite_counts_as_zero(value, shape):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(8, *shape)
    others = torch.cat([x[:3], x[4:]])
    x[3] = value
    engine = engine_of(model, 0.5)
    found = []
    for batch in (x, others):
        model(batch).square().sum().backward()
        seen, sums = engine.collect()
        assert seen == len(batch)
        found.append(sums)
    for all_of_them, rest in zip(*found, strict=True):
        assert bool(torch.isfinite(all_of_them).all())
        assert float((all_of_them - rest).norm()) <= (0.5005 if value == 1e30 else 1e-5)


def test_first_rows_that_are_not_finite_spoil_no_comparison():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4)), torch.randn(8, 5)
    x[:2] = float("inf")
    engine = engine_of(model)
    model(x).square().sum().backward()
    assert engine.collect()[0] == 8


def test_weights_of_an_embedding_and_an_output_layer_are_clipped_as_one():
    """The gradients of both uses are one gradient, which is clipped to the bound and hardly below it."""
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.embed(x))

    x = torch.randint(0, 7, (8, 3))
    for bound in (1e6, 0.5):
        model = Tied()
        expected = clipped_gradient(model, lambda out, _: out.square().sum(), [x, x], 1e6)["embed.weight"]
        engine = engine_of(model, bound)
        model(x).square().sum().backward()
        _, (whole,) = engine.collect()
        if bound == 1e6:
            torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
        for row in x:
            model(row[None]).square().sum().backward()
            _, (alone,) = engine.collect()
            assert bound == 1e6 or 0.4999 < float(alone.norm()) <= 0.5


# Units of several rows


def test_a_unit_is_clipped_as_one_and_no_row_of_it_alone():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3, 5)
    x[1] *= 50
    whole, without = [], []
    for rows, found in ((x, whole), (torch.cat([x[:1], x[2:]]), without)):
        engine = engine_of(copy.deepcopy(model), unit=3)
        output = engine.model(rows.flatten(0, 1))
        output.square().sum().backward()
        seen, sums = engine.collect()
        assert seen == len(rows)
        found.append(torch.cat([total.flatten() for total in sums]))
    assert 0.5 < float((whole[0] - without[0]).norm()) <= 1.001
    engine = engine_of(model, unit=3)
    with pytest.raises(QuellError, match="rows"):
        _norm_of_sum(engine, model(torch.randn(8, 5)).sum())  # 8 rows are no blocks of 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_in_other_precisions(dtype):
    found = []
    for kind in (torch.float32, dtype):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(5, 3)).to(kind), torch.randn(8, 4, 5).to(kind)
        engine = engine_of(model, 0.5)
        model(x).square().sum().backward()
        found.append(engine.collect()[1])
        assert all(total.dtype == torch.float32 for total in found[-1])
    coarse = 0.05 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(*found, rtol=coarse, atol=coarse)
