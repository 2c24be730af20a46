"""What a compiled step cannot refuse by itself: keys, ledgers, resuming, and what `privatize` is given."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from quell import QuellError
from quell.jax import NoiseState, batches, check, clipped_grad, privatize
from quell.jax.batches import PaddedBatches, _roomy
from quell.jax.devices import refuse_devices
from quell.jax.host import _mixed
from quell.noise import Key
from quell.noise.guard import ReleaseGuard
from quell.planning import Plan
from quell.schemes import Batches, Poisson
from tests.noise import cases

from ..user_streams import IDS, user_plan
from .trees import seeded

PARAMS = {"w": np.zeros((7, 30), np.float32)}
FAST = {"expected_batch_size": 2.0, "generator": "philox"}


def steps(private: Any, state: Any, first: int, last: int) -> tuple[list[Any], Any]:
    found = []
    for step in range(first, last):
        sums = {"w": jnp.full((7, 30), step, jnp.float32)}
        noisy, state = private.update(sums, state)
        found.append(np.asarray(noisy["w"]))
    return found, state


def through_a_file(path: Path, state: Any) -> Any:
    """Saved and restored by Orbax where that is installed."""
    if find_spec("orbax") is None:
        np.savez(path, *jax.tree_util.tree_leaves(state))
        read = np.load(path.with_suffix(".npz"))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(state), [read[name] for name in read])
    from orbax import checkpoint

    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, state)


def test_resuming_is_bitwise_and_falling_behind_is_refused(tmp_path: Path) -> None:
    spec = cases.spec("bsr")

    def start() -> Any:
        return privatize(spec, PARAMS, key=tmp_path / "run.key", **FAST)

    private = start()
    _, state = steps(private, private.init(PARAMS), 0, 3)
    saved = through_a_file(tmp_path / "checkpoint", state)
    assert isinstance(saved, NoiseState)
    assert not any(str(value) in repr(saved) for value in (private.key.reveal(), private.key.id))
    more, state = steps(private, state, 3, 6)
    private.close()

    private = start()  # as another process would: the checkpoint is three steps old
    again, state = steps(private, saved, 3, 6)
    np.testing.assert_array_equal(again, more)
    check(state)
    assert private.key.loaded
    private.close()

    private = start()
    state = jax.tree_util.tree_map(jnp.asarray, saved)
    noisy, after = private.update({"w": jnp.ones((7, 30))}, state)  # other gradients under the same noise
    assert np.isnan(noisy["w"]).all()
    with pytest.raises(QuellError, match="step 3 was released before and would now be released with other gradients"):
        check(after)
    private.close()
    (tmp_path / "run.key.ledger").unlink()
    with pytest.raises(QuellError, match="not its ledger"):
        start()


def test_a_training_that_is_resumed_ends_bitwise_the_same(plan: Plan, tmp_path: Path) -> None:
    """With momentum, the plan's batches and donated states, from a checkpoint that is two steps old."""
    random = np.random.default_rng(2)
    x, y = random.standard_normal((60, 5)).astype(np.float32), random.standard_normal(60).astype(np.float32)
    params = {"w": np.zeros(5, np.float32)}

    def start() -> Any:
        private = privatize(plan, params, 1.0, key=tmp_path / "run.key", generator="philox")
        optimizer = optax.chain(private, optax.sgd(0.1, momentum=0.9))
        sums = clipped_grad(lambda params, x, y: (x @ params["w"] - y) ** 2, private, micro_batch=5)

        def step(params: Any, state: Any, batch: Any, mask: Any) -> Any:
            updates, state = optimizer.update(sums(params, batch, mask), state, params)
            return optax.apply_updates(params, updates), state

        return private, optimizer, jax.jit(step, donate_argnums=(0, 1))

    def trained(now: Any, steps: int) -> Any:
        for indices, mask in list(batches(private, 60).starting(now[1]))[:steps]:
            now = step(*now, (x[indices], y[indices]), mask)
        return now

    private, optimizer, step = start()
    now = trained((jax.tree_util.tree_map(jnp.asarray, params), optimizer.init(params)), 3)
    saved = through_a_file(tmp_path / "checkpoint", now)
    whole = trained(trained(now, 2), plan.steps)
    private.close()
    private, optimizer, step = start()
    again = trained(saved, plan.steps)
    check(again)
    assert private.report(again).steps_done == plan.steps
    jax.tree_util.tree_map(np.testing.assert_array_equal, again, whole)
    private.close()


def test_a_step_comes_once_without_a_ledger() -> None:
    private = privatize(cases.spec("independent"), PARAMS, key=Key.generate(), **FAST)
    first = private.init(PARAMS)
    _, after = steps(private, first, 0, 1)
    check(after)
    noisy, twice = steps(private, first, 0, 1)
    assert np.isnan(noisy[0]).all()
    with pytest.raises(QuellError, match="step 0 was released before, and each step's noise is used once"):
        check(twice)
    private.close()
    with pytest.raises(QuellError, match="no more steps are released"):
        check(steps(private, after, 1, 2)[1])
    other = privatize(cases.spec("independent"), PARAMS, key=private.key, **FAST)
    with pytest.raises(QuellError, match="step 0 counts as released"):
        check(steps(other, other.init(PARAMS), 0, 1)[1])


def test_sums_that_are_mapped_over_get_no_noise_twice() -> None:
    """Two sums under one state would be released with the same noise (found by a review)."""
    private = privatize(cases.spec("independent"), PARAMS, key=seeded(5), **FAST)
    sums = {"w": jnp.stack([jnp.zeros((7, 30)), jnp.ones((7, 30))])}
    noisy, state = jax.vmap(private.update, in_axes=(0, None))(sums, private.init(PARAMS))
    assert np.isnan(np.asarray(noisy["w"])).all(axis=(1, 2)).sum() == 1
    assert (np.asarray(state.refused) > 0).sum() == 1


def test_of_two_threads_with_one_state_one_gets_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both must not look, before either notes, what was released."""
    private = privatize(cases.spec("independent"), PARAMS, key=Key.generate(), **FAST)
    state = private.init(PARAMS)
    released = ReleaseGuard.released.fget

    def slowly(guard: ReleaseGuard) -> int:
        known = released(guard)
        time.sleep(0.1)  # as a disk that a ledger lies on
        return int(known)

    monkeypatch.setattr(ReleaseGuard, "released", property(slowly))
    update = jax.jit(private.update).lower(PARAMS, state).compile()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda number: update({"w": PARAMS["w"] + np.float32(number)}, state)[0]["w"], range(2)))
    assert sorted(bool(np.isnan(noisy).all()) for noisy in found) == [False, True]


def test_accumulated_gradients_get_no_noise_twice() -> None:
    """MultiSteps calls update for every batch, and returns to the older state for all but the last."""
    private = privatize(cases.spec("independent"), PARAMS, key=Key.generate(), **FAST)
    optimizer = optax.MultiSteps(private, 2)
    update = jax.jit(optimizer.update)
    found, state = update(PARAMS, optimizer.init(PARAMS), PARAMS)
    assert not found["w"].any()
    found, state = update(PARAMS, state, PARAMS)
    assert np.isnan(found["w"]).all()
    with pytest.raises(QuellError, match=r"return to an older state, such as MultiSteps, cannot be used"):
        check(state)


def test_digests_of_sums_know_places() -> None:
    """Sums of bits alone are equal for (1, −1) and (−1, 1), as gradients of two classes are."""
    pairs = ([1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [2.0, 0.5], [0.5, 2.0])
    assert len({int(_mixed(jnp.array(pair))) for pair in pairs}) == len(pairs)


def test_the_state_of_another_run_is_refused() -> None:
    one = privatize(cases.spec("independent"), PARAMS, key=seeded(1), **FAST)
    two = privatize(cases.spec("independent", 2.0), PARAMS, key=seeded(1), **FAST)
    noisy, state = two.update(PARAMS, one.init(PARAMS))
    assert np.isnan(noisy["w"]).all()
    with pytest.raises(QuellError, match="belongs to another key, plan"):
        check(state)
    with pytest.raises(QuellError, match="no state of quell"):
        check(optax.sgd(0.1).init(PARAMS))


def test_parameters_that_are_no_trained_arrays(plan: Plan) -> None:
    for leaf, message in [
        (0.0, "a leaf is a float: pass arrays only"),
        (jax.nn.relu, r"equinox\.partition"),  # as in an Equinox model
        (jnp.arange(3), "has dtype int32"),
        (jax.random.key(0), r"has dtype key<fry>"),
        (jnp.ones(3, jnp.complex64), "has dtype complex64"),
    ]:
        with pytest.raises(QuellError, match=message):
            privatize(plan, {**PARAMS, "other": leaf}, 1.0)
        with pytest.raises(QuellError, match=message):
            clipped_grad(lambda params, x: x, 1.0)({**PARAMS, "other": leaf}, (np.ones(3),), None)
    with pytest.raises(QuellError, match=r"plan is a dict: pass a plan first"):
        privatize(PARAMS, plan, 1.0)


def test_numbers_may_be_arrays(plan: Plan) -> None:
    private = privatize(plan, PARAMS, jnp.float32(0.5), generator="philox")
    assert private.max_grad_norm == 0.5
    for norm in (jnp.float32(0.5), np.array(0.5)):
        one = clipped_grad(lambda w, x: w @ x, norm)(jnp.zeros(2), (np.eye(1, 2),), None)
        np.testing.assert_allclose(one, [0.5, 0], rtol=1e-3)
    for norm in (2.0**127, 1e-40):
        with pytest.raises(QuellError, match="outside what float32 can measure"):
            clipped_grad(lambda w, x: w @ x, norm)
    drawn = batches(private, jnp.int32(60))
    np.testing.assert_array_equal(drawn[jnp.int32(2)][0], drawn[2][0])
    with pytest.raises(QuellError, match=r"examples is a ndarray: pass how many"):
        batches(private, np.zeros((60, 3)))


def test_states_of_others_and_several_states() -> None:
    private = privatize(cases.spec("independent"), PARAMS, key=seeded(1), **FAST)
    state = private.init(PARAMS)
    for wrong in (None, optax.chain(private, optax.sgd(0.1)).init(PARAMS)):
        with pytest.raises(QuellError, match="call the chain's update"):
            private.update(PARAMS, wrong)
    with pytest.raises(QuellError, match="a stack of several states"):
        check(jax.tree_util.tree_map(lambda leaf: jnp.stack([leaf, leaf]), state))


@pytest.mark.parametrize("case", ["independent", "blt", "tree"])
def test_states_that_are_not_as_init_makes_them(case: str) -> None:
    """Fewer buffers were read as noise, without a word (found by a review)."""
    private = privatize(cases.spec(case), PARAMS, key=seeded(1), **FAST)
    state = private.init(PARAMS)
    changed = [
        jax.tree_util.tree_map(lambda leaf: leaf.astype(jnp.float32), state),
        jax.tree_util.tree_map(lambda leaf: jnp.stack([leaf, leaf]), state),
    ]
    if state.buffers:
        (kept,) = state.buffers
        changed += [state._replace(buffers=other) for other in ((), (kept[:-1],), (kept.astype(jnp.bfloat16),))]
    for wrong in changed:
        with pytest.raises(QuellError, match="other shapes or dtypes than init"):
            private.update(PARAMS, wrong)
    with jax.enable_x64(True), pytest.raises(QuellError, match="other shapes or dtypes than init"):
        private.update(PARAMS, state._replace(step=np.int64(0)))
    check(private.update(PARAMS, jax.tree_util.tree_map(np.asarray, state))[1])


def test_a_run_does_not_survive_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parent and child released the same noise with sums of their own (found by a review)."""
    private = privatize(cases.spec("independent"), PARAMS, key=Key.generate(), **FAST)
    state = private.init(PARAMS)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)  # a real child could wait for threads of JAX that it does not have
        noisy, after = private.update(PARAMS, state)
        assert np.isnan(noisy["w"]).all()
        with pytest.raises(QuellError, match="does not survive a fork"):
            check(after)
    check(private.update(PARAMS, state)[1])


def test_what_holds_a_key_says_how_it_is_let_go(tmp_path: Path) -> None:
    private = privatize(cases.spec("independent"), PARAMS, key=tmp_path / "run.key", **FAST)
    with pytest.raises(
        QuellError, match=r"call close\(\) on the earlier run's optimizer \(in JAX, on what privatize returned\)"
    ):
        privatize(cases.spec("independent"), PARAMS, key=tmp_path / "run.key", **FAST)
    first = private.init(PARAMS)
    steps(private, first, 0, 1)
    with pytest.raises(QuellError, match=r"older checkpoint of a run with a ledger, call close\(\) and then privatize"):
        check(steps(private, first, 0, 1)[1])
    private.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "max_grad_norm="),
        ({"max_grad_norm": -1.0}, "must be positive"),
        ({"max_grad_norm": 1.0, "expected_batch_size": 3.0}, "the plan's own"),
        ({"max_grad_norm": 1.0, "mechanism": "other"}, "has certified no mechanism 'other'"),
        ({"max_grad_norm": 1.0, "generator": "md5"}, "generator='md5' is not known"),
        ({"max_grad_norm": 1.0, "key": Key.generate(), "seed": 1}, "not both"),
    ],
)
def test_refusals(plan: Plan, options: dict[str, Any], message: str) -> None:
    with pytest.raises(QuellError, match=message):
        privatize(plan, PARAMS, **options)


def test_a_plan_whose_noise_is_for_fewer_participations(plan: Plan) -> None:
    more = replace(plan, run=plan.run.changed(batch_size=30, epochs=5))
    assert more.steps == plan.steps
    with pytest.raises(QuellError, match=r"is not certified to be \(8, 0.001\)-DP"):
        privatize(more, PARAMS, 1.0)


def test_devices_that_would_hang_or_count_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(np.zeros((8, 4), np.float32), jax.NamedSharding(mesh, jax.P("x")))
    with pytest.raises(QuellError, match="several CPU devices"):
        privatize(cases.spec("independent"), spread, key=tmp_path / "run.key", **FAST)
    assert not any(tmp_path.iterdir())
    private = privatize(cases.spec("independent"), np.zeros((8, 4)), key=tmp_path / "run.key", **FAST)  # on the host
    with pytest.raises(QuellError, match="sums lie on several CPU devices"):
        private.update(spread, private.init(np.zeros((8, 4))))
    apart = jax.shard_map(private.update, mesh=mesh, in_specs=(jax.P(), jax.P()), out_specs=jax.P(), check_vma=False)
    with pytest.raises(QuellError, match="sums lie on several CPU devices"):
        jax.eval_shape(apart, np.zeros((8, 4), np.float32), private.init(np.zeros((8, 4))))
    monkeypatch.setattr(jax, "process_count", lambda: 2)  # all these devices are process 0's
    for held in (spread, np.zeros(3), jnp.zeros(3)):
        with pytest.raises(QuellError, match="a mesh of all processes' devices"):
            refuse_devices(held, ledger=False)


def test_other_trees_shapes_and_dtypes_are_refused() -> None:
    private = privatize(cases.spec("independent"), PARAMS, key=seeded(1), **FAST)
    state = private.init(PARAMS)
    for wrong, message in [
        ({"v": PARAMS["w"]}, "not the parameters"),
        ({"w": np.zeros((30, 7), np.float32)}, "has shape"),
        ({"w": np.zeros((7, 30), np.int32)}, "has dtype int32"),
    ]:
        with pytest.raises(QuellError, match=message):
            private.update(wrong, state)
    for rounded in (jnp.bfloat16, jnp.float16):
        with pytest.raises(QuellError, match="can move them by more than the clip norm"):
            private.update({"w": PARAMS["w"].astype(rounded)}, state)
    with pytest.raises(QuellError, match="would pass without noise"):
        privatize(cases.spec("independent"), {**PARAMS, "b": optax.MaskedNode()}, key=seeded(1), **FAST)
    with pytest.raises(QuellError, match="no arrays"):
        privatize(cases.spec("independent"), {}, key=seeded(1), **FAST)
    with pytest.raises(QuellError, match=r"load a file with quell\.Plan\.load"):
        privatize("plan.json", PARAMS, 1.0)
    huge = jax.ShapeDtypeStruct((2**17, 2**16), jnp.float32)
    with pytest.raises(QuellError, match="split it into several"):
        privatize(cases.spec("independent"), huge, key=seeded(1), **FAST)


def test_report_and_batches_are_the_plans(plan: Plan) -> None:
    private = privatize(plan, PARAMS, 1.0, generator="philox")
    optimizer = optax.chain(private, optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    assert private.report(state).epsilon_so_far == 0
    _, state = optimizer.update(PARAMS, state, PARAMS)
    report = private.report(state)
    assert (report.steps_done, report.steps, report.expected_batch_size) == (1, plan.steps, 12)
    assert 0 < report.epsilon_so_far <= plan.run.epsilon
    assert report.versions["jax"] == jax.__version__
    assert "philox, which is NOT secure" in str(report)
    assert "must be clipped by the training loop, which nothing checks, to norm 1" in str(report)
    with pytest.raises(QuellError, match=r"1 steps of this run were released already.*starting\(state\)"):
        next(iter(batches(private, 60)))
    drawn, own = batches(private, 60), private.drawn
    assert own is not None
    assert len(drawn) == plan.steps
    np.testing.assert_array_equal(next(drawn.starting(state))[0], drawn[1][0])
    other = privatize(plan, PARAMS, 1.0)
    with pytest.raises(QuellError, match="the state of another run"):
        other.report(state)
    with pytest.raises(QuellError, match="the state of another run"):
        batches(other, 60).starting(state)
    both = (other.init(PARAMS), state)  # two runs in one optimizer
    assert private.report(both).steps_done == 1
    np.testing.assert_array_equal(next(drawn.starting(both))[0], drawn[1][0])
    for step, (indices, mask) in enumerate(drawn.starting(0)):
        assert indices.shape == mask.shape == (12,)
        np.testing.assert_array_equal(indices[mask], own.at(step))
        np.testing.assert_array_equal(drawn[step][0], indices)
    with pytest.raises(QuellError, match="called for 60"):
        batches(private, 61)
    with pytest.raises(QuellError, match="what privatize returned, not a Plan"):
        batches(plan, 60)
    with pytest.raises(QuellError, match="what privatize returned, or a norm, not a Plan"):
        clipped_grad(lambda w, x: w @ x, plan)
    one = clipped_grad(lambda w, x: jnp.sum(w["w"] * x), private)(PARAMS, (np.full((1, 7, 30), 1e3),), np.array([True]))
    assert np.linalg.norm(one["w"]) == pytest.approx(1.0, rel=1e-3)  # the clip norm of the run


def test_batches_of_random_size_are_padded() -> None:
    stream = Batches(Poisson(steps=50, rate=0.05), 400, bytes(range(32)))
    drawn = PaddedBatches(stream, _roomy(stream))
    assert 20 < drawn.size < 100
    for step, (indices, mask) in enumerate(drawn.starting(3), start=3):
        batch = stream.at(step)
        assert indices.shape == (drawn.size,)
        assert not indices[len(batch) :].any()
        assert mask.tolist() == [True] * len(batch) + [False] * (drawn.size - len(batch))
        np.testing.assert_array_equal(indices[mask], batch)
    with pytest.raises(QuellError, match="does not fit into size=5"):
        list(PaddedBatches(stream, 5))
    with pytest.raises(IndexError):
        drawn[50]


def test_a_loader_may_look_batches_up_in_any_order_and_process() -> None:
    """What grain asks of a random-access source: a length, items by number, and a copy for every worker."""
    plan = user_plan("b_min_sep")
    private = privatize(plan, PARAMS, 1.0, users=IDS, rows_per_user=2, key=seeded(3))
    source = batches(private, 40, devices=8)
    assert source.size % 8 == 0
    copy = pickle.loads(pickle.dumps(source))
    in_order = list(source)
    for step in np.random.default_rng(1).permutation(len(source)):
        for mine, other in zip(in_order[step], copy[int(step)], strict=True):
            np.testing.assert_array_equal(mine, other)
    grain = pytest.importorskip("grain")
    loaded = grain.MapDataset.source(source).map(lambda batch: (IDS[batch[0]], batch[1])).to_iter_dataset()
    for (ids, counts), (indices, mask) in zip(loaded, in_order, strict=True):
        np.testing.assert_array_equal(ids, IDS[indices])
        np.testing.assert_array_equal(counts, mask)


def test_a_run_is_closed_after_its_updates(plan: Plan) -> None:
    """JAX runs them when their inputs are there. What comes after close() is refused: the last step was lost."""

    @jax.jit
    def slow(number: int) -> Any:
        many = jnp.ones((1000, 1000))
        made = jax.lax.fori_loop(0, 20, lambda _, kept: (kept @ many) * 1e-3, many)
        return {"w": jnp.full((7, 30), number, jnp.float32) + 0 * made[0, 0]}

    private = privatize(plan, PARAMS, max_grad_norm=1.0, key=seeded(3))
    _, state = private.update(slow(1), private.init(PARAMS))  # which compiles both
    check(state)
    updates, state = private.update(slow(2), state)
    private.close()
    check(state)
    assert bool(jnp.isfinite(updates["w"]).all())
