"""What max_grad_norm may be: a number, "automatic", or one of them for each group of parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from quell.errors import QuellError
from quell.torch import make_private

from .conftest import small_plan
from .training import examples, network, seeded, without_noise

GROUPS = {"0": 0.2, "": "automatic", "3": 0.05}  # of layers 0, 2 and 3


def private(max_grad_norm, plan=None, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = plan or without_noise(small_plan())
    return make_private(model, optimizer, examples(), plan, max_grad_norm, key=seeded(1), **options)


def alone(batch):
    """The gradient of each example, by name."""
    model, found = network(), []
    for x, y in zip(*batch, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def brought(gradient, given):
    """One example's gradient, clipped or normalised group by group."""
    result = {}
    for prefix in given:
        names = [n for n in gradient if n.startswith(prefix) and (prefix or n.split(".")[0] not in given)]
        norm = math.sqrt(sum(float(gradient[n].double().square().sum()) for n in names))
        factor = 1 / (norm + 0.01) if given[prefix] == "automatic" else min(1.0, given[prefix] / norm)
        result |= {n: gradient[n] * factor for n in names}
    return result


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
@pytest.mark.parametrize("given", ["automatic", GROUPS])
def test_sums_are_those_of_one_gradient_after_the_other(given, clipping):
    model, optimizer, loader = private(given, clipping=clipping)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    each = [brought(gradient, given if isinstance(given, dict) else {"": given}) for gradient in alone((x, y))]
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad * 8, sum(one[name] for one in each), rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
@pytest.mark.parametrize("given", [0.3, "automatic", GROUPS])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_no_example_adds_more_than_the_noise_is_for(given, clipping, size):
    model, optimizer, _ = private(given, clipping=clipping, loss_reduction="sum")
    most = {0.3: 0.3, "automatic": 1.0}.get(given if isinstance(given, (float, str)) else None)
    most = most or math.sqrt(0.2**2 + 1 + 0.05**2)
    assert optimizer.run.noise.max_grad_norm == optimizer.max_grad_norm == pytest.approx(most, rel=1e-15)
    for x, y in zip(*examples(4).tensors, strict=True):
        (size * nn.functional.cross_entropy(model(x[None]), y[None])).backward()
        seen, sums = optimizer._engine.collect()
        assert seen == 1
        norm = math.sqrt(sum(float(total.double().square().sum()) for total in sums))
        assert norm <= most * (1 + 1e-6)
        if size == 1e6:  # nothing is clipped by more than it has to be
            assert norm >= 0.99 * most


def test_noise_is_for_all_groups_together():
    """The mutation: noise for the largest group alone."""
    _, optimizer, _ = private({"0": 3.0, "": 4.0}, small_plan())
    assert optimizer.run.noise.scale == pytest.approx(5.0 * optimizer.noise_multiplier)


def test_a_replay_with_other_bounds_is_noticed():
    for given, other in (("automatic", 1.0), (1.0, "automatic"), ({"": 1.0}, 1.0)):
        settings = [private(each)[1]._engine.settings()["max_grad_norm"] for each in (given, other)]
        assert settings[0] != settings[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "pass a number, such as 1.0, or 'automatic'"),
        ({"": None}, "pass a number, such as 1.0, or 'automatic'"),
        ("auto", "must be a positive number or 'automatic'"),
        (-1.0, "must be positive"),
        ({"0": 1.0}, r"no group for 2\.weight"),
        ({"": 1.0, "9": 1.0}, "a group '9' without trained parameters"),
        ({"": 0.0}, "must be positive"),
    ],
)
def test_what_is_refused(given, said):
    with pytest.raises(QuellError, match=said):
        private(given)
