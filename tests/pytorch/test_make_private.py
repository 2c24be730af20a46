"""The whole stack in one process: the user's loop, every way of clipping, and what is refused."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from quell.noise.audit import audit
from quell.torch import CorrelatedNoise, make_private

from .conftest import small_plan, unpriced_poisson_plan
from .training import examples, network, reference_run, seeded, train, without_noise

MODES = ["layers", "microbatch"]


def sgd(model, **options):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **{"lr": 0.5, **options})


@pytest.mark.parametrize("clipping", MODES)
@pytest.mark.parametrize("sampling", ["cyclic", "balls_in_bins"])
def test_without_noise_it_is_clipped_sgd(clipping, sampling):
    plan, data = without_noise(small_plan(momentum=0.5, sampling=sampling)), examples()
    model, twin = network(), network()
    model, optimizer, loader = make_private(model, sgd(model, momentum=0.5), data, plan, 0.3, clipping=clipping)
    run = optimizer.run
    assert train(model, optimizer, loader) == plan.steps
    reference_run(twin, sgd(twin, momentum=0.5), data, list(run.batches), run.expected_batch_size, 0.3)
    # Norms are raised by what rounding may take from them, about 4e-6, so ten steps end about 1e-6 apart.
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6, msg=name)


class Attention(nn.Module):
    """A one-head transformer block over seven tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.query, self.key, self.value, self.out = (nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        h = self.norm(self.embed(tokens))
        weights = torch.softmax(self.query(h) @ self.key(h).transpose(1, 2), dim=-1)
        return self.head((h + self.out(weights @ self.value(h))).mean(1))


class Adapter(nn.Module):
    """LoRA: a frozen layer plus a trained product of two thin ones."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.frozen(x) + self.up(self.down(x))))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )


ARCHITECTURES = {
    "attention": (Attention, lambda x: (x.abs() * 5).long() % 7),
    "lora": (Adapter, lambda x: x),
    "convolutional": (convolutional, lambda x: torch.cat([x, x, x[:, :4]], 1).view(-1, 1, 4, 4)),
}


@pytest.mark.parametrize("clipping", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_architectures_without_noise(clipping, architecture):
    make, change = ARCHITECTURES[architecture]
    x, y = examples().tensors
    data, plan = TensorDataset(change(x), y), without_noise(small_plan(epochs=1, alone=True))
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        models.append(make())
    model, twin = models
    model, optimizer, loader = make_private(model, sgd(model), data, plan, 0.4, clipping=clipping, micro_batch=3)
    train(model, optimizer, loader)
    reference_run(twin, sgd(twin), data, list(optimizer.run.batches), 8.0, 0.4)
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(p, q[1], rtol=0, atol=2e-6, msg=name)


class Watched(nn.Module):
    """Remembers, weakly, what came through."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(weakref.ref(x.untyped_storage()))
        return x * 1


def test_a_step_keeps_no_activations_alive(plan):
    """Without the garbage collector's help: nothing of a step is part of a cycle, though the loss is still there."""
    watched = Watched()
    model = nn.Sequential(nn.Linear(6, 8), watched, nn.LayerNorm(8), nn.Linear(8, 3))
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan)
    gc.collect()
    gc.disable()
    try:
        for _, (x, y) in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            assert watched.seen
            assert all(kept() is None for kept in watched.seen)
    finally:
        gc.enable()


def test_a_step_in_micro_batches_keeps_no_activations_alive(plan):
    model = network()
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan, clipping="microbatch")
    gc.collect()
    gc.disable()
    try:
        x, y = next(iter(loader))
        loss = nn.functional.cross_entropy(model(x), y)
        kept = weakref.ref(optimizer._engine._open)
        loss.backward()
        optimizer.step()
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("clipping", MODES)
def test_the_two_line_example_runs(clipping, plan):
    data, model, criterion = examples(), network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model, optimizer, loader = make_private(model, optimizer, data, plan, max_grad_norm=1.0, clipping=clipping)
    for _ in range(plan.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    assert optimizer.run.step == plan.steps
    assert all(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert list(model.state_dict()) == list(network().state_dict())  # the model is the user's own


@pytest.mark.parametrize("clipping", MODES)
def test_the_noise_of_the_whole_stack_passes_the_audit(clipping):
    """A loss that is constant has zero gradients: what the optimizer is given is the noise, divided."""
    for name in ("bisr", "blt"):
        plan = small_plan(name, examples=160, batch_size=8, epochs=1)
        model = nn.Sequential(nn.Linear(6, 400))
        model, optimizer, loader = make_private(
            model, torch.optim.SGD(model.parameters(), lr=1.0), examples(160), plan, 0.7, clipping=clipping
        )
        rows = []
        optimizer.step_hook = lambda opt, rows=rows: rows.append(
            [p.grad.double().flatten().numpy() * opt.expected_batch_size for p in opt.params]
        )
        train(model, optimizer, loader, criterion=lambda out, y: 0.0 * out.sum())
        found = audit(
            [np.stack(group) for group in zip(*rows, strict=True)],
            plan.mechanism.strategy.matrix(),
            0.7 * plan.mechanism.noise_multiplier,
        )
        assert found.passed, (name, str(found))


def test_the_audit_sees_noise_that_is_added_per_physical_batch(monkeypatch):
    """The mutation: a row for every portion of a batch instead of one for the step."""
    plan = small_plan("identity", examples=160, batch_size=8, epochs=1)
    model = nn.Linear(6, 400)
    model, optimizer, loader = make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), examples(160), plan, 1.0, physical_batch_size=4
    )
    stray = CorrelatedNoise(small_plan("identity", examples=1600, epochs=1), model.parameters(), 1.0)
    collect = optimizer._engine.collect

    def with_noise():
        seen, sums = collect()
        stray.add_(sums)
        return seen, sums

    monkeypatch.setattr(optimizer._engine, "collect", with_noise)
    rows = []
    optimizer.step_hook = lambda opt: rows.append([p.grad.double().flatten().numpy() * 8 for p in opt.params])
    train(model, optimizer, loader, 2 * plan.steps, criterion=lambda out, y: 0.0 * out.sum())
    groups = [np.stack(group) for group in zip(*rows, strict=True)]
    assert not audit(groups, np.eye(plan.steps), plan.mechanism.noise_multiplier).passed


@pytest.mark.parametrize("clipping", MODES)
def test_examples_that_need_no_clipping_weigh_the_same_in_passes_of_unequal_size(clipping):
    """Clipping hides a wrong weight, so here nothing is clipped."""
    gradients = []
    for cut in (8, 3):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, loader = make_private(
            model, optimizer, examples(), without_noise(small_plan()), 1e6, clipping=clipping, key=seeded(2)
        )
        x, y = next(iter(loader))
        optimizer.zero_grad()
        for part in (slice(0, cut), slice(cut, None)):
            if len(x[part]):
                nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        gradients.append([p.grad for p in model.parameters()])
    plain = network()
    nn.functional.cross_entropy(plain(x), y).backward()
    for whole, parts, mean in zip(*gradients, (p.grad for p in plain.parameters()), strict=True):
        torch.testing.assert_close(whole, mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parts, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clipping", MODES)
def test_physical_batches_and_accumulation_change_nothing(clipping):
    plan, data = small_plan(), examples()
    results = []

    def by_hand(model, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            for part in (slice(0, 3), slice(3, None)):
                nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()

    def managed(model, optimizer, loader):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
            for x, y in parts:
                assert len(x) <= 3
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    ways = [(None, None), (3, None), (None, by_hand), (None, managed)]
    for physical, epoch in ways:
        model = network()
        model, optimizer, loader = make_private(
            model, sgd(model), data, plan, 0.5, clipping=clipping, physical_batch_size=physical, key=seeded(3)
        )
        for _ in range(plan.epochs):
            if epoch is not None:
                epoch(model, optimizer, loader)
                continue
            for x, y in loader:
                assert physical is None or len(x) <= physical
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert optimizer.run.step == plan.steps
        results.append([p.detach() for p in model.parameters()])
    for other in results[1:]:
        for p, q in zip(results[0], other, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@pytest.mark.parametrize("clipping", MODES)
def test_empty_batches_still_get_their_noise(clipping):
    plan = unpriced_poisson_plan()
    model = network()
    model, optimizer, loader = make_private(model, sgd(model), examples(12), plan, clipping=clipping)
    sizes = [len(batch) for batch in optimizer.run.batches]
    assert 0 in sizes
    assert train(model, optimizer, loader) == plan.steps
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    other = network()  # as a loop must whose model cannot run on no rows
    other, optimizer, loader = make_private(other, sgd(other), examples(12), plan, clipping=clipping)
    for x, y in loader:
        optimizer.zero_grad()
        if len(x):
            torch.nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
    assert optimizer.run.step == plan.run.steps_per_epoch


class NeedsRows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return self.layers(x.reshape(len(x), 2, -1).flatten(1))  # which torch refuses without rows


@pytest.mark.parametrize("collated", [False, True])
def test_a_batch_of_nobody_has_a_row_that_counts_for_nobody(collated):
    """Models and losses need no care for it, also where a loop makes several backward passes, or none."""
    plan, seen = without_noise(unpriced_poisson_plan()), 0
    x, y = examples(12).tensors
    data = TensorDataset(x, y + 1)  # of which zero is no label
    data = DataLoader(data, collate_fn=lambda rows: default_collate(rows)) if collated else data
    model = NeedsRows()
    with pytest.raises(RuntimeError):
        model(torch.zeros(0, 6))
    model, optimizer, loader = make_private(model, sgd(model), data, plan, key=seeded(1))
    for _ in range(plan.epochs):
        for step, (x, y) in enumerate(loader):
            nobody = not optimizer.run.unfinished.received.examples
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            for _ in range(step % 3 if nobody else 1):
                torch.nn.functional.cross_entropy(model(x), y - 1).backward()
            optimizer.step()
            if nobody:
                assert len(x) == 1
                torch.testing.assert_close(before, list(model.parameters()), rtol=0, atol=1e-20)
                seen |= 1 << step % 3
    assert seen == 7


@pytest.mark.parametrize("clipping", MODES)
def test_frozen_and_unused_parameters(clipping):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)
            self.frozen.requires_grad_(False)
            self.used.bias.requires_grad_(False)

        def forward(self, x):
            return self.used(torch.tanh(self.frozen(x)))

    plan, model = small_plan(), Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.unused.requires_grad_(False)  # otherwise refused: no gradient comes for it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, examples(), plan, clipping=clipping)
    train(model, optimizer, loader)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"used.weight"}


@pytest.mark.parametrize("clipping", MODES)
def test_an_optimizer_of_some_layers_only(clipping, plan):
    model = network()
    model[:3].requires_grad_(False)  # or it is refused
    before = model[0].weight.clone()
    model, optimizer, loader = make_private(
        model, torch.optim.SGD(model[3].parameters(), lr=0.1), examples(), plan, clipping=clipping
    )
    train(model, optimizer, loader)
    assert torch.equal(model[0].weight, before)
    assert optimizer.run.step == plan.steps


class Tied(nn.Module):
    """An embedding used again as the output layer, through a second module that holds the same parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x.abs().mul(5).long().remainder(7)).sum(1))[:, :3]


class TiedLayers(nn.Module):
    """One weight in two layers, one of which is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.first(torch.tanh(self.second(torch.tanh(self.first(x))))))


class Itself(nn.Linear):
    """A model that is a layer, of a class of its own."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(6, 3)


def in_place():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Hardtanh(inplace=True), nn.Linear(8, 3)
    )


@pytest.mark.parametrize("clipping", MODES)
@pytest.mark.parametrize("make", [Tied, TiedLayers, Itself, in_place])
def test_shared_and_loose_parameters_equal_one_example_at_a_time(make, clipping):
    bound = 1e3 if make is Tied else 0.3  # clipped gradients are 1e-5 shorter, which long ones would show
    plan, model, twin = without_noise(small_plan()), make(), make()
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan, bound, clipping=clipping)
    train(model, optimizer, loader)
    reference_run(twin, sgd(twin), examples(), list(optimizer.run.batches), 8.0, bound)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6, msg=name)


def test_dropout_is_the_same_in_both_passes_of_microbatch():
    """With dropout last and the sum of outputs as loss, a bias moves by how often its output was kept."""
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5))
    data, plan = examples(8), without_noise(small_plan(examples=8, batch_size=8, epochs=1))
    model, optimizer, loader = make_private(
        model, sgd(model, lr=1.0), data, plan, 1e6, clipping="microbatch", micro_batch=3
    )
    before = model[0].bias.detach().clone()
    ((x, _),) = list(loader)
    out = model(x)
    torch.rand(3)  # the user's own random numbers in between
    out.sum(1).mean().backward()
    optimizer.step()
    kept = (out != 0).sum(0)
    assert len(kept.unique()) > 2
    torch.testing.assert_close(before - model[0].bias.detach(), kept * 2.0 / 8)


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_bfloat16_autocast_trains(clipping, plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # torch.func cannot do CPU autocast of norms
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan, clipping=clipping)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            exact = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            assert not torch.equal(out.detach().float(), exact)  # it did work in low precision
            loss = nn.functional.cross_entropy(out.float(), y)
        loss.backward()
        optimizer.step()
    assert all(p.dtype == torch.float32 and bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_a_bfloat16_model_trains(clipping, plan):
    model = network().to(torch.bfloat16)
    data = TensorDataset(examples().tensors[0].bfloat16(), examples().tensors[1])
    model, optimizer, loader = make_private(model, sgd(model), data, plan, clipping=clipping)
    train(model, optimizer, loader)
    assert all(p.dtype == torch.bfloat16 and bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_an_example_without_a_finite_gradient_counts_as_zero(clipping):
    x, y = examples().tensors
    spoiled = x.clone()
    spoiled[5] = float("nan")
    plan, model, twin = without_noise(small_plan()), network(), network()
    model, optimizer, loader = make_private(model, sgd(model), TensorDataset(spoiled, y), plan, 0.5, clipping=clipping)
    train(model, optimizer, loader)
    others = [batch[batch != 5] for batch in optimizer.run.batches]
    reference_run(twin, sgd(twin), examples(), others, 8.0, 0.5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)


def test_an_existing_loader_keeps_its_collate_function_and_workers(plan):
    def collate(rows):
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}

    model = network()
    given = DataLoader(examples(), batch_size=8, shuffle=True, collate_fn=collate, num_workers=1)
    model, optimizer, loader = make_private(model, sgd(model), given, plan)
    assert loader.num_workers == 1
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
    assert optimizer.run.step == plan.run.steps_per_epoch


def test_the_loader_gives_the_plans_batches(plan):
    model = network()
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan)
    assert repr(loader) == "<planned loader: 5 batches per epoch, step 0 of 10>"
    data, promised = examples().tensors[0], list(optimizer.run.batches)
    given = []
    for _ in range(plan.epochs):
        for x, y in loader:
            given.append(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert all(torch.equal(x, data[torch.as_tensor(indices)]) for x, indices in zip(given, promised, strict=True))
    order = [int(i) for batch in promised[: len(loader)] for i in batch]
    assert sorted(order) == list(range(40))
    assert order != sorted(order)  # data that is sorted by label must not make batches of one label


@pytest.mark.parametrize("clipping", MODES)
def test_evaluation_between_steps_is_free(clipping, plan):
    model = network()
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan, clipping=clipping)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()  # after the forward pass is as good as before
        loss.backward()
        optimizer.step()
        model.eval()
        assert model(x).shape == (8, 3)
        model.train()
        with torch.no_grad():
            model(x)
    assert optimizer.run.step == plan.run.steps_per_epoch


def test_the_optimizer_takes_schedulers(plan):
    model = network()
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan)
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer, loader, steps=1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
