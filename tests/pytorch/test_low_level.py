"""The parts for other trainers: clip-and-sum, and the noise of a plan for torch tensors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from quell.errors import QuellError
from quell.noise import Key, SeededKeyWarning
from quell.noise.audit import audit
from quell.torch import CorrelatedNoise, clipped_sum


def loss(params, x, y):
    hidden = torch.tanh(params["a"] @ x)
    return (params["b"] @ hidden * params["scale"] - y) ** 2


def weights(dtype=torch.float32):
    torch.manual_seed(0)
    return {
        "a": torch.randn(5, 3, dtype=dtype),
        "b": torch.randn(5, dtype=dtype),
        "scale": torch.tensor(1.5, dtype=dtype),
    }


def by_hand(params, batch, bound):
    """The same with one backward pass per example."""
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for example in zip(*batch, strict=True):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        loss(leaves, *example).backward()
        norm = torch.sqrt(sum(leaf.grad.square().sum() for leaf in leaves.values()))
        for name, leaf in leaves.items():
            total[name] += leaf.grad * min(1.0, bound / float(norm))
    return total


def test_float64_gives_the_sums_of_float32():
    batch = torch.randn(7, 3), torch.randn(7)
    single = clipped_sum(loss, weights(), batch, 0.5)
    double = clipped_sum(loss, weights(torch.float64), tuple(part.double() for part in batch), 0.5)
    assert all(value.dtype == torch.float32 for value in double.values())
    torch.testing.assert_close(double, single)


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
@pytest.mark.parametrize("bound", [0.01, 1.0, 1e6])
def test_clipped_sum_equals_one_example_at_a_time(micro_batch, bound):
    params, batch = weights(), (torch.randn(10, 3), torch.randn(10))
    got = clipped_sum(loss, params, batch, bound, micro_batch=micro_batch)
    for name, value in by_hand(params, batch, bound).items():
        torch.testing.assert_close(got[name], value, rtol=3e-5, atol=1e-6 * bound if bound < 1 else 1e-5)


def test_one_example_moves_the_sum_by_at_most_the_clip_norm():
    params = weights()
    for size in (1e-3, 1.0, 1e6):
        got = clipped_sum(loss, params, (size * torch.ones(1, 3), size * torch.ones(1)), 0.5)
        assert float(torch.sqrt(sum(g.double().square().sum() for g in got.values()))) <= 0.5


def test_an_empty_batch_gives_zeros():
    got = clipped_sum(loss, weights(), (torch.randn(0, 3), torch.randn(0)), 1.0)
    assert {name: g.shape for name, g in got.items()} == {name: p.shape for name, p in weights().items()}
    assert all(not g.any() for g in got.values())


def test_an_example_without_a_finite_gradient_counts_as_zero():
    x, y = torch.randn(6, 3), torch.randn(6)
    x[2, 0], y[4] = float("inf"), float("nan")
    kept = [0, 1, 3, 5]
    got, without = (clipped_sum(loss, weights(), batch, 1.0) for batch in ((x, y), (x[kept], y[kept])))
    for name in got:
        torch.testing.assert_close(got[name], without[name])


def test_sums_are_float32_for_a_bfloat16_model():
    batch = (torch.randn(20, 3, dtype=torch.bfloat16), torch.randn(20, dtype=torch.bfloat16))
    got = clipped_sum(loss, weights(torch.bfloat16), batch, 1.0)
    assert all(g.dtype == torch.float32 for g in got.values())


def test_batches_of_unequal_length_are_refused():
    with pytest.raises(QuellError, match=r"have \[2, 3\] examples"):
        clipped_sum(loss, weights(), (torch.randn(3, 3), torch.randn(2)), 1.0)


@pytest.mark.parametrize("name", ["blt", "bisr", "identity", "bsr"])
def test_the_noise_of_a_mechanism_passes_the_audit(plan, name):
    params = {"w": torch.zeros(60, 40), "b": torch.zeros(40)}
    noise = CorrelatedNoise(plan, params, 2.0, mechanism=name)
    rows = {key: [] for key in params}
    for _ in range(plan.steps):
        summed = {key: torch.zeros_like(value) for key, value in params.items()}
        noise.add_(summed)
        for key, value in summed.items():
            rows[key].append(value.double().flatten().numpy())
    chosen = next(m for m in plan.mechanisms if m.name == name)
    found = audit([np.stack(r) for r in rows.values()], chosen.strategy.matrix(), 2.0 * chosen.noise_multiplier)
    assert found.passed, str(found)


def test_noise_goes_by_name_not_by_order(plan):
    params = {"w": torch.zeros(8), "b": torch.zeros(3)}
    key = Key.generate()
    with pytest.warns(SeededKeyWarning):
        one = CorrelatedNoise(plan, params, 1.0, seed=1)
    with pytest.warns(SeededKeyWarning):
        other = CorrelatedNoise(plan, params, 1.0, seed=1)
    straight = {name: torch.zeros_like(value) for name, value in params.items()}
    turned = dict(reversed({name: torch.zeros_like(value) for name, value in params.items()}.items()))
    one.add_(straight)
    other.add_(turned)
    assert all(torch.equal(straight[name], turned[name]) for name in params)
    with pytest.raises(QuellError, match="'b' has no gradient"):
        one.add_({"w": torch.zeros(8)})
    with pytest.raises(QuellError, match="a key or a seed"):
        CorrelatedNoise(plan, params, 1.0, key=key, seed=1)


def test_noise_goes_on_from_its_state(plan):
    params, key = [torch.zeros(50)], Key.generate()
    straight = CorrelatedNoise(plan, params, 1.0, key=key)
    rows = []
    for step in range(6):
        if step == 3:
            saved = straight.state_dict()
        row = torch.zeros(50)
        straight.add_([row])
        rows.append(row)
    resumed = CorrelatedNoise(plan, params, 1.0, key=key)
    with pytest.raises(QuellError, match="replay=True"):
        resumed.load_state_dict(saved)
    resumed.load_state_dict(saved, replay=True)
    assert resumed.step == 3
    for row in rows[3:]:
        again = torch.zeros(50)
        resumed.add_([again])
        assert torch.equal(again, row)


@pytest.mark.parametrize(("one", "other"), [("chacha8", "chacha20"), ("chacha20", "chacha8")])
def test_a_run_stays_with_its_generator(plan, one, other):
    params, key = [torch.zeros(50)], Key.generate()
    noise = CorrelatedNoise(plan, params, 1.0, key=key, generator=one)
    noise.add_([torch.zeros(50)])
    saved = noise.state_dict()
    for replay in (False, True):
        resumed = CorrelatedNoise(plan, params, 1.0, key=key, generator=other)
        with pytest.raises(QuellError, match=f"generator='{one}', this stream has '{other}'"):
            resumed.load_state_dict(saved, replay=replay)
    CorrelatedNoise(plan, params, 1.0, key=key, generator=one).load_state_dict(saved)


def test_a_mechanism_the_plan_lacks_is_named(plan):
    with pytest.raises(QuellError, match="certified no mechanism 'magic', only "):
        CorrelatedNoise(plan, [torch.zeros(1)], 1.0, mechanism="magic")
    with pytest.raises(QuellError, match="max_grad_norm is missing"):
        CorrelatedNoise(plan, [torch.zeros(1)])


@pytest.mark.slow
def test_importing_the_room_does_not_import_opacus():
    code = "import sys, quell.torch; assert 'opacus' not in sys.modules and 'dp_accounting' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
