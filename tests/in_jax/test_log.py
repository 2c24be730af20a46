"""`privatize(..., log=...)`: the same rows as in PyTorch, told by callbacks."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from quell import Log, QuellError
from quell.adapters.scheme import batches_of, scheme_of
from quell.adapters.so_far import expected_norms
from quell.jax import check, privatize
from quell.jax.watch import Watch
from quell.planning import Plan

from .trees import seeded

FAST: dict[str, Any] = {"generator": "philox"}
PARAMS = {"w": np.zeros((8, 30), np.float32), "b": np.zeros((), np.float32)}


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


def run(private: Any, state: Any, last: int) -> tuple[list[float], Any]:
    """The norms of the means that were released, and the state."""
    found = []
    for step in range(int(state.step), last):
        sums = jax.tree_util.tree_map(lambda leaf, step=step: jnp.full(leaf.shape, step, jnp.float32), PARAMS)
        means, state = private.update(sums, state)
        leaves = jax.tree_util.tree_leaves(means)
        found.append(math.sqrt(sum(float(np.square(np.asarray(leaf, np.float64)).sum()) for leaf in leaves)))
    jax.effects_barrier()
    return found, state


def test_rows_are_those_of_what_was_released(plan: Plan, tmp_path: Path) -> None:
    private = privatize(plan, PARAMS, 1.0, log=Log(tmp_path, every=4), **FAST)
    norms, _ = run(private, private.init(PARAMS), plan.steps)
    rows, expected = rows_of(tmp_path), expected_norms(plan.mechanism, 1.0, 241)
    assert [row["step"] for row in rows] == ["4", "8", "10"]
    assert expected is not None
    for row, first in zip(rows, (0, 4, 8), strict=True):
        stop = int(row["step"])
        for column, values in (("gradient_norm", norms), ("noise_norm", expected / 12)):
            mean = math.sqrt(np.mean(np.square(values[first:stop])))
            assert float(row[column]) == pytest.approx(mean, rel=1e-5)
        assert row["noise_seconds"] == ""
    assert float(rows[-1]["epsilon_at_most"]) == 8.0


@pytest.mark.slow
def test_norms_go_along_where_they_are_wanted(plan: Plan, tmp_path: Path) -> None:
    private = privatize(plan, PARAMS, 1.0, log=Log(tmp_path, every=4, norms=True), **FAST)
    optimizer = optax.chain(private, optax.scale(-1.0))
    state, seen = optimizer.init(PARAMS), []
    with pytest.raises(QuellError, match="update was given none"):
        optimizer.update(PARAMS, state, PARAMS)
    for step in range(plan.steps):
        norms = np.random.default_rng(step).exponential(size=5).astype(np.float32)
        norms[step % 5], norms[0] = np.inf, np.nan if step == 3 else norms[0]
        seen.append(norms[~np.isnan(norms)])
        _, state = optimizer.update(PARAMS, state, PARAMS, norms=norms)
    jax.effects_barrier()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == ["4", "8", "10"]
    for row, first in zip(rows, (0, 4, 8), strict=True):
        whole = np.concatenate(seen[first : int(row["step"])])
        assert float(row["clipped_share_not_private"]) == pytest.approx(np.mean(whole > 1))
        assert float(row["median_norm_not_private"]) == pytest.approx(np.median(whole))


@pytest.mark.slow
def test_no_step_comes_twice_after_a_crash(plan: Plan, tmp_path: Path) -> None:
    def start() -> Any:
        return privatize(plan, PARAMS, 1.0, key=tmp_path / "key", log=Log(tmp_path / "log", every=2), **FAST)

    private = start()
    _, saved = run(private, private.init(PARAMS), 3)
    more, _ = run(private, saved, 6)
    private.close()
    private = start()  # the checkpoint is three steps old
    again, state = run(private, saved, plan.steps)
    assert again[:3] == more
    check(state)
    private.close()
    assert [row["step"] for row in rows_of(tmp_path / "log")] == ["2", "4", "6", "8", "10"]


@pytest.mark.slow
def test_sharded_parameters_have_one_norm(plan: Plan, tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    shardings = {"w": NamedSharding(mesh, P("x")), "b": NamedSharding(mesh, P())}
    params = jax.tree_util.tree_map(jax.device_put, PARAMS, shardings)
    for name, held in (("one", PARAMS), ("two", params)):
        private = privatize(plan, held, 1.0, key=seeded(3), log=Log(tmp_path / name, every=2, times=False), **FAST)
        run(private, private.init(held), 4)
        private.close()
    one, two = (rows_of(tmp_path / name) for name in ("one", "two"))
    assert [row["step"] for row in one] == ["2", "4"]
    for row, other in zip(one, two, strict=True):
        assert float(row["gradient_norm"]) == pytest.approx(float(other["gradient_norm"]), rel=1e-5)


def test_what_comes_late_is_waited_for(plan: Plan, tmp_path: Path) -> None:
    key = seeded(3)
    drawn = batches_of(plan, scheme_of(plan, plan.mechanism), key)
    watch = Watch(Log(tmp_path, every=2), plan.mechanism, drawn, key, 1.0, PARAMS)
    for step in (0, 1, 2):
        watch.begin(step, step)
    for step in (1, 2, 0):
        assert not rows_of(tmp_path)
        watch.told(step, 4.0)
    assert [row["step"] for row in rows_of(tmp_path)] == ["2"]
    watch.close()


@pytest.mark.slow
def test_refusals(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(QuellError, match="with a Plan"):
        privatize(plan.mechanism, PARAMS, 1.0, expected_batch_size=2.0, log=tmp_path)
    private = privatize(plan, PARAMS, 1.0, key=seeded(3), log=Log(tmp_path / "log", every=1), **FAST)
    run(private, private.init(PARAMS), 1)
    private.close()
    private = privatize(plan, PARAMS, 1.0, key=seeded(3), log=Log(tmp_path / "log", every=1), **FAST)
    _, state = run(private, private.init(PARAMS), 1)
    with pytest.raises(QuellError, match="nothing says that the same steps come again"):
        check(state)
