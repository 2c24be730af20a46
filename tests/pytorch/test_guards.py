"""What must hold whatever the user's loop does: clipped means clipped, noise before every step, no row for two sums."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from quell.adapters.report import leading_block
from quell.errors import QuellError
from quell.noise import Key
from quell.privacy import epsilon
from quell.schemes import BallsInBins, Cyclic
from quell.torch import CorrelatedNoise, PlanMismatchWarning, clipped_sum, make_private

from .conftest import small_plan
from .test_unfinished_steps import criterion, gradients, one_step, private, released
from .training import examples, network, train

MODES = ["layers", "microbatch"]


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


# The parts for other trainers


@pytest.mark.parametrize("sampling", ["cyclic", "balls_in_bins"])
def test_batches_are_those_that_the_promise_is_about(sampling):
    plan = small_plan("identity", alone=True, sampling=sampling)
    noise = CorrelatedNoise(plan, {"w": torch.zeros(3)}, 1.0)
    batches = noise.batches(40)
    wanted = {"cyclic": Cyclic(10, 5, participations=2, shuffle=True), "balls_in_bins": BallsInBins(10, 5)}
    assert batches.scheme == wanted[sampling]
    assert sorted(index for step in range(5) for index in batches.at(step)) == list(range(40))
    with pytest.raises(QuellError, match="41 examples, but the plan is for 40"):
        noise.batches(41)
    with pytest.raises(QuellError, match="make the noise from a Plan"):
        CorrelatedNoise(plan.mechanism, {"w": torch.zeros(3)}, 1.0).batches(40)


def test_estimates_and_looser_promises_are_refused(plan):
    estimate = plan.prices.estimate(plan.mechanism.strategy, Cyclic)
    loose = small_plan("bisr", epsilon=50.0).mechanism
    looser_delta = small_plan("bisr", delta=1e-3).mechanism
    for mechanism, message in ((estimate, "only estimated"), (loose, r"\(50, "), (looser_delta, r", 0.001\)-DP")):
        with pytest.raises(QuellError, match=message):
            private(plan, mechanism=mechanism)
        with pytest.raises(QuellError, match=message):
            CorrelatedNoise(plan, {"w": torch.zeros(3)}, 1.0, mechanism=mechanism)
    with pytest.raises(QuellError, match="only estimated"):
        CorrelatedNoise(estimate, {"w": torch.zeros(3)}, 1.0)


# Clipping


def test_large_gradients_are_clipped_to_the_bound():
    """Squares of ten million elements, added up one by one in float32, lose a percent of the norm."""
    size = 10_000_000
    summed = clipped_sum(lambda p, v: p["w"] @ v, {"w": torch.zeros(size)}, (torch.full((1, size), 0.1),), 1.0)["w"]
    assert math.isclose(float(summed.double().norm()), 1.0, rel_tol=3e-5)


@pytest.mark.parametrize("elements", [0, 1, 5, (1 << 14) - 1, 1 << 14, 3 * (1 << 14) + 7])
def test_norms_in_blocks(elements):
    rows = torch.randn(3, elements)
    found = clipped_sum(lambda p, v: (p["w"] * v).sum(), {"w": torch.zeros(elements)}, (rows,), 1e-3)["w"]
    norms = rows.double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(found.double(), (rows * 1e-3 / (norms + 1e-6)).sum(0), rtol=3e-5, atol=1e-9)


class Leaking(nn.Module):
    """From some step on, a weight is used a second time where clipping does not look."""

    leak = 0.0

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        output = self.second(self.first(x))
        return output + self.leak * self.first.weight.sum() * torch.tensor([1.0, -1.0, 0.0]) if self.leak else output


def test_a_weight_that_leaks_into_the_output_later(plan):
    model = Leaking()
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan)
    batches = iter(loader)
    one_step(model, optimizer, next(batches))
    model.leak = 100.0
    with pytest.raises(QuellError, match=r"the loss reaches first\.weight outside its layer"):
        one_step(model, optimizer, next(batches))
    assert optimizer.run.step == 1


@pytest.mark.parametrize("clipping", MODES)
def test_a_sum_that_no_clipped_gradients_can_have(clipping, plan, monkeypatch):
    """The mutation: factors that clip nothing."""
    model, optimizer, loader = private(plan, clipping)
    monkeypatch.setattr("quell.torch.engine.together.clip_factors", lambda norms, bound: torch.full_like(norms, 100.0))
    with pytest.raises(QuellError, match=r"more than 8 gradients clipped to 1 can have"):
        one_step(model, optimizer, next(iter(loader)))
    assert optimizer.run.step == 0


def test_sums_at_the_very_bound_are_fine(plan):
    """Equal examples with large gradients add up to exactly examples · max_grad_norm."""
    model, optimizer, loader = private(plan)
    x, _ = next(iter(loader))
    x.fill_(0.7)  # not x[:] = x[0], which the probe refuses: one example would be in every row
    optimizer.zero_grad()
    (model(x)[:, 0] * 100).mean().backward()
    optimizer.step()
    assert optimizer.run.step == 1


# No step without noise


@pytest.mark.parametrize("clipping", MODES)
def test_a_layer_that_is_unfrozen_during_the_backward_pass_only(clipping, plan):
    model = network()
    model[0].requires_grad_(False)
    model, optimizer, loader = make_private(model, sgd(model), examples(), plan, clipping=clipping)
    before = model[0].weight.detach().clone()
    x, y = next(iter(loader))
    optimizer.zero_grad()
    model[0].requires_grad_(True)
    criterion(model(x) * 1000, y).backward()
    model[0].requires_grad_(False)
    if clipping == "layers":
        with pytest.raises(QuellError, match="frozen when make_private was called has a gradient"):
            optimizer.step()
    else:
        optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_the_wrapped_optimizer_steps_with_noise_only(plan):
    model = network()
    plain = sgd(model)
    model, optimizer, loader = make_private(model, plain, examples(), plan)
    before = model[0].weight.detach().clone()
    batches = iter(loader)
    gradients(model, optimizer, *next(batches))
    with pytest.raises(QuellError, match=r"call step\(\) of the one that make_private returned"):
        plain.step()
    assert torch.equal(model[0].weight, before)
    assert optimizer.pre_step()  # as Opacus's own loops do
    plain.step()
    with pytest.raises(QuellError, match="has no noise"):
        plain.step()  # once
    optimizer.zero_grad()
    with pytest.raises(QuellError, match="has no noise"):
        plain.step()


# Keys and ledgers


@pytest.mark.parametrize(
    ("lost", "found"), [("key.ledger", "the key .* is there, but not its"), ("key", "the key .* is missing, but its")]
)
def test_a_key_and_its_ledger_belong_together(lost, found, tmp_path, plan):
    model, optimizer, loader = private(plan, key=tmp_path / "key")
    train(model, optimizer, loader, steps=2)
    optimizer.close()
    (tmp_path / lost).unlink()
    with pytest.raises(QuellError, match=f"{found} ledger"):
        private(plan, key=tmp_path / "key")
    assert not (tmp_path / lost).exists()


def test_a_failed_attempt_leaves_the_key_free(tmp_path, plan):
    with pytest.raises(QuellError, match="micro_batch=0") as kept:  # with its traceback, as a notebook does
        private(plan, "microbatch", key=tmp_path / "key", micro_batch=0)
    with pytest.raises(QuellError, match="physical_batch_size"):
        private(plan, key=tmp_path / "key", physical_batch_size=0)
    private(plan, key=tmp_path / "key")[1].close()
    assert kept


def test_a_cell_that_is_run_again(tmp_path, plan):
    first = private(plan, key=tmp_path / "key")
    with pytest.raises(QuellError, match=r"in use .*close\(\)"):
        private(plan, key=tmp_path / "key")
    first[1].close()
    private(plan, key=tmp_path / "key")[1].close()


# Steps that come again


def with_dropout(key, plan, lr=0.1):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    return make_private(model, sgd(model, lr), examples(), plan, key=key)


def test_a_replay_starts_from_the_weights_and_options_of_the_checkpoint(plan):
    key = Key.generate()
    model, optimizer, loader = with_dropout(key, plan)
    train(model, optimizer, loader, steps=2)
    state, weights = optimizer.state_dict(), {n: v.clone() for n, v in model.state_dict().items()}
    sums = released(optimizer)
    train(model, optimizer, loader, steps=3)

    model, optimizer, loader = with_dropout(key, plan)
    again = released(optimizer)
    optimizer.load_state_dict(state, replay=True)
    with pytest.raises(QuellError, match="the weights are not those of the checkpoint: load the model's state"):
        train(model, optimizer, loader, steps=1)
    model.load_state_dict(weights)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(QuellError, match=r"lr of parameter group 0 was 0\.1 and is 0\.5"):
        train(model, optimizer, loader, steps=1)
    assert not again
    torch.manual_seed(99)  # decides nothing about dropout
    optimizer.load_state_dict(state, replay=True)
    train(model, optimizer, loader, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(sums, again, strict=True))


def test_other_weights_are_fine_where_nothing_comes_again(plan):
    key = Key.generate()
    _, optimizer, _ = with_dropout(key, plan)
    state = optimizer.state_dict()
    model, optimizer, loader = with_dropout(key, plan)
    nn.init.zeros_(model[0].weight)
    optimizer.load_state_dict(state, replay=True)
    train(model, optimizer, loader, steps=1)


def test_a_declared_replay_ends_where_the_new_steps_begin(plan):
    key = Key.generate()
    model, optimizer, loader = with_dropout(key, plan)
    state, weights = optimizer.state_dict(), {n: v.clone() for n, v in model.state_dict().items()}
    train(model, optimizer, loader, steps=2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state, replay=True)
    train(model, optimizer, loader, steps=3)  # the third is new
    train(*with_dropout_at(key, plan, optimizer.state_dict()), steps=1)  # another run releases step 3
    with pytest.raises(QuellError, match="released steps up to 3, and step 3 would come again"):
        train(model, optimizer, loader, steps=1)


def with_dropout_at(key, plan, state):
    trio = with_dropout(key, plan)
    trio[1].load_state_dict(state)
    return trio


def test_what_was_spent_is_not_unspent_by_going_back():
    plan = small_plan("lambda_cgd", alone=True)
    model, optimizer, loader = private(plan)
    start = optimizer.state_dict()
    train(model, optimizer, loader, steps=4)
    spent = optimizer.privacy_report()
    optimizer.load_state_dict(start, replay=True)
    after = optimizer.privacy_report()
    assert after.steps_done == 0
    assert after.epsilon_so_far == spent.epsilon_so_far > 0
    strategy, noise = plan.mechanism.strategy, plan.mechanism.noise_multiplier
    assert spent.epsilon_so_far == epsilon(leading_block(strategy, 4), Cyclic(4, 4), noise, 1e-5).epsilon


# The optimizer as torch and its users expect it


def test_hooks_copies_and_closures(plan):
    model, optimizer, loader = private(plan)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))
    x, y = next(iter(loader))

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0
    optimizer.state_dict()
    assert called == ["before", "after", "saved"]
    for carry_away in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(QuellError, match="never pickled or copied"):
            carry_away(optimizer)


def test_arguments_that_are_something_else(plan):
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    cases = [
        ((optimizer, plan, examples()), "data and plan are swapped"),
        ((optimizer, examples(), plan.mechanism), "pass the plan itself, and mechanism="),
        ((optimizer, examples(), 8.0), r"quell\.plan"),
        ((scheduler, examples(), plan), "optimizer is a scheduler"),
        ((model, examples(), plan), "optimizer is a Sequential"),
        ((torch.optim.LBFGS(model.parameters()), examples(), plan), "LBFGS looks at a batch several times"),
    ]
    for arguments, message in cases:
        with pytest.raises(QuellError, match=message):
            make_private(model, *arguments)
    with pytest.raises(QuellError, match=r"model is a str: pass the torch\.nn\.Module"):
        make_private("resnet", optimizer, examples(), plan)
    with pytest.raises(QuellError, match="noise_memory=-1 must be"):
        make_private(model, optimizer, examples(), plan, noise_memory=-1)


def test_a_sampler_that_is_not_used_is_a_warning(plan):
    sampler = WeightedRandomSampler(torch.ones(40), 40)
    for given, name in (
        (DataLoader(examples(), sampler=sampler), "WeightedRandomSampler"),
        (DataLoader(examples(), batch_sampler=[[0, 1]] * 20), "list"),
    ):
        with pytest.warns(PlanMismatchWarning, match=f"the loader's {name} is not used"):
            private(plan, data=given)
    private(plan, data=DataLoader(examples(), shuffle=True, drop_last=True))  # as usual: no warning


def test_a_batch_size_that_is_not_the_plans_is_a_warning(plan):
    said = "the loader's batch_size=16 is not used: the plan's batches have 8 examples; .* pass physical_batch_size=16"
    with pytest.warns(PlanMismatchWarning, match=said):
        private(plan, data=DataLoader(examples(), batch_size=16))
    for same in (8, 1):
        private(plan, data=DataLoader(examples(), batch_size=same))
    private(plan, data=DataLoader(examples(), batch_size=4), physical_batch_size=4)


def test_messages_that_name_the_way_out(plan):
    model, optimizer, loader = private(plan, "microbatch")
    model.eval()
    with pytest.raises(QuellError, match=r"call model\.train\(\)"):
        one_step(model, optimizer, next(iter(loader)))
    state = optimizer.state_dict()
    with pytest.raises(QuellError, match=r'key="run\.key"'):
        private(plan)[1].load_state_dict(state)
    model, optimizer, loader = private(plan, "microbatch")
    x, y = next(iter(loader))
    loss = criterion(model(x), y)
    model(x).argmax(1)
    with pytest.raises(QuellError, match=r"torch\.no_grad\(\)"):
        loss.backward()
    model, optimizer, loader = private(plan)
    batches = iter(loader)
    gradients(model, optimizer, *next(batches))
    with pytest.raises(QuellError, match="physical_batch_size="):
        next(batches)  # "accumulation" over two batches


@pytest.mark.parametrize("clipping", MODES)
def test_a_summed_loss_bounds_what_one_example_can_do(clipping, plan):
    """Class weights: a weighted mean divides by the others' weights too, so the docs say to sum."""
    weights = torch.tensor([1.0, 1000.0, 1.0])
    x, y = examples()[:9][0], torch.tensor([0, 2, 0, 2, 0, 2, 0, 2, 1])

    def clipped(count, reduction):
        model, optimizer, _ = private(plan, clipping, loss_reduction=reduction)
        (0.5 * criterion(model(x[:count]), y[:count], weight=weights, reduction=reduction)).backward()
        return torch.cat([total.flatten() for total in optimizer._engine.collect()[1]])

    assert float((clipped(9, "sum") - clipped(8, "sum")).norm()) <= 1.0 + 1e-5
    assert float((clipped(9, "mean") - clipped(8, "mean")).norm()) > 1.2  # why the docs insist
