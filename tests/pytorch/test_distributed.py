"""Worlds of gloo processes: the same results whatever the number of ranks, one row of noise per step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quell.noise import NoiseSpec
from quell.noise.audit import audit
from quell.watching.log import NORMS

from .conftest import small_plan, unpriced_poisson_plan
from .forks import run_script
from .ranks import SCENARIOS, WAYS
from .training import logged_rows

pytestmark = pytest.mark.slow  # every number of ranks is as many processes
RANKS = Path(__file__).with_name("ranks.py")


def run_worlds(folder: Path, *sizes: int) -> dict[int, Path]:
    """Run all scenarios in so many processes, one world after the other. A hang is a failure."""
    run_script(RANKS, folder, *sizes, timeout=280)
    return {size: folder / str(size) for size in sizes}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """A world of one leaves checkpoints at step 7; a world of two goes on from them."""
    return run_worlds(tmp_path_factory.mktemp("worlds"), 1, 2)


def assert_equal(a, b, within=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=within, msg=name)


def test_results_do_not_depend_on_the_number_of_ranks(worlds):
    for name in SCENARIOS:
        one, two = (torch.load(worlds[world] / f"final {name} 2.pt") for world in (1, 2))
        assert_equal(one, two)


def test_one_rank_writes_the_log_of_all(worlds):
    """The norm of a sharded gradient is over all ranks, as are the norms of single examples."""
    for name in SCENARIOS:
        one, two = (logged_rows(worlds[world] / f"log {name} 2") for world in (1, 2))
        assert [row["step"] for row in one] == [row["step"] for row in two]
        for row, other in zip(one, two, strict=True):
            for column in ("gradient_norm", "noise_norm", *NORMS):
                assert float(row[column] or -1) == pytest.approx(float(other[column] or -1), rel=1e-4), (name, column)


def test_sharded_and_replicated_models_learn_the_same(worlds):
    for name, within in (("fsdp", 1e-6), ("microbatch", 1e-4)):  # whose norms are not rounded up
        assert_equal(*(torch.load(worlds[2] / f"final {which} 2.pt") for which in ("ddp", name)), within)
    # Sums that differ in their last bit can be released as neighbours on the noise's grid, and later steps follow.
    plan = unpriced_poisson_plan()
    apart = 0.2 * float(NoiseSpec.of(plan, 0.5).recipe(0).grids[0]) / plan.run.batch_size
    one, other = (torch.load(worlds[2] / f"final {name} 2.pt") for name in ("ddp empty", "fsdp empty"))
    assert_equal(one, other, 3.5 * apart)
    assert sum(int(((one[name] - other[name]).abs() > 0.5 * apart).sum()) for name in one) < 20  # of 146


def test_a_run_goes_on_in_a_larger_world(worlds):
    for name in ("ddp", "fsdp"):
        assert_equal(torch.load(worlds[1] / f"final {name} 2.pt"), torch.load(worlds[2] / f"resumed {name}.pt"))


def test_ranks_with_different_arguments_refuse_to_start(worlds):
    for rank in (0, 1):
        said = torch.load(worlds[2] / f"disagreement {rank}.pt")
        *disagreements, half_sharded = said
        for message, name in zip(disagreements, ("max_grad_norm", "clipping", "promise"), strict=True):
            assert f"rank {1 - rank} has {name}" in message
        assert "some trained parameters are sharded and others are not" in half_sharded


def test_what_rank_0_cannot_open_is_an_error_on_every_rank(worlds):
    first, second = (torch.load(worlds[2] / f"unopened {rank}.pt") for rank in (0, 1))
    assert list(first) == list(second) == ["key", "ledger", "budget", "loaded"]
    said = ("nowhere", "broken", "no budget", "would charge several runs of it once")
    for name, part in zip(first, said, strict=True):
        assert part in first[name]
        assert second[name] == f"rank 0 failed: {first[name]}"


def test_ranks_replay_together_or_not_at_all(worlds):
    for name in ("ddp", "fsdp"):
        for rank in (0, 1):
            same, refused, not_asked = torch.load(worlds[2] / f"replay {name} {rank}.pt")
            assert same is True
            assert "step 2 was released before and would now be released with other gradients" in refused
            assert "released" in not_asked
            assert not_asked.startswith("rank 0 failed: ") == (rank == 1)


def audit_rows(groups):
    mechanism = small_plan("bsr", alone=True, momentum=0.9).mechanism
    return audit(
        [np.asarray(g, np.float64) for g in groups], mechanism.strategy.matrix(), 0.5 * mechanism.noise_multiplier
    )


def test_the_noise_of_two_sharded_processes_passes_the_audit(worlds):
    ranks = [torch.load(worlds[2] / f"audit fsdp {rank}.pt") for rank in (0, 1)]
    total = 6 * 300 + 300 + 300 * 3 + 3
    assert sum(sum(rank["drawn"]) for rank in ranks) == total  # each rank draws its shard and nothing else
    assert max(sum(rank["drawn"]) for rank in ranks) < 0.6 * total
    found = audit_rows([group for rank in ranks for group in rank["rows"]])
    assert found.passed, str(found)
    twice = audit_rows([*ranks[0]["rows"], *ranks[0]["rows"]])  # the mutation: both ranks draw the same shard
    assert not twice.passed


def test_replicas_add_the_same_row(worlds):
    first, second = (torch.load(worlds[2] / f"audit ddp {rank}.pt")["rows"] for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    found = audit_rows(first)
    assert found.passed, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_torchrun_with_every_trainer(first, then, tmp_path):
    """A loop, Trainer and Lightning with DDP and FSDP2, and checkpoints whole or in slices.

    The model is the same in one process and in two, also where one goes on for another.
    """
    launched = Path(__file__).with_name("launched.py")
    for world in (first, then):
        options = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world, launched, tmp_path)
        run_script(*options, timeout=280)
    for name in WAYS:
        one, two = (torch.load(tmp_path / str(world) / f"{name}, whole.pt") for world in (1, 2))
        within = 2e-3 if "bf16" in name else 1e-6  # products of other sizes are rounded otherwise
        if name in ("hugging face fsdp", "hugging face fsdp, sharded"):
            within = 2.0**-17  # sums that differ in their last bit can be neighbours on the noise's grid: 2⁻¹⁸ here
        assert_equal(one, two, within)
        assert_equal(one, torch.load(tmp_path / str(then) / f"{name}, resumed.pt"), within)
        if "bf16" in name:
            wide = torch.load(tmp_path / "2" / f"{name.removesuffix(', bf16')}, whole.pt")
            assert_equal(wide, two, 0.05)
            assert max(float((wide[each] - two[each]).abs().max()) for each in wide) > 1e-5


@pytest.mark.slow
def test_four_ranks(tmp_path, worlds):
    """Also in the other direction: four ranks save, one goes on."""
    found = run_worlds(tmp_path, 4, 1)
    four, one = found[4], found[1]
    for name in SCENARIOS:
        reference = torch.load(worlds[1] / f"final {name} 2.pt")
        for physical in (None, 2):
            assert_equal(reference, torch.load(four / f"final {name} {physical}.pt"))
    for name in ("ddp", "fsdp"):
        assert_equal(torch.load(worlds[1] / f"final {name} 2.pt"), torch.load(one / f"resumed {name}.pt"))
