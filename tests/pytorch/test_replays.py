"""Attacks on replays: a step that was released comes again exactly as it was, or not at all."""

from __future__ import annotations

import copy
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from quell.errors import QuellError
from quell.noise import Key, claims
from quell.noise.ledger import HEADER, RECORD
from quell.torch import attach, clipped_sum, make_private

from .conftest import small_plan
from .training import examples, network, train

OTHER = "would now be released with other gradients or other noise, so nothing was released"


class Augmented(Dataset):
    """Examples that come a little different each time."""

    def __init__(self, draw):
        self.examples, self.draw = examples(), draw

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        x, y = self.examples[index]
        return x + float(self.draw()), y


def start(key, plan, data=None, dropout=0.0, seed=1, **options):
    """A run in what could be a new process, all seeds set."""
    claims._claims.clear()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, data or examples(), plan, key=key, **options)


def watch(optimizer) -> dict[int, torch.Tensor]:
    """The sums that noise was added to, by step, once they are released."""
    found: dict[int, torch.Tensor] = {}
    add = optimizer.run.noise.add_

    def spy(sums):
        step, before = optimizer.run.step, torch.cat([total.flatten() for total in sums]).clone()
        add(sums)
        found[step] = before

    optimizer.run.noise.add_ = spy
    return found


def checkpoint(model, optimizer, loader):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    return copy.deepcopy(state)


def resume(state, model, optimizer, loader, replay=True):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"], replay=replay)
    loader.load_state_dict(state["loader"])


DATA = {
    "dropout": lambda: None,
    "numpy": lambda: Augmented(np.random.normal),
    "python": lambda: Augmented(random.random),
    "torch": lambda: Augmented(lambda: torch.randn(())),
}


@pytest.mark.parametrize("what", DATA)
def test_random_numbers_come_back_with_every_checkpoint(what, plan, tmp_path):
    """P1 and P4: a crash right after the checkpoint, then a second one before the next."""
    options = {"data": DATA[what](), "dropout": 0.5 if what == "dropout" else 0.0}
    run = start(tmp_path / "key", plan, **options)
    train(*run, steps=4)
    state = checkpoint(*run)
    run[1].close()  # killed, with nothing released since

    released = {}
    for steps in (2, 3, 4):
        run = start(tmp_path / "key", plan, seed=100 + steps, **options)  # other seeds than the checkpoint's
        resume(state, *run)
        found = watch(run[1])
        train(*run, steps=steps)
        run[1].close()
        for step, total in found.items():
            assert torch.equal(released.setdefault(step, total), total)
    assert set(released) == {4, 5, 6, 7}


@pytest.mark.parametrize("in_one_process", [False, True])
def test_a_step_that_comes_again_with_other_gradients_is_refused(in_one_process, plan, tmp_path):
    """Random numbers of a generator that no checkpoint knows: the step is refused, and stays so."""
    key = Key.generate() if in_one_process else tmp_path / "key"
    dice = np.random.default_rng(7)
    run = start(key, plan, Augmented(dice.normal))
    state = checkpoint(*run)
    train(*run, steps=2)
    run[1].close()
    known = dict(claims._claims)
    run = start(key, plan, Augmented(dice.normal))
    if in_one_process:
        claims._claims.update({name: known[name] + claims._claims[name] for name in known})
    found, before = watch(run[1]), copy.deepcopy(run[0].state_dict())
    for _ in range(2):
        resume(state, *run)
        with pytest.raises(QuellError, match=f"go on as before the crash.*: step 0 was released before and {OTHER}"):
            train(*run, steps=1)
    assert not found
    assert run[1].run.step == 0
    assert all(torch.equal(before[name], value) for name, value in run[0].state_dict().items())


def test_a_millionth_of_one_weight_is_enough(plan, tmp_path):
    run = start(tmp_path / "key", plan)
    train(*run, steps=2)
    run[1].close()
    run = start(tmp_path / "key", plan)
    with torch.no_grad():
        run[0][2].bias[0] += 1e-6
    with pytest.raises(QuellError, match=OTHER):
        train(*run, steps=1)


def test_workers_with_random_augmentation_from_the_end_of_an_epoch(plan, tmp_path):
    """Workers start anew in every epoch, so that they can come again, also where the loader asks for others."""
    data = DataLoader(Augmented(np.random.normal), num_workers=1, persistent_workers=True)
    run = start(tmp_path / "key", plan, data)
    train(*run, steps=5)
    state = checkpoint(*run)
    train(*run, steps=3)
    run[1].close()
    del run  # with its workers, which have the ledger open too
    run = start(tmp_path / "key", plan, data)
    resume(state, *run)
    train(*run)
    assert run[1].run.step == plan.steps


def test_workers_with_random_augmentation_in_the_middle_of_an_epoch(plan, tmp_path):
    """Workers are seeded where the loader starts: from an epoch's start the same numbers come, else others."""
    data = DataLoader(Augmented(np.random.normal), num_workers=1)
    run = start(tmp_path / "key", plan, data)
    states = [checkpoint(*run)]
    for x, y in run[2]:
        run[1].zero_grad()
        nn.functional.cross_entropy(run[0](x), y).backward()
        run[1].step()
        states.append(checkpoint(*run))
    run[1].close()
    for step in (2, 0):
        run = start(tmp_path / "key", plan, data)
        resume(states[step], *run)
        if step:
            with pytest.raises(QuellError, match=OTHER):
                train(*run, steps=1)
        else:
            assert train(*run, steps=5) == 5
        run[1].close()


def test_a_crash_before_the_first_checkpoint(plan, tmp_path):
    """Starting again is a replay from step 0: with the same seeds it goes on, with others nothing is released."""
    straight = start(Key.generate(), plan, dropout=0.5)
    run = start(tmp_path / "key", plan, dropout=0.5)
    found = watch(run[1])
    train(*run, steps=3)
    run[1].close()
    other = start(tmp_path / "key", plan, dropout=0.5, seed=2)
    with pytest.raises(QuellError, match=r"load the checkpoint first.* new run with a new key.* set the same seeds"):
        train(*other, steps=1)
    assert other[1].privacy_report().epsilon_so_far > 0
    other[1].close()
    again = start(tmp_path / "key", plan, dropout=0.5)
    twice = watch(again[1])
    assert train(*again) == plan.steps
    assert all(torch.equal(found[step], twice[step]) for step in found)
    assert straight[1].run.step == 0


# One plan, one promise, one clip norm, one set of parameters


def test_another_plan_and_clip_norm_with_the_same_product(tmp_path):
    """ε = 1 at clip norm 1, then ε = 8 at the clip norm that gives σ·clip to six digits: two sums under one noise."""
    strict, loose = (small_plan("identity", alone=True, epsilon=epsilon) for epsilon in (1.0, 8.0))
    bound = strict.mechanism.noise_multiplier / loose.mechanism.noise_multiplier
    assert f"{bound * loose.mechanism.noise_multiplier:.6g}" == f"{strict.mechanism.noise_multiplier:.6g}"
    run = start(tmp_path / "key", strict)
    state = checkpoint(*run)
    train(*run, steps=1)
    spent = run[1].privacy_report()
    run[1].close()
    with pytest.raises(QuellError, match="under another key, plan, max_grad_norm"):
        start(tmp_path / "key", loose, max_grad_norm=bound)
    for ledger in ("new", "own"):  # also where the ledger is not there to tell, or not told
        key = Key(Key.load(tmp_path / "key").reveal())
        run = start(key, loose, max_grad_norm=bound, ledger=tmp_path / ledger)
        with pytest.raises(
            QuellError, match=r"the state has promise .*\(1\.0, 1e-05, .*, this run has .*\(8\.0, 1e-05"
        ):
            resume(state, *run)
        run[1].close()
    run = start(tmp_path / "key", strict)
    resume(state, *run)
    assert run[1].privacy_report().epsilon_so_far == spent.epsilon_so_far


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_grad_norm": float(np.nextafter(1.0, 2.0))}, r"max_grad_norm 1\.0, this run has 1\.0000000000000002"),
        ({"generator": "philox"}, "generator chacha20, this run has philox"),
        ({"mechanism": "identity"}, "promise"),
    ],
)
def test_states_belong_to_one_run_exactly(changed, message, plan):
    key = Key.generate()
    state = checkpoint(*start(key, plan))
    with pytest.raises(QuellError, match=message):
        resume(state, *start(key, plan, **changed))


def test_states_belong_to_one_set_of_parameters(plan):
    key = Key.generate()
    state = checkpoint(*start(key, plan))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, loader = make_private(model, optimizer, examples(), plan, key=key)
    for part, name in ((optimizer, "optimizer"), (loader, "loader")):
        with pytest.raises(QuellError, match=r"the state has parameters 4 with 83 elements .*, this run has 6 with 99"):
            part.load_state_dict(state[name])


def test_the_report_counts_what_was_released_after_the_state_was_saved(plan, tmp_path):
    run = start(tmp_path / "key", plan)
    early = checkpoint(*run)
    train(*run, steps=4)
    run[0].load_state_dict(early["model"])
    resume(early, *run)
    train(*run, steps=2)
    middle = checkpoint(*run)  # at step 2, with 4 steps released
    run[1].close()
    key = Key(Key.load(tmp_path / "key").reveal())
    alone = start(key, plan)  # without the ledger
    with pytest.raises(QuellError, match="released steps up to 3, and step 2 would come again"):
        resume(middle, *alone, replay=False)
    resume(middle, *alone)
    assert alone[1].run.noise.released == 4
    with pytest.raises(QuellError, match="no ledger has a digest of it"):
        train(*alone, steps=1)


# Ledgers that know less than was released


@pytest.mark.parametrize("left", [0, 1, len(HEADER), len(HEADER) + 3 * RECORD.size, len(HEADER) + 6 * RECORD.size + 1])
def test_an_emptied_or_shortened_ledger(left, plan, tmp_path):
    run = start(tmp_path / "key", plan)
    train(*run, steps=5)
    state = checkpoint(*run)
    train(*run, steps=2)
    run[1].close()
    ledger = tmp_path / "key.ledger"
    ledger.write_bytes(ledger.read_bytes()[:left])

    def go_on():
        run = start(tmp_path / "key", plan)
        resume(state, *run)
        train(*run, steps=1)

    with pytest.raises(QuellError, match=r"is empty|does not begin|steps of this key, but 5 were|has a digest"):
        go_on()


def test_an_old_copy_in_the_place_of_the_ledger(plan, tmp_path):
    ledger = tmp_path / "key.ledger"
    run = start(tmp_path / "key", plan)
    shutil.copy(ledger, tmp_path / "old")
    train(*run, steps=2)
    ledger.rename(tmp_path / "away")
    shutil.copy(tmp_path / "old", ledger)
    found = watch(run[1])
    with pytest.raises(QuellError, match="was deleted, moved, replaced or changed while in use"):
        train(*run, steps=1)
    assert not found


def test_what_a_loop_hands_over_is_compared_too(plan, tmp_path):
    def attached():
        claims._claims.clear()
        params = {"w": nn.Parameter(torch.zeros(6))}
        optimizer = torch.optim.SGD(params.values(), lr=0.1)
        return params, *attach(optimizer, params, examples(), plan, key=tmp_path / "key")

    def one_step(params, optimizer, loader, factor):
        x, y = next(iter(loader))
        optimizer.zero_grad()
        sums = clipped_sum(lambda p, x, y: (p["w"] @ x - factor * y) ** 2, params, (x, y), 1.0)
        optimizer.take(sums, examples=len(x))
        optimizer.step()

    run = attached()
    one_step(*run, factor=1.0)
    run[1].close()
    run = attached()
    with pytest.raises(QuellError, match=OTHER):
        one_step(*run, factor=1.5)
    one_step(*run, factor=1.0)
    assert run[1].run.step == 1
