"""What dropout and augmentation draw follows from the secret key, and tells nothing about who was in which batch."""

from __future__ import annotations

import copy
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from quell.noise import Key, claims
from quell.torch import attach, clipped_sum, crop_and_flip, make_private
from quell.torch.random_states import own_states, seed_all

from .conftest import unpriced_poisson_plan
from .training import examples, seeded, train, without_noise

WHO = 3  # the one who is not in the data


class Noisy(Dataset):
    """Every example comes with what was drawn for it."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([*drawn(), torch.utils.data.get_worker_info() is not None], dtype=torch.float64)


def drawn():
    return float(torch.rand((), dtype=torch.float64)), float(np.random.rand()), random.random()


def with_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def for_images():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def start(key, data=None, plan=None, make=with_dropout, without=None, **options):
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    claims._claims.clear()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trio = make_private(model, optimizer, data or examples(), plan or unpriced_poisson_plan(40, 8), key=key, **options)
    if without is not None:
        batch = trio[2]._planned._batch
        trio[2]._planned._batch = lambda step: (lambda found: found[found != without])(batch(step))
    return trio


def sums_of(model, optimizer, loader):
    """The clipped sums of all steps, and the random states after each."""
    sums, states, release = [], [], optimizer.run.release

    def seen(totals, gathered):
        sums.append(torch.cat([total.flatten() for total in totals]))
        release(totals, gathered)
        states.append(str(own_states()))

    optimizer.run.release = seen
    train(model, optimizer, loader)
    return sums, states


def batches_of(key):
    loader = start(key)[2]
    return [loader._planned._batch(step) for step in range(loader.run.noise.steps)]


@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("what", ["dropout", "augment"])
def test_one_example_more_moves_only_its_own_step(what, physical):
    """Also for somebody who knows torch's seed: later steps, and what checkpoints could save, do not depend on it."""
    images = TensorDataset(torch.rand(40, 1, 6, 6), torch.randint(0, 3, (40,)))

    def run(without):
        if what == "dropout":
            return sums_of(*start(seeded(1), without=without, physical_batch_size=physical))
        options = {"augment": lambda x: crop_and_flip(x, 2), "physical_batch_size": physical}
        return sums_of(*start(seeded(1), images, make=for_images, without=without, **options))

    (sums, states), (others, other_states) = run(None), run(WHO)
    member = [WHO in batch for batch in batches_of(seeded(1))]
    assert 0 < sum(member) < len(member) - 1
    assert member == [not torch.equal(a, b) for a, b in zip(sums, others, strict=True)]
    assert states == other_states
    assert len(set(states)) == len(states)


def test_the_seed_of_torch_does_not_decide_what_is_drawn():
    """Both keys draw the same batches."""
    found = []
    for key in (seeded(1), seeded(2), seeded(1)):
        trio = start(key, plan=without_noise(unpriced_poisson_plan(40, 8)))
        trio[1].run.batches = start(seeded(1))[1].run.batches
        torch.manual_seed(len(found) // 2)
        found.append(sums_of(*trio)[0])
    apart = [torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True)]
    assert not any(apart)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_every_step_part_and_rank_draws_its_own(workers):
    """In the data set and in the loop, from torch's, NumPy's and Python's numbers, whatever generator the user has."""

    def run(key, rank=0):
        known = torch.Generator().manual_seed(0)
        data = DataLoader(Noisy(), num_workers=workers, generator=known, worker_init_fn=random_worker)
        _, optimizer, loader = start(key, data, physical_batch_size=2)
        optimizer.run.rank, optimizer.run.world = rank, 2
        found = []
        for batch in loader:
            found += [drawn(), *map(tuple, batch[:, :3].tolist())]
            assert batch[:, 3].bool().all() == bool(workers)
            due = optimizer.run.unfinished
            due.received, due.parts = None, due.parts + 1
            if len(found) > 12 or due.parts == loader._planned._portions(len(batches[0])):
                break
        return found

    batches = batches_of(seeded(1))
    one, again, other, beside = run(seeded(1)), run(seeded(1)), run(seeded(2)), run(seeded(1), 1)
    assert one == again
    counts = Counter(number for each in (one, other, beside) for numbers in each for number in numbers)
    assert max(counts.values()) == 1
    assert len(one) > 3


def random_worker(number):
    """The user's own function is called too."""
    assert torch.utils.data.get_worker_info().id == number


def test_an_evaluation_may_draw_and_checkpoints_hold_no_states(tmp_path):
    """Between steps: neither a resumed run nor one that evaluates more often draws other numbers in its steps."""
    key = tmp_path / "key"
    straight = start(key)
    train(*straight, steps=2)
    state = copy.deepcopy(straight[1].state_dict())
    assert "random" not in state["quell"]
    train(*straight, steps=3)
    straight[1].close()
    again = start(key)
    again[0].load_state_dict(straight[0].state_dict())
    state["quell"]["random"] = [own_states()]  # as in checkpoints that an earlier version wrote
    again[1].load_state_dict(state, replay=True)
    for _ in range(3):  # refused if it were another sum
        drawn()
        train(*again, steps=1)
    assert again[1].run.step == 5


def test_loops_with_gradients_of_their_own_draw_from_the_key_too():
    def run(key):
        torch.manual_seed(0)
        params = {"w": nn.Parameter(torch.zeros(6))}
        plan = unpriced_poisson_plan(40, 8)
        optimizer, loader = attach(torch.optim.SGD(params.values(), lr=0.1), params, examples(), plan, key=key)
        found = []
        for x, y in loader:
            found.append(drawn())
            optimizer.zero_grad()
            optimizer.take(clipped_sum(lambda p, x, y: (p["w"] @ x - y) ** 2, params, (x, y), 1.0), examples=len(x))
            optimizer.step()
        return found

    first = run(seeded(1))
    assert first == run(seeded(1))
    assert not set(first) & set(run(seeded(2)))


def test_a_loader_of_somebody_else_draws_from_the_key_too():
    """As Opacus's BatchMemoryManager makes one."""

    def run(key):
        *_, loader = start(key, Noisy())
        batches = iter(DataLoader(Noisy(), batch_sampler=loader.batch_sampler))
        return [*map(tuple, next(batches).tolist()), drawn()]

    first = run(seeded(1))
    assert first == run(seeded(1))
    assert not set(first) & set(run(seeded(2)))


def test_torch_gets_more_than_32_bits_of_a_seed():
    """Its generator on the CPU has the 624 words that it was given: it goes on as NumPy's does from the same words."""
    for secret in (b"one", b"another", Key.generate().derive("test")):
        seed_all(secret)
        words = torch.get_rng_state().view(torch.int64)[3:627].numpy().astype(np.uint32)
        assert len(np.unique(words)) > 600
        twister = np.random.MT19937()
        twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
        assert torch.randint(2**16, (1000,)).tolist() == (twister.random_raw(1000) % 2**16).tolist()
        torch.randn(3)  # of which one number waits for the next call
        made = []
        for _ in range(2):
            seed_all(secret)
            made.append((drawn(), torch.randn(()), np.random.randn()))
        assert made[0] == made[1]
