"""Whatever couples the examples of a batch is refused before the first step; what does not is left alone."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import quell
from quell.errors import QuellError
from quell.torch import coupling, make_private
from quell.torch.engine.check import _largest
from quell.torch.engine.layers import LayerEngine
from quell.torch.probe import Probe, UncheckedLossWarning
from quell.torch.tape import Watched

from .conftest import small_plan, unpriced_poisson_plan
from .training import examples, network, seeded, train

MODES = ["layers", "microbatch"]
cross_entropy = functional.cross_entropy
WEIGHTS = torch.tensor([1.0, 20.0, 0.1])


def private(model=None, clipping="layers", data=None, plan=None, **options):
    model = network() if model is None else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plan = small_plan("bisr", alone=True) if plan is None else plan
    return make_private(model, optimizer, data or examples(), plan, clipping=clipping, **options)


def three_steps(trio, loss=cross_entropy):
    """A few batches by the user's loop; the probe must have understood at least one of them."""
    model, optimizer, loader = trio
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        assert type(x) is type(y) is torch.Tensor
    assert optimizer.run.guard._checked
    assert not optimizer.run.guard._why


def test_tensors_are_compared_alike_in_slices_and_whole(monkeypatch):
    """Against the plain formula in float64; the tolerance is a share of the largest number in all slices."""
    random = torch.Generator().manual_seed(0)
    one = torch.randn(5, 7, generator=random).bfloat16()
    one[0, 0], one[1, :3] = 40.0, torch.tensor([torch.nan, torch.inf, -torch.inf])
    other = one + 0.3 * torch.randn(5, 7, generator=random)
    other[2, 0], other[1, 0] = torch.inf, torch.nan
    for a, b in ((one, other), (one, other[0]), (one[:0], other[:0]), (one[0, 1], other[0, 1])):
        wide_a, wide_b = torch.broadcast_tensors(a.double(), b.double())
        finite = [values.where(values.isfinite(), 0.0).abs().amax() for values in (wide_a, wide_b) if values.numel()]
        apart = (wide_a - wide_b).abs() > 0.01 * max(finite, default=0.0)
        expected = apart | (wide_a.isnan() != wide_b.isnan()) | (wide_a.isinf() != wide_b.isinf())
        for size in (1, 4, 1 << 22):
            monkeypatch.setattr(coupling, "_AT_ONCE", size)
            assert torch.equal(coupling.differ(a, b, 0.01), expected)


def test_the_unit_with_the_largest_finite_gradients_is_looked_at():
    gradients = [torch.randn(8, 3).bfloat16(), torch.randn(8, 2, 2)]
    gradients[0][5], gradients[1][2] = 30.0, torch.inf
    assert _largest(gradients, 8) == 5
    assert _largest(gradients, 4) == 2


# Losses that couple


def contrastive(out, y):
    unit = functional.normalize(out, dim=1)
    return cross_entropy(unit @ unit.t(), torch.arange(len(out)))


def per_counted(out, y):
    counted = y > 0
    return (cross_entropy(out, y, reduction="none") * counted).sum() / counted.sum()


def per_counted_by_a_number(out, y):
    counted = (y > 0).sum().item()
    return (cross_entropy(out, y, reduction="none") * (y > 0)).sum() * (1 / (counted + 1))


def per_counted_by(number):
    """A loss that is divided by what is made of the number of some labels."""

    def loss(out, y):
        return (cross_entropy(out, y, reduction="none") * (y > 0)).sum() / number((y > 0).sum().item() + 1)

    return loss


def normalised(out, y):
    return cross_entropy((out - out.mean(0)) / out.std(0), y)


def normalised_by_detached_statistics(out, y):
    return cross_entropy((out - out.mean(0).detach()) / out.std(0).detach(), y)


def hardest_half(out, y):
    return cross_entropy(out, y, reduction="none").topk(len(y) // 2).values.mean()


def advantages(out, y):
    """A loss that is always 0, as in policy gradients, with rewards normalised over the batch."""
    reward = (y - y.float().mean()) / y.float().std()
    chance = out.log_softmax(1)[torch.arange(len(y)), y]
    return ((chance - chance.detach()).exp() * reward).mean()


def hooked(hook):
    """A loss whose gradient goes through a hook of the loop on its way to the model."""

    def loss(out, y):
        out.register_hook(hook)
        return cross_entropy(out, y)

    return loss


COUPLED = [
    hooked(lambda gradient: gradient / gradient.norm()),
    contrastive,
    per_counted,
    per_counted_by_a_number,
    *(
        per_counted_by(number)
        for number in (abs, lambda n: -n, lambda n: round(n, 0), lambda n: n**2, lambda n: n // 1)
    ),
    *(per_counted_by(number) for number in (lambda n: 1 / n**-1, lambda n: 2**n, lambda n: n % 1000, lambda n: +n)),
    normalised,
    normalised_by_detached_statistics,
    hardest_half,
    advantages,
    lambda out, y: cross_entropy(out, y, weight=WEIGHTS),
    lambda out, y: cross_entropy(out, y.masked_fill(y == 0, -100)),
]


@pytest.fixture
def mixed_labels():
    """All labels in the first batch of the key below, so that all of these losses couple there."""
    x, _ = examples().tensors
    return TensorDataset(x, torch.arange(40) % 3)


@pytest.mark.parametrize("loss", COUPLED)
@pytest.mark.parametrize("clipping", MODES)
def test_losses_that_couple_examples(loss, clipping, mixed_labels):
    model, optimizer, loader = private(clipping=clipping, data=mixed_labels, key=seeded(1))
    x, y = next(iter(loader))
    assert set(y.tolist()) == {0, 1, 2}
    with pytest.raises(QuellError, match=r"the loss couples the examples of a batch.*loss_reduction='sum'") as said:
        loss(model(x), y).backward()
    assert "clipping=" not in str(said.value)
    assert optimizer.run.step == 0


def test_a_loop_that_goes_on_after_the_error_gets_it_again():
    model, optimizer, loader = private()
    for _ in range(5):
        x, y = next(iter(loader))
        with pytest.raises(QuellError, match="the loss couples the examples"):
            contrastive(model(x), y).backward()
    assert optimizer.run.step == 0


def halves(model, optimizer, x, y):
    """The second half of the batch has a loss of its own."""
    half = len(x) // 2
    cross_entropy(model(x[:half]), y[:half]).backward()
    contrastive(model(x[half:]), y[half:]).backward()


def two_losses(model, optimizer, x, y):
    """Of one forward pass, which `clipping="microbatch"` takes."""
    out = model(x)
    cross_entropy(out, y).backward(retain_graph=True)
    contrastive(out, y).backward()


def after_a_generator(model, optimizer, x, y):
    """As docs/pytorch.md says about GANs: the generator's step comes before that of the private discriminator."""
    model(torch.randn(x.shape)).square().mean().backward()
    optimizer.zero_grad()
    contrastive(model(x), y).backward()


@pytest.mark.parametrize(
    ("passes", "clipping"),
    [
        (halves, "layers"),
        (halves, "microbatch"),
        (two_losses, "microbatch"),
        (after_a_generator, "layers"),
        (after_a_generator, "microbatch"),
    ],
)
def test_a_loss_that_couples_after_one_that_does_not(passes, clipping):
    model, optimizer, loader = private(clipping=clipping)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
        passes(model, optimizer, x, y)
    assert optimizer.run.step == 0


def later_targets(model, optimizer, x, y):
    """What the loop still has of its first backward pass, whose loss it has not."""
    half = len(x) // 2
    out = model(x[:half])
    cross_entropy(out, y[:half]).backward()
    wanted = out.detach().square()
    for rows in (slice(half), slice(half, 2 * half)):
        functional.mse_loss(model(x[rows]), wanted - wanted.mean(0)).backward()


def by_the_loss_before(model, optimizer, x, y):
    half = len(x) // 2
    loss = cross_entropy(model(x[:half]), y[:half])
    loss.backward()
    ((model(x[half:]) - loss.item()).square().mean() / 2).backward()


def numbers_of_parts(model, optimizer, x, y):
    """What loops log, and save."""
    total = 0.0
    for rows in (slice(8), slice(8, None)):
        loss = cross_entropy(model(x[rows]), y[rows], reduction="sum") / len(x)
        loss.backward()
        total += loss.item()
        assert type(total) is type(loss.item()) is float
        assert type((y > 0).sum().item()) is int


@pytest.mark.parametrize("clipping", MODES)
def test_numbers_after_a_backward_pass(clipping):
    model, optimizer, loader = private(clipping=clipping)
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        numbers_of_parts(model, optimizer, x, y)
        optimizer.step()
    assert optimizer.run.guard._checked
    assert not optimizer.run.guard._why
    model, optimizer, loader = private(clipping=clipping)
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
        by_the_loss_before(model, optimizer, x, y)


def test_targets_from_before_other_backward_passes():
    model, optimizer, loader = private()
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
        later_targets(model, optimizer, x, y)


@pytest.mark.parametrize("clipping", MODES)
def test_outputs_are_kept_for_one_backward_pass_only(clipping):
    """A loop may take a batch in parts because the outputs of the whole one do not fit."""
    model, optimizer, loader = private(clipping=clipping)
    for _, (x, y) in zip(range(4), loader, strict=False):
        optimizer.zero_grad()
        outputs = []
        for rows in range(len(x)):
            out = model(x[rows : rows + 1])
            outputs.append(weakref.ref(out))
            (cross_entropy(out, y[rows : rows + 1]) / len(x)).backward()
            assert sum(output() is not None for output in outputs) <= 2
        optimizer.step()
    assert optimizer.run.guard._checked
    assert not optimizer.run.guard._why


def test_losses_that_are_forgotten_drew_random_numbers():
    model, optimizer, loader = private(clipping="microbatch")
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        out = model(x)
        cross_entropy(functional.dropout(out), y).backward(retain_graph=True)
        cross_entropy(functional.dropout(out), y).backward()
        optimizer.step()
    assert optimizer.run.guard._checked
    assert not optimizer.run.guard._why


def written_into_a_part(model, x, y):
    out = torch.zeros_like(y, dtype=torch.float32)[:, None].repeat(1, 3)
    out[:, :].copy_(model(x))
    return cross_entropy(out, y)


def written_into(model, x, y):
    out = torch.zeros(len(x), 3)
    out[:] = model(x)
    return cross_entropy(out, y)


@pytest.mark.parametrize("loss", [written_into_a_part, written_into])
@pytest.mark.parametrize("clipping", MODES)
def test_outputs_that_are_written_into_another_tensor_are_of_the_model(loss, clipping):
    model, optimizer, loader = private(clipping=clipping)
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
    assert optimizer.run.guard._checked
    assert not optimizer.run.guard._why
    model, optimizer, loader = private(Around(nn.Identity(), lambda layer, x: x - x.mean(0)), clipping=clipping)
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match="mixes the examples of a batch"):
        loss(model, x, y).backward()


def second_half(model, x, y):
    """What the loop does with rows that are not among the first few."""
    out, half = model(x), len(x) // 2
    return cross_entropy(out[:half], y[:half], reduction="sum") + (out[half:] @ out[half:].t()).square().sum()


def centred_targets(model, x, y):
    """Of the model itself, as in self-distillation."""
    with torch.no_grad():
        wanted = model(x)
    return functional.mse_loss(model(x), wanted - wanted.mean(0))


@pytest.mark.parametrize("loss", [second_half, centred_targets])
@pytest.mark.parametrize("clipping", MODES)
def test_losses_that_couple_in_later_rows_and_through_targets(loss, clipping):
    data = examples(64)
    plan = quell.plan(examples=64, batch_size=32, epochs=2, epsilon=8, delta=1e-3, memory=0, sampling="cyclic")
    model, optimizer, loader = private(clipping=clipping, data=data, plan=plan)
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
        loss(model, x, y).backward()
    assert optimizer.run.step == 0


def test_labels_that_rarely_do_not_count():
    """One in 33, and the probe looks at eight rows of a batch."""
    x, _ = examples(400).tensors
    y = torch.zeros(400, dtype=torch.long).masked_fill(torch.arange(400) % 33 == 20, -100)
    plan = quell.plan(examples=400, batch_size=100, epochs=1, epsilon=8, delta=1e-3, memory=0, sampling="cyclic")
    for key in range(4):
        model, _, loader = private(data=TensorDataset(x, y), plan=plan, key=seeded(key))
        x_, y_ = next(iter(loader))
        assert (y_ < 0).any()
        with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
            cross_entropy(model(x_), y_).backward()


def per_example(out, y):
    return (cross_entropy(out, y, weight=WEIGHTS, reduction="none") * (y > 0)).sum() / len(y)


def in_place(out, y):
    target = functional.one_hot(y, 3).float()
    target[target == 0] = 0.1
    target /= target.sum(1, keepdim=True)
    return -(target * out.log_softmax(1)).sum(1).mean()


SEPARATE = [
    cross_entropy,
    hooked(lambda gradient: gradient.clamp(-0.01, 0.01)),
    per_example,
    in_place,
    lambda out, y: cross_entropy(out, y, label_smoothing=0.1),
    lambda out, y: sum(cross_entropy(row[None], label[None]) for row, label in zip(out, y, strict=True)) / len(y),
    lambda out, y: functional.mse_loss(functional.dropout(out, 0.5), functional.one_hot(y, 3).float()),
    lambda out, y: cross_entropy(out.unsqueeze(2).expand(-1, -1, 4), y.unsqueeze(1).expand(-1, 4)),
]


@pytest.mark.parametrize("loss", SEPARATE)
@pytest.mark.parametrize("clipping", MODES)
def test_losses_of_single_examples(loss, clipping):
    three_steps(private(clipping=clipping), loss)


def test_a_weighted_sum_is_fine():
    trio = private(loss_reduction="sum")
    three_steps(trio, lambda out, y: cross_entropy(out, y, weight=WEIGHTS, reduction="sum"))


# Models that mix


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.body, self.head, self.mix = nn.Linear(6, 8), nn.Linear(8, 3), mix

    def forward(self, x):
        return self.head(self.mix(torch.tanh(self.body(x))))


class OwnBatchNorm(nn.Module):
    def forward(self, h):
        return (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt()


MIXERS = [
    lambda h: h - h.mean(0),
    lambda h: torch.softmax(h @ h.t(), dim=1) @ h,
    lambda h: h / h.abs().max(),
    lambda h: h[h.sum(1).argsort()],
    lambda h: h + 0.05 * h.flip(0),
]


@pytest.mark.parametrize("mix", MIXERS)
@pytest.mark.parametrize("clipping", ["layers"])
def test_models_that_mix_rows(mix, clipping):
    model, optimizer, loader = private(Mixing(mix), clipping)
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match=r"the model mixes the examples of a batch, before head \(Linear\)"):
        cross_entropy(model(x), y).backward()
    assert optimizer.run.step == 0


def test_rows_that_change_places():
    """Each output is one example's, and meets another one's label."""
    model, _, loader = private(Mixing(lambda h: h.roll(1, 0)))
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
        cross_entropy(model(x), y).backward()


def rolled_too(model, x, y):
    """Two passes over one batch, in two orders: every example is in two places."""
    order = torch.arange(len(x)).roll(1)
    return cross_entropy(model(x), y) + cross_entropy(model(x[order]), y[order])


def shuffled(model, x, y):
    order = torch.randperm(len(x))
    return cross_entropy(model(x[order]), y[order])


@pytest.mark.parametrize("loss", [rolled_too, shuffled])
def test_rows_that_change_places_with_their_labels(loss):
    model, optimizer, loader = private()
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match="belong to other examples than the same rows of the batch"):
        loss(model, x, y).backward()
    assert optimizer.run.step == 0


def test_the_layer_that_mixes_is_named():
    model, _, loader = private(Mixing(OwnBatchNorm()))
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match=r"in mix \(OwnBatchNorm\): one example's output changes"):
        cross_entropy(model(x), y).backward()


class Remembering(nn.Module):
    """Rows do not mix, but the buffer learns what was seen."""

    def __init__(self, rate):
        super().__init__()
        self.layer, self.rate = nn.Linear(6, 3), rate
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), self.rate)
        return self.layer(x)


def test_buffers_that_keep_what_was_seen():
    model, _, loader = private(nn.Sequential(Remembering(0.1)))
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match=r"writes what it sees into the buffer 0\.seen"):
        cross_entropy(model(x), y).backward()
    model, optimizer, loader = private(nn.Sequential(Remembering(0.0)))
    three_steps((model, optimizer, loader))
    assert model[0].calls == 3  # the probe's own passes do not count


# A model that returns its own loss (P2)


class OwnLoss(nn.Module):
    """Tokens in, the mean loss over all labelled tokens of the batch out: as Hugging Face's models do."""

    def __init__(self, per_token=True):
        super().__init__()
        self.layer, self.per_token = nn.Linear(6, 3), per_token

    def forward(self, x, y):
        each = cross_entropy(self.layer(x).movedim(-1, 1), y, reduction="none", ignore_index=-100)
        counted = (y != -100).sum(1)
        return {"loss": each.sum() / counted.sum() if self.per_token else (each.sum(1) / counted).mean()}


def sentences(lengths):
    maker = torch.Generator().manual_seed(3)
    x, y = torch.randn(40, 5, 6, generator=maker), torch.randint(0, 3, (40, 5), generator=maker)
    return TensorDataset(x, y.masked_fill(torch.arange(5) >= lengths[:, None], -100))


def own_steps(trio):
    model, optimizer, loader = trio
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        model(x, y)["loss"].backward()
        optimizer.step()
    assert optimizer.run.guard._checked


def test_one_example_moves_a_clipped_sum_by_many_clip_norms():
    """The attack: what the promise allows is 2 when one example is replaced."""
    torch.manual_seed(0)
    model = OwnLoss()
    x, y = torch.ones(16, 200, 6), torch.zeros(16, 200, dtype=torch.long)
    y[:, 1:] = -100  # one token each,
    long = y.clone()
    long[15] = 0  # or 200 in one of them

    def clipped(labels, bound):
        twin = copy.deepcopy(model)
        engine = LayerEngine(twin, dict(twin.named_parameters()), bound, "mean")
        twin(x, labels)["loss"].backward()
        return torch.cat([total.flatten() for total in engine.collect()[1]])

    bound = float(clipped(y, 1e6).norm()) / 16
    assert float((clipped(y, bound) - clipped(long, bound)).norm()) > 7 * bound
    trio = private(model, data=sentences(1 + torch.arange(40) % 5))
    with pytest.raises(
        QuellError, match=r"returns its own loss.*does not add up.*leave the labels out.*='sum'"
    ) as said:
        own_steps(trio)
    assert trio[1].run.step == 0
    assert "clipping=" not in str(said.value)


def test_a_model_that_returns_the_mean_of_its_examples_losses():
    own_steps(private(OwnLoss(per_token=False), data=sentences(1 + torch.arange(40) % 5)))
    own_steps(private(OwnLoss(), data=sentences(torch.full((40,), 5))))  # as many tokens everywhere


def test_a_model_in_eval_mode_is_probed_like_any_other():
    """Hugging Face's from_pretrained returns models in eval mode, and loops forget model.train()."""
    trio = private(network().eval())
    with pytest.raises(QuellError, match="the loss couples"):
        three_steps(trio, lambda out, y: cross_entropy(out, y, weight=WEIGHTS))
    assert trio[1].run.step == 0
    three_steps(private(network().eval()))
    with pytest.raises(QuellError, match="returns its own loss"):
        own_steps(private(OwnLoss().eval(), data=sentences(1 + torch.arange(40) % 5)))


# Parameters outside (P3, L4)


@pytest.mark.parametrize("clipping", MODES)
def test_passes_beside_the_loss_may_use_any_parameters(clipping):
    """A teacher whose outputs are detached, and a look at the loss in eval mode, without torch.no_grad()."""
    model, optimizer, loader = private(clipping=clipping)
    teacher = network()
    for _, (x, y) in zip(range(3), loader, strict=False):
        if clipping == "layers":  # "microbatch" takes one forward pass per loss
            model.eval()
            cross_entropy(model(x), y).item()
            model.train()
        wanted = teacher(x).detach()
        optimizer.zero_grad()
        functional.mse_loss(model(x), wanted).backward()
        optimizer.step()
    assert optimizer.run.guard._checked


def test_a_teacher_that_is_trained_is_refused_also_where_it_is_changed_in_place():
    model, _, loader = private()
    teacher = network()
    x, _ = next(iter(loader))
    wanted = teacher(x.detach().as_subclass(torch.Tensor))
    loss = (model(x) * wanted).mean()
    wanted.add_(1.0)
    with pytest.raises(QuellError, match="a trainable tensor of shape"):
        loss.backward()


def test_parameters_of_a_second_optimizer():
    model = network()
    body = torch.optim.SGD(model[:3].parameters(), lr=0.1)
    with pytest.raises(QuellError, match=r"3\.weight and 1 more can be trained, but are not in the private optimizer"):
        make_private(model, body, examples(), small_plan("bisr", alone=True))
    model[3].requires_grad_(False)
    three_steps(make_private(model, body, examples(), small_plan("bisr", alone=True)))


@pytest.mark.parametrize("clipping", MODES)
def test_a_parameter_that_becomes_trainable_later(clipping):
    model = network()
    model[3].requires_grad_(False)
    optimizer = torch.optim.SGD(model[:3].parameters(), lr=0.1)  # does not hold it at all
    trio = make_private(model, optimizer, examples(), small_plan("bisr", alone=True), clipping=clipping)
    model[3].bias.requires_grad_(True)
    with pytest.raises(QuellError, match=r"3\.bias can be trained, but"):
        three_steps(trio)
    assert trio[1].run.step == 0


def test_a_layer_that_joins_later():
    model, optimizer, loader = private()
    model.append(nn.Linear(3, 3))
    with pytest.raises(QuellError, match=r"4\.weight and 1 more can be trained"):
        train(model, optimizer, loader, 1)


@pytest.mark.parametrize("end", ["last step", "checkpoint"])
def test_no_run_ends_with_a_layer_that_joined_late(end):
    """New parameters are looked for now and then; another optimizer could train them in between."""
    model, optimizer, loader = private(plan=small_plan("bisr", alone=True, epochs=1))
    for x, y in loader:
        if optimizer.run.step == 2:
            model.add_module("late", nn.Linear(3, 3))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if end == "checkpoint" and optimizer.run.step == 3:
            with pytest.raises(QuellError, match=r"late\.weight and 1 more can be trained, but are not in the private"):
                optimizer.state_dict()
        if optimizer.run.step == 4:
            with pytest.raises(QuellError, match=r"late\.weight and 1 more can be trained, but are not in the private"):
                optimizer.step()
            break
        optimizer.step()
    assert optimizer.run.step == optimizer.run.noise.steps - 1


def test_a_trainable_temperature_outside_the_model():
    temperature = nn.Parameter(torch.ones(1))
    model, _, loader = private()
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match=r"a trainable tensor of shape \(1,\) that is not the model's"):
        cross_entropy(model(x) / temperature, y).backward()


# No false alarms


class Attention(nn.Module):
    """Time or batch first, with dropout and a padding mask."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.heads, self.out = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=batch_first), nn.Linear(6, 3)

    def forward(self, x, padding):
        h = x if self.batch_first else x.transpose(0, 1)
        h = self.heads(h, h, h, key_padding_mask=padding, need_weights=False)[0]
        return self.out(h.mean(1 if self.batch_first else 0))


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_with_padding(batch_first):
    padding = torch.arange(8) >= (1 + torch.arange(40) % 8)[:, None]  # as many positions as examples
    data = TensorDataset(torch.randn(40, 8, 6), padding, torch.randint(0, 3, (40,)))
    model, optimizer, loader = private(Attention(batch_first), "microbatch", data)
    for _, (x, padding, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        cross_entropy(model(x, padding), y).backward()
        optimizer.step()
    assert optimizer.run.guard._checked


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.LSTM(6, 4), nn.Linear(4, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return self.out(nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], total_length=8)[0])


def watched(model, loss, *batch):
    """The probe alone, without an engine: the loop's pass, with what the probe says."""
    probe = Probe(model, dict(model.named_parameters()))
    probe.watch(batch, len(batch[-1]))
    loss(model, *batch).backward()
    probe.settle(last=True)
    assert probe._checked
    assert not probe._why
    assert not any(isinstance(tensor, Watched) for tensor in batch)


def test_packed_sequences_time_first():
    torch.manual_seed(0)
    lengths = torch.tensor([8, 1, 3, 5, 8, 2, 4, 7])

    def loss(model, x, lengths, y):
        out = model(x.transpose(0, 1), lengths)  # as many positions as examples
        return cross_entropy(out[lengths - 1, torch.arange(8)], y)

    watched(TimeFirst(), loss, torch.randn(8, 8, 6), lengths, torch.randint(0, 3, (8,)))


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_dropout_and_autocast(clipping):
    torch.manual_seed(0)
    model, optimizer, loader = private(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), clipping)
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert optimizer.run.guard._checked
    assert not optimizer.run.guard._why


def test_random_numbers_are_left_as_they_were():
    import numpy as np

    def after(probed):
        torch.manual_seed(0)
        np.random.seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        if probed:
            Probe(model, dict(model.named_parameters())).watch((x, y), 8)
        loss = cross_entropy(functional.dropout(model(x) * np.random.rand(), 0.1), y)
        loss.backward()
        return loss.item(), torch.rand(()).item(), np.random.rand(), [p.grad for p in model.parameters()]

    assert str(after(True)) == str(after(False))


@pytest.mark.parametrize("clipping", MODES)
def test_empty_batches_and_batches_of_one(clipping):
    model, optimizer, loader = private(clipping=clipping, data=examples(12), plan=unpriced_poisson_plan())
    assert {0, 1} <= {len(batch) for batch in optimizer.run.batches}
    train(model, optimizer, loader)


def test_parts_of_batches_and_two_passes():
    model, optimizer, loader = private()
    for _, (x, y) in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        for part in (slice(0, 3), slice(3, None)):
            cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    assert optimizer.run.guard._checked
    three_steps(private(physical_batch_size=3))


@dataclasses.dataclass
class Named:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("kind", [Named, lambda x, y: {"x": x, "y": [y]}])
def test_batches_of_other_kinds(kind):
    def collate(rows):
        x, y = zip(*rows, strict=True)
        return kind(torch.stack(x), torch.stack(y))

    def parts(batch):
        return (batch.x, batch.y) if isinstance(batch, Named) else (batch["x"], batch["y"][0])

    for loss, refused in ((cross_entropy, False), (contrastive, True)):
        model, _, loader = private(data=DataLoader(examples(), collate_fn=collate))
        x, y = parts(next(iter(loader)))
        if refused:
            with pytest.raises(QuellError, match="the loss couples"):
                loss(model(x), y).backward()
        else:
            loss(model(x), y).backward()


class Centred(nn.Module):
    """Mixes the rows of a batch that it gets in an object, or in a list of texts, which nobody can look into."""

    def __init__(self, unpack):
        super().__init__()
        self.unpack, self.layer = unpack, nn.Linear(6, 3)

    def forward(self, batch):
        out = self.layer(self.unpack(batch))
        return out - out.mean(0)


@pytest.mark.parametrize(
    ("packed", "unpack"),
    [
        (lambda x: SimpleNamespace(x=x), lambda batch: batch.x),
        (
            lambda x: [" ".join(map(str, row.tolist())) for row in x],
            lambda batch: torch.tensor(list(map(numbers, batch))),
        ),
    ],
)
def test_batches_that_cannot_be_looked_into_are_a_warning(packed, unpack):
    """No example can be replaced there, so that nothing changes says nothing."""
    model, optimizer, loader = private(Centred(unpack))
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model(packed(x)), y).backward()
        if number == 2:
            with pytest.warns(UncheckedLossWarning, match="no tensor with a row per example"):
                optimizer.step()
            break
        optimizer.step()


def numbers(text):
    return [float(word) for word in text.split()]


class Shortened(torch.autograd.Function):
    """The gradient by its norm over the batch, which doing the forward pass again does not show."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


@pytest.mark.parametrize("clipping", MODES)
def test_a_backward_pass_of_the_loops_own_is_a_warning(clipping):
    model, optimizer, loader = private(clipping=clipping)
    with pytest.warns(UncheckedLossWarning, match="the loss uses ShortenedBackward, whose own backward pass"):
        train(model, optimizer, loader, 3, lambda out, y: cross_entropy(Shortened.apply(out), y))


def test_a_loss_that_cannot_be_followed_is_a_warning():
    model, optimizer, loader = private()
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(x), y))
        if number == 2:
            with pytest.warns(UncheckedLossWarning, match="could not be probed"):
                optimizer.step()
            break
        optimizer.step()
    assert type(x) is torch.Tensor


# Layers that an engine cannot take


class Around(nn.Module):
    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call, self.out = layer, call, nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.call(self.layer, x))


def in_one_step(x):
    return x.view(len(x), 1, 6)


LAYERS = [
    (lambda: nn.MultiheadAttention(6, 2, batch_first=True), lambda f, x: f(*[in_one_step(x)] * 3)[0][:, 0], True),
    (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), lambda f, x: f(in_one_step(x))[:, 0], True),
    (lambda: nn.Bilinear(6, 6, 6), lambda f, x: f(x, x), True),
    (lambda: nn.GRUCell(6, 6), lambda f, x: f(x), False),
    (lambda: nn.LSTM(6, 6, batch_first=True), lambda f, x: f(in_one_step(x))[0][:, 0], False),
]
COMPUTED_WEIGHTS = [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("make", "call", "mapped"), LAYERS)
@pytest.mark.parametrize("clipping", MODES)
def test_layers_are_taken_or_named(make, call, mapped, clipping):
    model = Around(make(), call)
    if clipping == "layers" or mapped:
        three_steps(private(model, clipping))
        return
    with pytest.raises(QuellError, match=r"by torch.func.vmap, failed with"):
        three_steps(private(model, clipping))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("computed", COMPUTED_WEIGHTS)
@pytest.mark.parametrize("width", [6, 8])  # the batch has 8 examples: rows of the weight must not pass for them
def test_weights_that_are_computed_are_named(computed, width):
    model = Around(nn.Sequential(computed(nn.Linear(6, width)), nn.Linear(width, 6)), lambda f, x: f(x))
    with pytest.raises(QuellError, match=r"parametrizations.weight \(ParametrizationList\)|no input of it has a row"):
        three_steps(private(model))
    three_steps(private(Around(computed(nn.Linear(6, 6)), lambda f, x: f(x)), "microbatch"))


class Odd(nn.Module):
    """A layer of the user's that torch.func cannot take."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.weight * (1.0 if x[0, 0].item() > 100 else 2.0)


@pytest.mark.parametrize("clipping", MODES)
def test_errors_inside_the_engines_are_sentences(clipping):
    with pytest.raises(QuellError, match=r"failed with \w+Error"):
        three_steps(private(Around(Odd(), lambda f, x: f(x)), clipping))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clipping", ["layers"])
def test_compiled_models(clipping):
    model, optimizer, loader = private(clipping=clipping)
    three_steps((torch.compile(model, backend="eager"), optimizer, loader))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
@pytest.mark.parametrize("clipping", MODES)
def test_compiled_losses(clipping):
    """They run as they are written while the probe watches: compilers cannot take watched tensors."""
    torch.compiler.reset()
    three_steps(private(clipping=clipping), torch.compile(per_example, backend="aot_eager"))
    model, _, loader = private(clipping=clipping)
    x, y = next(iter(loader))
    with pytest.raises(QuellError, match="the loss couples the examples of a batch"):
        torch.compile(contrastive, backend="aot_eager")(model(x), y).backward()
