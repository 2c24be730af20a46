"""Views of one example are clipped as one, are the same after a crash, and are made of this example alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quell.errors import QuellError
from quell.noise import claims
from quell.torch import crop_and_flip, load_checkpoint, make_private, save_checkpoint

from .conftest import small_plan
from .training import clipped_gradient, examples, network, seeded, train, without_noise


def shaken(x):
    return x + 0.1 * torch.randn_like(x)


def private(key, augment=shaken, plan=None, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = plan or small_plan()
    return make_private(model, optimizer, examples(), plan, 0.3, key=key, augment=augment, **options)


@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 3}, {"fixed_shape": True, "physical_batch_size": 5}])
def test_views_of_one_example_are_clipped_as_one(options):
    model, optimizer, loader = private(seeded(1), plan=without_noise(small_plan()), rows_per_example=4, **options)
    seen = []

    def unit_loss(outputs, labels):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

    for x, y in loader:
        count = optimizer.run.unfinished.received.examples
        assert len(x) % 4 == 0
        views = x.view(-1, 4, 6)[:count]
        assert views.std(1).min() > 1e-3  # no view is another
        seen.append((views, y.view(-1, 4)[:count]))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if optimizer.acted:
            break
    expected = clipped_gradient(network(), unit_loss, [torch.cat(parts) for parts in zip(*seen, strict=True)], 0.3)
    for (name, p), right in zip(model.named_parameters(), expected.values(), strict=True):
        torch.testing.assert_close(p.grad * 8, right, rtol=0, atol=1e-5, msg=name)


def test_a_function_may_write_into_its_inputs():
    _, _, loader = private(seeded(1), augment=lambda x: x.add_(torch.randn_like(x)))
    assert len(next(iter(loader))[0])


@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 1}])
def test_a_function_must_return_something(options):
    _, _, loader = private(seeded(1), augment=lambda x: None, **options)
    with pytest.raises(QuellError, match="augment returned None"):
        next(iter(loader))


def test_views_are_the_same_after_a_crash(tmp_path):
    """Three steps after the checkpoint come again, compared with the ledger's digests."""

    def start(seed):
        claims._claims.clear()
        torch.manual_seed(seed)
        trio = private(tmp_path / "key", rows_per_example=2)
        return trio, load_checkpoint(tmp_path / "run.pt", *trio)

    trio, _ = start(1)
    train(*trio, steps=4)
    save_checkpoint(tmp_path / "run.pt", *trio)
    train(*trio, steps=3)
    straight = [p.detach().clone() for p in trio[0].parameters()]
    trio[1].close()
    trio, step = start(2)
    assert step == 4
    train(*trio, steps=3)
    assert all(torch.equal(p, q) for p, q in zip(straight, trio[0].parameters(), strict=True))


OWN = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "augment",
    [
        lambda x: 0.9 * x + 0.1 * x[torch.randperm(len(x))],  # mixup
        lambda x: 0.9 * x + 0.1 * x.roll(2, 0),  # at an even distance
        lambda x: 0.9 * x + 0.1 * x.roll(len(x) // 2, 0),
        lambda x: x - x.mean(0),
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x + 0.1 * torch.randn(x.shape, generator=OWN),
    ],
)
def test_examples_must_not_mix(augment):
    *_, loader = private(seeded(1), augment, rows_per_example=2)
    for _ in range(6):  # however often the loop tries
        with pytest.raises(QuellError, match="augment makes an example's rows from other examples too"):
            list(loader)


def test_what_a_batch_may_be():
    *_, loader = private(seeded(1), lambda x: x.repeat(2, 1))
    with pytest.raises(QuellError, match="augment made 16 rows from 8"):
        next(iter(loader))
    with pytest.raises(QuellError, match="augment is a str"):
        private(seeded(1), "flip")
    from quell.torch.augmentation import Augmentation

    x = torch.ones(4, 2)
    double = Augmentation(lambda batch: {"x": 2 * batch["x"], "y": batch["y"]}, 1)
    assert torch.equal(double({"x": x, "y": x})["x"], 2 * x)
    assert [type(Augmentation(lambda x: x, 1)(kind((x, x)))) for kind in (list, tuple)] == [list, tuple]
    with pytest.raises(QuellError, match="batches of tensors"):
        double(["a"])


def test_a_loader_that_would_leave_it_out_is_refused():
    *_, loader = private(seeded(1))
    with pytest.raises(QuellError, match="would leave out augment"):
        iter(loader.batch_sampler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_crops_are_those_of_the_reflected_image(dtype):
    """Every result is one of the crops of the padded image, mirrored or not, and all of them come."""
    torch.manual_seed(0)
    images = torch.randint(0, 250, (600, 2, 4, 5)).to(dtype)
    images[:] = images[0]
    made = crop_and_flip(images, padding=2)
    assert made.dtype == dtype
    padded = nn.functional.pad(images[0].float(), (2, 2, 2, 2), mode="reflect").to(dtype)
    crops = [padded[:, i : i + 4, j : j + 5] for i in range(5) for j in range(5)]
    allowed = torch.stack([crop.flip(2) if mirror else crop for crop in crops for mirror in (False, True)])
    found = (made[:, None] == allowed[None]).flatten(2).all(2)
    assert bool(found.any(1).all())
    assert bool(found.any(0).all())
    with pytest.raises(QuellError, match="padding=5"):
        crop_and_flip(images, padding=5)
