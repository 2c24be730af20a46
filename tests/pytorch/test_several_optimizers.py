"""Several optimizers, schedulers and parts, GANs, models with batch norm: all that trains is private, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quell.errors import QuellError
from quell.noise import claims
from quell.torch import (
    load_checkpoint,
    make_private,
    replace_batch_norm,
    save_checkpoint,
    standardise_convolutions,
)

from .conftest import small_plan
from .training import examples, network, reference_run, seeded, train, without_noise


def two(model, momentum=0.0):
    """Body and head."""
    body = torch.optim.SGD(list(model[0].parameters()) + list(model[2].parameters()), lr=0.5, momentum=momentum)
    return [body, torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=momentum)]


def test_several_optimizers_step_together_on_gradients_that_are_clipped_as_one():
    plan, expected = without_noise(small_plan()), network()
    model = network()
    model, optimizer, loader = make_private(model, two(model), examples(), plan, 0.3)
    train(model, optimizer, loader, steps=3)
    parts = two(expected)
    both = type("Both", (), {"step": lambda self: [part.step() for part in parts]})()
    batches = [batch for _, batch in zip(range(3), optimizer.run.batches.starting(0), strict=False)]
    reference_run(expected, both, examples(), batches, 8, 0.3)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_same_run_as_with_parameter_groups_and_it_goes_on_from_a_checkpoint(tmp_path):
    plan, model = small_plan(momentum=0.9), network()
    groups = [group for part in two(model, 0.9) for group in part.param_groups]
    whole = make_private(model, torch.optim.SGD(groups, momentum=0.9), examples(), plan, key=seeded(5))
    train(*whole)
    for steps in (4, None):
        claims._claims.clear()
        model = network()
        run = make_private(model, two(model, 0.9), examples(), plan, key=seeded(5))
        scheduler = torch.optim.lr_scheduler.ConstantLR(run[1].original_optimizer.parts[1], factor=1.0)
        load_checkpoint(tmp_path / "checkpoint.pt", *run, scheduler=scheduler)
        train(*run, steps=steps)
        save_checkpoint(tmp_path / "checkpoint.pt", *run, scheduler=scheduler)
    assert run[1].run.step == plan.steps
    assert all(torch.equal(a, b) for a, b in zip(run[0].parameters(), whole[0].parameters(), strict=True))


def test_what_would_train_without_noise_is_refused(plan):
    model = network()
    body, head = two(model)
    with pytest.raises(QuellError, match=r"3\.weight and 1 more can be trained, but are not in the private optimizer"):
        make_private(model, [body], examples(), plan)
    with pytest.raises(QuellError, match="two of the optimizers hold the same parameter"):
        make_private(model, [body, body, head], examples(), plan)
    with pytest.raises(QuellError, match="optimizer is a str"):
        make_private(model, [body, "head"], examples(), plan)
    model, optimizer, loader = make_private(model, [body, head], examples(), plan)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    for part in (body, head):
        part.param_groups[0]["params"][0].grad = torch.ones_like(part.param_groups[0]["params"][0])  # without noise
        with pytest.raises(QuellError, match="its own step has no noise"):
            part.step()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(QuellError, match="its own step has no noise"):
        head.step()


# Schedulers


@pytest.mark.filterwarnings("ignore:.*learning rate is")
def test_a_scheduler_steps_when_a_step_was_taken(plan):
    """With parts, `acted` says when; a scheduler that counts parts is refused."""
    model = network()
    model, optimizer, loader = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.5), examples(), plan, physical_batch_size=3
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    acted = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        acted.append(optimizer.acted)
        if optimizer.acted:
            scheduler.step()
    assert acted == [False, False, True] * 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.9**5)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if number == 1:
            with pytest.raises(QuellError, match=r"between the parts of one batch: .* `if optimizer\.acted: sched"):
                optimizer.step()
            break
        optimizer.step()
        scheduler.step()
    assert optimizer.run.step == 5


# GANs


def test_a_gan_whose_discriminator_is_private(plan):
    """The generator sees the data through the discriminator only, and trains by an optimizer of its own."""
    torch.manual_seed(0)
    judge, maker = network(), nn.Linear(4, 6)
    before = [p.detach().clone() for p in maker.parameters()]
    judge, private, loader = make_private(judge, torch.optim.SGD(judge.parameters(), lr=0.1), examples(), plan)
    plain = torch.optim.SGD(maker.parameters(), lr=0.1)
    for real, _ in loader:
        private.zero_grad()
        made = maker(torch.randn(len(real), 4))
        scores = judge(real)[:, 0], judge(made.detach())[:, 0]
        (nn.functional.softplus(-scores[0]) + nn.functional.softplus(scores[1])).mean().backward()
        private.step()
        plain.zero_grad()
        nn.functional.softplus(-judge(maker(torch.randn(8, 4)))[:, 0]).mean().backward()
        plain.step()
    assert private.run.step == 5
    assert not any(torch.equal(a, b) for a, b in zip(before, maker.parameters(), strict=True))


# Batch norm


def residual():
    """As torchvision's models have it, nested."""
    block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), block, nn.Flatten(), nn.LazyLinear(3))


def test_batch_norm_is_replaced_by_one_line(plan):
    model = residual()
    model(torch.randn(1, 3, 5, 5))
    model[1].weight.data.fill_(2.0)
    with pytest.raises(QuellError, match=r"quell\.torch\.replace_batch_norm\(model\) puts GroupNorm there"):
        make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), plan)
    assert replace_batch_norm(model) is model
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert model[1].num_groups == 6
    assert bool((model[1].weight == 2.0).all())
    data = torch.utils.data.TensorDataset(torch.randn(40, 3, 5, 5), torch.randint(0, 3, (40,)))
    trio = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, plan)
    train(*trio, steps=2)
    assert isinstance(replace_batch_norm(nn.BatchNorm1d(7), groups=4), nn.GroupNorm)


def test_what_replaces_a_batch_norm_of_features_lets_the_example_through():
    """One channel per group, each with one number, would be 0 whatever the example is; two would be 1 and -1."""
    model = replace_batch_norm(nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32)))
    assert model[1].num_groups == 1
    assert torch.linalg.matrix_rank(model(torch.randn(100, 20))) >= 20


@pytest.mark.parametrize("options", [{}, {"clipping": "microbatch"}, {"autocast": True}])
def test_standardised_convolutions_train_on_their_own_weights(options, plan):
    """The first batch's gradients are compared with autograd's by the engine; afterwards all is as with any weights."""
    torch.manual_seed(0)
    model = replace_batch_norm(residual())
    model(torch.randn(1, 3, 5, 5))
    weights = [p.detach().clone() for p in model.parameters()]
    assert standardise_convolutions(model) is model
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    kernel, x = model[0].weight.detach(), torch.randn(2, 3, 5, 5)
    by_hand = (kernel - kernel.mean((1, 2, 3), keepdim=True)) / torch.sqrt(
        kernel.var((1, 2, 3), correction=0, keepdim=True) * 27 + 1e-5
    )
    torch.testing.assert_close(model[0](x), nn.functional.conv2d(x, by_hand, model[0].bias), rtol=1e-5, atol=1e-5)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3, 5, 5), torch.randint(0, 3, (40,)))
    given = {name: value for name, value in options.items() if name != "autocast"}
    model, optimizer, loader = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, plan, **given)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in options):
        train(model, optimizer, loader, steps=2)
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's, which most of its convolutional networks have."""

    def __init__(self, features):
        super().__init__(features)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)


def test_what_timm_does_after_a_batch_norm_stays():
    model = replace_batch_norm(nn.Sequential(nn.Conv2d(3, 6, 3), BatchNormAct2d(6)), groups=3)
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(model(x), nn.functional.group_norm(model[0](x), 3).relu())
    assert len(list(model.parameters())) == 4


def test_a_batch_norm_that_does_more_is_named():
    class Activated(nn.BatchNorm2d):
        """With something that nobody knows."""

    with pytest.raises(QuellError, match=r"0 is a Activated, which does more than a BatchNorm: .* norm_layer="):
        replace_batch_norm(nn.Sequential(Activated(3)))
