"""What a user could do wrong, and what Quell says then."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from quell.errors import QuellError
from quell.torch import CorrelatedNoise, PlanMismatchWarning, make_private

from .conftest import small_plan, unpriced_poisson_plan
from .training import clipped_gradient, examples, network, train

MODES = ["layers", "microbatch"]
criterion = nn.functional.cross_entropy


def private(plan, clipping="layers", model=None, data=None, **options):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, data or examples(), plan, clipping=clipping, **options)


def one_step(model, optimizer, batch):
    optimizer.zero_grad()
    criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{"cuda_graphs": True}, {"canaries": 10**6}, {"correct_moments": True}], ids=str)
def test_a_run_that_is_refused_leaves_the_model_to_the_next_try(options, plan):
    model = network()
    with pytest.raises(QuellError, match=next(iter(options))):
        private(plan, model=model, **options)
    train(*private(plan, model=model))


def test_no_optimizer_at_all(plan):
    with pytest.raises(QuellError, match="optimizer is an empty list"):
        make_private(network(), [], examples(), plan)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_model_that_writes_into_its_weights_what_it_saw(kind, plan):
    """max_norm rescales the rows of a batch's tokens in the forward pass: a release without noise, also when frozen."""
    model = nn.Sequential(kind(6, 4, max_norm=1.0).requires_grad_(False), nn.Linear(4, 3))
    with pytest.raises(QuellError, match="0 has max_norm, which changes the weights"):
        make_private(model, torch.optim.SGD(model[1].parameters(), lr=0.1), examples(), plan, clipping="microbatch")


class Linear8bitLt(nn.Linear):
    """As bitsandbytes', whose columns with large numbers, in any row of a batch, are not rounded to 8 bits."""

    def __init__(self, threshold):
        super().__init__(6, 4)
        self.state = SimpleNamespace(threshold=threshold)


def test_a_layer_of_8_bits_that_looks_at_the_whole_batch(plan):
    for threshold in (0.0, 6.0):
        model = nn.Sequential(Linear8bitLt(threshold).requires_grad_(False), nn.Linear(4, 3))
        given = (model, torch.optim.SGD(model[1].parameters(), lr=0.1), examples(), plan)
        if threshold:
            with pytest.raises(QuellError, match=r"0 is a Linear8bitLt that decides.* llm_int8_threshold=0\.0"):
                make_private(*given)
        else:
            make_private(*given)


@pytest.mark.parametrize("clipping", MODES)
def test_a_model_with_batch_norm(clipping, plan):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(QuellError, match=r"1 is a BatchNorm1d, which mixes .* GroupNorm"):
        private(plan, clipping, model)


def test_a_frozen_batch_norm_in_eval_mode_mixes_nothing(plan):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].requires_grad_(False).eval()
    model, optimizer, loader = private(plan, "layers", model)
    x, y = next(iter(loader))
    stepped(optimizer, criterion(model(x), y))
    model.train()
    with pytest.raises(QuellError, match=r"a frozen BatchNorm1d was put into train mode"):
        model(x)


def test_a_layer_without_a_shape_yet(plan):
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    with pytest.raises(QuellError, match=r"0\.weight has no shape yet: run the model once"):
        private(plan, model=model)
    model(examples()[:2][0])
    train(*private(plan, model=model), steps=1)


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
    with pytest.raises(QuellError, match=r"of 0 examples.*call zero_grad\(\) before backward\(\)"):
        optimizer.step()


@pytest.mark.parametrize("clipping", MODES)
@pytest.mark.parametrize("zeroed", [False, True])
def test_two_steps_on_one_batch(clipping, zeroed, plan):
    model, optimizer, loader = private(plan, clipping)
    one_step(model, optimizer, next(iter(loader)))
    if zeroed:
        optimizer.zero_grad()
    with pytest.raises(QuellError, match=r"step\(\) (was called twice|once for each of its batches)"):
        optimizer.step()


def test_a_collate_function_that_makes_several_rows_of_an_item(plan):
    data = DataLoader(examples(), collate_fn=lambda items: default_collate([each for each in items for _ in range(2)]))
    model, optimizer, loader = private(plan, data=data)
    with pytest.raises(QuellError, match=r"of 16 examples, but .* has 8: .*rows_per_example="):
        one_step(model, optimizer, next(iter(loader)))


def test_evaluating_on_the_private_loader(plan):
    _, _, loader = private(plan)
    with pytest.raises(QuellError, match="To evaluate, use a DataLoader of your own"):
        for _ in loader:
            pass


@pytest.mark.parametrize("clipping", MODES)
def test_a_penalty_on_the_weights_in_the_loss(clipping, plan):
    model, optimizer, loader = private(plan, clipping)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    (criterion(model(x), y) + model[0].weight.square().sum()).backward()
    with pytest.raises(QuellError, match=r"the loss reaches 0\.weight (outside its layer|around the model's output)"):
        optimizer.step()


@pytest.mark.parametrize("clipping", MODES)
@pytest.mark.parametrize("cut", [4, 3])
def test_two_forward_passes_before_a_backward_pass(clipping, cut, plan):
    """Halves of a batch under one loss are not examples of one pass."""
    model, optimizer, loader = private(plan, clipping)
    x, y = next(iter(loader))
    first, second = model(x[:cut]), model(x[cut:])
    with pytest.raises(QuellError, match=r"called twice before a backward pass|of 4 examples|numbers of examples"):
        stepped(optimizer, criterion(torch.cat([first, second]), y))


def stepped(optimizer, loss):
    loss.backward()
    optimizer.step()


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


class InAnotherLayer(Escaping):
    """The weight is handed to a layer as its input, which is no one's row."""

    def forward(self, x):
        return self.second(self.first(x) * self.second(self.first.weight).sum())


class Reparametrised(Escaping):
    """A layer whose weight is computed from its parameters at every call."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("make", [Escaping, OnlyFunctional, InAnotherLayer, Reparametrised])
def test_parameters_that_are_used_outside_their_layers(make, plan):
    model, optimizer, loader = private(plan, "layers", make())
    with pytest.raises(QuellError, match=r"the loss reaches first\.\w*.* outside its layer|rows from|by autograd"):
        one_step(model, optimizer, next(iter(loader)))
    assert optimizer.run.step == 0


def test_a_parameter_that_leaves_its_layer_later(plan):
    class Changing(OnlyFunctional):
        escape = False

        def forward(self, x):
            return super().forward(x) if self.escape else self.second(torch.tanh(self.first(x)))

    model, optimizer, loader = private(plan, "layers", Changing())
    batches = iter(loader)
    one_step(model, optimizer, next(batches))
    model.escape = True
    with pytest.raises(QuellError, match=r"the loss reaches first\.weight outside its layer"):
        one_step(model, optimizer, next(batches))


@pytest.mark.parametrize("clipping", MODES)
def test_a_parameter_that_no_loss_reaches(clipping, plan):
    class Unused(Escaping):
        def forward(self, x):
            return self.second(x)

    model, optimizer, loader = private(plan, clipping, Unused())
    for _ in range(2):  # and it stays refused
        with pytest.raises(QuellError, match=r"no gradient came for first\.bias, first\.weight .*freeze it"):
            one_step(model, optimizer, next(iter(loader)))


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 3)

    def forward(self, x, y):
        return criterion(self.layer(x), y)


def test_a_model_that_returns_its_own_loss(plan):
    """Layers see the examples; torch.func would have to take the loss apart."""
    model, optimizer, loader = private(plan, "microbatch", WithLoss())
    with pytest.raises(QuellError, match="row per example"):
        stepped(optimizer, model(*next(iter(loader))))
    model, optimizer, loader = private(plan, "layers", WithLoss())
    batch = next(iter(loader))
    model(*batch).backward()
    expected = clipped_gradient(WithLoss().layer, criterion, batch, 1.0)
    torch.testing.assert_close(optimizer._engine.collect()[1], list(expected.values()), rtol=1e-4, atol=1e-5)


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
        QuellError, match=r"0\.weight and 1 more can be trained, but are not in the private optimizer, or were frozen"
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
    with pytest.raises(QuellError, match="key is a bytes: pass the path"):
        make_private(model, optimizer, examples(), plan, key=bytes(range(32)))

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
    with pytest.raises(QuellError, match=r"is not certified to be \(8, 1e-05\)-DP"):
        private(plan, mechanism=once.mechanism)
    longer = replace(once, run=once.run.changed(batch_size=16, epochs=2))  # its rows were certified for one use
    assert longer.steps == once.steps
    model = network()
    with pytest.raises(QuellError, match=r"is not certified to be \(8, 1e-05\)-DP"):
        make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), examples(80), longer)
    own = plan.price("lambda_cgd", **{"lambda": 0.5})
    assert private(plan, mechanism=own)[1].noise_multiplier == own.noise_multiplier
    assert private(plan, mechanism="blt")[1].run.mechanism.name == "blt"


def test_a_collate_function_that_cannot_be_empty():
    plan = unpriced_poisson_plan()
    data = TensorDataset(*examples(12).tensors)
    loader = DataLoader(data, collate_fn=lambda rows: "text")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = make_private(model, optimizer, loader, plan, clipping="microbatch")
    with pytest.raises(QuellError, match="cannot be made of str"):
        loader.collate_fn([])


def test_an_optimizer_that_is_not_the_planned_one_is_a_warning(plan):
    cases = [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "plan with momentum=0.9"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01), "plan with weight_decay=0.999"),
        (lambda p: torch.optim.Adam(p), "shaped for SGD, and Adam is not: .* plan with optimizer='adamw'"),
        (lambda p: torch.optim.RMSprop(p), "shaped for SGD, and RMSprop is not: .* plan with adaptive=True"),
    ]
    for make, message in cases:
        model = network()
        with pytest.warns(PlanMismatchWarning, match=message) as caught:
            make_private(model, make(model.parameters()), examples(), plan)
        assert [warning.filename for warning in caught] == [__file__]  # it points to the user's line


def test_a_plan_for_adam_fits_adam():
    plan = small_plan("identity", alone=True, optimizer="adamw", betas=(0.8, 0.99))
    model = network()
    make_private(model, torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99)), examples(), plan)
    model = network()
    with pytest.warns(PlanMismatchWarning, match=r"plan with optimizer='adamw', betas=\(0.9, 0.999\)"):
        make_private(model, torch.optim.AdamW(model.parameters()), examples(), plan)


def test_a_schedule_that_was_not_planned_is_a_warning(plan):
    model, optimizer, loader = private(plan)
    batches = iter(loader)
    one_step(model, optimizer, next(batches))
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.warns(
        PlanMismatchWarning, match=r"0.5 times that of step 0, where the plan has 1: plan with.*ReduceLROnPlateau"
    ):
        one_step(model, optimizer, next(batches))
    one_step(model, optimizer, next(batches))  # said once


@pytest.mark.parametrize("first", [1.0, 0.1])  # a warm-up sets the rate of step 0 when it is made
def test_a_planned_schedule_is_no_warning(first):
    rates = (first, *(1.0 - 0.05 * step for step in range(1, 10)))
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
