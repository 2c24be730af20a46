"""Adam's second moments without noise: the variance of the noise is known, and torch's own AdamW steps by the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from quell.errors import QuellError
from quell.torch import make_private

from .conftest import small_plan
from .training import examples, network, seeded

BETAS = (0.8, 0.9)

pytestmark = pytest.mark.filterwarnings("ignore:the plan's noise is shaped for SGD")


def private(model, mechanism="bisr", optimizer=None, data=None, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05, betas=BETAS, weight_decay=0.1)
    options = {"correct_moments": True, "mechanism": mechanism, "key": seeded(1), **options}
    return make_private(model, optimizer, data or examples(), small_plan(), **options)


def noise_variances(optimizer):
    """(steps,) by the dense matrix."""
    rows = np.square(np.asarray(optimizer.run.mechanism.strategy.noising_matrix())).sum(1)
    return rows * (optimizer.run.noise.max_grad_norm * optimizer.noise_multiplier / 8) ** 2


@pytest.mark.parametrize("mechanism", ["identity", "bisr", "bsr", "blt"])
def test_a_run_is_that_of_corrected_moments(mechanism):
    """Against Adam with a corrected second moment, written out in float64 over the released gradients."""
    model, optimizer, loader = private(network(), mechanism)
    first = [p.detach().double() for p in model.parameters()]
    released = []
    while optimizer.run.step < 10:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            released.append([p.grad.double() for p in model.parameters()])
    variances = noise_variances(optimizer)
    floored = 0
    for place, parameter in enumerate(model.parameters()):
        weight, m, v, noise = first[place], 0.0, 0.0, 0.0
        for t, gradients in enumerate(released, 1):
            g = gradients[place]
            weight = weight * (1 - 0.05 * 0.1)
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            v = BETAS[1] * v + (1 - BETAS[1]) * g**2
            noise = BETAS[1] * noise + (1 - BETAS[1]) * variances[t - 1]
            shares = [BETAS[1] ** (t - s) for s in range(1, t + 1)]
            count = sum(shares) ** 2 / sum(share**2 for share in shares)  # of equal shares, for the same steadiness
            least = math.sqrt(2 / count) * noise
            divisor = torch.clamp(v - noise, min=least) if t > 1 else v
            floored += int((v - noise < least).sum())
            weight = weight - 0.05 * (m / (1 - BETAS[0] ** t)) / ((divisor / (1 - BETAS[1] ** t)).sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), weight, rtol=0, atol=2e-5)
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"].double(), v, rtol=1e-5, atol=0)
    assert floored  # both sides of the floor are met


@pytest.mark.parametrize("mechanism", ["bisr", "blt"])
def test_the_noise_has_the_variance_that_is_subtracted(mechanism):
    """Gradients of zero: what is released is noise alone."""
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    model, optimizer, loader = private(nn.Linear(50, 400), mechanism, data=TensorDataset(x, torch.zeros(40)))
    variances = noise_variances(optimizer)
    for step, (rows, _) in enumerate(loader):
        optimizer.zero_grad()
        (model(rows) * 0).sum(1).mean().backward()
        optimizer.step()
        released = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        assert float(released.square().mean()) == pytest.approx(variances[step], rel=0.06)


def test_what_is_refused():
    for kind in (torch.optim.RMSprop, torch.optim.Adam):
        model = network()
        with pytest.raises(QuellError, match=f"takes AdamW, or Adam without weight_decay, not this {kind.__name__}"):
            private(model, optimizer=kind(model.parameters(), weight_decay=0.1))
    with pytest.raises(QuellError, match="needs float32 parameters"):
        private(network().bfloat16())
    with pytest.raises(QuellError, match="pass one"):
        private(network(), scale_gradients=True)
