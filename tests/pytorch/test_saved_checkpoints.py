"""`save_checkpoint` and `load_checkpoint`: whole or not at all, and always one to go back to."""

from __future__ import annotations

import os
import stat

import pytest
import torch
from torch import nn

from quell.errors import QuellError
from quell.noise import Key, Ledger, claims
from quell.torch import load_checkpoint, make_private, save_checkpoint, shards
from quell.torch.checkpoints import newest_whole
from quell.torch.folders import is_whole, require_whole_folder
from quell.torch.sharding import Slices, dealt

from .training import examples, train


def start(key, plan, seed=1):
    """A script that was started once more: other seeds, other first weights."""
    claims._claims.clear()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, examples(), plan, key=key)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.original_optimizer, step_size=1, gamma=0.99)
    return model, optimizer, loader, scheduler


def go_on(path, run, steps=None, every=2, sharded=False):
    """The loop of docs/pytorch.md."""
    model, optimizer, loader, scheduler = run
    first = load_checkpoint(path, model, optimizer, loader, sharded=sharded, scheduler=scheduler)
    done = first
    while done < optimizer.run.noise.steps and done - first != steps:
        done += train(model, optimizer, loader, steps=1)
        scheduler.step()
        if done % every == 0:
            save_checkpoint(path, model, optimizer, loader, sharded=sharded, scheduler=scheduler)
    optimizer.close()
    return first


@pytest.fixture
def straight(plan, tmp_path):
    """The weights of a run that nothing happened to, and its key."""
    key = Key.generate()
    for name in ("straight", "key"):
        key.save(tmp_path / name)
        Ledger(tmp_path / f"{name}.ledger").close()
    run = start(tmp_path / "straight", plan)
    go_on(tmp_path / "straight.pt", run)
    return run


def weights(run):
    return torch.cat([p.detach().flatten() for p in run[0].parameters()])


@pytest.mark.filterwarnings("ignore:.*learning rate is")
@pytest.mark.parametrize("stops", [[1], [3, 2], [4, 1, 1]])
def test_a_run_goes_on_as_if_it_had_never_stopped(stops, straight, plan, tmp_path):
    """Also before the first save, from a script that seeds nothing: the state of step 0 is there."""
    path = tmp_path / "checkpoint.pt"
    for seed, steps in enumerate([*stops, None], start=1):
        last = start(tmp_path / "key", plan, seed)
        go_on(path, last, steps)
    assert torch.equal(weights(last), weights(straight))
    assert last[3].state_dict() == straight[3].state_dict()
    assert not list(tmp_path.glob("*.new"))
    assert path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) == 0  # optimizer states can hold noise


@pytest.mark.filterwarnings("ignore:.*learning rate is")
def test_a_run_may_change_between_a_file_and_a_folder(straight, plan, tmp_path):
    path = tmp_path / "checkpoint.pt"
    for number, (steps, sharded) in enumerate([(3, False), (2, True), (2, False), (None, True)], start=1):
        last = start(tmp_path / "key", plan, seed=number)
        go_on(path, last, steps, every=1, sharded=sharded)
        assert path.is_dir() == sharded
    assert torch.equal(weights(last), weights(straight))
    assert sorted(each.name for each in path.iterdir()) == ["quell.json", "rank-0.pt"]
    assert path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) == 0


def test_saved_slices_become_any_others():
    whole = torch.arange(10.0)
    saved = Slices(torch.Size([5, 2]), [(0, whole[:4]), (4, whole[4:]), (4, whole[4:4]), (4, whole[4:].clone())])
    for offset in range(10):
        for length in range(10 - offset):
            assert torch.equal(saved.cut(offset, length), whole[offset : offset + length])
    assert torch.equal(dealt({"w": saved}, {"w": torch.zeros(5, 2)})["w"], whole.view(5, 2))
    with pytest.raises(QuellError, match=r"2 elements of a tensor of shape \(5, 2\) were not saved"):
        Slices(torch.Size([5, 2]), [(0, whole[:4]), (6, whole[6:])]).cut(0, 10)


def test_parts_of_ranks_that_are_gone_are_not_read(monkeypatch, tmp_path):
    """Trainer writes into the folder of a step again where a run that had more processes was there before."""
    monkeypatch.setattr(shards, "together", lambda work: work())
    monkeypatch.setattr(shards, "decided", lambda work: work() if shards.world()[0] == 0 else None)
    for rank, ranks, value in ((1, 2, 1.0), (0, 2, 1.0), (0, 1, 2.0)):
        monkeypatch.setattr(shards, "world", lambda rank=rank, ranks=ranks: (rank, ranks))
        shards.write_slices({"w": torch.tensor([value]), "noise": shards.EveryRanks(value)}, tmp_path)
    assert (tmp_path / "rank-1.pt").exists()
    assert shards.read_slices(tmp_path) == {"w": torch.tensor([2.0]), "noise": [2.0]}
    monkeypatch.setattr(shards, "world", lambda: (0, 3))  # the third has written to a disk of its own
    with pytest.raises(QuellError, match="rank 0 does not see what rank 2 wrote"):
        shards.write_slices({}, tmp_path)


def shorten(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def zero_a_block(path):
    """What a disk can make of a file that was not forced onto it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(64))


def move_away(path):
    """A crash between the two renamings: nothing was damaged, nothing to warn of."""
    path.rename(path.with_name("elsewhere"))


@pytest.mark.filterwarnings("ignore:.*learning rate is")
@pytest.mark.parametrize(
    ("damage", "file"),
    [
        *[(shorten, None), (empty, None), (zero_a_block, None), (move_away, None)],
        *[(zero_a_block, "rank-0.pt"), (os.unlink, "rank-0.pt"), (os.unlink, "quell.json"), (move_away, "")],
    ],
)
def test_a_damaged_checkpoint_costs_itself_and_not_the_run(damage, file, straight, plan, tmp_path):
    path, sharded = tmp_path / "checkpoint.pt", file is not None
    go_on(path, start(tmp_path / "key", plan), steps=5, sharded=sharded)
    damage(path / file if file else path)
    last = start(tmp_path / "key", plan, seed=2)
    if damage is move_away:
        assert go_on(path, last, sharded=sharded) == 2
    else:
        with pytest.warns(
            UserWarning, match=r"is damaged: going on from the checkpoint before it, checkpoint\.pt\.bef"
        ):
            assert go_on(path, last, sharded=sharded) == 2
    assert torch.equal(weights(last), weights(straight))
    assert is_whole(path)
    for each in (path, path.with_name("checkpoint.pt.before")):
        shorten(each / "rank-0.pt" if sharded else each)
    with pytest.raises(QuellError, match="is damaged or no checkpoint, and there is no whole"):
        go_on(path, start(tmp_path / "key", plan))


def test_a_path_where_nothing_is_is_not_called_damaged(tmp_path):
    with pytest.raises(QuellError, match=r"there is no checkpoint .*nowhere\.ckpt: pass the path of one that is there"):
        newest_whole(tmp_path / "nowhere.ckpt")
    with pytest.raises(QuellError, match=r"there is no checkpoint .*checkpoint-9: pass resume_from_checkpoint=True"):
        require_whole_folder(tmp_path / "checkpoint-9")


def refused(path, key, plan, match, sharded=False):
    run = start(key, plan)
    try:
        with pytest.raises(QuellError, match=match):
            load_checkpoint(path, *run[:3], sharded=sharded)
    finally:
        run[1].close()


def test_what_could_not_go_on_is_refused(plan, tmp_path):
    path, key = tmp_path / "checkpoint.pt", tmp_path / "key"
    refused(path, None, plan, r"key is not kept.*pass key='run\.key'")
    assert not path.exists()
    for sharded in (False, True):
        refused(tmp_path / "nowhere" / "c.pt", key, plan, "there is no folder .*nowhere; make it first", sharded)
    run = start(key, plan)
    load_checkpoint(path, *run[:3])
    train(*run[:3], steps=2)
    run[1].close()
    refused(
        tmp_path / "elsewhere.pt", key, plan, r"no checkpoint .*elsewhere\.pt, but 2 steps were released with this key"
    )
    refused(
        path, tmp_path / "other", plan, "state has key_id .*: pass the path of that run's key.* was made just now if"
    )
    save_checkpoint(path, *run[:3], scheduler=run[3])
    refused(
        path,
        key,
        plan,
        "has the states of scheduler beside model and optimizer, and nothing was given.*same as in save_ch",
    )
    torch.save({"model": {}}, path)
    refused(path, key, plan, "is not a checkpoint of save_checkpoint")
