"""What a user could do wrong, and what Quell says then."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from quell.errors import QuellError
from quell.torch import CorrelatedNoise, PlanMismatchWarning, make_private

from .conftest import small_plan, unpriced_poisson_plan
from .training import examples, network, train

MODES = ["layers", "microbatch"]
criterion = nn.functional.cross_entropy


def private(plan, clipping="flat", model=None, **options):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, examples(), plan, clipping=clipping, **options)


def one_step(model, optimizer, batch):
    optimizer.zero_grad()
    criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_model_that_writes_into_its_weights_what_it_saw(kind, plan):
    """max_norm rescales the rows of a batch's tokens in the forward pass: a release without noise, also when frozen."""
    model = nn.Sequential(kind(6, 4, max_norm=1.0).requires_grad_(False), nn.Linear(4, 3))
    with pytest.raises(QuellError, match="0 has max_norm, which changes the weights"):
        make_private(model, torch.optim.SGD(model[1].parameters(), lr=0.1), examples(), plan, clipping="microbatch")


@pytest.mark.parametrize("clipping", MODES)
def test_a_model_with_batch_norm(clipping, plan):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(QuellError, match=r"1 is a BatchNorm1d, which mixes .* GroupNorm"):
        private(plan, clipping, model)


def test_a_changed_clip_norm(plan):
    _, optimizer, _ = private(plan)
    with pytest.raises(QuellError, match="max_grad_norm cannot become 2"):
        optimizer.max_grad_norm = 2.0
    assert optimizer.max_grad_norm == 1.0


@pytest.mark.parametrize("clipping", MODES)
def test_a_step_past_the_plan(clipping, plan):
    model, optimizer, loader = private(plan, clipping)
    train(model, optimizer, loader)
    with pytest.raises(QuellError, match=r"10 steps \(2 epochs\) are done"):
        next(iter(loader))
    with pytest.raises(QuellError, match=r"10 steps \(2 epochs\) are done"):
        one_step(model, optimizer, examples()[:8])


@pytest.mark.parametrize("clipping", MODES)
def test_a_loader_that_is_not_the_plans(clipping, plan):
    model, optimizer, loader = private(plan, clipping)
    own = DataLoader(examples(), batch_size=8)
    with pytest.raises(QuellError, match="without a batch of the plan"):
        one_step(model, optimizer, next(iter(own)))
    next(iter(loader))
    with pytest.raises(QuellError, match=r"of 16 examples, but the batch of step 0 has 8"):
        one_step(model, optimizer, examples()[:16])
    assert optimizer.run.step == 0


@pytest.mark.parametrize("clipping", MODES)
def test_two_batches_in_one_step(clipping, plan):
    model, optimizer, loader = private(plan, clipping)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    for _ in range(2):
        criterion(model(x), y).backward()
    with pytest.raises(QuellError, match=r"of 16 examples.*torch\.no_grad.*physical_batch_size="):
        optimizer.step()


@pytest.mark.parametrize("clipping", MODES)
def test_gradients_that_were_not_zeroed(clipping, plan):
    model, optimizer, loader = private(plan, clipping)
    batches = iter(loader)
    one_step(model, optimizer, next(batches))
    x, y = next(batches)
    criterion(model(x), y).backward()
    with pytest.raises(QuellError, match=r"zero_grad\(\) was not called"):
        optimizer.step()


@pytest.mark.parametrize("clipping", MODES)
def test_no_backward_pass(clipping, plan):
    model, optimizer, loader = private(plan, clipping)
    model(next(iter(loader))[0])
    with pytest.raises(QuellError, match=r"of 0 examples.*model\.train\(\)"):
        optimizer.step()


@pytest.mark.parametrize("clipping", MODES)
def test_a_penalty_on_the_weights_in_the_loss(clipping, plan):
    model, optimizer, loader = private(plan, clipping)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    with pytest.raises(QuellError, match=r"the loss reaches 0\.weight around the model's output"):
        (criterion(model(x), y) + model[0].weight.square().sum()).backward()


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_two_forward_passes_before_a_backward_pass(clipping, plan):
    model, _, loader = private(plan, clipping)
    x, y = next(iter(loader))
    first, second = model(x[:4]), model(x[4:])
    with pytest.raises(QuellError, match="called twice before a backward pass"):
        criterion(torch.cat([first, second]), y).backward()


class Escaping(nn.Module):
    """Uses a layer's weight a second time, behind the layer's back."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.tanh(nn.functional.linear(self.first(x), self.first.weight)))


class OnlyFunctional(Escaping):
    def forward(self, x):
        return self.second(torch.tanh(nn.functional.linear(x, self.first.weight)))


def test_ghost_notices_parameters_it_cannot_see(plan):
    for net, message in ((Escaping(), "its layers say"), (OnlyFunctional(), "its layers say|no norm")):
        model, optimizer, loader = private(plan, "ghost", net)
        with pytest.raises(QuellError, match=message):
            one_step(model, optimizer, next(iter(loader)))


def test_ghost_notices_a_parameter_that_leaves_its_layer_later(plan):
    class Changing(OnlyFunctional):
        escape = False

        def forward(self, x):
            return super().forward(x) if self.escape else self.second(torch.tanh(self.first(x)))

    model, optimizer, loader = private(plan, "ghost", Changing())
    batches = iter(loader)
    one_step(model, optimizer, next(batches))
    model.escape = True
    with pytest.raises(QuellError, match=r"first\.weight has a gradient but no norm"):
        one_step(model, optimizer, next(batches))


def test_ghost_refuses_tied_weights_and_layers_used_twice(plan):
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(QuellError, match=r"0\.weight and 1\.weight are one parameter"):
        private(plan, "ghost", tied)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.RMSNorm(6), nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.norm(torch.tanh(self.norm(x))))

    model, optimizer, loader = private(plan, "ghost", Twice())
    with pytest.raises(QuellError, match="more than once"):
        one_step(model, optimizer, next(iter(loader)))


def test_ghost_refuses_low_precision_and_loose_parameters(plan):
    model, optimizer, loader = private(plan, "ghost")
    x, y = next(iter(loader))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(model(x).float(), y)
    loss.backward()
    with pytest.raises(QuellError, match=r"bfloat16, too coarse"):
        optimizer.step()
    with pytest.raises(QuellError, match="Linear holds parameters itself"):
        private(plan, "ghost", nn.Linear(6, 3))


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
def test_a_model_that_returns_its_own_loss(clipping, plan):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, y):
            return criterion(self.layer(x), y)

    model, optimizer, loader = private(plan, clipping, WithLoss())
    x, y = next(iter(loader))

    def step():
        model(x, y).backward()
        optimizer.step()

    with pytest.raises(QuellError, match="row per example"):
        step()


def test_a_grad_scaler(plan):
    model, optimizer, loader = private(plan)
    x, y = next(iter(loader))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(criterion(model(x), y)).backward()
    with pytest.raises(QuellError, match="use bfloat16 autocast"):
        scaler.step(optimizer)


@pytest.mark.parametrize("clipping", MODES)
def test_parameters_that_change_during_the_run(clipping, plan):
    model = network()
    model[0].requires_grad_(False)
    model, optimizer, loader = private(plan, clipping, model)
    model[0].requires_grad_(True)
    with pytest.raises(
        QuellError, match=r"0\.weight and 1 more can be trained, but is not in the private optimizer, or was frozen"
    ):
        one_step(model, optimizer, next(iter(loader)))
    with pytest.raises(QuellError, match="cannot join during a run"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_what_make_private_refuses(plan):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(QuellError, match="has 41 examples, but the plan is for 40: make a plan with examples=41"):
        make_private(model, optimizer, examples(41), plan)
    with pytest.raises(QuellError, match="clipping='magic' is not known"):
        make_private(model, optimizer, examples(), plan, clipping="magic")
    with pytest.raises(QuellError, match="max_grad_norm=0 must be positive"):
        make_private(model, optimizer, examples(), plan, 0.0)
    with pytest.raises(QuellError, match="loss_reduction='none'"):
        make_private(model, optimizer, examples(), plan, loss_reduction="none")
    with pytest.raises(QuellError, match="that the model does not have"):
        make_private(network(), optimizer, examples(), plan)
    with pytest.raises(QuellError, match="forms no batches"):
        make_private(model, optimizer, DataLoader(examples(), batch_size=None), plan)
    with pytest.raises(QuellError, match="a key or a seed"):
        make_private(model, optimizer, examples(), plan, key="a", seed=1)

    class Endless(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(QuellError, match="no length and no index"):
        make_private(model, optimizer, Endless(), plan)
    frozen = network().requires_grad_(False)
    with pytest.raises(QuellError, match="no trainable parameters"):
        make_private(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1), examples(), plan)
    model, optimizer, _ = make_private(model, optimizer, examples(), plan)
    with pytest.raises(QuellError, match="private already"):
        make_private(model, optimizer, examples(), plan)
    assert not hasattr(network(), "_quell_private")


def test_a_mechanism_priced_for_fewer_participations(plan):
    once = small_plan("bisr", examples=80, batch_size=8, epochs=1)
    assert once.steps == plan.steps
    with pytest.raises(QuellError, match=r"is not \(8, 1e-05\)-DP"):
        private(plan, mechanism=once.mechanism)
    own = plan.problem.price("lambda_cgd", **{"lambda": 0.5})
    assert private(plan, mechanism=own)[1].noise_multiplier == own.noise_multiplier
    assert private(plan, mechanism="blt")[1].run.mechanism.name == "blt"


def test_a_collate_function_that_cannot_be_empty():
    plan = unpriced_poisson_plan()
    data = TensorDataset(*examples(12).tensors)
    loader = DataLoader(data, collate_fn=lambda rows: "text")
    model = network()
    _, _, loader = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, plan)
    with pytest.raises(QuellError, match="cannot be made of str"):
        loader.collate_fn([])


def test_without_opacus_the_message_says_what_to_do(plan, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name == "opacus" or name.startswith("opacus.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opacus", None)
    for name in ("flat", "ghost", "ghost_hooks", "opacus"):
        monkeypatch.delitem(sys.modules, f"quell.torch.{name}", raising=False)
        monkeypatch.delattr(f"quell.torch.{name}", raising=False)
    with pytest.raises(QuellError, match=r"'.\[torch\]', or take 'microbatch'"):
        private(plan)
    private(plan, "microbatch")


def test_an_optimizer_that_is_not_the_planned_one_is_a_warning(plan):
    cases = [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "plan with momentum=0.9"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01), "plan with weight_decay=0.999"),
        (lambda p: torch.optim.Adam(p), "shaped for SGD, and Adam is not"),
    ]
    for make, message in cases:
        model = network()
        with pytest.warns(PlanMismatchWarning, match=message) as caught:
            make_private(model, make(model.parameters()), examples(), plan)
        assert [warning.filename for warning in caught] == [__file__]  # it points to the user's line


def test_a_schedule_that_was_not_planned_is_a_warning(plan):
    model, optimizer, loader = private(plan)
    batches = iter(loader)
    one_step(model, optimizer, next(batches))
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.warns(PlanMismatchWarning, match=r"0.5 times the first one, where the plan has 1: plan with"):
        one_step(model, optimizer, next(batches))
    one_step(model, optimizer, next(batches))  # said once


def test_a_planned_schedule_is_no_warning():
    rates = tuple(1.0 - 0.05 * step for step in range(10))
    model, optimizer, loader = private(small_plan(learning_rates=rates))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, 9)])
    for _ in range(2):
        for batch in loader:
            one_step(model, optimizer, batch)
            schedule.step()
    assert optimizer.run.step == 10


def test_a_plan_per_user():
    """The loader draws examples, so a promise per user would not hold."""
    per_user = small_plan(separation=3, participations=2)
    with pytest.raises(QuellError, match=r"promise is per user.*without separation and participations"):
        private(per_user)
    weights = {"w": torch.zeros(3)}
    with pytest.raises(QuellError, match=r"promise is per user.*pass plan\.mechanism"):
        CorrelatedNoise(per_user, weights, max_grad_norm=1.0)
    assert CorrelatedNoise(per_user.mechanism, weights, max_grad_norm=1.0).steps == per_user.steps
