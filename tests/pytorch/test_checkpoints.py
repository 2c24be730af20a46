"""Stop anywhere, go on: the same weights bit for bit, and no row of noise for two different gradients."""

from __future__ import annotations

import copy
import random
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from quell.errors import QuellError
from quell.noise import Key
from quell.torch import load_checkpoint, make_private, save_checkpoint

from .conftest import small_plan
from .forks import run_script
from .training import examples, logged_rows, network, train

CRASH = Path(__file__).with_name("crash.py")


def private(key, plan, clipping="layers", momentum=0.9, data=None, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return make_private(model, optimizer, data or examples(), plan, clipping=clipping, key=key, **options)


@pytest.mark.parametrize("clipping", ["layers", "microbatch"])
@pytest.mark.parametrize("mechanism", ["bisr", "blt"])
def test_a_run_goes_on_in_the_middle_of_an_epoch(clipping, mechanism, tmp_path):
    plan, key = small_plan(mechanism, momentum=0.9), Key.generate()
    straight, optimizer, loader = private(key, plan, clipping)
    train(straight, optimizer, loader, steps=7)
    state = {"model": straight.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    torch.save(state, tmp_path / "checkpoint.pt")
    train(straight, optimizer, loader)
    assert optimizer.run.step == plan.steps

    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model, optimizer, loader = private(key, plan, clipping)
    model.load_state_dict(saved["model"])
    with pytest.raises(QuellError, match="replay=True"):
        optimizer.load_state_dict(saved["optimizer"])
    optimizer.load_state_dict(saved["optimizer"], replay=True)
    loader.load_state_dict(saved["loader"])
    assert optimizer.run.step == 7
    assert train(model, optimizer, loader) == plan.steps - 7
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("first", "then"), [(3, 0), (0, 3), (3, 3)])
def test_a_run_may_go_on_with_another_noise_memory(first, then):
    """BISR with 4 bands keeps 3 old draws where it may, and none where it may not: the weights are the same."""
    plan, key = small_plan("bisr", momentum=0.9), Key.generate()
    straight, optimizer, loader = private(key, plan, noise_memory=2)
    train(straight, optimizer, loader)
    assert optimizer.run.noise.buffers == 2  # two of three, the third is made again

    model, optimizer, loader = private(Key(key.reveal()), plan, noise_memory=first)
    optimizer.load_state_dict(optimizer.state_dict(), replay=True)  # of step 0: the same gradients come again
    train(model, optimizer, loader, steps=7)
    assert optimizer.run.noise.buffers == first
    saved, weights = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    assert saved["quell"]["noise"][0]["buffers"] is None

    model, optimizer, loader = private(Key(key.reveal()), plan, noise_memory=then)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved, replay=True)
    train(model, optimizer, loader)
    assert optimizer.run.noise.buffers == then
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), model.parameters(), strict=True))


def test_the_key_is_in_a_file_of_its_own(tmp_path):
    plan = small_plan(momentum=0.9)
    model, optimizer, loader = private(tmp_path / "key", plan)
    train(model, optimizer, loader, steps=3)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    torch.save({"o": optimizer.state_dict(), "l": loader.state_dict(), "m": model.state_dict()}, tmp_path / "all.pt")
    secret = optimizer.run.noise.key.reveal()
    derived = optimizer.run.batches.key
    content = (tmp_path / "all.pt").read_bytes()
    for hidden in (secret, derived, secret.hex().encode(), derived.hex().encode()):
        assert hidden not in content
    assert (tmp_path / "key.ledger").exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    plan = small_plan(momentum=0.9)
    _, optimizer, loader = private(Key.generate(), plan)
    state, position = optimizer.state_dict(), loader.state_dict()
    _, other, other_loader = private(Key.generate(), plan)
    with pytest.raises(QuellError, match="key_id"):
        other.load_state_dict(state)
    with pytest.raises(QuellError, match="key_id"):
        other_loader.load_state_dict(position)
    with pytest.raises(QuellError, match="not the state of a private optimizer"):
        other.load_state_dict(torch.optim.SGD(network().parameters(), lr=0.1).state_dict())


def kinds(name):
    """One optimizer, or two as a list."""
    model = network()
    parts = [model.parameters()] if "," not in name else [model[:3].parameters(), model[3].parameters()]
    made = [getattr(torch.optim, kind)(part, lr=0.1) for kind, part in zip(name.split(", "), parts, strict=True)]
    return model, made if len(made) > 1 else made[0]


@pytest.mark.filterwarnings("ignore:the plan's noise is shaped for SGD")
@pytest.mark.parametrize(
    ("saved", "now"),
    [("SGD", "AdamW"), ("AdamW", "SGD"), ("AdamW", "Adam"), ("SGD, AdamW", "AdamW, SGD"), ("SGD, SGD", "SGD, AdamW")],
)
def test_a_state_of_another_optimizer_is_refused(saved, now, plan, tmp_path):
    """Torch's own load_state_dict takes it, and the next step ends in a KeyError, or goes another way."""
    model, optimizer = kinds(saved)
    run = make_private(model, optimizer, examples(), plan, key=tmp_path / "key")
    load_checkpoint(tmp_path / "c", *run)
    train(*run, steps=2)
    save_checkpoint(tmp_path / "c", *run)
    state = copy.deepcopy(run[1].state_dict())
    run[1].close()
    model, optimizer = kinds(now)
    run = make_private(model, optimizer, examples(), plan, key=tmp_path / "key")
    message = f"the state was saved with optimizer={saved} and this run has optimizer={now}: pass what that run"
    with pytest.raises(QuellError, match=message):
        load_checkpoint(tmp_path / "c", *run)
    with pytest.raises(QuellError, match=message):
        run[1].load_state_dict(state)
    assert run[1].run.step == 0
    run[1].close()
    model, optimizer = kinds(saved)
    run = make_private(model, optimizer, examples(), plan, key=tmp_path / "key")
    assert load_checkpoint(tmp_path / "c", *run) == 2
    assert train(*run, steps=1) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"clipping": "microbatch"}, "clipping was layers and is microbatch"),
        ({"loss_reduction": "sum"}, "loss_reduction was mean and is sum"),
    ],
)
def test_released_steps_do_not_come_again_with_other_clipping(changed, message, tmp_path):
    """Two different gradients under one row of noise would give the noise away."""
    plan = small_plan(momentum=0.9)
    model, optimizer, loader = private(tmp_path / "key", plan)
    first = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, loader, steps=2)
    last = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    optimizer.close()

    model, optimizer, loader = private(tmp_path / "key", plan, **changed)
    model.load_state_dict(first["model"])
    optimizer.load_state_dict(first["optimizer"], replay=True)
    for _ in range(2):  # and it stays refused
        with pytest.raises(QuellError, match=message):
            train(model, optimizer, loader, steps=1)
    model.load_state_dict(last["model"])
    optimizer.load_state_dict(last["optimizer"], replay=True)  # nothing comes again from here
    assert train(model, optimizer, loader, steps=1) == 1


def test_loader_and_optimizer_are_loaded_together():
    plan, key = small_plan(momentum=0.9), Key.generate()
    model, optimizer, loader = private(key, plan)
    train(model, optimizer, loader, steps=2)
    position = loader.state_dict()
    _, _, fresh = private(key, plan)
    fresh.load_state_dict(position)
    with pytest.raises(QuellError, match="load the optimizer's state of the same checkpoint"):
        iter(fresh)


def test_workers_get_the_seeds_they_would_have_had():
    """Seeds of loader workers follow from key and step, not from how often a loader was started."""
    plan, key = small_plan(momentum=0.9), Key.generate()
    data = torch.utils.data.DataLoader(examples(), collate_fn=lambda rows: rows)  # row by row, as workers read
    seeds = []
    for chosen, starts in ((key, 1), (key, 3), (Key.generate(), 1)):
        _, _, loader = private(chosen, plan, data=data)
        for _ in range(starts):
            started = iter(loader)
        seeds.append(started.gi_frame.f_locals["items"]._base_seed)
    assert seeds[0] == seeds[1] != seeds[2]


def test_half_a_batch_is_not_saved(plan):
    model = network()
    model, optimizer, loader = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), plan, physical_batch_size=4
    )
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(QuellError, match="not complete"):
        optimizer.state_dict()


def killed_and_resumed(folder, mechanism, clipping, kills, ranks=1):
    """A run that was killed after so many steps, each time, ends with the weights of one that was not."""
    run_script(CRASH, folder, mechanism, clipping, ranks, *kills, timeout=240)
    hashes: dict[str, set[str]] = {}
    lines = (folder / "gradients.log").read_text().splitlines()
    for line in lines:
        step, content = line.split()
        hashes.setdefault(step, set()).add(content)
    assert len(hashes) == 20
    assert all(len(found) == 1 for found in hashes.values()), "a row of noise was added to two different gradients"
    final, straight = (torch.load(home / "final.pt", weights_only=True) for home in (folder, folder / "straight"))
    assert all(torch.equal(final[name], value) for name, value in straight.items())
    logs = [logged_rows(home / "log") for home in (folder, folder / "straight")]
    assert [row["step"] for row in logs[0]] == [str(2 * number) for number in range(1, 11)]
    for one, other in zip(*logs, strict=True):
        assert all(one[name] == other[name] for name in ("step", "steps_left", "epsilon_at_most", "epsilon_is"))


@pytest.mark.slow
def test_kill_minus_nine_three_times(tmp_path):
    """Before the first checkpoint, with a new one, and a step after one."""
    killed_and_resumed(tmp_path, "bsr", "microbatch", kills=[2, 6, 4])


@pytest.mark.slow
def test_kill_minus_nine_of_two_processes(tmp_path):
    killed_and_resumed(tmp_path, "bsr", "layers", kills=[2, 5], ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", range(20))
def test_kill_minus_nine_at_a_random_step(number, ranks, tmp_path):
    dice = random.Random(number)
    mechanism = dice.choice(["blt", "bisr", "bsr", "identity"])
    clipping = dice.choice(["layers", "microbatch"])
    killed_and_resumed(tmp_path, mechanism, clipping, [dice.randint(1, 17), dice.randint(1, 5)], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hugging face", "lightning"])
def test_trainers_that_are_killed_at_random_moments(way, tmp_path):
    """Killed 20 times: all runs end with the weights of runs that nobody killed, to the last bit."""
    run_script(CRASH.with_name("killed_trainers.py"), tmp_path, way, 20, timeout=900)
