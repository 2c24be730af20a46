"""The first batches are looked at for all that would be released without clipping and noise beside the gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Subset

from quell.errors import QuellError

from .test_probe import private, three_steps
from .training import examples, train

cross_entropy = functional.cross_entropy


def all_batches(trio, loss=cross_entropy):
    train(*trio, criterion=loss)
    assert trio[1].run.step == 10
    assert trio[1].run.guard._checked


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
