"""Privacy per user in JAX: who is in a batch, what one user can do to a step, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quell import QuellError
from quell.adapters.scheme import batches_of, scheme_of
from quell.adapters.users import owned_rows
from quell.jax import PaddedBatches, batches, clipped_grad, privatize
from quell.noise import Key
from quell.planning import Plan, Prices
from quell.run import Run
from quell.schemes import SCHEMES
from quell.schemes.users import numbered

from ..user_streams import IDS, keys, require_accounted, user_plan
from .trees import seeded

CLIP = 0.3
RANDOM = np.random.default_rng(6)
X, Y = RANDOM.standard_normal((40, 6)).astype(np.float32), RANDOM.standard_normal(40).astype(np.float32)
PARAMS = {"w": RANDOM.standard_normal(6).astype(np.float32), "b": np.float32(0.1).reshape(())}


def drawn(plan: Plan, numbers: Any, most: int, key: Key) -> list[list[int]]:
    """The rows that count, step by step, as `batches` gives them."""
    stream = batches_of(plan, scheme_of(plan, plan.mechanism), key)
    found = []
    for indices, mask in PaddedBatches(stream, plan.run.examples or 0, owned_rows(numbers, plan, most, key)):
        assert indices.shape == (len(mask), most)
        assert not indices[~mask].any()
        found.append(indices[mask].ravel().tolist())
    return found


@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", SCHEMES)
def test_streams_of_rows_are_what_is_accounted(sampling: str, count: int) -> None:
    require_accounted(sampling, count, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SCHEMES)
def test_rows_are_those_of_pytorch(sampling: str) -> None:
    pytorch = pytest.importorskip("tests.pytorch.test_users")
    given = (user_plan(sampling), numbered(IDS), 3, next(keys(1)))
    assert drawn(*given) == pytorch.drawn(*given)


def loss(params: Any, x: Any, y: Any) -> Any:
    return (x @ params["w"] + params["b"] - y) ** 2


@cache
def compiled(most: int) -> Any:
    private = privatize(user_plan(), PARAMS, CLIP, users=IDS, rows_per_user=most, key=seeded(3))
    return jax.jit(clipped_grad(loss, private, micro_batch=4))


def steps_of(x: Any, most: int, dtype: Any, plan: Plan) -> Any:
    """(steps, 7) the clipped sums of every step of a run, in float64."""
    private = privatize(plan, PARAMS, CLIP, users=IDS, rows_per_user=most, key=seeded(3))
    params, x, y = ({name: leaf.astype(dtype) for name, leaf in PARAMS.items()}, x.astype(dtype), Y.astype(dtype))
    found = []
    for indices, mask in batches(private, 40):
        total = compiled(most)(params, (x[indices], y[indices]), mask)
        assert total["w"].dtype == jnp.float32
        found.append(np.concatenate([np.ravel(total[name]) for name in ("w", "b")]).astype(np.float64))
    return np.array(found)


@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 3), (jnp.bfloat16, 2)])
def test_a_whole_user_moves_a_step_by_at_most_the_clip_norm(dtype: Any, most: int) -> None:
    """All rows of one user are made extreme: one clip norm at most, in the user's own steps only."""
    plan = user_plan("poisson")
    own = IDS == "user 7"
    number = numbered(IDS)[own][0]
    members = batches_of(plan, scheme_of(plan, plan.mechanism), seeded(3))
    taken = np.array([number in batch for batch in members])
    assert 0 < taken.sum() < len(taken)

    def changed(value: float) -> Any:
        return steps_of(np.where(own[:, None], np.float32(value), X), most, dtype, plan)

    without = changed(np.nan)  # a gradient that is not finite counts as zero: the run without the user
    assert np.isfinite(without).all()
    for value in (1e6, -50.0):
        moved = np.linalg.norm(changed(value) - without, axis=1)
        assert moved.max() <= CLIP * (1 + 1e-6)
        assert moved[taken].min() > 0.99 * CLIP
        assert moved[~taken].max() == 0
    for value in (np.inf, 3e38):  # and so does one whose norm float32 does not hold
        np.testing.assert_array_equal(changed(value), without)
    one = np.where((np.arange(40) == np.flatnonzero(own)[0])[:, None], np.nan, X)  # a single broken row of the user
    moved = np.linalg.norm(steps_of(one, most, dtype, plan) - without, axis=1)
    assert moved.max() <= CLIP * (1 + 1e-6)
    assert moved[~taken].max() == 0


def test_a_users_rows_are_clipped_as_one() -> None:
    x, y = X[:12].reshape(4, 3, 6), Y[:12].reshape(4, 3)
    whole = np.concatenate([x, np.ones((4, 3, 1))], axis=2).astype(np.float64)
    weights = np.append(PARAMS["w"], PARAMS["b"]).astype(np.float64)
    gradients = (2 * (whole @ weights - y)[..., None] * whole).mean(axis=1)
    norms = np.linalg.norm(gradients, axis=1)
    bound = float(np.median(norms))
    expected = (gradients * np.minimum(1, bound / norms)[:, None])[[0, 1, 3]].sum(axis=0)
    mask = np.array([True, True, False, True])
    sums = jax.jit(clipped_grad(loss, bound, micro_batch=3, rows_per_unit=3, with_norms=True))
    found, seen = sums(PARAMS, (x, y), mask)
    np.testing.assert_allclose(np.append(found["w"], found["b"]), expected, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(seen, np.where(mask, norms, np.nan), rtol=2e-4)


@pytest.mark.slow
def test_rows_that_are_clipped_alone_would_be_noticed() -> None:
    """The mutation: every row a unit. Then one user moves a step by more than the clip norm."""
    x = np.where((IDS == "user 7")[:, None], 1e3, X).astype(np.float32)
    rows = np.flatnonzero(IDS == "user 7")[:8].reshape(8, 1)
    total = compiled(1)(PARAMS, (x[rows], Y[rows]), np.ones(8, bool))
    assert np.linalg.norm(total["w"]) > 7 * CLIP


def test_the_report_and_the_state_are_the_users() -> None:
    plan = user_plan()

    def started(ids: Any = IDS, most: int = 2) -> Any:
        return privatize(plan, PARAMS, CLIP, users=ids, rows_per_user=most, key=seeded(3), generator="philox")

    private = started()
    report = private.report(private.init(PARAMS))
    assert report.unit == "one user"
    assert report.expected_batch_size == 2
    assert "example" not in str(report)
    indices, _ = batches(private, 40)[3]
    assert indices.shape == (2, 2)
    swapped = IDS.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert swapped[0] != IDS[0]
    names = [tuple(each.host.name) for each in (private, started(IDS.copy()), started(swapped), started(most=3))]
    assert names[0] == names[1]  # which is what a state is compared by: see test_the_state_of_another_run_is_refused
    assert len(set(names)) == 3


def test_groups_leave_out_examples_of_two_groups() -> None:
    run = Run.from_data(groups=14, batch_size=2, epochs=2, epsilon=8.0, delta=1e-5, sampling="cyclic")
    plan = Plan(run, (Prices(run).price("bsr", bands=2),), 0)
    owners: list[Any] = [(f"p{number % 12}", f"p{number % 12 + 12}") for number in range(36)]
    owners += [("p0", "p1"), ("p0", "p1"), "p24", "p25"]
    private = privatize(plan, PARAMS, CLIP, users=owners, rows_per_user=2, key=seeded(3))
    rows = {row for indices, mask in batches(private, 40) for row in indices[mask].ravel()}
    assert rows == set(range(40)) - {36, 37}
    assert private.report(private.init(PARAMS)).unit == "one user with public ownership of examples"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": None}, "nothing says whose the examples are: pass users="),
        ({"users": jnp.arange(40) % 9}, "those of 9 users, but the plan is for 10"),
        ({"users": [*IDS[:-1], None]}, r"example 39 has no user \(None\)"),
        ({"rows_per_user": 0}, "rows_per_user=0"),
    ],
)
def test_what_does_not_say_whose_rows_are_whose(change: dict[str, Any], message: str) -> None:
    with pytest.raises(QuellError, match=message):
        privatize(user_plan(), PARAMS, CLIP, **{"users": IDS, "key": seeded(3), **change})


def test_users_and_examples_are_not_mixed_up() -> None:
    run = Run.from_data(examples=60, batch_size=12, epochs=2, epsilon=8.0, delta=1e-3, sampling="cyclic")
    plan = Plan(run, (Prices(run).price("bsr", bands=2),), 0)
    with pytest.raises(QuellError, match="this plan's are drawn of examples"):
        privatize(plan, PARAMS, CLIP, users=np.arange(60))
    with pytest.raises(QuellError, match="pass a Plan, not a mechanism"):
        privatize(plan.mechanism, PARAMS, CLIP, expected_batch_size=2.0, users=np.arange(60))
    with pytest.raises(QuellError, match="no plan to draw batches of"):
        batches(privatize(plan.mechanism, PARAMS, CLIP, expected_batch_size=2.0, key=seeded(3)), 60)
    private = privatize(user_plan(), PARAMS, CLIP, users=IDS, rows_per_user=3, key=seeded(3))
    with pytest.raises(QuellError, match="has 41 examples, but privatize was called for 40"):
        batches(private, 41)
    with pytest.raises(QuellError, match="rows_per_unit=2, but privatize has rows_per_user=3"):
        clipped_grad(loss, private, rows_per_unit=2)
    with pytest.raises(QuellError, match=r"rows_per_unit=3: pass arrays of shape \(units, 3"):
        clipped_grad(loss, private)(PARAMS, (X, Y), np.ones(40, bool))
